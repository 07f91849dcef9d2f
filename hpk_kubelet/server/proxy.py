"""exec and attach: bytes between the API server's WebSocket and the agent's stream.

The agent speaks v5.channel.k8s.io (one channel byte, then data). Clients may speak older versions
of it, too (cri-streaming's remotecommand/websocket.go): the first ones have no Status but an
error's words, and each has a form that is base64 in text messages.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from typing import Any

from aiohttp import WSMsgType, web

from hpk_kubelet.agent.wire import ERROR, STDERR, STDOUT
from hpk_kubelet.server.agents import AgentGone
from hpk_kubelet.server.attach import Conversation

PROTOCOLS = (
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "channel.k8s.io",
    "base64.channel.k8s.io",
)
_MAX_MESSAGE = 16 << 20


def failure(message: str) -> bytes:
    """The Status of a command that could not be run or watched to its end."""
    status: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": "InternalError",
        "message": message,
        "code": 500,
    }
    return json.dumps(status).encode()


class Channels:
    """A WebSocket that speaks one of PROTOCOLS, or none: then it is as with channel.k8s.io."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        protocol = socket.ws_protocol or "channel.k8s.io"
        self._text = "base64" in protocol
        self._has_status = protocol.startswith("v")

    async def send(self, channel: int, data: bytes) -> None:
        if channel == ERROR and not self._has_status:
            data = old_status(data)
            if not data:
                return
        if self._text:
            await self._socket.send_str(f"{channel}{base64.b64encode(data).decode()}")
        else:
            await self._socket.send_bytes(bytes([channel]) + data)

    async def close(self) -> None:
        await self._socket.close()

    async def received(self, stream: Conversation) -> None:
        """Passes on what the client says, until it leaves."""
        async for message in self._socket:
            if not message.data:
                continue
            if message.type is WSMsgType.BINARY and not self._text:
                await stream.send(message.data[0], message.data[1:])
            elif message.type is WSMsgType.TEXT and self._text and message.data[0].isdecimal():
                try:
                    data = base64.b64decode(message.data[1:], validate=True)
                except binascii.Error:
                    return  # no client of this protocol
                await stream.send(int(message.data[0]), data)


def old_status(data: bytes) -> bytes:
    """A Status as the first versions of the protocol tell it: nothing of a success."""
    try:
        status = json.loads(data)
    except ValueError:
        return data
    return b"" if status.get("status") == "Success" else str(status.get("message", "")).encode()


async def proxy(request: web.Request, stream: Conversation) -> web.StreamResponse:
    """Upgrades the request and carries both directions until the agent ends the stream or the
    client leaves."""
    socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=_MAX_MESSAGE)
    inbound: asyncio.Task[None] | None = None
    try:
        await socket.prepare(request)
        channels = Channels(socket)
        # An empty message says that the connection stands (apimachinery's wsstream does so too).
        query = request.query
        lowest = STDOUT if _flag(query.get("output")) or _flag(query.get("stdout")) else STDERR
        await channels.send(lowest, b"")
        inbound = asyncio.create_task(_from_client(channels, stream))
        told = False
        while (received := await stream.receive()) is not None:
            channel, data = received
            told = told or channel == ERROR
            await channels.send(channel, data)
        if not told:
            words = failure(stream.error or "the stream ended without a result")
            await channels.send(ERROR, words)
        await channels.close()
    except (ConnectionError, AgentGone):
        pass  # the client left: there is nobody to tell
    finally:
        stream.close()
        if inbound is not None:
            inbound.cancel()
            await asyncio.gather(inbound, return_exceptions=True)
    return socket


async def _from_client(channels: Channels, stream: Conversation) -> None:
    try:
        await channels.received(stream)
    except AgentGone:
        return
    stream.close()  # the client is gone; the other direction ends with it


def _flag(value: str | None) -> bool:
    return value in ("1", "true", "True")
