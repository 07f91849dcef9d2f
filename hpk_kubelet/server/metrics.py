"""What pods use, on request: asked of their agents, answered as the kubelet and as metrics.k8s.io.

Nothing is sampled while nobody asks. A CPU rate is that between two requests, or since the start
of the container for the first one.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

from aiohttp import web

from hpk_kubelet.errors import HPKError
from hpk_kubelet.server import selector, stats
from hpk_kubelet.server.agents import Agent
from hpk_kubelet.spec.quantity import ceil, parse_quantity

Object = dict[str, Any]

_FRESH = 2.0  # seconds for which an answer is given again
_WINDOW = 10.0  # seconds between two samples that a rate is made of, where there are two
_PATIENCE = 5.0  # seconds an agent has to answer
_AT_ONCE = 32
_NOT_SHOWN = ("Pending", "Succeeded", "Failed")


class MeasuredPod(Protocol):
    @property
    def object(self) -> Object: ...
    @property
    def status(self) -> Object: ...
    @property
    def agent(self) -> Agent | None: ...


Nodes = Callable[[], Mapping[str, Mapping[str, str]]]
"""Virtual nodes: name → allocatable."""


class Metrics:
    """Handlers for one server; `pods` and `nodes` tell what there is now."""

    def __init__(self, pods: Callable[[], Iterable[MeasuredPod]], nodes: Nodes) -> None:
        self._pods = pods
        self._nodes = nodes
        self._before: dict[str, Object] = {}  # the sample a rate starts from, by pod uid
        self._last: dict[str, Object] = {}
        self._known: list[stats.PodUsage] = []
        self._asked = 0.0
        self._failed = False
        self._lock = asyncio.Lock()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/stats/summary", self._summary)
        app.router.add_get("/metrics/resource", self._resource)
        app.router.add_get("/metrics", self._own)
        base = f"/apis/{stats.VERSION}"
        app.router.add_get(base, self._discovery)
        app.router.add_get(f"{base}/nodes", self._list_nodes)
        app.router.add_get(f"{base}/nodes/{{name}}", self._list_nodes)
        app.router.add_get(f"{base}/pods", self._list_pods)
        app.router.add_get(f"{base}/namespaces/{{namespace}}/pods", self._list_pods)
        app.router.add_get(f"{base}/namespaces/{{namespace}}/pods/{{name}}", self._list_pods)

    # --- asking

    async def usage(self) -> list[stats.PodUsage]:
        """Of every running pod whose agent answers."""
        async with self._lock:
            if time.monotonic() - self._asked >= _FRESH:
                self._known = await self._ask()
                self._asked = time.monotonic()
            return self._known

    async def _ask(self) -> list[stats.PodUsage]:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(pod: MeasuredPod, agent: Agent) -> tuple[MeasuredPod, Object | None]:
            async with limit:
                return pod, await _sample(agent)

        running = [
            one(pod, pod.agent)
            for pod in self._pods()
            if pod.agent is not None and pod.status.get("phase") not in _NOT_SHOWN
        ]
        answers = await asyncio.gather(*running)
        self._failed = any(sample is None for _, sample in answers)
        found = [self._of(pod, sample) for pod, sample in answers if sample is not None]
        uids = {usage.pod["metadata"]["uid"] for usage in found}
        for known in (self._before, self._last):
            for uid in known.keys() - uids:
                del known[uid]
        return found

    def _of(self, pod: MeasuredPod, sample: Object) -> stats.PodUsage:
        uid = pod.object["metadata"]["uid"]
        last = self._last.get(uid)
        if last is not None and sample["time"] - last["time"] >= _WINDOW:
            self._before[uid] = last
        if last is None or sample["time"] - last["time"] >= _WINDOW:
            self._last[uid] = sample
        started = _started(pod.status)
        seconds = {name: datetime.fromisoformat(at).timestamp() for name, at in started.items()}
        used = stats.usage(sample, self._before.get(uid), seconds)
        whole = {**pod.object, "status": pod.status}
        node = pod.object["spec"].get("nodeName", "")
        return stats.PodUsage(whole, node, float(sample["time"]), used, started)

    # --- the kubelet's own

    async def _summary(self, request: web.Request) -> web.Response:
        nodes = self._nodes()
        memory = sum(_memory(allocatable) for allocatable in nodes.values())
        name = ",".join(sorted(nodes))
        document = stats.summary(name, memory, await self.usage(), time.time())
        return web.json_response(document)

    async def _resource(self, request: web.Request) -> web.Response:
        text = stats.resource_metrics(await self.usage(), self._failed)
        return web.Response(text=text, content_type="text/plain")

    async def _own(self, request: web.Request) -> web.Response:
        """Of the kubelet itself, by the names of the real one where it has them."""
        pods = list(self._pods())
        states = {"running": 0, "exited": 0, "created": 0}
        for pod in pods:
            for entry in pod.status.get("containerStatuses") or ():
                kind = next(iter(entry.get("state") or {}), "waiting")
                states[{"running": "running", "terminated": "exited"}.get(kind, "created")] += 1
        used = resource.getrusage(resource.RUSAGE_SELF)
        phases = [pod.status.get("phase") or "Unknown" for pod in pods]
        text = [
            stats.metric(
                "kubelet_node_name", "gauge", "[ALPHA] The node's name. The count is always 1.",
                [({"node": name}, 1) for name in self._nodes()],
            ),
            stats.metric(
                "kubelet_running_pods", "gauge",
                "[BETA] Number of pods that have a running pod sandbox",
                [({}, phases.count("Running"))],
            ),
            stats.metric(
                "kubelet_running_containers", "gauge",
                "[BETA] Number of containers currently running",
                [({"container_state": state}, count) for state, count in states.items()],
            ),
            stats.metric(
                "hpk_pods", "gauge", "Pods of the nodes by phase",
                [({"phase": phase}, phases.count(phase)) for phase in sorted(set(phases))],
            ),
            stats.metric(
                "hpk_connected_agents", "gauge", "Agents whose connection is up",
                [({}, sum(pod.agent is not None for pod in pods))],
            ),
            stats.metric(
                "process_cpu_seconds_total", "counter",
                "[STABLE] Total user and system CPU time spent in seconds.",
                [({}, used.ru_utime + used.ru_stime)],
            ),
            stats.metric(
                "process_resident_memory_bytes", "gauge",
                "[STABLE] Resident memory size in bytes.", [({}, _resident())],
            ),
        ]  # fmt: skip
        return web.Response(text="".join(text), content_type="text/plain")

    # --- metrics.k8s.io

    async def _discovery(self, request: web.Request) -> web.Response:
        return web.json_response(stats.api_resources())

    async def _list_nodes(self, request: web.Request) -> web.Response:
        usage = await self.usage()
        names = sorted(self._nodes())
        items = [
            stats.node_metrics(
                {"metadata": {"name": name}}, [u for u in usage if u.node == name], time.time()
            )
            for name in names
        ]
        return _answer(request, "NodeMetrics", items)

    async def _list_pods(self, request: web.Request) -> web.Response:
        items = [stats.pod_metrics(used) for used in await self.usage() if used.containers]
        if namespace := request.match_info.get("namespace"):
            items = [i for i in items if i["metadata"]["namespace"] == namespace]
        return _answer(request, "PodMetrics", items)


def _answer(request: web.Request, kind: str, items: list[Object]) -> web.Response:
    if name := request.match_info.get("name"):
        one = next((i for i in items if i["metadata"]["name"] == name), None)
        if one is None:
            plural = "nodes" if kind == "NodeMetrics" else "pods"
            status = {
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": f'{plural}.{stats.GROUP} "{name}" not found', "reason": "NotFound",
                "details": {"name": name, "group": stats.GROUP, "kind": plural}, "code": 404,
            }  # fmt: skip
            return web.json_response(status, status=404)
        return web.json_response(one)
    try:
        labels = selector.parse(request.query.get("labelSelector", ""))
        fields = selector.fields(request.query.get("fieldSelector", ""))
    except HPKError as e:
        raise web.HTTPBadRequest(text=f"{e}\n") from None
    kept = [i for i in items if labels(i["metadata"].get("labels") or {}) and fields(i)]
    return web.json_response(stats.listed(kind, kept))


async def _sample(agent: Agent) -> Object | None:
    """The agent's answer; None when it gives none."""
    stream = agent.open("stats")
    text = b""
    try:
        async with asyncio.timeout(_PATIENCE):
            while (received := await stream.receive()) is not None:
                text += received[1]
        found: Object = json.loads(text)
    except (TimeoutError, ValueError):
        return None
    finally:
        stream.close()
    return found


def _started(status: Mapping[str, Any]) -> dict[str, str]:
    """When each running container started."""
    return {
        entry["name"]: entry["state"]["running"]["startedAt"]
        for key in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
        for entry in status.get(key) or ()
        if "running" in (entry.get("state") or {})
    }


def _memory(allocatable: Mapping[str, str]) -> int:
    return ceil(parse_quantity(allocatable.get("memory", "0")))


def _resident() -> int:
    with open("/proc/self/statm") as f:  # noqa: PTH123 - /proc answers at once
        return int(f.read().split()[1]) * resource.getpagesize()
