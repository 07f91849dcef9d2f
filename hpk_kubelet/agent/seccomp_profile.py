"""A seccomp profile of the site's or the user's (seccompProfile: Localhost) as a filter.

The profile is OCI's (runtime-spec, config-linux.md#seccomp), checked by the kubelet
(spec/seccomp.py). Rules are tried in their order, as they are in the file; the first that fits
a call decides. Calls of another architecture than the node's own are killed, as by libseccomp.
"""

import struct
from typing import Any, Dict, List, Tuple

from .seccomp import ARCHES, X32
from .syscall_numbers import NUMBERS

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06  # <linux/bpf_common.h>
_EQUAL, _GREATER, _AT_LEAST = 0x15, 0x25, 0x35
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_MOST = 4096  # BPF_MAXINSNS
_EPERM = 1
_HALF = 0xFFFFFFFF
_PASS, _FAIL = -1, -2
_COMPARE = {
    "SCMP_CMP_EQ": _EQUAL, "SCMP_CMP_GT": _GREATER, "SCMP_CMP_GE": _AT_LEAST,
}  # fmt: skip
_NEGATED = {
    "SCMP_CMP_NE": "SCMP_CMP_EQ", "SCMP_CMP_LE": "SCMP_CMP_GT", "SCMP_CMP_LT": "SCMP_CMP_GE",
}  # fmt: skip

_ACTIONS = {  # <linux/seccomp.h>
    "SCMP_ACT_KILL": 0x00000000,
    "SCMP_ACT_KILL_THREAD": 0x00000000,
    "SCMP_ACT_KILL_PROCESS": 0x80000000,
    "SCMP_ACT_TRAP": 0x00030000,
    "SCMP_ACT_ERRNO": 0x00050000,
    "SCMP_ACT_TRACE": 0x7FF00000,
    "SCMP_ACT_LOG": 0x7FFC0000,
    "SCMP_ACT_ALLOW": 0x7FFF0000,
}

_Code = List[Tuple[int, int, int, int]]
"""struct sock_filter: operation, jump if true, jump if false, value."""


class ProfileError(ValueError):
    """The kernel would not take it."""


def program(profile: Dict[str, Any], machine: str) -> bytes:
    """The filter, as struct sock_filter for each instruction; ProfileError when it is too long."""
    which = 0 if machine == "x86_64" else 1
    default = _answer(profile["defaultAction"], profile.get("defaultErrnoRet"))
    kill = _ACTIONS["SCMP_ACT_KILL_PROCESS"]
    code: _Code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, ARCHES[machine]), (_RETURN, 0, 0, kill)]
    code.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, X32), (_RETURN, 0, 0, kill)]
    for rule in profile.get("syscalls", ()):
        answer = _answer(rule["action"], rule.get("errnoRet"))
        conditions = [_condition(condition) for condition in rule.get("args", ())]
        for name in rule["names"]:
            number = NUMBERS.get(name, (-1, -1))[which]
            if number >= 0:  # what this kernel or this list does not know nobody can call by name
                code += _rule(number, conditions, answer)
    code.append((_RETURN, 0, 0, default))
    if len(code) > _MOST:
        raise ProfileError(
            "the seccomp profile has %d instructions, the kernel takes %d" % (len(code), _MOST)
        )
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _answer(action: str, errno: Any) -> int:
    value = _ACTIONS[action]
    if action in ("SCMP_ACT_ERRNO", "SCMP_ACT_TRACE"):
        value |= (_EPERM if errno is None else int(errno)) & 0xFFFF
    return value


def _rule(number: int, conditions: List[_Code], answer: int) -> _Code:
    """The answer if the call is this one and all conditions hold. Entered and left with the call's
    number loaded."""
    if not conditions:
        return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    length = sum(map(len, conditions))  # after them: return the answer, load the number again
    code: _Code = [(_EQUAL, 0, length + 2, number)]
    at = 0
    for condition in conditions:
        targets = {_PASS: at + len(condition), _FAIL: length + 1}
        for operation, yes, no, value in condition:
            at += 1
            yes, no = (targets[x] - at if x in targets else x for x in (yes, no))
            code.append((operation, yes, no, value))
    return [*code, (_RETURN, 0, 0, answer), (_LOAD, 0, 0, _NUMBER)]


def _condition(condition: Dict[str, Any]) -> _Code:
    """A test of one 64-bit argument, in two halves; its jumps go to _PASS and _FAIL."""
    low = _ARGUMENTS + 8 * int(condition["index"])
    operator, value = condition["op"], int(condition["value"])
    if operator == "SCMP_CMP_MASKED_EQ":
        mask, value = value, int(condition.get("valueTwo", 0)) & value
        return [
            (_LOAD, 0, 0, low + 4), (_AND, 0, 0, mask >> 32), (_EQUAL, 0, _FAIL, value >> 32),
            (_LOAD, 0, 0, low), (_AND, 0, 0, mask & _HALF), (_EQUAL, _PASS, _FAIL, value & _HALF),
        ]  # fmt: skip
    yes, no = (_FAIL, _PASS) if operator in _NEGATED else (_PASS, _FAIL)
    operator = _NEGATED.get(operator, operator)
    code: _Code = [(_LOAD, 0, 0, low + 4)]
    if operator != "SCMP_CMP_EQ":
        code.append((_GREATER, yes, 0, value >> 32))
    code += [(_EQUAL, 0, no, value >> 32), (_LOAD, 0, 0, low)]
    return [*code, (_COMPARE[operator], yes, no, value & _HALF)]
