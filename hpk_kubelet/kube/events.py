"""Records core/v1 Events the way client-go's recorder does for kubelet and scheduler."""

from __future__ import annotations

import asyncio
import logging
import time as clocks
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from hpk_kubelet.kube.client import ApiError, Client, Object, Unreachable, events
from hpk_kubelet.kube.times import now, rfc3339

log = logging.getLogger(__name__)

REMEMBERED = 4096
"""Events whose count can still be raised (client-go's maxLruCacheEntries)."""
SPAM_BURST, SPAM_SECONDS = 25, 300.0
"""Per object: 25 events at once, then one every five minutes (client-go's spam filter)."""
LONGEST_QUEUE = 20_000
LONGEST_MESSAGE = 1024
RETRY_PAUSE = 2.0
FORBIDDEN_TRIES = 5


def reference(obj: Object, field_path: str = "") -> Object:
    """`involvedObject` for a whole API object, or for an ObjectReference already made."""
    meta = obj.get("metadata")
    if meta is None:
        ref = dict(obj)
    else:
        ref = {
            "kind": obj.get("kind", "Pod"),
            "apiVersion": obj.get("apiVersion", "v1"),
            "namespace": meta.get("namespace", ""),
            "name": meta["name"],
            "uid": meta.get("uid", ""),
            "resourceVersion": meta.get("resourceVersion", ""),
        }
    if field_path:
        ref["fieldPath"] = field_path
    return {key: value for key, value in ref.items() if value}


class SpamFilter:
    """A token bucket per object. `allow` takes the monotonic time in seconds."""

    def __init__(self, burst: int = SPAM_BURST, refill_seconds: float = SPAM_SECONDS) -> None:
        self._burst = burst
        self._refill = refill_seconds
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, key: str, time: float) -> bool:
        tokens, at = self._buckets.get(key, (float(self._burst), time))
        tokens = min(float(self._burst), tokens + (time - at) / self._refill)
        allowed = tokens >= 1
        remember(self._buckets, key, (tokens - 1 if allowed else tokens, time))
        return allowed


def remember(
    cache: OrderedDict[Any, Any], key: object, value: object, limit: int = REMEMBERED
) -> None:
    """Puts into a least-recently-used cache."""
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > limit:
        cache.popitem(last=False)


@dataclass(slots=True)
class Sent:
    """An Event that exists in the API and may be counted up."""

    path: str
    count: int


Key = tuple[Any, ...]


class EventRecorder:
    """`record()` never blocks and never fails; `run()` sends until cancelled.

    The same event again (object, type, reason, message, field) raises the count of the first
    one. Events of one object are sent in order. While the API server is away they wait; when
    too many wait, new ones are dropped and the log says so. `calm` is waited for before a Normal
    one.
    """

    def __init__(
        self,
        client: Client,
        *,
        component: str = "hpk-kubelet",
        host: str = "",
        parallel: int = 8,
        calm: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], datetime] = now,
        monotonic: Callable[[], float] = clocks.monotonic,
    ) -> None:
        self._client = client
        self._source = {"component": component, **({"host": host} if host else {})}
        self._clock = clock
        self._monotonic = monotonic
        self._calm = calm
        self._filter = SpamFilter()
        self._sent: OrderedDict[Key, Sent] = OrderedDict()
        self._queues: list[asyncio.Queue[tuple[Key, Object]]] = [
            asyncio.Queue() for _ in range(parallel)
        ]
        self._pending = 0
        self._dropping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_name = 0

    def record(
        self,
        obj: Object,
        type: Literal["Normal", "Warning"],
        reason: str,
        message: str,
        *,
        field_path: str = "",
        name: str | None = None,
        time: datetime | None = None,
    ) -> None:
        """`obj`: the whole object or an ObjectReference; `name`: a name that is the same after
        a restart, so that the event is made once (without it each has a new one)."""
        ref = reference(obj, field_path)
        who = ref.get("uid") or f"{ref.get('namespace')}/{ref['name']}"
        if not self._filter.allow(who, self._monotonic()):
            return
        if self._pending >= LONGEST_QUEUE:
            if not self._dropping:
                log.error("%d events wait for the API server; dropping new ones", self._pending)
            self._dropping = True
            return
        self._dropping = False
        if len(message) > LONGEST_MESSAGE:
            message = message[: LONGEST_MESSAGE - 1] + "…"
        # The nanoseconds in the name keep events in order where their seconds are equal.
        self._last_name = max(clocks.time_ns(), self._last_name + 1)
        stamp = rfc3339(time or self._clock())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": name or f"{ref['name']}.{self._last_name:x}",
                "namespace": ref.get("namespace", "default"),
            },
            "involvedObject": ref,
            "type": type,
            "reason": reason,
            "message": message,
            "source": self._source,
            "reportingComponent": self._source["component"],
            "reportingInstance": self._source.get("host", ""),
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        key = (who, type, reason, message, field_path, name)
        self._pending += 1
        self._idle.clear()
        self._queues[hash(who) % len(self._queues)].put_nowait((key, event))

    async def flush(self) -> None:
        """Waits until all is sent; put `asyncio.timeout` around it where `run` may be gone."""
        await self._idle.wait()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for queue in self._queues:
                group.create_task(self._work(queue))

    async def _work(self, queue: asyncio.Queue[tuple[Key, Object]]) -> None:
        while True:
            key, event = await queue.get()
            try:
                if self._calm is not None and event["type"] == "Normal":
                    await self._calm()
                await self._send(key, event)
            finally:
                self._pending -= 1
                if self._pending == 0:
                    self._idle.set()

    async def _send(self, key: Key, event: Object) -> None:
        about = f"event {event['reason']} of {event['involvedObject']['name']}"
        forbidden = 0
        while True:
            try:
                await self._write(key, event)
                return
            except ApiError as e:
                if e.already_exists or e.not_found or e.namespace_terminating:
                    return  # made before a restart under its own name; its namespace is going
                forbidden += e.forbidden
                if not isinstance(e, Unreachable) and not 0 < forbidden < FORBIDDEN_TRIES:
                    log.error("%s refused: %s", about, e)
                    return
                log.warning("%s: %s", about, e)
            await asyncio.sleep(RETRY_PAUSE)

    async def _write(self, key: Key, event: Object) -> None:
        if sent := self._sent.get(key):
            again = {"count": sent.count + 1, "lastTimestamp": event["lastTimestamp"]}
            try:
                await self._client.patch(sent.path, again)
            except ApiError as e:
                if not e.not_found:
                    raise
                # The API server drops events after an hour: make it anew.
            else:
                sent.count += 1
                self._sent.move_to_end(key)
                return
        meta = event["metadata"]
        await self._client.create(events(meta["namespace"]), event)
        remember(self._sent, key, Sent(events(meta["namespace"], meta["name"]), 1))
