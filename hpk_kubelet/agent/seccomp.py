"""The runtime's default seccomp profile as a filter: for pods that ask for RuntimeDefault.

It is Docker's and containerd's (profiles/seccomp/default_linux.go), turned round: what that profile
does not allow is named here and refused, everything else passes. So a system call younger than
this list passes, too, where that profile would refuse it.
"""

import struct
from typing import Any, Dict, List, Sequence, Tuple

PR_SET_SECCOMP, MODE_FILTER = 22, 2  # <linux/prctl.h>, <linux/seccomp.h>

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*, <linux/audit.h>
_X32 = 0x40000000
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # <linux/bpf_common.h>
_NUMBER, _ARCH, _FIRST_LOW = 0, 4, 16  # offsets in struct seccomp_data
_NAMESPACES = 0x7E020000  # every CLONE_NEW… that clone takes

# name: its numbers on x86_64 and aarch64, -1 where there is none
_NUMBERS: Dict[str, Tuple[int, int]] = {
    "_sysctl": (156, -1), "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280),
    "chroot": (161, 51), "clock_settime": (227, 112), "create_module": (174, -1),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "get_kernel_syms": (177, -1), "get_mempolicy": (239, 236), "init_module": (175, 105),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425),
    "ioperm": (173, -1), "iopl": (172, -1), "kcmp": (312, 272), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "listmount": (458, 458), "listns": (470, 470),
    "lookup_dcookie": (212, 18), "mbind": (237, 235), "migrate_pages": (256, 238),
    "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "nfsservctl": (180, 42), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "open_tree_attr": (467, 467), "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "query_module": (178, -1), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "reboot": (169, 142), "request_key": (249, 218), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450), "setdomainname": (171, 162), "sethostname": (170, 161),
    "setns": (308, 268), "settimeofday": (164, 170), "statmount": (457, 457),
    "swapoff": (168, 225), "swapon": (167, 224), "sysfs": (139, -1), "syslog": (103, 116),
    "umount2": (166, 39), "unshare": (272, 97), "uselib": (134, -1), "userfaultfd": (323, 282),
    "ustat": (136, -1), "vhangup": (153, 58),
}  # fmt: skip
_CLONE, _CLONE3, _PERSONALITY, _SOCKET = (56, 220), (435, 435), (135, 92), (41, 198)
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
    return [name for name in _NUMBERS if name not in given]


def program(machine: str, capabilities: Sequence[str]) -> bytes:
    """The filter, as struct sock_filter for each instruction."""
    which = 0 if machine == "x86_64" else 1
    code: List[Tuple[int, int, int, int]] = []

    def add(operation: int, value: int, yes: int = 0, no: int = 0) -> None:
        code.append((operation, yes, no, value))

    add(_LOAD, _ARCH)
    add(_EQUAL, _ARCHES[machine], 1, 0)
    add(_RETURN, _ERRNO | _EPERM)  # 32-bit programs
    add(_LOAD, _NUMBER)
    if machine == "x86_64":
        add(_AT_LEAST, _X32, 0, 1)
        add(_RETURN, _ERRNO | _EPERM)
    for name in refused(capabilities):
        number = _NUMBERS[name][which]
        if number >= 0:
            add(_EQUAL, number, 0, 1)
            add(_RETURN, _ERRNO | _EPERM)
    if "SYS_ADMIN" not in capabilities:
        add(_EQUAL, _CLONE3[which], 0, 1)
        add(_RETURN, _ERRNO | _ENOSYS)  # its flags can't be seen: glibc then uses clone
        add(_EQUAL, _CLONE[which], 0, 4)
        add(_LOAD, _FIRST_LOW)
        add(_ANY_BIT, _NAMESPACES, 0, 1)
        add(_RETURN, _ERRNO | _EPERM)
        add(_RETURN, _ALLOW)
    add(_EQUAL, _SOCKET[which], 0, 4)
    add(_LOAD, _FIRST_LOW)
    add(_EQUAL, _AF_VSOCK, 0, 1)
    add(_RETURN, _ERRNO | _EPERM)
    add(_RETURN, _ALLOW)
    add(_EQUAL, _PERSONALITY[which], 0, 3 + len(_PERSONALITIES))
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
