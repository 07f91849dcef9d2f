"""Where provisioned volumes live: one private directory, one directory in it for each volume.

Blocks on the disk. The directories in it are open to every user id, because containers run as
many; that is safe as long as nobody else can pass the private one above them.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from hpk_kubelet.errors import HPKError

_LONGEST_CLAIM = 128  # characters of a claim's name in its directory's: 255 bytes is the limit


def directory_name(namespace: str, claim: str, volume: str) -> str:
    """So that a user finds the data: NAMESPACE_CLAIM_pvc-UID."""
    return f"{namespace}_{claim[:_LONGEST_CLAIM]}_{volume}"


def check_base(base: Path, hpk_home: Path) -> None:
    """HPKError unless claims may be kept there: outside HPK's own state but for its `volumes`."""
    if not base.is_absolute():
        raise HPKError(f"volumes can't be kept in {base}: it is not an absolute path")
    real, home = Path(os.path.realpath(base)), Path(os.path.realpath(hpk_home))
    if real.is_relative_to(home) and real != home / "volumes":
        raise HPKError(
            f"volumes can't be kept in {base}: it is inside HPK's own directory, {hpk_home}"
        )


def make_base(base: Path) -> None:
    """Makes the private directory; HPKError if it is there and anybody else could enter it."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.stat()
    except OSError as e:
        raise HPKError(f"volumes can't be kept in {base}: {e.strerror}") from None
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise HPKError(
            f"volumes can't be kept in {base}: others may enter it (mode "
            f"{stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}); chmod 700 it, or name a "
            "directory that does not exist yet"
        )


def make_volume(path: Path) -> None:
    """A directory for the containers' users, whoever they are; again for the same one is fine."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) == 0o700:
            path.chmod(0o777)
    except OSError as e:
        raise HPKError(f"volume {path} can't be made: {e.strerror}") from None


@dataclass(frozen=True)
class Space:
    """Bytes; `total` counts what is free together with what is used."""

    free: int
    total: int


def space(base: Path) -> Space:
    """As df has it: what the file system gives, which knows quotas only where it says so."""
    try:
        found = os.statvfs(base)
    except OSError as e:
        raise HPKError(f"the free space of {base} is not known: {e.strerror}") from None
    return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def removable(path: Path, volume: str, hpk_home: Path) -> bool:
    """Whether this is a directory that `make_volume` could have made for the volume of this name,
    so that a volume written by hand removes nothing."""
    try:
        check_base(path.parent, hpk_home)
        found = path.lstat()
    except (HPKError, OSError):
        return False
    return (
        path.name.endswith(f"_{volume}")
        and ".." not in path.parts
        and stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
    )
