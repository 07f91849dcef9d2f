"""A pod and what was observed of it → its PodStatus (kubelet_pods.go, generateAPIPodStatus)."""

from __future__ import annotations

import copy
from typing import Any

from hpk_kubelet.spec.conditions import pod_conditions
from hpk_kubelet.spec.container_status import container_statuses, ephemeral_statuses, timestamp
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.observed import Ended, Observed, Waiting
from hpk_kubelet.spec.phase import Phase, pod_phase
from hpk_kubelet.spec.restart import should_restart

__all__ = ["Ended", "Observed", "Waiting", "build_status", "same_status"]


def build_status(pod: Object, observed: Observed) -> Object:
    """The whole status; `pod["status"]` is the one before. A finished pod's never changes."""
    previous = pod.get("status") or {}
    if previous.get("phase") in ("Succeeded", "Failed") and not _running(previous):
        return copy.deepcopy(previous)
    state = observed.state
    main, init = ([], []) if observed.failed else container_statuses(pod, observed)
    by_name = {status["name"]: status for status in main + init}
    phase = previous.get("phase")
    reason, message = previous.get("reason"), previous.get("message")
    if phase not in ("Succeeded", "Failed"):
        phase, reason, message = _phase(pod, observed, by_name)
    alive = state is not None and not state["finished"] and observed.ended is None
    now = timestamp(observed.now)
    status: Object = {
        "phase": phase,
        "conditions": pod_conditions(pod, by_name, phase, alive, now, observed.suspended),
        "startTime": previous.get("startTime")
        or timestamp(observed.now if observed.start_time is None else observed.start_time),
        "containerStatuses": main,
    }
    if init or observed.failed:
        status["initContainerStatuses"] = init
    if (pod["spec"].get("ephemeralContainers")) and not observed.failed:
        status["ephemeralContainerStatuses"] = ephemeral_statuses(pod, observed)
    if reason:
        status["reason"] = reason
    if message:
        status["message"] = message
    host = (state["hostIP"] if state else "") or previous.get("hostIP") or observed.host_ip
    if host:
        status |= {"hostIP": host, "hostIPs": [{"ip": host}]}
    address = (state["podIP"] if state else "") or previous.get("podIP")
    if address:
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    if previous.get("qosClass"):
        status["qosClass"] = previous["qosClass"]  # the API server's, made at creation
    generation = pod["metadata"].get("generation")
    if generation is not None:
        status["observedGeneration"] = generation
    return status


def same_status(old: Object | None, new: Object) -> bool:
    """Whether writing `new` over `old` would change nothing."""
    old = old or {}
    return all(_same(old.get(key), value) for key, value in new.items())


def _phase(pod: Object, observed: Observed, statuses: dict[str, Object]) -> tuple[Phase, str, str]:
    """(phase, reason, message): the end of a job and a deadline overrule the containers."""
    if observed.failed:
        return "Failed", *observed.failed
    state = observed.state
    phase = pod_phase(
        pod, statuses, terminal=observed.ended is not None or bool(state and state["finished"])
    )
    if observed.ended:
        if phase == "Succeeded" and _all_done(pod, observed):
            return "Succeeded", "", ""
        return "Failed", observed.ended.reason, observed.ended.message
    over = phase in ("Succeeded", "Failed")
    # All containers may have ended a moment before the agent says that it is finished, and a phase
    # that is final is never looked at again.
    if state and state.get("reason") and (over or state["finished"]):
        return "Failed", state.get("reason", ""), state.get("message", "")
    if state and state["finished"] and not over:
        return "Failed", "", ""  # ended before its containers could run
    waits = any("waiting" in status["state"] for status in statuses.values())
    if state and not state["finished"] and over and waits:
        # A sidecar between two runs, say: what becomes of it is not known yet.
        return (pod.get("status") or {}).get("phase") or "Pending", "", ""
    return phase, "", ""


def _all_done(pod: Object, observed: Observed) -> bool:
    """Every main container ended by itself for good, and the agent said so."""
    containers = observed.state["containers"] if observed.state else {}
    for container in pod["spec"]["containers"]:
        state = containers.get(container["name"])
        run = state.get("terminated") if state else None
        if run is None or should_restart(pod, container, run["exitCode"]):
            return False
    return True


def _running(status: Object) -> bool:
    every = [
        *(status.get("containerStatuses") or []),
        *(status.get("initContainerStatuses") or []),
    ]
    return any("running" in (one.get("state") or {}) for one in every)


def _same(one: Any, other: Any) -> bool:
    """Equal but for what the API adds or leaves out at will: nulls, empty maps, lists and texts;
    and lists of conditions in any order."""
    if one == other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same(one.get(key), other.get(key)) for key in one.keys() | other.keys())
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(_sorted(one), _sorted(other), strict=False)
        return len(one) == len(other) and all(_same(a, b) for a, b in pairs)
    return _empty(one) and _empty(other)


def _sorted(items: list[Any]) -> list[Any]:
    if all(isinstance(item, dict) and "type" in item for item in items):
        return sorted(items, key=lambda item: str(item["type"]))
    return items


def _empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_empty(one) for one in value.values())
    return value is None or value in ("", [])
