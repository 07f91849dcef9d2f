"""The system calls that Python's oldest supported version has no function for, or a clumsy one."""

import ctypes
import os
import socket
import struct
from typing import Optional

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

MADV_DONTNEED = 4

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, "%s: %s" % (what, os.strerror(error)))


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    _check(_libc.setns(fd, flags), "setns")


def mount(
    source: str, target: str, fstype: Optional[str] = None, flags: int = 0, data: str = ""
) -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        fstype.encode() if fstype else None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(result, "mount %s on %s" % (source, target))


def umount(target: str, flags: int = 0) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), "umount %s" % target)


def die_with_parent(signal: int) -> None:
    """This process gets the signal when the thread that forked it ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl")


def inherit_orphans() -> None:
    """What this process's descendants leave behind becomes its own child."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def madvise(address: int, length: int, advice: int) -> None:
    result = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
    _check(result, "madvise")


def peer_uid(peer: socket.socket) -> int:
    """Who is at the other end of a Unix socket."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    return int(struct.unpack("iII", found)[1])
