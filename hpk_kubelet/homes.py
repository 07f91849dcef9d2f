"""Which HPK_HOMEs this user has: each that a control plane was started in, as long as it exists.

They share the image cache, and in Slurm's queue a job does not tell which of them it is for.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from hpk_kubelet.config import cache_dir


def remember(home: Path) -> None:
    directory = cache_dir() / "homes"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # One write of one name: two control planes that start at once do no harm.
    name = hashlib.sha256(bytes(home)).hexdigest()[:16]
    (directory / name).write_bytes(bytes(home))


def known(home: Path) -> list[Path]:
    """`home` and all others."""
    try:
        found = [Path(file.read_text()) for file in (cache_dir() / "homes").iterdir()]
    except FileNotFoundError:
        found = []
    others = {other for other in found if other.is_absolute() and other.is_dir()}
    return [home, *sorted(others - {home})]
