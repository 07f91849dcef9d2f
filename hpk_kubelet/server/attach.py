"""attach to a container that ends just then.

`kubectl run -i` prints the log so far, attaches, and where that fails prints the whole log again: a
quick command's output would be there twice. So an attachment that comes too late, by a client that
has just read the log, is given what of the log it has not read, and the container's end.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from hpk_kubelet.agent.wire import ERROR, STDOUT
from hpk_kubelet.server.agents import AgentGone

_MEMORY = 10.0  # seconds; kubectl attaches at once after the log

Key = tuple[str, str]  # a pod's uid, a container


class Conversation(Protocol):
    """What an exec or an attachment is to its client's side."""

    error: str

    async def send(self, channel: int, data: bytes) -> None: ...

    async def receive(self) -> tuple[int, bytes] | None: ...

    def close(self) -> None: ...


class ReadLogs:
    """Whose whole log was read a moment ago, and how many bytes it was."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read: dict[Key, tuple[float, int]] = {}

    def note(self, key: Key, count: int) -> None:
        now = self._clock()
        self._read = {k: v for k, v in self._read.items() if now - v[0] < _MEMORY}
        self._read[key] = (now, count)

    def take(self, key: Key) -> int | None:
        """The bytes, once; None if nobody has read it."""
        then, count = self._read.pop(key, (0.0, 0))
        return count if then and self._clock() - then < _MEMORY else None


class Attachment:
    """The agent's stream; where that says that nothing runs, the rest of the log and a success."""

    def __init__(self, stream: Conversation | None, log: AsyncIterator[bytes], skip: int) -> None:
        self.error = ""
        self._stream = stream
        self._log = log
        self._skip = skip
        self._begun = self._told = False

    async def send(self, channel: int, data: bytes) -> None:
        if self._told:
            raise AgentGone("the container has ended")
        if self._stream is not None:
            await self._stream.send(channel, data)

    async def receive(self) -> tuple[int, bytes] | None:
        if self._stream is not None:
            received = await self._stream.receive()
            self._begun = self._begun or received is not None
            if received is not None or self._begun or "not running" not in self._stream.error:
                self.error = self._stream.error
                return received
            self._stream.close()
            self._stream = None
        async for part in self._log:
            fresh = part[self._skip :]
            self._skip = max(0, self._skip - len(part))
            if fresh:
                return STDOUT, fresh
        if self._told:
            return None
        self._told = True
        return ERROR, json.dumps({"metadata": {}, "status": "Success"}).encode()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
