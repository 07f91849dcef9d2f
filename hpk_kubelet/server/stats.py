"""What pods use, in the three forms that are asked for: the kubelet's Summary, Prometheus' text
and the objects of metrics.k8s.io. Pure.

Documents are those of k8s.io/kubelet/pkg/apis/stats/v1alpha1, pkg/kubelet/metrics/collectors/
resource_metrics.go and k8s.io/metrics/pkg/apis/metrics/v1beta1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """Of one container at one moment."""

    cpu_seconds: float  # since it started
    cpu_cores: float  # lately
    memory: int  # bytes, resident
    processes: int
    window: float  # seconds that `cpu_cores` is the mean of


@dataclass(frozen=True)
class PodUsage:
    """`time` in Unix seconds; `started` by container (RFC 3339)."""

    pod: Object
    node: str
    time: float
    containers: Mapping[str, Usage]
    started: Mapping[str, str]

    @property
    def memory(self) -> int:
        return sum(usage.memory for usage in self.containers.values())

    @property
    def cpu_seconds(self) -> float:
        return sum(usage.cpu_seconds for usage in self.containers.values())

    @property
    def cpu_cores(self) -> float:
        return sum(usage.cpu_cores for usage in self.containers.values())


def usage(
    now: Mapping[str, Any], before: Mapping[str, Any] | None, started: Mapping[str, float]
) -> dict[str, Usage]:
    """Of two answers of an agent (agent/stats.py) or, without an earlier one, since the start of
    each container (`started`, Unix seconds)."""
    found = {}
    for name, one in now["containers"].items():
        cpu = float(one["cpuSeconds"])
        earlier = before["containers"].get(name) if before else None
        since, cpu_then = started.get(name, now["time"]), 0.0
        if before and earlier and earlier["cpuSeconds"] <= cpu and before["time"] >= since:
            since, cpu_then = before["time"], float(earlier["cpuSeconds"])
        window = max(float(now["time"]) - since, 0.001)
        found[name] = Usage(
            cpu, (cpu - cpu_then) / window, int(one["memoryBytes"]), int(one["processes"]), window
        )
    return found


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- /stats/summary -----------------------------------------------------------------------------


def _cpu(time: str, cores: float, seconds: float) -> Object:
    return {
        "time": time,
        "usageNanoCores": int(cores * 1e9),
        "usageCoreNanoSeconds": int(seconds * 1e9),
    }


def _memory(time: str, used: int, capacity: int | None = None) -> Object:
    document = {"time": time, "usageBytes": used, "workingSetBytes": used, "rssBytes": used}
    if capacity is not None:
        document["availableBytes"] = max(0, capacity - used)
    return document


def summary(node: str, capacity: int, pods: Sequence[PodUsage], now: float) -> Object:
    """`capacity`: the node's memory in bytes. What a node uses is what its pods use: the rest of
    the compute nodes is other people's."""
    time = rfc3339(now)
    return {
        "node": {
            "nodeName": node,
            "startTime": time,
            "cpu": _cpu(time, sum(p.cpu_cores for p in pods), sum(p.cpu_seconds for p in pods)),
            "memory": _memory(time, sum(p.memory for p in pods), capacity),
        },
        "pods": [_pod_summary(pod) for pod in pods],
    }


def _pod_summary(pod: PodUsage) -> Object:
    metadata, time = pod.pod["metadata"], rfc3339(pod.time)
    return {
        "podRef": {key: metadata[key] for key in ("name", "namespace", "uid")},
        "startTime": (pod.pod.get("status") or {}).get("startTime"),
        "containers": [
            {
                "name": name,
                "startTime": pod.started.get(name),
                "cpu": _cpu(time, used.cpu_cores, used.cpu_seconds),
                "memory": _memory(time, used.memory),
            }
            for name, used in pod.containers.items()
        ],
        "cpu": _cpu(time, pod.cpu_cores, pod.cpu_seconds),
        "memory": _memory(time, pod.memory),
        "process_stats": {"process_count": sum(u.processes for u in pod.containers.values())},
    }


# --- Prometheus ---------------------------------------------------------------------------------

Series = tuple[Mapping[str, str], float]


