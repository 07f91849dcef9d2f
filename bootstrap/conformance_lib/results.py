"""What became of each test, kept in a file, so that an interrupted run can go on."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path

ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class Result:
    """One attempt at one test."""

    name: str
    passed: bool
    seconds: float
    words: str = ""  # why it failed


class Results:
    """Every attempt, in order, by test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.of: dict[str, list[Result]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._keep(Result(**json.loads(line)))

    def _keep(self, result: Result) -> None:
        self.of.setdefault(result.name, []).append(result)

    def add(self, results: Iterable[Result]) -> None:
        with self.path.open("a") as f:
            for result in results:
                self._keep(result)
                f.write(json.dumps(dataclasses.asdict(result)) + "\n")

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.of.pop(name, None)
        every = [result for results in self.of.values() for result in results]
        self.path.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in every))

    def passed(self, name: str) -> bool:
        return any(result.passed for result in self.of.get(name, ()))

    def flaky(self, name: str) -> bool:
        return self.passed(name) and not self.of[name][0].passed

    def due(self, names: Sequence[str], attempts: int = ATTEMPTS) -> list[str]:
        """Those that did neither pass nor use up their attempts."""
        return [n for n in names if not self.passed(n) and len(self.of.get(n, ())) < attempts]


def sig(name: str) -> str:
    """The special interest group a test belongs to."""
    match = re.match(r"\[sig-([a-z-]+)\]", name)
    return match[1] if match else "other"


def read_junit(text: str) -> list[Result]:
    """The tests that an e2e.test really ran."""
    found = []
    for case in ET.fromstring(text).iter("testcase"):
        status, name = case.get("status", ""), case.get("name", "")
        if not name.startswith("[It] ") or status in ("skipped", "pending"):
            continue
        failure = next(
            (case.find(k) for k in ("failure", "error") if case.find(k) is not None), None
        )
        words = (failure.get("message") or failure.text or "") if failure is not None else ""
        found.append(
            Result(
                name.removeprefix("[It] "),
                failure is None and status == "passed",
                round(float(case.get("time") or 0), 1),
                " ".join(words.split())[:600],
            )
        )
    return found


def focus(names: Sequence[str]) -> str:
    """A regular expression (Go's) for exactly these tests."""
    return "(" + "|".join(re.escape(name) for name in names) + ")$"


def batches(names: Sequence[str], size: int) -> list[list[str]]:
    return [list(names[i : i + size]) for i in range(0, len(names), size)]
