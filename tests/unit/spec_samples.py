"""Pods, images and inputs that the tests of spec and volumes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import PlanInputs
from hpk_kubelet.spec.plan import ContainerState, PodState, SeccompProfile, Terminated

Object = dict[str, Any]


@dataclass(frozen=True)
class Config:
    entrypoint: Sequence[str] = ("/entry",)
    cmd: Sequence[str] = ("default",)
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": "/bin", "LANG": "C"})
    working_dir: str = "/srv"
    user: str = ""
    stop_signal: str = ""


@dataclass(frozen=True)
class Image:
    config: Config = field(default_factory=Config)
    id: str = "registry/app@sha256:1"
    digest: str = "sha256:1"
    rootfs: Path = Path("/images/1/rootfs")


@dataclass(frozen=True)
class User:
    uid: int
    gid: int
    groups: Sequence[int] = ()
    home: str = "/"


def resolve_user(rootfs: Path, user: str) -> User:
    known = {
        "": User(0, 0, (), "/root"),
        "0": User(0, 0, (), "/root"),
        "app": User(1000, 1001, (44,), "/home/app"),
    }
    if user in known:
        return known[user]
    if user.isdecimal():
        return User(int(user), 0)
    raise HPKError(f"unable to find user {user}: no matching entries in passwd file")


def seccomp_profile(name: str) -> SeccompProfile:
    if name == "known.json":
        return {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}
    raise HPKError(f'cannot load seccomp profile "{name}": No such file or directory')


def container(name: str = "main", **more: Any) -> Object:
    return {"name": name, "image": "app:1", **more}


def pod(*containers: Object, metadata: Object | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p", "namespace": "ns", "uid": "u-1", "generation": 1, **(metadata or {}),
        },
        "spec": {
            "containers": list(containers) or [container()],
            "restartPolicy": "Never",
            "nodeName": "part",
            "serviceAccountName": "default",
            "enableServiceLinks": True,
            **spec,
        },
        "status": {"phase": "Pending", "qosClass": "BestEffort"},
    }  # fmt: skip


def inputs(whole: Object, image: Image | None = None, **changes: Any) -> PlanInputs:
    spec = whole["spec"]
    names = [c["name"] for c in [*spec.get("initContainers", []), *spec["containers"]]]
    arguments: Object = {
        "objects": {},
        "images": {name: image or Image() for name in names},
        "resolve_user": resolve_user,
        "seccomp_profile": seccomp_profile,
        "volumes": {},
        "allocatable": {"cpu": "32", "memory": "64Gi", "ephemeral-storage": "1Ti"},
        "api_host": "10.0.0.1",
        "api_port": 6443,
        "pod_dir": Path("/h/.hpk/pods/u-1"),
        "agent_token": "secret-token",
        "kubelet_address": Path("/h/.hpk/run/kubelet.json"),
        "ca": Path("/h/.hpk/pki/ca.crt"),
        "local_dir": "/tmp",
        "created": 1000.0,
        "start_time": 990.0,
    }
    return PlanInputs(**(arguments | changes))


def exited(code: int, *, at: float = 200.0, message: str = "", reason: str = "") -> Terminated:
    return {
        "exitCode": code,
        "reason": reason or ("Completed" if code == 0 else "Error"),
        "message": message,
        "startedAt": 150.0,
        "finishedAt": at,
    }


def seen(**changes: Any) -> ContainerState:
    state: Object = {"restartCount": 0, "started": False, "ready": False}
    return state | changes  # type: ignore[return-value]


def running(**changes: Any) -> ContainerState:
    return seen(**({"running": {"startedAt": 150.0}, "started": True, "ready": True} | changes))


def agent_says(finished: bool = False, /, **containers: ContainerState) -> PodState:
    return {
        "jobId": "42",
        "node": "n1",
        "hostIP": "10.1.0.1",
        "podIP": "10.1.0.1",
        "startedAt": 140.0,
        "containers": containers,
        "finished": finished,
    }
