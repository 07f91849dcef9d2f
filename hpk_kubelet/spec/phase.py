"""The phase of a pod (kubelet_pods.go, getPhase)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.restart import is_sidecar, should_restart

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


def pod_phase(pod: Object, statuses: Mapping[str, Object], terminal: bool) -> Phase:
    """`statuses` are the API's container statuses by name; `terminal`: nothing starts any more."""
    spec = pod["spec"]
    init = spec.get("initContainers") or []
    pending_init = 0
    for container in init:
        if is_sidecar(container):
            continue
        code = _exit_code(statuses.get(container["name"]))
        if code is None:
            pending_init += 1
        elif code != 0 and not should_restart(pod, container, code):
            return "Failed"

    pending_sidecars = unknown = running = waiting = 0
    for container in init:
        if not is_sidecar(container):
            continue
        status = statuses.get(container["name"])
        if status is None:
            unknown += 1
        elif "running" in status["state"]:
            running += 1
            pending_sidecars += not status.get("started")
        elif _exit_code(status) is None:
            pending_sidecars += 1
            waiting += 1

    stopped = finished = succeeded = 0
    for container in spec["containers"]:
        status = statuses.get(container["name"])
        code = _exit_code(status)
        if status is None:
            unknown += 1
        elif "running" in status["state"]:
            running += 1
        elif code is None:
            waiting += 1
        else:
            stopped += 1
            finished += not should_restart(pod, container, code)
            # a success counts once it is the container's last word
            succeeded += code == 0 and "terminated" in status["state"]

    has_initialized = any(_has_started(statuses.get(c["name"])) for c in spec["containers"])
    if pending_init or (pending_sidecars and not has_initialized) or waiting:
        return "Pending"
    if running and not unknown:
        return "Running"
    if not running and stopped and not unknown:
        if not terminal and stopped != finished:
            return "Running"  # at least one is about to start again
        return "Succeeded" if stopped == succeeded else "Failed"
    return "Pending"


def _exit_code(status: Object | None) -> int | None:
    """Of the run that ended, also while the container waits for its next one."""
    if status is None or "running" in status["state"]:
        return None
    terminated = status["state"].get("terminated") or (status.get("lastState") or {}).get(
        "terminated"
    )
    return None if terminated is None else int(terminated["exitCode"])


def _has_started(status: Object | None) -> bool:
    return status is not None and ("running" in status["state"] or _exit_code(status) is not None)
