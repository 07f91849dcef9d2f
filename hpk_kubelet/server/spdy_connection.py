"""A SPDY connection at work: its streams, each with its own queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from hpk_kubelet.server import spdy
from hpk_kubelet.server.upgrade import CHUNK, Pipe

_QUEUE = 64  # frames of one stream that may wait; then the whole connection does


class SpdyStream:
    """One stream. A reset by the client looks like its end, and `was_reset` tells."""

    def __init__(self, connection: SpdyConnection, number: int, headers: Mapping[str, str]) -> None:
        self.number = number
        self.headers = headers
        self.was_reset = False
        self._connection = connection
        self._received: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE)
        self._finished = False

    async def receive(self) -> bytes | None:
        """The next bytes; None at the end."""
        return await self._received.get()

    async def send(self, data: bytes) -> None:
        for at in range(0, len(data), CHUNK):
            if self.was_reset:
                return
            await self._connection.write(spdy.data(self.number, data[at : at + CHUNK]))

    async def finish(self) -> None:
        """No more will be sent; what the client sends still comes."""
        if not self._finished and not self.was_reset:
            self._finished = True
            await self._connection.write(spdy.data(self.number, b"", fin=True))

    async def reset(self) -> None:
        if not self.was_reset:
            self.was_reset = True
            await self._connection.write(spdy.reset(self.number))

    async def take(self, data: bytes | None) -> None:
        await self._received.put(data)

    def end(self) -> None:
        """It is over in both directions: nothing that waits is worth anything."""
        self.was_reset = True
        while not self._received.empty():
            self._received.get_nowait()
        self._received.put_nowait(None)


class SpdyConnection:
    """`run` serves until the client leaves; `on_stream` is called with each stream it opens."""

    def __init__(self, pipe: Pipe, on_stream: Callable[[SpdyStream], None]) -> None:
        self._pipe = pipe
        self._on_stream = on_stream
        self._session = spdy.Session()
        self._streams: dict[int, SpdyStream] = {}

    async def write(self, data: bytes) -> None:
        await self._pipe.write(data)

    async def run(self) -> None:
        """ConnectionError or SpdyError where it ends badly."""
        try:
            while data := await self._pipe.read():
                for event in self._session.feed(data):
                    await self._take(event)
        finally:
            for stream in self._streams.values():
                stream.end()

    def forget(self, *streams: SpdyStream) -> None:
        """Nobody reads them any more: what still comes for them is dropped."""
        for stream in streams:
            self._streams.pop(stream.number, None)
            stream.end()

    async def _take(self, event: spdy.Event) -> None:
        match event:
            case spdy.Opened(number, headers, fin):
                stream = self._streams[number] = SpdyStream(self, number, headers)
                await self.write(self._session.reply(number))
                self._on_stream(stream)
                if fin:
                    await stream.take(None)
            case spdy.Data(number, data, fin):
                if (known := self._streams.get(number)) is not None and not known.was_reset:
                    if data:
                        await known.take(data)
                    if fin:
                        await known.take(None)
            case spdy.Reset(number):
                if (known := self._streams.pop(number, None)) is not None:
                    known.end()
            case spdy.Ping(number):
                await self.write(spdy.pong(number))
            case spdy.GoAway():
                pass  # the client opens no more; those there go on
