"""What carries SPDY: a WebSocket's messages, or the HTTP connection itself after an upgrade.

kubectl and newer clients tunnel SPDY through a WebSocket; older ones (and what is built with them)
upgrade the connection, which the API server passes on as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from aiohttp import WSMsgType, web

CHUNK = 1 << 16
PROTOCOL_HEADER = "X-Stream-Protocol-Version"
_MAX_MESSAGE = 16 << 20


class Pipe(Protocol):
    response: web.StreamResponse
    """What the request's handler returns once the pipe is closed."""

    async def read(self) -> bytes:
        """Some bytes; b"" at the end."""

    async def write(self, data: bytes) -> None:
        """Waits while the other end is behind; ConnectionError when it is gone."""

    async def close(self) -> None: ...


class WebSocketPipe:
    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.response: web.StreamResponse = socket
        self._socket = socket

    async def read(self) -> bytes:
        while True:
            message = await self._socket.receive()
            if message.type is not WSMsgType.BINARY:
                return b""
            if message.data:
                return bytes(message.data)

    async def write(self, data: bytes) -> None:
        await self._socket.send_bytes(data)

    async def close(self) -> None:
        await self._socket.close()


class RawPipe:
    """The connection of a request whose handler has taken it over."""

    def __init__(self, request: web.Request) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self.response: web.StreamResponse = web.Response()  # to nobody
        self._http = request.protocol
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(limit=CHUNK)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)

    async def read(self) -> bytes:
        try:
            return await self._reader.read(CHUNK)
        except OSError:
            return b""

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        self._http.connection_lost(None)  # it has seen nothing since its connection was taken


def wants_spdy(request: web.Request) -> bool:
    """Whether the client asks for an upgrade of the connection itself."""
    return request.headers.get("Upgrade", "").upper() == "SPDY/3.1"


async def raw_pipe(request: web.Request, supported: Sequence[str]) -> RawPipe:
    """Answers 101 with the first of `supported` that the client offers; HTTPForbidden else, as
    httpstream.Handshake does."""
    offered = [
        word.strip()
        for value in request.headers.getall(PROTOCOL_HEADER, [])
        for word in value.split(",")
    ]
    chosen = next((p for p in supported if p in offered), None)
    if chosen is None:
        raise web.HTTPForbidden(
            text=f"unable to upgrade: unable to negotiate protocol: client supports {offered}, "
            f"server accepts {list(supported)}"
        )
    pipe = RawPipe(request)
    await pipe.write(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
        + f"{PROTOCOL_HEADER}: {chosen}\r\n\r\n".encode()
    )
    return pipe


async def websocket_pipe(request: web.Request, protocol: str) -> WebSocketPipe:
    """Accepts a WebSocket of that subprotocol."""
    socket = web.WebSocketResponse(protocols=(protocol,), max_msg_size=_MAX_MESSAGE)
    await socket.prepare(request)
    return WebSocketPipe(socket)
