"""Profiles of type Localhost: what the kubelet takes, and the filter the agent makes of one."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
from bpf import I386, run
from hypothesis import given
from hypothesis import strategies as st

from hpk_kubelet.agent import seccomp_profile
from hpk_kubelet.agent.syscall_numbers import NUMBERS
from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.seccomp import load_profile
from hpk_kubelet.spec.seccomp import OPERATORS, parse_profile

ALLOW, KILL, ERRNO, LOG = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FFC0000


def compiled(**profile: Any) -> bytes:
    return seccomp_profile.program(parse_profile(json.dumps(profile).encode()), "x86_64")  # type: ignore[arg-type]


def test_the_first_rule_that_fits_decides() -> None:
    code = compiled(
        defaultAction="SCMP_ACT_ERRNO",
        defaultErrnoRet=38,
        architectures=["SCMP_ARCH_X86_64"],
        syscalls=[
            {"names": ["read", "no_such_call", "write"], "action": "SCMP_ACT_ALLOW"},
            {"names": ["mkdir"], "action": "SCMP_ACT_ERRNO"},
            {"names": ["mkdir", "chmod"], "action": "SCMP_ACT_LOG"},
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [
                {"index": 0, "op": "SCMP_CMP_EQ", "value": 2},
                {"index": 1, "op": "SCMP_CMP_MASKED_EQ", "value": 0xF, "valueTwo": 1}]},
            {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": 97},
        ],
    )  # fmt: skip
    calls = {name: NUMBERS[name][0] for name in ("read", "write", "mkdir", "chmod", "socket")}
    assert run(code, calls["read"], []) == run(code, calls["write"], []) == ALLOW
    assert run(code, calls["mkdir"], []) == ERRNO | 1
    assert run(code, calls["chmod"], []) == LOG
    assert run(code, calls["socket"], [2, 0x80001]) == ALLOW
    assert run(code, calls["socket"], [2, 2]) == ERRNO | 97
    assert run(code, calls["socket"], [1 << 32 | 2, 1]) == ERRNO | 97
    assert run(code, NUMBERS["reboot"][0], []) == ERRNO | 38
    assert run(code, calls["read"], arch=I386) == KILL
    assert run(code, calls["read"] | 0x40000000, []) == KILL


VALUES = st.integers(0, (1 << 64) - 1) | st.integers(0, 3).map(lambda n: n << 31)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(OPERATORS), VALUES, VALUES),
                min_size=1, max_size=6), st.lists(VALUES, min_size=6, max_size=6))  # fmt: skip
def test_conditions_mean_what_libseccomp_says(
    conditions: list[tuple[int, str, int, int]], arguments: list[int]
) -> None:
    names = ("index", "op", "value", "valueTwo")
    rule = {
        "names": ["ioctl"], "action": "SCMP_ACT_ALLOW",
        "args": [dict(zip(names, condition, strict=True)) for condition in conditions],
    }  # fmt: skip
    code = compiled(defaultAction="SCMP_ACT_KILL_PROCESS", syscalls=[rule])

    def holds(index: int, op: str, value: int, second: int) -> bool:
        x = arguments[index]
        return {
            "NE": x != value, "LT": x < value, "LE": x <= value, "EQ": x == value,
            "GE": x >= value, "GT": x > value, "MASKED_EQ": x & value == second & value,
        }[op.removeprefix("SCMP_CMP_")]  # fmt: skip

    expected = ALLOW if all(holds(*condition) for condition in conditions) else KILL
    assert run(code, NUMBERS["ioctl"][0], arguments) == expected
    assert run(code, NUMBERS["read"][0], arguments) == KILL


def test_a_profile_of_every_call_fits() -> None:
    rule = {"names": sorted(NUMBERS), "action": "SCMP_ACT_ALLOW"}
    for machine in ("x86_64", "aarch64"):
        profile = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [rule]}
        assert len(seccomp_profile.program(profile, machine)) < 8 * 4096
    with pytest.raises(seccomp_profile.ProfileError, match="instructions, the kernel takes 4096"):
        seccomp_profile.program({**profile, "syscalls": [rule] * 9}, platform.machine())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "defaultAction is None, not one of"),
        ('{"defaultAction": "SCMP_ACT_NOTIFY"}', "defaultAction is 'SCMP_ACT_NOTIFY'"),
        ('{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": {}}', "syscalls is {}, which is no list"),
        ('{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["a"], "action": '
         '"SCMP_ACT_LOG", "args": [{"index": 6}]}]}', "index is 6, which is no number from 0 to 5"),
    ],
)  # fmt: skip
def test_what_is_no_profile(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(HPKError, match=r"cannot load seccomp profile .*p\.json") as raised:
        load_profile(tmp_path, "p.json")
    assert words in str(raised.value)


def test_only_files_of_the_directory_are_profiles(tmp_path: Path) -> None:
    directory = tmp_path / "seccomp"
    directory.mkdir()
    (tmp_path / "p.json").write_text('{"defaultAction": "SCMP_ACT_ALLOW"}')
    (directory / "link.json").symlink_to(tmp_path / "p.json")
    for name in ("../p.json", "link.json", str(tmp_path / "p.json"), "a\0b", "none.json", ""):
        with pytest.raises(HPKError, match="cannot load seccomp profile"):
            load_profile(directory, name)
