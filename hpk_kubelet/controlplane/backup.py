"""Copies of etcd's data, made while it is stopped."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from hpk_kubelet.controlplane.files import make_private_dir

KEPT = 2
DAILY = 86400.0
_EVERY = 3600.0  # seconds between two copies


def database(data: Path) -> Path:
    return data / "member" / "snap" / "db"


def is_due(data: Path, backups: Path, now: float) -> bool:
    """Whether the newest copy is older than a day, and there is room for another."""
    if not database(data).exists() or not _room(data, backups):
        return False
    there = _copies(backups)
    return not there or now - there[-1].stat().st_mtime >= DAILY


def _copies(backups: Path) -> list[Path]:
    """The oldest first."""
    if not backups.is_dir():
        return []
    return sorted(path for path in backups.iterdir() if not path.name.startswith("."))


def _room(data: Path, backups: Path) -> bool:
    """For four copies at least: a backup may not be what fills the disk."""
    room = os.statvfs(backups if backups.is_dir() else backups.parent)
    return room.f_bavail * room.f_frsize >= 4 * database(data).stat().st_size


def back_up(data: Path, backups: Path, now: float, say: Callable[[str], None]) -> Path | None:
    """Copies the data of a stopped etcd, unless there is a copy from a short while ago; a copy
    that can't be made is said, and nothing more. To go back: stop, put a copy in `data`'s place,
    start."""
    if not database(data).exists():
        return None
    make_private_dir(backups)
    there = _copies(backups)
    if there and now - there[-1].stat().st_mtime < _EVERY:
        return None
    if not _room(data, backups):
        say(f"no copy of etcd's data: {backups} has room for less than four of them")
        return None
    name = dt.datetime.fromtimestamp(now, dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    staging = backups / f".{name}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        # The write-ahead log is mostly zeros that were set aside: they need not be kept.
        subprocess.run(
            ["cp", "-r", "--sparse=always", str(data), str(staging)],
            check=True,
            capture_output=True,
            text=True,
        )
        os.utime(staging, (now, now))
        staging.rename(backups / name)
    except (OSError, subprocess.CalledProcessError) as e:
        shutil.rmtree(staging, ignore_errors=True)
        say(f"no copy of etcd's data: {getattr(e, 'stderr', '') or e}")
        return None
    for old in there[: len(there) + 1 - KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return backups / name
