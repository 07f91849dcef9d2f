"""exec and attach: bytes between the API server's WebSocket and the agent's stream.

Both sides speak v5.channel.k8s.io (one channel byte, then data), so nothing is looked into but
whether the final Status (channel 3) has come.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import WSMsgType, web

from hpk_kubelet.agent.wire import ERROR, STDERR, STDOUT
from hpk_kubelet.server.agents import AgentGone, Stream

PROTOCOL = "v5.channel.k8s.io"
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


async def proxy(request: web.Request, stream: Stream) -> web.StreamResponse:
    """Upgrades the request and carries both directions until the agent ends the stream or the
    client leaves."""
    socket = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=_MAX_MESSAGE)
    inbound: asyncio.Task[None] | None = None
    try:
        await socket.prepare(request)
        # An empty message says that the connection stands (apimachinery's wsstream does so too).
        query = request.query
        lowest = STDOUT if _flag(query.get("output")) or _flag(query.get("stdout")) else STDERR
        await socket.send_bytes(bytes([lowest]))
        inbound = asyncio.create_task(_from_client(socket, stream))
        told = False
        while (received := await stream.receive()) is not None:
            channel, data = received
            told = told or channel == ERROR
            await socket.send_bytes(bytes([channel]) + data)
        if not told:
            await socket.send_bytes(
                bytes([ERROR]) + failure(stream.error or "the stream ended without a result")
            )
        await socket.close()
    except (ConnectionError, AgentGone):
        pass  # the client left: there is nobody to tell
    finally:
        stream.close()
        if inbound is not None:
            inbound.cancel()
            await asyncio.gather(inbound, return_exceptions=True)
    return socket


async def _from_client(socket: web.WebSocketResponse, stream: Stream) -> None:
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data:
                await stream.send(message.data[0], message.data[1:])
    except AgentGone:
        return
    stream.close()  # the client is gone; the other direction ends with it


def _flag(value: str | None) -> bool:
    return value in ("1", "true", "True")
