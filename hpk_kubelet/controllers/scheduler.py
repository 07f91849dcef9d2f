"""The pass-through scheduler: binds each pod at once to the first virtual node that it fits.

Slurm is what queues; a pod waits here only when no node could ever take it as things are, and
then its PodScheduled condition and an Event say why, as kube-scheduler would.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable
from datetime import datetime

from hpk_kubelet.controllers.claims import (
    IN_USE,
    Claims,
    Unschedulable,
    claim_keys,
    claims_of,
    conflicts,
)
from hpk_kubelet.controllers.fit import choose, ready_status
from hpk_kubelet.controllers.volume_binding import VolumeBinder
from hpk_kubelet.kube.client import ApiError, Client, Object, Unreachable, nodes, pods
from hpk_kubelet.kube.events import EventRecorder
from hpk_kubelet.kube.reflector import Change, Reflector, key_of
from hpk_kubelet.kube.status import StatusWriter
from hpk_kubelet.kube.times import now, rfc3339

log = logging.getLogger(__name__)

NAMES = ("default-scheduler", "hpk-scheduler")
"""The `schedulerName`s that are ours; pods with another one are left alone."""
UNBOUND = "spec.nodeName=,status.phase!=Succeeded,status.phase!=Failed"
REPEAT = 300.0
"""Seconds until a pod that fits nowhere is tried, and its Event counted, again (the same time
after which kube-scheduler empties its unschedulable pods)."""
BIND_RETRY = 2.0
PARALLEL = 32


def waits_for_us(pod: Object) -> bool:
    """Whether the pod is to be bound by this scheduler, now."""
    spec = pod["spec"]
    return (
        not spec.get("nodeName")
        and spec.get("schedulerName", NAMES[0]) in NAMES
        and not spec.get("schedulingGates")
        and "deletionTimestamp" not in pod["metadata"]
    )


def matters(node: Object) -> tuple[object, ...]:
    """What of a node can change a decision; two equal ones need no new try."""
    meta, status = node["metadata"], node.get("status") or {}
    return (
        meta.get("labels"),
        meta.get("annotations"),
        node.get("spec"),
        ready_status(node),
        status.get("capacity"),
    )


def unschedulable(pod: Object, message: str, time: datetime) -> Object:
    """The PodScheduled condition; its transition time stays while it was False before."""
    since = rfc3339(time)
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            since = condition.get("lastTransitionTime") or since
    return {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
        "lastTransitionTime": since,
    }


class Scheduler:
    """`run()` schedules until cancelled. `clock` is the wall clock."""

    def __init__(self, client: Client, *, clock: Callable[[], datetime] = now) -> None:
        self._client = client
        self._clock = clock
        self._nodes = Reflector(client, nodes(), on_change=self._node_changed)
        self._pods = Reflector(client, pods(), field_selector=UNBOUND, on_change=self._pod_changed)
        self._volumes = VolumeBinder(client, self._claim_changed, self._storage_changed)
        self._events = EventRecorder(client, component=NAMES[0])
        self._status = StatusWriter(client)
        self._queue: list[tuple[int, int, str]] = []  # (-priority, order of arrival, key)
        self._queued: set[str] = set()
        self._order = itertools.count()
        self._waiting = asyncio.Semaphore(0)  # as many as there are in the queue
        self._failed: dict[str, str] = {}  # key → message told last

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            group.create_task(self._status.run())
            for task in self._volumes.tasks():
                group.create_task(task)
            group.create_task(self._nodes.run())
            await self._nodes.synced.wait()
            group.create_task(self._pods.run())
            group.create_task(self._repeat())
            for _ in range(PARALLEL):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._waiting.acquire()
            key = heapq.heappop(self._queue)[2]
            self._queued.discard(key)
            await self._schedule(key)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REPEAT)
            again, self._failed = self._failed, {}
            for key in again:
                self._enqueue(key)

    def _node_changed(self, change: Change) -> None:
        if change.old and change.new and matters(change.old) == matters(change.new):
            return
        for key in self._failed:
            self._enqueue(key)

    def _claim_changed(self, claim: str) -> None:
        for key, pod in self._pods.store.items():
            if claim in claim_keys(pod):
                self._enqueue(key)

    def _storage_changed(self) -> None:
        for key in self._failed:
            if (pod := self._pods.store.get(key)) is not None and claim_keys(pod):
                self._enqueue(key)

    def _pod_changed(self, change: Change) -> None:
        pod = change.object
        key = key_of(pod)
        if change.new is None:  # bound, ended or deleted
            self._failed.pop(key, None)
            self._status.forget(pod["metadata"]["uid"])
        elif not change.old or change.old["spec"] != pod["spec"]:
            self._enqueue(key)

    def _enqueue(self, key: str) -> None:
        pod = self._pods.store.get(key)
        if pod is None or key in self._queued or not waits_for_us(pod):
            return
        self._queued.add(key)
        heapq.heappush(self._queue, (-(pod["spec"].get("priority") or 0), next(self._order), key))
        self._waiting.release()

    async def _schedule(self, key: str) -> None:
        pod = self._pods.store.get(key)
        if pod is None or not waits_for_us(pod):
            return
        claims = Claims()
        try:
            if claim_keys(pod):
                storage = await self._volumes.storage()
                claims = claims_of(pod, storage)
                node, message = choose(
                    pod, self._nodes.values(), lambda node: conflicts(claims, node, storage)
                )
            else:
                node, message = choose(pod, self._nodes.values())
        except Unschedulable as e:
            node, message = None, self._for_no_node(str(e))
        except Exception as e:  # a malformed pod must not end the scheduler
            log.exception("%s", key)
            node, message = None, f"the scheduler can't read this pod: {e}"
        if node is None:
            self._refuse(pod, message)
        elif claims.delayed:
            await self._bind_claims(pod, claims, node)
        elif claims.once_per_pod:
            await self._bind_alone(pod, claims, node["metadata"]["name"])
        else:
            await self._bind(pod, node["metadata"]["name"])

    def _for_no_node(self, why: str) -> str:
        return f"0/{len(self._nodes.store)} nodes are available: {why}."

    def _again(self, pod: Object) -> None:
        asyncio.get_running_loop().call_later(BIND_RETRY, self._enqueue, key_of(pod))

    async def _bind_claims(self, pod: Object, claims: Claims, node: Object) -> None:
        """The pod's turn comes again when its claims are bound."""
        try:
            await self._volumes.bind(claims, node)
        except (ApiError, Unschedulable) as e:
            log.warning("binding the claims of %s: %s", key_of(pod), e)
            self._again(pod)

    async def _bind_alone(self, pod: Object, claims: Claims, node: str) -> None:
        async with self._volumes.single:
            try:
                used = await self._volumes.in_use(pod, claims)
            except ApiError as e:
                log.warning("who uses the claims of %s: %s", key_of(pod), e)
                self._again(pod)
                return
            if not used:
                await self._bind(pod, node)
                return
        self._refuse(pod, self._for_no_node(f"{len(self._nodes.store)} {IN_USE}"))
        self._again(pod)  # bound pods are not watched here

    def _refuse(self, pod: Object, message: str) -> None:
        key, meta = key_of(pod), pod["metadata"]
        if self._failed.get(key) == message:
            return
        self._failed[key] = message
        condition = unschedulable(pod, message, self._clock())
        self._status.set(meta["namespace"], meta["name"], meta["uid"], {"conditions": [condition]})
        self._events.record(pod, "Warning", "FailedScheduling", message)

    async def _bind(self, pod: Object, node: str) -> None:
        meta = pod["metadata"]
        namespace, name = meta["namespace"], meta["name"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"namespace": namespace, "name": name, "uid": meta["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            await self._client.create(pods(namespace, name, "binding"), binding)
        except ApiError as e:
            if e.not_found or e.conflict:  # deleted, made again, or bound by an earlier try
                return
            log.warning("binding %s/%s to %s: %s", namespace, name, node, e)
            if not (isinstance(e, Unreachable) or e.forbidden):
                self._refuse(pod, f"binding rejected: {e}")
            self._again(pod)
        else:
            self._events.record(
                pod, "Normal", "Scheduled", f"Successfully assigned {namespace}/{name} to {node}"
            )
