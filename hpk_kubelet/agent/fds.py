"""Waiting for file descriptors, signals and the clock in the event loop."""

import asyncio
import os
import signal
from typing import Any, AsyncIterator, Awaitable, Callable, Optional, TypeVar

_Result = TypeVar("_Result")

LINGER = 0.5  # seconds for output to arrive after its process's end


async def readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    await _ready(fd, loop.add_reader, loop.remove_reader)


async def writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    await _ready(fd, loop.add_writer, loop.remove_writer)


async def _ready(fd: int, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    ready: "asyncio.Future[None]" = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)


async def within(seconds: float, work: Awaitable[_Result]) -> _Result:
    """asyncio.wait_for, which before Python 3.12 may lose a cancellation (bpo-37658): what it was
    in would never end. asyncio.TimeoutError."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled():
                raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


async def chunks(fd: int, exited: "Optional[asyncio.Future[Any]]" = None) -> AsyncIterator[bytes]:
    """What arrives on a non-blocking descriptor, until its end. Once `exited` is done, only what
    is there is read: something left in the background may hold the other end open for ever."""
    while True:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            if not await _more(fd, exited):
                return
            continue
        except OSError:
            return  # EIO: the last one has closed the terminal
        if not data:
            return
        yield data
        await asyncio.sleep(0)


async def _more(fd: int, exited: "Optional[asyncio.Future[Any]]") -> bool:
    waiting = asyncio.ensure_future(readable(fd))
    try:
        if exited is not None:
            await asyncio.wait({waiting, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await asyncio.wait({waiting}, timeout=LINGER)
                return waiting.done()
        await waiting
        return True
    finally:
        waiting.cancel()


Output = Callable[[str, bytes], Awaitable[None]]


def on_signal(number: int, call: Callable[[], Any]) -> None:
    """Has the event loop call when the signal comes. The loop's own add_signal_handler imports
    inspect, which makes an agent a megabyte larger (see later.py)."""
    loop = asyncio.get_running_loop()

    def came(*_: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    signal.signal(number, came)
