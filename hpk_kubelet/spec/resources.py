"""What a pod asks of a node, as Slurm counts it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from hpk_kubelet.config import SlurmConfig
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.annotations import slurm_flags
from hpk_kubelet.spec.quantity import ceil, parse_quantity
from hpk_kubelet.spec.slurm_options import SBATCH, read_flags, value_of

GPUS: dict[str, Literal["nvidia", "rocm"]] = {"nvidia.com/gpu": "nvidia", "amd.com/gpu": "rocm"}
FEATURE = "feature.hpk.io/"
_FEATURE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MB = 2**20
_BACKSTOP_S = 120
"""The agent keeps the deadline to the second; Slurm's limit comes so long after the grace period
that its signal before the limit never comes before the deadline."""


@dataclass(frozen=True)
class JobResources:
    """sbatch's view of a pod's resources; MB are MiB, as Slurm counts them."""

    cpus: int
    memory_mb: int
    tmp_mb: int = 0  # 0: not asked for
    gpus: int = 0
    gpu_kind: Literal["nvidia", "rocm"] | None = None
    time_limit_s: int | None = None
    constraint: str = ""


def job_resources(pod: Mapping[str, Any], config: SlurmConfig) -> JobResources:
    """The job a pod needs; HPKError names the container and resource of a malformed quantity."""
    spec = pod["spec"]
    kinds = [kind for kind in GPUS if _effective(spec, kind)]
    if len(kinds) > 1:
        raise HPKError(f"a job has one kind of GPU, and this pod asks for {' and '.join(kinds)}")
    memory = _effective(spec, "memory", first="limits")
    deadline = spec.get("activeDeadlineSeconds")
    grace = spec.get("terminationGracePeriodSeconds") or 0
    return JobResources(
        cpus=max(1, ceil(_effective(spec, "cpu"))),
        memory_mb=(ceil(memory / _MB) or config.default_memory_mb) + config.memory_overhead_mb,
        tmp_mb=ceil(_effective(spec, "ephemeral-storage") / _MB),
        gpus=ceil(_effective(spec, kinds[0])) if kinds else 0,
        gpu_kind=GPUS[kinds[0]] if kinds else None,
        time_limit_s=deadline + grace + _BACKSTOP_S if deadline else None,
        constraint="&".join(sorted(_features(spec))),
    )


def _features(spec: Mapping[str, Any]) -> Iterator[str]:
    """The features of nodes that the nodeSelector names; HPKError for what can't be one."""
    for label in spec.get("nodeSelector") or {}:
        if label.startswith(FEATURE):
            feature = label.removeprefix(FEATURE)
            if not _FEATURE_NAME.fullmatch(feature):
                raise HPKError(f"nodeSelector: {label!r} does not name a feature of nodes")
            yield feature


def granted(pod: Mapping[str, Any], config: SlurmConfig) -> dict[str, str]:
    """What a container without limits of its own may use at most: all that the job has. In it
    `resourceFieldRef` is true; the node's allocatable is that of a whole partition."""
    resources = job_resources(pod, config)
    flags = read_flags([*config.extra_flags, *slurm_flags(pod)], SBATCH, "the pod's Slurm flags")
    found = {}
    cpus = value_of(flags, "cpus-per-task")
    if cpus is None:
        found["cpu"] = str(resources.cpus)
    elif cpus.isdecimal():
        found["cpu"] = cpus
    if value_of(flags, "mem", "mem-per-cpu", "mem-per-gpu") is None:
        found["memory"] = f"{resources.memory_mb - config.memory_overhead_mb}Mi"
    return found


def storage_limit(spec: Mapping[str, Any]) -> int:
    """Bytes of ephemeral storage that the pod may use, as the eviction manager sums up limits; 0
    for no limit."""
    limits: dict[str, Any] = {"overhead": spec.get("overhead"), **_only_limits(spec)}
    for kind in ("initContainers", "containers"):
        limits[kind] = [{**c, **_only_limits(c)} for c in spec.get(kind) or ()]
    return ceil(_effective(limits, "ephemeral-storage", first="limits"))


def _only_limits(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {"resources": {"limits": (holder.get("resources") or {}).get("limits") or {}}}


def _amount(container: Mapping[str, Any], resource: str, first: str) -> Fraction:
    resources = container.get("resources") or {}
    second = {"requests": "limits", "limits": "requests"}[first]
    for kind in (first, second):
        text = (resources.get(kind) or {}).get(resource)
        if text is not None:
            name = f"container {container['name']}" if "name" in container else "pod"
            return _quantity(text, f"{name}: resources.{kind}.{resource}")
    return Fraction(0)


def _quantity(text: object, where: str) -> Fraction:
    try:
        return parse_quantity(text)
    except HPKError as e:
        raise HPKError(f"{where}: {e}") from None


def _effective(spec: Mapping[str, Any], resource: str, first: str = "requests") -> Fraction:
    """The most the pod uses at any one time (KEP-753, "Resources calculation for scheduling"):
    an init container runs beside the sidecars before it, the main ones beside all of them."""
    sidecars = peak = Fraction(0)
    for container in spec.get("initContainers") or ():
        amount = _amount(container, resource, first)
        if container.get("restartPolicy") == "Always":
            sidecars += amount
            peak = max(peak, sidecars)
        else:
            peak = max(peak, sidecars + amount)
    main = sum((_amount(c, resource, first) for c in spec["containers"]), Fraction(0))
    whole = max(peak, sidecars + main)
    if _amount(spec, resource, first):
        whole = _amount(spec, resource, first)  # pod-level resources (KEP-2837) replace the sum
    return whole + _quantity((spec.get("overhead") or {}).get(resource, 0), f"overhead.{resource}")
