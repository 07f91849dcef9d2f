"""Who a container runs as: an image's `USER` or a pod's runAsUser against the image's own files.

The rules are runc's (libcontainer/user, GetExecUser), the error texts included.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpk_kubelet.errors import HPKError
from hpk_kubelet.images.rootfs import resolve

_MAX_FILE = 8 << 20
_MAX_ID = (1 << 31) - 1


class User(NamedTuple):
    uid: int
    gid: int
    groups: list[int]  # supplementary, without gid
    home: str


def resolve_user(rootfs: Path, user: str) -> User:
    """`""`, `1000`, `1000:100`, `nobody`, `nobody:users` → ids.

    Raises HPKError when a name is not in the image, or a number is out of range.
    """
    who, _, group = user.partition(":")
    uid, gid, home, name = _number(who or "0", "uid"), 0, "/", ""
    for entry in _lines(rootfs, "etc/passwd", 6):
        if entry[0] == who if uid is None else entry[2] == str(uid):
            found_uid, found_gid = _number(entry[2], "uid"), _number(entry[3], "gid")
            if found_uid is not None and found_gid is not None:
                name, uid, gid, home = entry[0], found_uid, found_gid, entry[5] or "/"
                break
    if uid is None:
        raise HPKError(f"unable to find user {who}: no matching entries in passwd file")
    groups = []
    explicit = _number(group, "gid") if group else None
    named = False
    for entry in _lines(rootfs, "etc/group", 4):
        number = _number(entry[2], "gid")
        if number is None:
            continue
        if group:
            if entry[0] == group:
                gid, named = number, True
                break
        elif name and name in entry[3].split(",") and number != gid:
            groups.append(number)
    if group and not named:
        if explicit is None:
            raise HPKError(f"unable to find group {group}: no matching entries in group file")
        gid = explicit
    return User(uid, gid, sorted(set(groups)), home)


def _number(text: str, what: str) -> int | None:
    if not (text.isascii() and text.isdigit()):
        return None
    value = int(text[:12])
    if value > _MAX_ID:
        raise HPKError(f"{what}s must be in range 0-{_MAX_ID}: {text}")
    return value


def _lines(rootfs: Path, name: str, fields: int) -> Iterator[list[str]]:
    """The entries with at least that many fields; a missing or odd file has none."""
    try:
        path = resolve(str(rootfs), name)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    with open(fd, "rb") as file:  # noqa: PTH123 - from a descriptor
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return
        text = file.read(_MAX_FILE).decode("utf-8", "surrogateescape")
    for line in text.splitlines():
        entry = line.strip().split(":")
        if len(entry) >= fields:
            yield entry
