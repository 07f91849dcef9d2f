"""exec and attach for clients that upgrade to SPDY (kubectl before 1.30, and older libraries).

The client opens one SPDY stream for each of stdin, stdout, stderr, resize, and one for the final
Status; they become the channels of v5.channel.k8s.io, which the agent speaks (agent/wire.py).
cri-streaming's remotecommand/httpstream.go is the model.
"""

from __future__ import annotations

import asyncio
import logging

from hpk_kubelet.agent.wire import CLOSE, ERROR, RESIZE, STDERR, STDIN, STDOUT
from hpk_kubelet.server.agents import AgentGone
from hpk_kubelet.server.attach import Conversation
from hpk_kubelet.server.proxy import failure
from hpk_kubelet.server.spdy import SpdyError
from hpk_kubelet.server.spdy_connection import SpdyConnection, SpdyStream
from hpk_kubelet.server.upgrade import Pipe

log = logging.getLogger(__name__)

SPDY_PROTOCOLS = (
    "v4.channel.k8s.io",
)  # v1 to v3 have no exit codes; all clients since 1.5 know it
_CHANNELS = {"stdin": STDIN, "stdout": STDOUT, "stderr": STDERR, "resize": RESIZE, "error": ERROR}
_CREATION_TIMEOUT = 30.0


class SpdyExec:
    """One command or attachment. `wanted`: the streams the client opens besides `error`."""

    def __init__(self, pipe: Pipe, stream: Conversation, wanted: set[str]) -> None:
        self._pipe = pipe
        self._stream = stream
        self._wanted = wanted | {"error"}
        self._connection = SpdyConnection(pipe, self._opened)
        self._streams: dict[int, SpdyStream] = {}  # by channel
        self._complete = asyncio.Event()

    async def serve(self) -> None:
        """Until the command has ended or the client has left."""
        reading = asyncio.create_task(self._connection.run())
        carrying = asyncio.create_task(self._carry())
        try:
            await asyncio.wait({reading, carrying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, carrying):
                task.cancel()
            for end in await asyncio.gather(reading, carrying, return_exceptions=True):
                if isinstance(end, ConnectionError | SpdyError | TimeoutError):
                    log.info("exec or attach over SPDY: %s", end or type(end).__name__)
                elif isinstance(end, Exception):
                    log.error("exec or attach over SPDY", exc_info=end)
            self._stream.close()
            await self._pipe.close()

    def _opened(self, stream: SpdyStream) -> None:
        channel = _CHANNELS.get(stream.headers.get("streamtype", ""))
        if channel is not None:
            self._streams[channel] = stream
        if {_CHANNELS[name] for name in self._wanted} <= self._streams.keys():
            self._complete.set()

    async def _carry(self) -> None:
        async with asyncio.timeout(_CREATION_TIMEOUT):
            await self._complete.wait()
        inward = [
            asyncio.create_task(self._inward(channel))
            for channel in (STDIN, RESIZE)
            if channel in self._streams
        ]
        try:
            told = False
            while (received := await self._stream.receive()) is not None:
                channel, data = received
                told = told or channel == ERROR
                if channel in self._streams:
                    await self._streams[channel].send(data)
            if not told:
                words = self._stream.error or "the stream ended without a result"
                await self._streams[ERROR].send(failure(words))
            for stream in self._streams.values():
                await stream.finish()
        finally:
            for task in inward:
                task.cancel()
            await asyncio.gather(*inward, return_exceptions=True)

    async def _inward(self, channel: int) -> None:
        try:
            while (data := await self._streams[channel].receive()) is not None:
                await self._stream.send(channel, data)
            if channel == STDIN:
                await self._stream.send(CLOSE, bytes([STDIN]))
        except AgentGone:
            pass  # the other direction hears of it too
