"""What the kernel makes of a seccomp filter: as much of BPF as ours use."""

from __future__ import annotations

import struct
from collections.abc import Sequence

X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003  # AUDIT_ARCH_*, <linux/audit.h>


def run(code: bytes, number: int, arguments: Sequence[int] = (), arch: int = X86_64) -> int:
    """What the filter says of a system call."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *[*arguments, 0, 0, 0, 0, 0, 0][:6])
    instructions = list(struct.iter_unpack("<HBBI", code))
    at = value = 0
    while True:
        operation, yes, no, k = instructions[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("<I", data, k)
        elif operation == 0x54:
            value &= k
        elif operation == 0x06:
            return int(k)
        else:
            holds = {
                0x15: value == k, 0x25: value > k, 0x35: value >= k, 0x45: bool(value & k),
            }[operation]  # fmt: skip
            at += yes if holds else no
