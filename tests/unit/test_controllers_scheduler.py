"""The scheduler's loop: what it binds, in which order, and what it says of the rest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from hpk_kubelet.controllers import scheduler as module
from hpk_kubelet.controllers.scheduler import Scheduler, matters, unschedulable, waits_for_us
from hpk_kubelet.kube.client import ApiError, Unreachable

Object = dict[str, Any]
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
READY = {"conditions": [{"type": "Ready", "status": "True"}], "capacity": {"cpu": "8"}}

STORAGE_PATHS = (
    "/api/v1/persistentvolumeclaims",
    "/api/v1/persistentvolumes",
    "/apis/storage.k8s.io/v1/storageclasses",
)


def pod(name: str, **spec: Any) -> Object:
    meta = {"namespace": "ns", "name": name, "uid": name, "resourceVersion": "1"}
    return {"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": {"containers": [], **spec}}


def node(name: str, **labels: str) -> Object:
    meta = {"name": name, "uid": name, "resourceVersion": "1", "labels": labels}
    return {"metadata": meta, "spec": {}, "status": READY}


class Api:
    """An API server in memory: lists, watches fed by `send`, and what was written."""

    def __init__(self, nodes: list[Object], pods: list[Object]) -> None:
        self.lists = {"/api/v1/nodes": nodes, "/api/v1/pods": pods}
        self.lists |= {path: [] for path in STORAGE_PATHS}
        self.feeds: dict[str, asyncio.Queue[Any]] = {p: asyncio.Queue() for p in self.lists}
        self.bound: list[tuple[str, str]] = []
        self.events: list[tuple[str, str, str]] = []
        self.conditions: list[tuple[str, Object]] = []
        self.refuse: list[ApiError] = []
        self.changed = asyncio.Event()
        self.version = 10

    def send(self, kind: str, obj: Object) -> None:
        self.version += 1
        meta = {**obj["metadata"], "resourceVersion": str(self.version)}
        path = "/api/v1/pods" if "namespace" in meta else "/api/v1/nodes"
        self.feeds[path].put_nowait((kind, {**obj, "metadata": meta}))

    async def list(self, path: str, params: Any) -> Object:
        return {"metadata": {"resourceVersion": "2"}, "items": self.lists[path]}

    async def watch(self, path: str, params: Any) -> AsyncIterator[tuple[str, Object]]:
        while True:
            yield await self.feeds[path].get()

    async def create(self, path: str, body: Object) -> Object:
        if body["kind"] == "Binding":
            assert path == f"/api/v1/namespaces/ns/pods/{body['metadata']['name']}/binding"
            if self.refuse:
                raise self.refuse.pop(0)
            assert body["metadata"]["uid"] == body["metadata"]["name"]
            self.bound.append((body["metadata"]["name"], body["target"]["name"]))
        else:
            assert body["source"] == {"component": "default-scheduler"}
            name = body["involvedObject"]["name"]
            self.events.append((name, body["reason"], body["message"]))
        self.changed.set()
        return {}

    async def patch(self, path: str, body: Object, *_: Any) -> Object:
        self.conditions.append((path.split("/")[-2], body["status"]["conditions"][0]))
        self.changed.set()
        return {}

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def scheduling(nodes: list[Object], pods: list[Object]) -> AsyncIterator[Api]:
    api = Api(nodes, pods)
    task = asyncio.create_task(Scheduler(api, clock=lambda: NOON).run())  # type: ignore[arg-type]
    try:
        yield api
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pods_are_bound_at_once_and_it_is_said() -> None:
    async with scheduling([node("n")], [pod("a")]) as api:
        api.send("ADDED", pod("b"))
        await api.until(lambda: len(api.events) == 2)
    assert sorted(api.bound) == [("a", "n"), ("b", "n")]
    assert ("a", "Scheduled", "Successfully assigned ns/a to n") in api.events
    assert not api.conditions


@pytest.mark.parametrize(
    "change",
    [
        {"schedulerName": "somebody-else"},
        {"schedulingGates": [{"name": "g"}]},
        {"nodeName": "n"},
    ],
)
def test_whose_pods_are_ours(change: Object) -> None:
    assert waits_for_us(pod("a")) and waits_for_us(pod("a", schedulerName="hpk-scheduler"))
    assert not waits_for_us(pod("a", **change))
    deleted = pod("a")
    deleted["metadata"]["deletionTimestamp"] = "2026-01-02T12:00:00Z"
    assert not waits_for_us(deleted)


async def test_a_pod_goes_on_when_its_gates_are_gone() -> None:
    async with scheduling([node("n")], [pod("a", schedulingGates=[{"name": "g"}])]) as api:
        api.send("ADDED", pod("b"))
        await api.until(lambda: api.bound)
        api.send("MODIFIED", pod("a"))
        await api.until(lambda: len(api.bound) == 2)
    assert api.bound == [("b", "n"), ("a", "n")]


async def test_a_pod_nobody_fits_is_told_why_once_and_tried_when_nodes_change() -> None:
    picky = pod("a", nodeSelector={"planet": "mars"})
    async with scheduling([node("n")], [picky]) as api:
        await api.until(lambda: api.conditions and api.events)
        message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
        assert api.events == [("a", "FailedScheduling", message)]
        [(name, condition)] = api.conditions
        assert (name, condition["status"], condition["reason"]) == ("a", "False", "Unschedulable")
        assert condition["message"] == message
        assert condition["lastTransitionTime"] == "2026-01-02T12:00:00Z"
        api.send("MODIFIED", {**picky, "status": {"conditions": [condition]}})
        api.send("MODIFIED", node("n"))  # nothing of interest changed
        api.send("ADDED", node("m", planet="mars"))
        await api.until(lambda: len(api.events) == 2)
    assert api.bound == [("a", "m")] and len(api.conditions) == 1


async def test_priority_goes_first_when_many_wait() -> None:
    pods = [pod("low"), pod("high", priority=1000), pod("lower", priority=-5)]
    async with scheduling([], pods) as api:
        await api.until(lambda: len(api.events) == 3)
        assert {message for _, _, message in api.events} == {"no nodes available to schedule pods"}
        api.send("ADDED", node("n"))
        await api.until(lambda: len(api.bound) == 3)
    assert [name for name, _ in api.bound] == ["high", "low", "lower"]


async def test_a_pod_bound_or_gone_meanwhile_is_nobodys_concern() -> None:
    async with scheduling([node("n")], []) as api:
        api.refuse = [ApiError(409, "Conflict", "assigned"), ApiError(404, "NotFound", "gone")]
        api.send("ADDED", pod("a"))
        api.send("ADDED", pod("b"))
        api.send("ADDED", pod("c"))
        await api.until(lambda: api.events)
    assert api.bound == [("c", "n")] and not api.conditions


@pytest.mark.parametrize("said", [True, False])
async def test_a_refused_binding_is_tried_again(
    said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BIND_RETRY", 0.0)
    error = ApiError(422, "Invalid", "no") if said else Unreachable(0, "Unreachable", "refused")
    async with scheduling([node("n")], []) as api:
        api.refuse = [error]
        api.send("ADDED", pod("a"))
        await api.until(lambda: ("a", "Scheduled") in [e[:2] for e in api.events])
    assert (
        [e[2] for e in api.events if e[1] == "FailedScheduling"] == ["binding rejected: no"]
    ) is said


async def test_a_malformed_pod_stops_nobody() -> None:
    bad = pod("a", tolerations=[5])
    tainted = {**node("n"), "spec": {"taints": [{"key": "k", "effect": "PreferNoSchedule"}]}}
    async with scheduling([tainted], [bad, pod("b")]) as api:
        await api.until(lambda: len(api.events) == 2)
    assert api.bound == [("b", "n")]
    assert any("can't read this pod" in message for _, _, message in api.events)


def test_the_transition_time_stays() -> None:
    before = unschedulable(pod("a"), "one", NOON)
    old = {**pod("a"), "status": {"conditions": [before]}}
    later = datetime(2026, 1, 2, 13, tzinfo=UTC)
    assert unschedulable(old, "two", later)["lastTransitionTime"] == before["lastTransitionTime"]


def test_what_of_a_node_matters() -> None:
    beat = {**node("n"), "status": {**READY, "nodeInfo": {"x": 1}}}
    assert matters(beat) == matters(node("n"))
    assert matters({**node("n"), "spec": {"unschedulable": True}}) != matters(node("n"))
    assert matters(node("n", a="b")) != matters(node("n"))