def metric(name: str, kind: str, text: str, series: Iterable[Series]) -> str:
    """One metric in Prometheus' text format."""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in series:
        inner = ",".join(f'{key}="{_escaped(word)}"' for key, word in labels.items())
        lines.append(f"{name}{{{inner}}} {value:.10g}" if inner else f"{name} {value:.10g}")
    return "\n".join(lines) + "\n"


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resource_metrics(pods: Sequence[PodUsage], failed: bool) -> str:
    """/metrics/resource: the names of the kubelet's. `failed`: a pod could not be asked."""

    def of_pod(pod: PodUsage) -> dict[str, str]:
        metadata = pod.pod["metadata"]
        return {"namespace": metadata["namespace"], "pod": metadata["name"]}

    each = [
        ({"container": name, **of_pod(pod)}, used, pod)
        for pod in pods
        for name, used in pod.containers.items()
    ]
    started = [
        (labels, datetime.fromisoformat(pod.started[labels["container"]]).timestamp())
        for labels, _, pod in each
        if labels["container"] in pod.started
    ]
    return "".join(
        [
            metric(
                "container_cpu_usage_seconds_total", "counter",
                "[STABLE] Cumulative cpu time consumed by the container in core-seconds",
                [(labels, used.cpu_seconds) for labels, used, _ in each],
            ),
            metric(
                "container_memory_working_set_bytes", "gauge",
                "[STABLE] Current working set of the container in bytes",
                [(labels, used.memory) for labels, used, _ in each],
            ),
            metric(
                "container_start_time_seconds", "gauge",
                "[STABLE] Start time of the container since unix epoch in seconds", started,
            ),
            metric(
                "node_cpu_usage_seconds_total", "counter",
                "[STABLE] Cumulative cpu time consumed by the node in core-seconds",
                [({}, sum(pod.cpu_seconds for pod in pods))],
            ),
            metric(
                "node_memory_working_set_bytes", "gauge",
                "[STABLE] Current working set of the node in bytes",
                [({}, sum(pod.memory for pod in pods))],
            ),
            metric(
                "pod_cpu_usage_seconds_total", "counter",
                "[STABLE] Cumulative cpu time consumed by the pod in core-seconds",
                [(of_pod(pod), pod.cpu_seconds) for pod in pods],
            ),
            metric(
                "pod_memory_working_set_bytes", "gauge",
                "[STABLE] Current working set of the pod in bytes",
                [(of_pod(pod), pod.memory) for pod in pods],
            ),
            metric(
                "resource_scrape_error", "gauge",
                "[STABLE] 1 if there was an error while getting container metrics, 0 otherwise",
                [({}, float(failed))],
            ),
        ]
    )  # fmt: skip


# --- metrics.k8s.io -----------------------------------------------------------------------------

GROUP = "metrics.k8s.io"
VERSION = f"{GROUP}/v1beta1"


def api_resources() -> Object:
    """Discovery of the group's one version."""
    verbs = ["get", "list"]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": VERSION,
        "resources": [
            {"name": name, "singularName": "", "namespaced": namespaced, "kind": kind,
             "verbs": verbs}
            for name, namespaced, kind in (
                ("nodes", False, "NodeMetrics"), ("pods", True, "PodMetrics"),
            )
        ],
    }  # fmt: skip


def _quantities(cores: float, memory: int) -> Object:
    return {"cpu": f"{int(cores * 1e9)}n", "memory": f"{memory // 1024}Ki"}


def _timed(kind: str, metadata: Object, time: float, window: float) -> Object:
    kept = {key: metadata[key] for key in ("name", "namespace", "labels") if metadata.get(key)}
    return {
        "kind": kind,
        "apiVersion": VERSION,
        "metadata": {**kept, "creationTimestamp": rfc3339(time)},
        "timestamp": rfc3339(time),
        "window": f"{window:.3f}s",
    }


def pod_metrics(pod: PodUsage) -> Object:
    window = max((used.window for used in pod.containers.values()), default=0.0)
    return {
        **_timed("PodMetrics", pod.pod["metadata"], pod.time, window),
        "containers": [
            {"name": name, "usage": _quantities(used.cpu_cores, used.memory)}
            for name, used in pod.containers.items()
        ],
    }


def node_metrics(node: Object, pods: Sequence[PodUsage], now: float) -> Object:
    """`node`: the Node; what its pods use together."""
    windows = [used.window for pod in pods for used in pod.containers.values()]
    return {
        **_timed("NodeMetrics", node["metadata"], now, max(windows, default=0.0)),
        "usage": _quantities(sum(p.cpu_cores for p in pods), sum(p.memory for p in pods)),
    }


def listed(kind: str, items: Sequence[Object]) -> Object:
    return {"kind": f"{kind}List", "apiVersion": VERSION, "metadata": {}, "items": list(items)}
