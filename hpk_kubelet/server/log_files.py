"""Logs of pods whose agent is not connected, from the files it wrote."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from hpk_kubelet.agent import logs
from hpk_kubelet.server.log_options import LogOptions

_POLL = 0.5


async def read_files(
    directory: Path, container: str, options: LogOptions, running: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """The log as text, in pieces; with `follow`, on to the end of a pod that still runs."""
    folder = str(directory / "logs")
    wanted = logs.LogOptions(
        tail_lines=options.tail,
        since=None if options.since is None else int(options.since * 1e9),
        limit_bytes=options.limit,
        timestamps=options.timestamps,
    )
    log = await asyncio.to_thread(_open, folder, container, options.previous, wanted, options.part)
    if log is None:
        return
    try:
        while not log.full:
            # Asked first: what is written before the end is then read after it.
            more = options.follow and not options.previous and running()
            while text := await asyncio.to_thread(log.read):
                yield text
            if not more:
                return
            await asyncio.sleep(_POLL)
    finally:
        log.close()


def _open(
    folder: str, container: str, previous: bool, options: logs.LogOptions, part: int | None
) -> logs.LogFile | None:
    runs = _runs(folder, container, previous)
    if not runs:
        return None
    try:
        return logs.LogFile(logs.path_of(folder, container, runs[0]), options, part)
    except FileNotFoundError:
        return None


def newest_part(directory: Path, container: str, previous: bool) -> int | None:
    """The inode of the file in which a reader who comes now begins; None while there is none."""
    folder = str(directory / "logs")
    for run in _runs(folder, container, previous):
        with contextlib.suppress(FileNotFoundError):
            return Path(logs.path_of(folder, container, run)).stat().st_ino
    return None


def _runs(folder: str, container: str, previous: bool) -> list[int]:
    runs = logs.runs(folder, container)
    return runs[-2:-1] if previous else runs[-1:]
