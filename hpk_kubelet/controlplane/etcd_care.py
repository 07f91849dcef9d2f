"""Copies of etcd's data, made while it is stopped, and giving back the room it does not use."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from hpk_kubelet.controlplane.api import ApiClient
from hpk_kubelet.controlplane.files import make_private_dir
from hpk_kubelet.errors import HPKError

KEPT = 2
_EVERY = 3600.0  # seconds between two copies
_LARGE = 64 << 20  # bytes from which etcd's file is worth compacting at a start


def database(data: Path) -> Path:
    return data / "member" / "snap" / "db"


def back_up(data: Path, backups: Path, now: float, say: Callable[[str], None]) -> Path | None:
    """Copies the data of a stopped etcd, unless there is a copy from a short while ago; a copy
    that can't be made is said, and nothing more. To go back: stop, put a copy in `data`'s place,
    start."""
    if not database(data).exists():
        return None
    make_private_dir(backups)
    there = sorted(path for path in backups.iterdir() if not path.name.startswith("."))
    if there and now - there[-1].stat().st_mtime < _EVERY:
        return None
    size = database(data).stat().st_size
    room = os.statvfs(backups)
    if room.f_bavail * room.f_frsize < 4 * size:
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


async def compact(data: Path, client: ApiClient, say: Callable[[str], None]) -> None:
    """Lets a running etcd with a large file give back what it does not use; nobody may need it
    meanwhile. `client` is one of etcd's HTTP port."""
    before = database(data).stat().st_size
    if before < _LARGE:
        return
    try:
        status, content = await client.request(
            "POST", "/v3/maintenance/defragment", {}, timeout=120.0
        )
        if status != 200:
            raise HPKError(f"{status} {content[:200].decode(errors='replace')}")
    except (OSError, HPKError) as e:
        say(f"etcd's file was not compacted: {e}")
        return
    after = database(data).stat().st_size
    say(f"etcd's file was compacted from {before >> 20} to {after >> 20} MB")
