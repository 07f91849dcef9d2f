"""Logs of pods whose agent is not connected, from the files it wrote."""

from __future__ import annotations

import asyncio
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
    log = await asyncio.to_thread(_open, folder, container, options.previous, wanted)
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
    folder: str, container: str, previous: bool, options: logs.LogOptions
) -> logs.LogFile | None:
    runs = logs.runs(folder, container)
    runs = runs[-2:-1] if previous else runs[-1:]
    if not runs:
        return None
    try:
        return logs.LogFile(logs.path_of(folder, container, runs[0]), options)
    except FileNotFoundError:
        return None
