"""Becomes root of another root file system: mounts, pivot_root, exec. Run after unshare(1).

Usage: python3 -I enter.py SPEC.json, with
    {"root": path, "hostname": name or null, "argv": [...], "env": {...},
     "steps": [["mkdir", path, mode] | ["bind", from, to] | ["ro-bind", from, to]
               | ["mount", type, to, options] | ["overlay", lower, scratch, to]
               | ["cgroup", directory, to] | ["write", path, text]
               | ["node", path, mode, major, minor] | ["link", target, path]]}
Steps run in order, every path as it is before the root changes. The kernel forbids user
namespaces inside a chroot, hence pivot_root.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import sys
from pathlib import Path

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWCGROUP = 0x02000000
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, fstype: str = "", flags: int = 0, options: str = "") -> None:
    if libc.mount(source.encode(), target.encode(), fstype.encode(), flags, options.encode()):
        error = ctypes.get_errno()
        raise OSError(error, f"mount {source} on {target}: {os.strerror(error)}")


def bind(source: str, target: str, read_only: bool) -> None:
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def place(source: str, target: str) -> None:
    """Makes sure there is something of the right kind to mount on."""
    path = Path(target)
    if Path(source).is_dir():
        path.mkdir(parents=True, exist_ok=True)
    elif not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def overlay(lower: str, scratch: str, target: str) -> None:
    """A writable view of `lower`; what is written lives in memory, on a tmpfs at `scratch`."""
    mount("hpk", scratch, "tmpfs", 0, "mode=0755")
    upper, work = Path(scratch) / "upper", Path(scratch) / "work"
    for path in (upper, work, Path(target)):
        path.mkdir(exist_ok=True)
    mount("hpk", target, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")


def own_cgroup(directory: str, target: str) -> None:
    """Makes a directory of the memory controller (v1) the root of this process and its children."""
    (Path(directory) / "cgroup.procs").write_text("0")
    if libc.unshare(CLONE_NEWCGROUP):
        raise OSError(ctypes.get_errno(), "unshare of the cgroup namespace")
    Path(target).mkdir(parents=True, exist_ok=True)
    mount("cgroup", target, "cgroup", 0, "memory")


def step(kind: str, *args: str | int) -> None:
    words = [str(a) for a in args]
    if kind == "mkdir":
        Path(words[0]).mkdir(parents=True, exist_ok=True)
        Path(words[0]).chmod(int(args[1]))
    elif kind in ("bind", "ro-bind"):
        place(words[0], words[1])
        bind(words[0], words[1], kind == "ro-bind")
    elif kind == "mount":
        Path(words[1]).mkdir(parents=True, exist_ok=True)
        mount("hpk", words[1], words[0], 0, words[2])
    elif kind == "overlay":
        overlay(*words)
    elif kind == "cgroup":
        own_cgroup(*words)
    elif kind == "write":
        Path(words[0]).unlink(missing_ok=True)  # a link there may lead out of the root
        Path(words[0]).write_text(words[1])
    elif kind == "node":
        os.mknod(words[0], stat.S_IFCHR | 0o600, os.makedev(int(args[2]), int(args[3])))
        Path(words[0]).chmod(int(args[1]))
    elif kind == "link":
        Path(words[1]).symlink_to(words[0])
    else:
        raise ValueError(f"unknown step {kind!r}")


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.umask(0o022)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    for item in spec["steps"]:
        step(*item)
    if spec["hostname"]:
        name = spec["hostname"].encode()
        if libc.sethostname(name, len(name)):
            raise OSError(ctypes.get_errno(), "sethostname")
    os.chdir(spec["root"])
    # The old root lands on the new one (pivot_root(2), "pivot_root(".", ".")") and goes away.
    if libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."):
        raise OSError(ctypes.get_errno(), f"pivot_root {spec['root']}")
    if libc.umount2(b".", MNT_DETACH):
        raise OSError(ctypes.get_errno(), "umount of the old root")
    os.chdir("/")
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])


if __name__ == "__main__":
    main()
