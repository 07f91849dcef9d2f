"""The conditions of a pod that the kubelet owns (pkg/kubelet/status/generate.go)."""

from __future__ import annotations

from collections.abc import Mapping

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.phase import Phase
from hpk_kubelet.spec.quantity import parse_quantity
from hpk_kubelet.spec.restart import is_sidecar

RESIZE = "PodResizePending"
OWNED = (
    RESIZE,
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
)

_COMPLETED = {"status": "True", "reason": "PodCompleted"}
_TERMINAL = {
    "Succeeded": {"status": "False", "reason": "PodCompleted"},
    "Failed": {"status": "False", "reason": "PodFailed"},
}


def pod_conditions(
    pod: Object,
    statuses: Mapping[str, Object],
    phase: Phase,
    has_sandbox: bool,
    now: str,
    suspended: str = "",
) -> list[Object]:
    """All conditions: the others' as they are, then ours. `now` is RFC 3339; a condition keeps the
    time of its last transition while its status stays. A `suspended` pod is not ready."""
    previous = {c["type"]: c for c in (pod.get("status") or {}).get("conditions") or []}
    foreign = [c for type_, c in previous.items() if type_ not in OWNED]
    containers_ready = _containers_ready(pod, statuses, phase)
    if suspended and containers_ready["status"] == "True":
        containers_ready = {"status": "False", "reason": "SlurmSuspended", "message": suspended}
    ours = {
        "PodReadyToStartContainers": {"status": "True" if has_sandbox else "False"},
        "Initialized": _initialized(pod, statuses, phase),
        "Ready": _ready(pod, foreign, containers_ready),
        "ContainersReady": containers_ready,
        "PodScheduled": {"status": "True"},
    }
    if _is_resized(pod, statuses):
        ours[RESIZE] = {
            "status": "True",
            "reason": "Infeasible",
            "message": "a Slurm job keeps the size it was given; a new pod gets the new one",
        }
    generation = pod["metadata"].get("generation")
    conditions = []
    for type_, condition in ours.items():
        old = previous.get(type_)
        same = old is not None and old["status"] == condition["status"]
        since = old.get("lastTransitionTime") if old and same else None
        whole = {"type": type_, **condition, "lastTransitionTime": since or now}
        if generation is not None:
            whole["observedGeneration"] = generation
        conditions.append(whole)
    return foreign + conditions


def _containers_ready(pod: Object, statuses: Mapping[str, Object], phase: Phase) -> Object:
    spec = pod["spec"]
    names = [c["name"] for c in spec.get("initContainers") or [] if is_sidecar(c)]
    names += [c["name"] for c in spec["containers"]]
    unknown = [name for name in names if name not in statuses]
    unready = [name for name in names if name in statuses and not statuses[name]["ready"]]
    if phase == "Failed" or (phase == "Succeeded" and not unknown):
        return _TERMINAL[phase]
    return _unless(unknown, "unready", unready, "ContainersNotReady")


def _initialized(pod: Object, statuses: Mapping[str, Object], phase: Phase) -> Object:
    unknown, incomplete = [], []
    for container in pod["spec"].get("initContainers") or []:
        status = statuses.get(container["name"])
        if status is None:
            unknown.append(container["name"])
        elif not status["started" if is_sidecar(container) else "ready"]:
            incomplete.append(container["name"])
    if phase == "Succeeded" and not unknown:
        return _COMPLETED
    main = [statuses.get(c["name"]) for c in pod["spec"]["containers"]]
    if any(s and ("running" in s["state"] or "terminated" in s["state"]) for s in main):
        return {"status": "True"}
    return _unless(unknown, "incomplete", incomplete, "ContainersNotInitialized")


def _ready(pod: Object, foreign: list[Object], containers_ready: Object) -> Object:
    if containers_ready["status"] != "True":
        return containers_ready
    by_type = {c["type"]: c["status"] for c in foreign}
    messages = []
    for gate in pod["spec"].get("readinessGates") or []:
        type_ = gate["conditionType"]
        if type_ not in by_type:
            messages.append(
                f'corresponding condition of pod readiness gate "{type_}" does not exist.'
            )
        elif by_type[type_] != "True":
            messages.append(
                f'the status of pod readiness gate "{type_}" is not "True", but {by_type[type_]}'
            )
    if not messages:
        return {"status": "True"}
    return {"status": "False", "reason": "ReadinessGatesNotReady", "message": ", ".join(messages)}


def _is_resized(pod: Object, statuses: Mapping[str, Object]) -> bool:
    """Whether the spec asks for other resources than a container was started with."""
    for container in pod["spec"]["containers"]:
        status = statuses.get(container["name"])
        if status is None or "running" not in status["state"]:
            continue
        for kind in ("requests", "limits"):
            wanted = (container.get("resources") or {}).get(kind) or {}
            given = (status.get("resources") or {}).get(kind) or {}
            if {k: _number(v) for k, v in wanted.items()} != {
                k: _number(v) for k, v in given.items()
            }:
                return True
    return False


def _number(text: str) -> object:
    try:
        return parse_quantity(text)
    except HPKError:
        return text


def _unless(unknown: list[str], word: str, bad: list[str], reason: str) -> Object:
    messages = []
    if unknown:
        messages.append(f"containers with unknown status: [{' '.join(unknown)}]")
    if bad:
        messages.append(f"containers with {word} status: [{' '.join(bad)}]")
    if not messages:
        return {"status": "True"}
    return {"status": "False", "reason": reason, "message": ", ".join(messages)}
