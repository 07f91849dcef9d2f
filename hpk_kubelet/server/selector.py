"""Label and field selectors, as they come in a query. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hpk_kubelet.errors import HPKError

Labels = Mapping[str, str]
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?"
_SET = re.compile(rf"({_NAME})\s+(in|notin)\s*\(([^()]*)\)")
_EQUAL = re.compile(rf"({_NAME})\s*(=|==|!=)\s*([-A-Za-z0-9_.]*)")
_EXISTS = re.compile(rf"(!?)\s*({_NAME})")


def parse(text: str) -> Callable[[Labels], bool]:
    """A predicate on labels (apimachinery's labels.Parse); HPKError for what is no selector."""
    tests: list[Callable[[Labels], bool]] = []
    for part in re.split(r",(?![^()]*\))", text):
        word = part.strip()
        if not word:
            if text.strip():
                raise HPKError(f"{text!r} is no label selector")
            continue
        tests.append(_one(word))
    return lambda labels: all(test(labels) for test in tests)


def _one(word: str) -> Callable[[Labels], bool]:
    if match := _SET.fullmatch(word):
        key, operator, values = match[1], match[3], {v.strip() for v in match[4].split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if match := _EQUAL.fullmatch(word):
        key, operator, value = match[1], match[3], match[4]
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if match := _EXISTS.fullmatch(word):
        key = match[2]
        if match[1]:
            return lambda labels: key not in labels
        return lambda labels: key in labels
    raise HPKError(f"{word!r} is no requirement of a label selector")


def fields(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """A predicate on an object's metadata.name and metadata.namespace."""
    wanted: list[tuple[str, bool, str]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"metadata\.(name|namespace)(=|==|!=)([-a-z0-9.]+)", part)
        if match is None:
            raise HPKError(f"{part!r} is no field selector that is known here")
        wanted.append((match[1], match[2] != "!=", match[3]))
    return lambda whole: all(
        (whole["metadata"].get(key) == value) is equal for key, equal, value in wanted
    )
