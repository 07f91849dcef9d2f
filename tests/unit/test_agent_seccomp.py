"""The filter, run by an interpreter of its own and by the kernel."""

from __future__ import annotations

import platform
import struct

import pytest
from bpf import AARCH64, I386, run

from hpk_kubelet.agent import seccomp
from hpk_kubelet.agent.program import _CAPABILITIES, _DEFAULT_CAPABILITIES

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026


@pytest.mark.parametrize(
    ("number", "first", "answer"),
    [
        (0, 0, ALLOW),  # read
        (59, 0, ALLOW),  # execve
        (161, 0, ALLOW),  # chroot, of which the default capabilities have one
        (165, 0, EPERM),  # mount
        (272, 0, EPERM),  # unshare
        (56, 0x11, ALLOW),  # clone as fork does
        (56, 0x10000011, EPERM),  # CLONE_NEWUSER
        (435, 0, ENOSYS),  # clone3
        (41, 2, ALLOW),  # socket AF_INET
        (41, 40, EPERM),  # AF_VSOCK
        (135, 0xFFFFFFFF, ALLOW),  # personality: what is it?
        (135, 0x20008, ALLOW),
        (135, 0x40000, EPERM),  # ADDR_NO_RANDOMIZE
        (250, 0, EPERM),  # keyctl
        (117, 0, ALLOW),  # setresuid
        (0x40000000, 0, EPERM),  # x32
    ],
)
def test_what_passes(number: int, first: int, answer: int) -> None:
    code = seccomp.program("x86_64", _DEFAULT_CAPABILITIES)
    assert run(code, number, [first]) == answer


def test_other_machines_and_rights() -> None:
    code = seccomp.program("x86_64", _DEFAULT_CAPABILITIES)
    assert run(code, 0, arch=I386) == EPERM
    code = seccomp.program("aarch64", [])
    assert [run(code, n, arch=AARCH64) for n in (40, 51, 63, 220)] == [EPERM, EPERM, ALLOW, ALLOW]
    code = seccomp.program("x86_64", ["SYS_ADMIN"])
    assert [run(code, n, [0x10000011]) for n in (165, 272, 56, 435)] == [ALLOW] * 4
    assert [run(code, n) for n in (246, 169)] == [EPERM, EPERM]  # kexec_load, reboot
    every = seccomp.program("x86_64", _CAPABILITIES)
    assert run(every, 250) == EPERM


def test_no_jump_leaves_the_filter() -> None:
    for machine in ("x86_64", "aarch64"):
        for capabilities in ([], _DEFAULT_CAPABILITIES, _CAPABILITIES):
            code = list(struct.iter_unpack("<HBBI", seccomp.program(machine, capabilities)))
            assert len(code) < 4096 and code[-1][0] == 0x06
            for at, (operation, yes, no, _) in enumerate(code):
                if operation in (0x15, 0x35, 0x45):
                    assert at + 1 + max(yes, no) < len(code)
    assert platform.machine() in ("x86_64", "aarch64")
