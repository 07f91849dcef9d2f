"""kubectl port-forward: SPDY's pairs of streams on the API server's side, the agent's on ours.

Each connection that a client forwards is an error and a data stream with the same requestID. Ends
travel both ways as TCP has them: what one side has closed, the other may still answer.
(cri-streaming's portforward/httpstream.go is the model.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from hpk_kubelet.agent.wire import CLOSE, STDIN, STDOUT
from hpk_kubelet.server.agents import Agent, AgentGone, Stream
from hpk_kubelet.server.spdy import SpdyError
from hpk_kubelet.server.spdy_connection import SpdyConnection, SpdyStream
from hpk_kubelet.server.upgrade import Pipe

log = logging.getLogger(__name__)

PROTOCOL = "portforward.k8s.io"
TUNNEL = f"SPDY/3.1+{PROTOCOL}"
_PAIR_TIMEOUT = 30.0  # seconds between the two streams of a pair


class PortForward:
    """One client's connection to one pod."""

    def __init__(self, pipe: Pipe, agent: Agent, pod: str, uid: str) -> None:
        self._pipe = pipe
        self._agent = agent
        self._pod = pod
        self._uid = uid
        self._connection = SpdyConnection(pipe, self._opened)
        self._halves: dict[str, SpdyStream] = {}  # by request: those whose other half is missing
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until the client leaves."""
        try:
            await self._connection.run()
        except (ConnectionError, SpdyError) as e:
            log.info("port-forward to %s: %s", self._pod, e)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._pipe.close()

    def _opened(self, stream: SpdyStream) -> None:
        port = stream.headers.get("port", "")
        kind = stream.headers.get("streamtype")
        valid = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
        if not valid or kind not in ("error", "data"):
            self._start(stream.reset())
        else:
            # Very old clients name no request; their pairs are neighbours.
            own = stream.number if kind == "error" else stream.number - 2
            request = stream.headers.get("requestid") or str(own)
            other = self._halves.pop(request, None)
            if other is None:
                self._halves[request] = stream
                self._start(self._await_other(request, stream))
            elif kind == "data":
                self._start(self._forward(int(port), stream, other))
            else:
                self._start(self._forward(int(port), other, stream))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await_other(self, request: str, stream: SpdyStream) -> None:
        await asyncio.sleep(_PAIR_TIMEOUT)
        if self._halves.get(request) is stream:
            del self._halves[request]
            await stream.reset()

    async def _forward(self, port: int, data: SpdyStream, error: SpdyStream) -> None:
        stream = self._agent.open("portForward", port=port)
        inward = asyncio.create_task(_inward(data, stream))
        try:
            while (received := await stream.receive()) is not None:
                channel, content = received
                if channel == STDOUT:
                    await data.send(content)
                elif channel == CLOSE:  # the pod will send no more; it may still read
                    await data.finish()
                    await error.finish()
            if stream.error:
                words = f"error forwarding port {port} to pod {self._pod}, uid {self._uid}: "
                await error.send((words + stream.error).encode())
                await error.finish()
                await data.reset()
            await data.finish()
            await error.finish()
        except ConnectionError:
            pass  # the client left: there is nobody to tell
        finally:
            stream.close()
            inward.cancel()
            await asyncio.gather(inward, return_exceptions=True)
            self._connection.forget(data, error)


async def _inward(data: SpdyStream, stream: Stream) -> None:
    """What the client sends, and its end."""
    try:
        while (content := await data.receive()) is not None:
            await stream.send(STDIN, content)
        if data.was_reset:
            stream.close()
        else:
            await stream.send(CLOSE, bytes([STDIN]))
    except AgentGone:
        pass  # the other direction hears of it too
