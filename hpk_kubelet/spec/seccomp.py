"""Seccomp profiles of type Localhost: OCI's JSON (runtime-spec, config-linux.md#seccomp)."""

from __future__ import annotations

import json
from typing import Any

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.plan import SeccompArgument, SeccompProfile, SeccompRule

ACTIONS = (
    "SCMP_ACT_KILL", "SCMP_ACT_KILL_THREAD", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP",
    "SCMP_ACT_ERRNO", "SCMP_ACT_TRACE", "SCMP_ACT_LOG", "SCMP_ACT_ALLOW",
)  # fmt: skip
OPERATORS = tuple(f"SCMP_CMP_{name}" for name in ("NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"))


def parse_profile(data: bytes) -> SeccompProfile:
    """What the agent needs of a profile; HPKError for what is none. Keys that a runtime does not
    know either (Docker's `includes`, …) are passed over."""
    try:
        whole = json.loads(data)
    except ValueError as e:
        raise HPKError(f"it is not JSON: {e}") from None
    if not isinstance(whole, dict):
        raise HPKError("it is not a JSON object")
    profile = SeccompProfile(
        defaultAction=_one_of(whole.get("defaultAction"), ACTIONS, "defaultAction"),
        syscalls=[_rule(rule) for rule in _list(whole.get("syscalls"), "syscalls")],
    )
    if whole.get("defaultErrnoRet") is not None:
        profile["defaultErrnoRet"] = _number(whole["defaultErrnoRet"], "defaultErrnoRet", 0xFFFF)
    return profile


def _rule(rule: Any) -> SeccompRule:
    if not isinstance(rule, dict):
        raise HPKError(f"syscalls has {rule!r}, which is no object")
    found = SeccompRule(
        names=[str(name) for name in _list(rule.get("names"), "names")],
        action=_one_of(rule.get("action"), ACTIONS, "action"),
    )
    if rule.get("errnoRet") is not None:
        found["errnoRet"] = _number(rule["errnoRet"], "errnoRet", 0xFFFF)
    if rule.get("args"):
        found["args"] = [_argument(argument) for argument in _list(rule["args"], "args")]
    return found


def _argument(argument: Any) -> SeccompArgument:
    if not isinstance(argument, dict):
        raise HPKError(f"args has {argument!r}, which is no object")
    return SeccompArgument(
        index=_number(argument.get("index"), "index", 5),
        value=_number(argument.get("value"), "value", (1 << 64) - 1),
        valueTwo=_number(argument.get("valueTwo") or 0, "valueTwo", (1 << 64) - 1),
        op=_one_of(argument.get("op"), OPERATORS, "op"),
    )


def _one_of(value: Any, known: tuple[str, ...], name: str) -> str:
    if value not in known:
        raise HPKError(f"{name} is {value!r}, not one of {', '.join(known)}")
    return str(value)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list | None):
        raise HPKError(f"{name} is {value!r}, which is no list")
    return value or []


def _number(value: Any, name: str, most: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise HPKError(f"{name} is {value!r}, which is no number from 0 to {most}")
    return value
