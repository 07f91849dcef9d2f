"""What only an administrator does to Slurm: its configuration, its daemons, its nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from conftest import User, eventually

ROOT = User("root")
_NAME = os.environ.get("HPK_SANDBOX") or "hpk"
CONF = Path(f"/var/lib/{_NAME}-sandbox/etc/slurm.conf")


def scontrol(*argv: str) -> str:
    return ROOT.run("scontrol", *argv).out


def answers() -> bool:
    return "is UP" in ROOT.run("scontrol", "ping", check=False).out


@contextlib.contextmanager
def configured(*lines: str) -> Iterator[None]:
    """slurm.conf with these lines more."""
    before = CONF.read_text()
    try:
        CONF.write_text(before + "\n".join(lines) + "\n")
        scontrol("reconfigure")
        eventually("slurmctld with its new configuration", answers)
        yield
    finally:
        CONF.write_text(before)
        scontrol("reconfigure")
        eventually("slurmctld with its old configuration", answers)


@contextlib.contextmanager
def slurmctld_away() -> Iterator[None]:
    """Until the end of the block, or until `slurmctld_back`."""
    ROOT.sh("pid=$(cat /run/slurmctld.pid); kill $pid; while kill -0 $pid; do sleep 0.1; done")
    try:
        yield
    finally:
        slurmctld_back()


def slurmctld_back() -> None:
    if not answers():
        ROOT.sh("setsid slurmctld >/dev/null 2>&1 </dev/null")
    eventually("slurmctld", answers)
