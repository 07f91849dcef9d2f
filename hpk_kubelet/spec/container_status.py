"""The statuses of a pod's containers (kubelet_pods.go, convertToAPIContainerStatuses;
status_manager.go, TerminatePod and normalizeStatus; prober_manager.go, UpdatePodStatus)."""

from __future__ import annotations

import copy
from datetime import UTC, datetime

from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.observed import Ended, Observed
from hpk_kubelet.spec.plan import ContainerState, Terminated
from hpk_kubelet.spec.restart import is_sidecar

MAX_TERMINATION_MESSAGES = 12 * 1024  # bytes, of all containers of a pod together

_UNKNOWN = Ended(
    "ContainerStatusUnknown", "The container could not be located when the pod was terminated"
)


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ephemeral_statuses(pod: Object, observed: Observed) -> list[Object]:
    """ephemeralContainerStatuses; they say neither ready nor started."""
    statuses = [
        _status(pod, container, observed, init=False)
        for container in pod["spec"].get("ephemeralContainers") or []
    ]
    for status in statuses:
        status["ready"] = False
        status.pop("started", None)
        if "waiting" in status["state"] and status["state"]["waiting"]["reason"] == (
            "PodInitializing"
        ):
            status["state"]["waiting"]["reason"] = "ContainerCreating"
    if observed.ended or (observed.state and observed.state["finished"]):
        _end(pod, statuses, [], observed)
    return statuses


def container_statuses(pod: Object, observed: Observed) -> tuple[list[Object], list[Object]]:
    """(containerStatuses by name, initContainerStatuses in the order of the spec)."""
    init = [
        _status(pod, container, observed, init=True)
        for container in pod["spec"].get("initContainers") or []
    ]
    main = [
        _status(pod, container, observed, init=False) for container in pod["spec"]["containers"]
    ]
    if observed.ended or (observed.state and observed.state["finished"]):
        _end(pod, main, init, observed)
    limit = MAX_TERMINATION_MESSAGES // len(main + init)
    for status in main + init:
        terminated = status["state"].get("terminated")
        if terminated and len(terminated.get("message", "").encode(errors="replace")) > limit:
            cut = terminated["message"].encode(errors="replace")[:limit]
            terminated["message"] = cut.decode(errors="ignore")
    return sorted(main, key=lambda status: str(status["name"])), init


def _status(pod: Object, container: Object, observed: Observed, *, init: bool) -> Object:
    name = container["name"]
    state = observed.state["containers"].get(name) if observed.state else None
    if state is None and (previous := _kept(pod, name, observed)):
        return previous
    status: Object = {
        "name": name,
        "image": container.get("image", ""),
        "imageID": "",
        "restartCount": state["restartCount"] if state else 0,
        "ready": False,
        "started": False,
        "state": {},
        "lastState": {},
    }
    if container.get("volumeMounts"):
        status["volumeMounts"] = [_mount_status(mount) for mount in container["volumeMounts"]]
    if observed.state and state:
        _fill(status, state, observed, observed.state["jobId"])
    if status.get("containerID"):
        status["imageID"] = observed.image_ids.get(name, "")
        resources = _allocated(pod, container)
        if resources:
            status["resources"] = resources
            if resources.get("requests"):
                status["allocatedResources"] = resources["requests"]
    if not status["state"]:
        status["state"] = {"waiting": _waiting(pod, name, state, observed)}
    if state and "running" in status["state"]:
        status["started"] = state["started"]
        status["ready"] = state["started"] and state["ready"]
    if init and not is_sidecar(container):
        terminated = status["state"].get("terminated")
        status["ready"] = terminated is not None and terminated["exitCode"] == 0
    return status


def _allocated(pod: Object, container: Object) -> Object:
    """What the container was started with, whatever the spec says by now: a job keeps its size."""
    status = pod.get("status") or {}
    for key in ("containerStatuses", "initContainerStatuses"):
        for previous in status.get(key) or []:
            if previous["name"] == container["name"] and previous.get("containerID"):
                kept: Object = previous.get("resources") or {}
                return kept
    wanted: Object = container.get("resources") or {}
    return wanted


