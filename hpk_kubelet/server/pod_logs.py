"""One container's log from where it is freshest, without a gap when that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hpk_kubelet.server.agents import Agent
from hpk_kubelet.server.log_files import newest_part
from hpk_kubelet.server.log_options import LogOptions

LogFiles = Callable[[Path, str, LogOptions, Callable[[], bool]], AsyncIterator[bytes]]
"""(pod's directory, container, options, whether the pod may still write) → the log as text."""

_MARK = 4096  # bytes of what was sent last, by which its place in the files is found


class LoggedPod(Protocol):
    @property
    def agent(self) -> Agent | None: ...
    @property
    def directory(self) -> Path: ...
    @property
    def running(self) -> bool: ...  # its job may still write


async def pod_log(
    pod: LoggedPod, container: str, options: LogOptions, files: LogFiles
) -> AsyncIterator[bytes]:
    """From the agent while it lives (a network file system shows its files late), else from the
    files. An agent that goes in the middle, as it does when the pod ends before a slow reader has
    all of it, is followed up by the files."""
    agent = pod.agent
    if agent is None:
        async for part in files(pod.directory, container, options, lambda: pod.running):
            yield part
        return
    first = await asyncio.to_thread(newest_part, pod.directory, container, options.previous)
    sent, mark = 0, b""
    stream = agent.open("logs", **options.to_stream(container))
    try:
        while (received := await stream.receive()) is not None:
            data = received[1]
            sent, mark = sent + len(data), (mark + data)[-_MARK:]
            yield data
        lost = bool(stream.error)
    finally:
        stream.close()
    if not lost:
        return
    left = None if options.limit is None else options.limit - sent
    # It counts from the file that was the newest then, wherever the log has moved on to.
    rest, skip = replace(options, limit=None, part=first), sent
    if options.tail is not None and sent:
        rest = replace(rest, tail=None)
        skip = await _place(pod, container, rest, files, mark)
    async for part in files(pod.directory, container, rest, lambda: pod.running):
        fresh = part[skip:]
        skip = max(0, skip - len(part))
        if left is not None:
            fresh = fresh[:left]
            left -= len(fresh)
        if fresh:
            yield fresh
        if left == 0:
            return


async def _place(
    pod: LoggedPod, container: str, options: LogOptions, files: LogFiles, mark: bytes
) -> int:
    """How much of the whole text lies before the end of `mark`; 0 when it is not there."""
    whole = bytearray()
    once = replace(options, follow=False)
    async for part in files(pod.directory, container, once, lambda: False):
        whole += part
    found = whole.rfind(mark)
    return found + len(mark) if found >= 0 else 0
