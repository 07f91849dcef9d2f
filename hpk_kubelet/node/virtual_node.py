"""One virtual node at work: registered, alive by its Lease, with its own credentials."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from hpk_kubelet.kube.client import MERGE, STRATEGIC, ApiError, Client, nodes, pods
from hpk_kubelet.kube.events import EventRecorder
from hpk_kubelet.kube.leases import heartbeat
from hpk_kubelet.kube.reflector import Change, Reflector
from hpk_kubelet.kube.status import StatusWriter
from hpk_kubelet.kube.times import now, rfc3339
from hpk_kubelet.node.nodes import Host, Object, labels, node_status, taints, without_times
from hpk_kubelet.node.objects import ObjectCache
from hpk_kubelet.node.watches import Watches
from hpk_kubelet.slurm.backend import Partition
from hpk_kubelet.slurm.sharing import Amounts

log = logging.getLogger(__name__)

_REPORT = 300.0  # seconds after which an unchanged status is written again, as the kubelet does


class VirtualNode:
    """Everything that is one node's: client, watch of its pods, status writer, events."""

    def __init__(
        self,
        name: str,
        partition: Partition,
        client: Client,
        host: Host,
        max_pods: int,
        *,
        offered: Callable[[Partition], Amounts],
        full: Callable[[], str],
        slow: Callable[[], str],
        way: Callable[[], str],
        calm: Callable[[], Awaitable[None]],
        on_pod: Callable[[VirtualNode, Change], None],
        on_written: Callable[[str, Object], None],
        on_refused: Callable[[str, ApiError], None],
    ) -> None:
        self.name = name
        self.partition = partition
        self.client = client
        self.host = host
        self.offered = offered
        self.full = full
        self.slow = slow
        self.way = way
        self.running: list[asyncio.Task[None]] = []
        self.objects = ObjectCache(client)
        self.watches = Watches(client, self.objects)
        self.events = EventRecorder(client, host=name, calm=calm)
        self.statuses = StatusWriter(client, on_written=on_written, on_error=on_refused)
        self.pods = Reflector(
            client,
            pods(),
            field_selector=f"spec.nodeName={name}",
            on_change=lambda change: on_pod(self, change),
        )
        self._itself = Reflector(
            client,
            nodes(),
            field_selector=f"metadata.name={name}",
            on_change=lambda change: self._deleted.set() if change.new is None else None,
        )
        self._deleted = asyncio.Event()
        self._max_pods = max_pods
        self._status: Object = {}
        self._written = 0.0
        self._unreachable = ""
        self._lock = asyncio.Lock()
        self._missed = False

    @property
    def allocatable(self) -> dict[str, str]:
        found: dict[str, str] = self._status.get("allocatable") or {}
        return found

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What must run as long as the node lives."""
        return [
            self.pods.run(),
            self.statuses.run(),
            self.events.run(),
            heartbeat(self.client, self.name, on_result=self._lease_result),
            self._itself.run(),
            self._stay(),
        ]

    async def _stay(self) -> None:
        """Registers the node again when somebody deletes it, before the garbage collector takes
        its pods for orphans (40 s)."""
        while True:
            await self._deleted.wait()
            self._deleted.clear()
            log.warning("node %s was deleted from the API, registering it again", self.name)
            try:
                await self.register()
            except ApiError as e:
                log.warning("node %s: %s", self.name, e)
                self._deleted.set()
                await asyncio.sleep(1.0)

    async def register(self, unreachable: str | None = None) -> None:
        """Makes the Node object, or brings one that is there up to date."""
        async with self._lock:
            await self._register(self._unreachable if unreachable is None else unreachable)

    async def _register(self, unreachable: str) -> None:
        self._unreachable = unreachable
        own = labels(self.name, self.partition, self.host)
        body: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": own},
            "spec": {"taints": taints(self.partition)},
        }
        status = self._new_status(unreachable, {})
        try:
            await self.client.create(nodes(), {**body, "status": status})
        except ApiError as e:
            if not e.already_exists:
                raise
            there = await self.client.get(nodes(self.name))
            stale = {
                key: None
                for key in there["metadata"].get("labels") or {}
                if key.startswith(("hpk.io/", "feature.hpk.io/")) and key not in own
            }
            await self.client.patch(
                nodes(self.name), {"metadata": {"labels": {**stale, **own}}}, MERGE
            )
            self._status = there.get("status") or {}
        self._written = 0.0
        await self._update(unreachable)

    async def update(self, partition: Partition, unreachable: str) -> None:
        """Writes the status if it says something new, or if it is time to."""
        async with self._lock:
            relabel = labels(self.name, partition, self.host) != labels(
                self.name, self.partition, self.host
            )
            self.partition, self._unreachable = partition, unreachable
            if relabel:
                await self._register(unreachable)
            else:
                await self._update(unreachable)

    def _new_status(self, unreachable: str, previous: Object) -> Object:
        return node_status(
            self.partition,
            self.host,
            self._max_pods,
            unreachable,
            previous,
            rfc3339(now()),
            self.offered(self.partition),
            self.full(),
            self.way(),
            self.slow(),
        )

    async def _update(self, unreachable: str) -> None:
        status = self._new_status(unreachable, self._status)
        due = time.monotonic() - self._written > _REPORT or not self._written
        if not due and without_times(status) == without_times(self._status):
            return
        try:
            await self.client.patch(nodes(self.name, "status"), {"status": status}, STRATEGIC)
        except ApiError as e:
            if not e.not_found:
                raise
            # Somebody deleted the object. Its pods go on.
            log.warning("node %s is gone from the API, registering it again", self.name)
            await self._register(unreachable)
            return
        self._status = status
        self._written = time.monotonic()

    async def unregister(self) -> None:
        """Ends everything that runs for the node, and removes its object."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        try:
            await self.client.delete(nodes(self.name))
        except ApiError as e:
            if not e.not_found:
                raise

    def _lease_result(self, error: ApiError | None) -> None:
        if error is not None and not self._missed:
            log.warning("no heartbeat of node %s: %s", self.name, error)
        elif error is None and self._missed:
            log.info("node %s has its heartbeat again", self.name)
        self._missed = error is not None

    async def close(self) -> None:
        await self.watches.close()
        await self.client.close()
