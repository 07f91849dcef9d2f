"""Many pods on their way into Slurm's queue at once: what can wait until they are there, waits."""

from __future__ import annotations

import asyncio
import contextlib
import time

MANY = 10  # pods between being taken up and having their jobs
LONGEST = 10.0  # seconds for which anything is put off


class Rush:
    """`begin` and `end` may be called again for the same pod."""

    def __init__(self) -> None:
        self._on_their_way: set[str] = set()
        self._began = 0.0
        self._calm = asyncio.Event()
        self._calm.set()

    def begin(self, uid: str) -> None:
        self._on_their_way.add(uid)
        if self._calm.is_set() and len(self._on_their_way) > MANY:
            self._began = time.monotonic()
            self._calm.clear()

    def end(self, uid: str) -> None:
        self._on_their_way.discard(uid)
        if len(self._on_their_way) <= MANY // 2:
            self._calm.set()

    def left(self) -> float:
        """Seconds it may take yet; 0 when there is none."""
        if self._calm.is_set():
            return 0.0
        return max(0.0, self._began + LONGEST - time.monotonic())

    async def over(self) -> None:
        while (left := self.left()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._calm.wait()
