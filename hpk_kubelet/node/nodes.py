"""The virtual nodes: one per Slurm partition. What a Node object says, as pure functions."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from hpk_kubelet.slurm.backend import Partition
from hpk_kubelet.slurm.sharing import Amounts

Object = dict[str, Any]

KUBERNETES = "v1.36.3"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "riscv64": "riscv64"}
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_NAME = _LABEL_VALUE
CONTROL_PLANE = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
_UP = ("KubeletReady", "pods become Slurm jobs")


def version() -> str:
    """HPK's own, as it was installed."""
    try:
        return metadata.version("hpk-kubelet")
    except metadata.PackageNotFoundError:
        return "0.0.0"


@dataclass(frozen=True)
class Host:
    """The machine that the kubelet runs on, for all its nodes."""

    address: str
    hostname: str
    port: int  # of the kubelet's HTTPS API
    runtime: str  # apptainer's version
    machine: str = platform.machine()
    kernel: str = platform.release()


def node_name(partition: str) -> str:
    """A partition's name as a DNS subdomain; what had to be changed is told apart by a hash."""
    name = re.sub(r"[^a-z0-9-]+", "-", partition.lower()).strip("-")
    if name == partition and len(name) <= 63:
        return name
    digest = hashlib.sha256(partition.encode()).hexdigest()[:6]
    return f"{name[:56].strip('-') or 'partition'}-{digest}"


def labels(name: str, partition: Partition, host: Host) -> dict[str, str]:
    result = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": _ARCHITECTURES.get(host.machine, host.machine),
    }
    if not partition.control_job:
        known = _LABEL_VALUE.fullmatch(partition.name)
        result["hpk.io/partition"] = partition.name if known else name
    if partition.default:
        result["hpk.io/default-partition"] = "true"
    for feature in sorted(partition.features):
        if _LABEL_NAME.fullmatch(feature):
            result[f"feature.hpk.io/{feature}"] = "true"
    return result


def taints(partition: Partition) -> list[Object]:
    """What keeps ordinary pods away: the node of the control job is for those that serve the
    cluster, as kubeadm's control plane nodes are."""
    return [CONTROL_PLANE] if partition.control_job else []


def resources(
    partition: Partition, max_pods: int, offered: Amounts
) -> tuple[dict[str, str], dict[str, str]]:
    """(capacity, allocatable): sums over the partition's nodes, and what of it is offered."""

    def amounts(whole: Amounts) -> dict[str, str]:
        found = {"cpu": str(whole.cpus), "memory": f"{whole.memory_mb}Mi", "pods": str(max_pods)}
        if partition.tmp_mb:
            found["ephemeral-storage"] = f"{partition.tmp_mb}Mi"
        if partition.gpus:
            found[partition.gpu_resource] = str(whole.gpus)
        return found

    capacity = Amounts(partition.cpus, partition.memory_mb, partition.gpus)
    return amounts(capacity), amounts(offered)


def conditions(
    partition: Partition,
    unreachable: str,
    previous: Iterable[Mapping[str, Any]],
    now: str,
    full: str = "",
    way: str = "",
    slow: str = "",
) -> list[Object]:
    """`unreachable`: why Slurm does not answer, "" while it does. The node stays Ready then: its
    pods go on, and must not be evicted. `full`: why there is no room in HPK's home. `way`: how jobs
    are submitted. `slow`: that the home does not answer in time."""
    wanted = {
        "Ready": ("True", *_UP),
        "MemoryPressure": ("False", "SlurmSchedules", "Slurm gives each pod's job its memory"),
        "DiskPressure": ("True", "HomeFull", full)
        if full
        else ("False", "HomeHasRoom", "there is room in HPK's home"),
        "HomeAnswers": ("False", "HomeSlow", slow)
        if slow
        else ("True", "HomeInTime", "files in HPK's home are kept in time"),
        "PIDPressure": ("False", "SlurmSchedules", "processes belong to the compute nodes"),
        "SlurmReachable": ("False", "SlurmUnreachable", unreachable)
        if unreachable
        else ("True", "SlurmAnswers", f"slurmctld answers; jobs go by {way}"),
        "PartitionUp": ("True", "PartitionUp", "the partition takes and starts jobs")
        if partition.up
        else ("False", "PartitionDown", "the partition starts no jobs at the moment"),
    }
    before = {c["type"]: c for c in previous}
    result = []
    for kind, (status, reason, message) in wanted.items():
        old = before.get(kind)
        same = old is not None and old["status"] == status
        result.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": now,
                "lastTransitionTime": old["lastTransitionTime"] if same and old else now,
            }
        )
    return result


def node_status(
    partition: Partition,
    host: Host,
    max_pods: int,
    unreachable: str,
    previous: Mapping[str, Any],
    now: str,
    offered: Amounts,
    full: str = "",
    way: str = "",
    slow: str = "",
) -> Object:
    capacity, allocatable = resources(partition, max_pods, offered)
    return {
        "capacity": capacity,
        "allocatable": allocatable,
        "conditions": conditions(
            partition, unreachable, previous.get("conditions") or (), now, full, way, slow
        ),
        "addresses": [
            {"type": "InternalIP", "address": host.address},
            {"type": "Hostname", "address": host.hostname},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": host.port}},
        # exec and attach come as plain WebSockets to a node that says so
        "declaredFeatures": ["ExtendWebSocketsToKubelet"],
        "nodeInfo": {
            "architecture": _ARCHITECTURES.get(host.machine, host.machine),
            "operatingSystem": "linux",
            "kernelVersion": host.kernel,
            "osImage": f"Slurm job {partition.control_job}"
            if partition.control_job
            else f"Slurm partition {partition.name} ({partition.nodes} nodes)",
            "containerRuntimeVersion": f"apptainer://{host.runtime}",
            "kubeletVersion": f"{KUBERNETES}-hpk.{version()}",
            "kubeProxyVersion": "",
            "machineID": "",
            "systemUUID": "",
            "bootID": "",
        },
    }


def without_times(status: Mapping[str, Any]) -> Object:
    """The status without its heartbeats: what makes it worth writing before its time."""
    return {
        **status,
        "conditions": [
            {k: v for k, v in c.items() if k != "lastHeartbeatTime"} for c in status["conditions"]
        ],
    }


def missing_partition(name: str) -> Partition:
    """A partition that Slurm does not show any more, while there are pods of it."""
    return Partition(
        name=name,
        up=False,
        default=False,
        nodes=0,
        nodes_usable=0,
        cpus=0,
        cpus_usable=0,
        memory_mb=0,
        memory_usable_mb=0,
        largest_cpus=0,
        largest_memory_mb=0,
    )