def _fill(status: Object, state: ContainerState, observed: Observed, job: str) -> None:
    """What the agent said of one container. Its n-th run has the id apptainer://JOB/NAME/n."""
    count = state["restartCount"]

    def container_id(run: int) -> str:
        return f"apptainer://{job}/{status['name']}/{run}"

    last = state.get("lastTerminated")
    if running := state.get("running"):
        status["containerID"] = container_id(count)
        status["state"] = {"running": {"startedAt": timestamp(running["startedAt"])}}
    elif terminated := state.get("terminated"):
        status["containerID"] = container_id(count)
        status["state"] = {"terminated": _terminated(terminated, container_id(count))}
    elif last:
        status["containerID"] = container_id(count)
        status["lastState"] = {"terminated": _terminated(last, container_id(count))}
        return
    if last:
        status["lastState"] = {"terminated": _terminated(last, container_id(max(count - 1, 0)))}


def _waiting(pod: Object, name: str, state: ContainerState | None, observed: Observed) -> Object:
    said = dict(state.get("waiting") or {}) if state else {}
    if not said:
        init = pod["spec"].get("initContainers")
        if waiting := observed.container_waiting.get(name):
            said = {"reason": waiting.reason, "message": waiting.message}
        elif waiting := observed.waiting:
            # The kubelet never says anything else of a pod with init containers.
            said = {"reason": "" if init else waiting.reason, "message": waiting.message}
    default = "PodInitializing" if pod["spec"].get("initContainers") else "ContainerCreating"
    whole = {"reason": said.get("reason") or default}
    if said.get("message"):
        whole["message"] = said["message"]
    return whole


def _terminated(run: Terminated, container_id: str) -> Object:
    whole: Object = {"exitCode": run["exitCode"], "reason": run["reason"]}
    if "signal" in run:
        whole["signal"] = run["signal"]
    if run["message"]:
        whole["message"] = run["message"]
    if run["startedAt"]:
        whole["startedAt"] = timestamp(run["startedAt"])
    if run["finishedAt"]:
        whole["finishedAt"] = timestamp(run["finishedAt"])
    return whole | {"containerID": container_id}


def _kept(pod: Object, name: str, observed: Observed) -> Object | None:
    """A container that ran is not unmade because its agent is out of reach for a while."""
    status = pod.get("status") or {}
    for key in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
        for previous in status.get(key) or []:
            state = previous.get("state") or {}
            ran = "terminated" in (previous.get("lastState") or {})
            if previous["name"] == name and (ran or "running" in state or "terminated" in state):
                defaults: Object = {"ready": False, "started": False, "lastState": {}}
                whole: Object = copy.deepcopy(defaults | previous)
                return whole
    return None


def _end(pod: Object, main: list[Object], init: list[Object], observed: Observed) -> None:
    """Nothing runs any more: gives every container that could have run an end (TerminatePod)."""
    ended = observed.ended or _UNKNOWN
    finished_at = ended.finished_at if ended.finished_at is not None else observed.now
    attempted = [i for i, status in enumerate(init) if _was_attempted(status)]
    # of init containers, all up to the last that was attempted; with none, the first
    victims = init[: attempted[-1] + 1 if attempted else 1]
    if _has_initialized(pod, main, init):
        victims = victims + main
    for status in victims:
        state = status["state"]
        if "terminated" in state:
            continue
        status["ready"] = status["started"] = False
        if "running" not in state and (last := status["lastState"].get("terminated")):
            # it waited for its next run, which never comes: its last word stands
            status["state"], status["lastState"] = {"terminated": last}, {}
            continue
        terminated: Object = {"exitCode": ended.exit_code, "reason": ended.reason}
        if ended.message:
            terminated["message"] = ended.message
        if "running" in state:
            terminated["startedAt"] = state["running"].get("startedAt")
            terminated["finishedAt"] = timestamp(finished_at)
        if status.get("containerID"):
            terminated["containerID"] = status["containerID"]
        status["state"] = {"terminated": terminated}


def _was_attempted(status: Object) -> bool:
    return "waiting" not in status["state"] or "terminated" in status["lastState"]


def _has_initialized(pod: Object, main: list[Object], init: list[Object]) -> bool:
    if not init or any(_was_attempted(status) for status in main):
        return True
    if is_sidecar(pod["spec"]["initContainers"][-1]):
        return bool(init[-1]["started"])
    return bool(init[-1]["ready"])


def _mount_status(mount: Object) -> Object:
    status = {"name": mount["name"], "mountPath": mount["mountPath"]}
    if mount.get("readOnly"):
        status |= {"readOnly": True, "recursiveReadOnly": "Disabled"}
    return status
