"""The runtime's default seccomp profile as a filter: for pods that ask for RuntimeDefault.

It is Docker's and containerd's (profiles/seccomp/default_linux.go), turned round: what that profile
does not allow is named here and refused, everything else passes. So a system call younger than
this list passes, too, where that profile would refuse it.
"""

import struct
from typing import Any, List, Sequence, Tuple

from .syscall_numbers import NUMBERS

PR_SET_SECCOMP, MODE_FILTER = 22, 2  # <linux/prctl.h>, <linux/seccomp.h>

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*, <linux/audit.h>
X32 = 0x40000000
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # <linux/bpf_common.h>
_NUMBER, _ARCH, _FIRST_LOW = 0, 4, 16  # offsets in struct seccomp_data
_NAMESPACES = 0x7E020000  # every CLONE_NEW… that clone takes

_REFUSED_NAMES = """
_sysctl acct add_key bpf chroot clock_settime create_module delete_module fanotify_init
finit_module fsconfig fsmount fsopen fspick get_kernel_syms get_mempolicy init_module
io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl
listmount listns lookup_dcookie mbind migrate_pages mount mount_setattr move_mount move_pages
nfsservctl open_by_handle_at open_tree open_tree_attr perf_event_open pidfd_getfd pivot_root
process_madvise query_module quotactl quotactl_fd reboot request_key set_mempolicy
set_mempolicy_home_node setdomainname sethostname setns settimeofday statmount swapoff swapon sysfs
syslog umount2 unshare uselib userfaultfd ustat vhangup
"""
_REFUSED = _REFUSED_NAMES.split()
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_AF_VSOCK = 40

_BY_CAPABILITY = {
    "DAC_READ_SEARCH": "open_by_handle_at",
    "SYS_ADMIN": "bpf fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount "
    "mount_setattr move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname "
    "sethostname setns syslog umount2 unshare",
    "SYS_BOOT": "reboot",
    "SYS_CHROOT": "chroot",
    "SYS_MODULE": "delete_module finit_module init_module",
    "SYS_PACCT": "acct",
    "SYS_PTRACE": "kcmp pidfd_getfd process_madvise",
    "SYS_RAWIO": "iopl ioperm",
    "SYS_TIME": "settimeofday clock_settime",
    "SYS_TTY_CONFIG": "vhangup",
    "SYS_NICE": "get_mempolicy mbind set_mempolicy set_mempolicy_home_node",
    "SYSLOG": "syslog",
    "BPF": "bpf",
    "PERFMON": "perf_event_open",
}


def refused(capabilities: Sequence[str]) -> List[str]:
    """Names of the system calls that a container with these capabilities may not use."""
    given = {name for kept in capabilities for name in _BY_CAPABILITY.get(kept, "").split()}
    return [name for name in _REFUSED if name not in given]


def program(machine: str, capabilities: Sequence[str]) -> bytes:
    """The filter, as struct sock_filter for each instruction."""
    which = 0 if machine == "x86_64" else 1
    code: List[Tuple[int, int, int, int]] = []

    def add(operation: int, value: int, yes: int = 0, no: int = 0) -> None:
        code.append((operation, yes, no, value))

    add(_LOAD, _ARCH)
    add(_EQUAL, ARCHES[machine], 1, 0)
    add(_RETURN, _ERRNO | _EPERM)  # 32-bit programs
    add(_LOAD, _NUMBER)
    if machine == "x86_64":
        add(_AT_LEAST, X32, 0, 1)
        add(_RETURN, _ERRNO | _EPERM)
    for name in refused(capabilities):
        number = NUMBERS[name][which]
        if number >= 0:
            add(_EQUAL, number, 0, 1)
            add(_RETURN, _ERRNO | _EPERM)
    if "SYS_ADMIN" not in capabilities:
        add(_EQUAL, NUMBERS["clone3"][which], 0, 1)
        add(_RETURN, _ERRNO | _ENOSYS)  # its flags can't be seen: glibc then uses clone
        add(_EQUAL, NUMBERS["clone"][which], 0, 4)
        add(_LOAD, _FIRST_LOW)
        add(_ANY_BIT, _NAMESPACES, 0, 1)
        add(_RETURN, _ERRNO | _EPERM)
        add(_RETURN, _ALLOW)
    add(_EQUAL, NUMBERS["socket"][which], 0, 4)
    add(_LOAD, _FIRST_LOW)
    add(_EQUAL, _AF_VSOCK, 0, 1)
    add(_RETURN, _ERRNO | _EPERM)
    add(_RETURN, _ALLOW)
    add(_EQUAL, NUMBERS["personality"][which], 0, 3 + len(_PERSONALITIES))
    add(_LOAD, _FIRST_LOW)
    for position, value in enumerate(_PERSONALITIES):
        add(_EQUAL, value, len(_PERSONALITIES) - position, 0)
    add(_RETURN, _ERRNO | _EPERM)
    add(_RETURN, _ALLOW)
    add(_RETURN, _ALLOW)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def argument(filter_: bytes) -> List[Any]:
    """struct sock_fprog, for launcher.Launcher.call."""
    return [len(filter_) // 8, filter_]
