"""What a plan is made of besides the pod itself; whoever calls fetches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hpk_kubelet.spec.plan import NetworkPlan, SeccompProfile, VolumePlan

Object = dict[str, Any]
"""An API object as JSON."""

Objects = Mapping[tuple[str, str], Object | None]
"""(kind, name) → the object in the pod's namespace, None when it does not exist."""


class ImageConfig(Protocol):
    """The part of an OCI image's configuration that containers inherit."""

    @property
    def entrypoint(self) -> Sequence[str]: ...
    @property
    def cmd(self) -> Sequence[str]: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def working_dir(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def stop_signal(self) -> str: ...


class Image(Protocol):
    """A pulled image, as the image store describes it."""

    @property
    def id(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def rootfs(self) -> Path: ...
    @property
    def config(self) -> ImageConfig: ...


class User(Protocol):
    """A user as the image's own /etc/passwd and /etc/group know it."""

    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def groups(self) -> Sequence[int]: ...
    @property
    def home(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    objects: Objects
    images: Mapping[str, Image]  # by container name, init containers included
    resolve_user: Callable[[Path, str], User]  # (rootfs, "USER[:GROUP]"); HPKError when unknown
    seccomp_profile: Callable[[str], SeccompProfile]  # of this name; HPKError when there is none
    volumes: Mapping[str, VolumePlan]
    allocatable: Mapping[str, str]  # the node's: what a container without a limit may use
    api_host: str
    api_port: int
    pod_dir: Path
    agent_token: str = field(repr=False)
    kubelet_address: Path
    ca: Path
    local_dir: str
    created: float  # Unix seconds
    start_time: float  # the pod's status.startTime, Unix seconds
    services: Sequence[Object] = ()  # of the pod's namespace
    cluster_domain: str = "cluster.local"
    mpi: Sequence[str] | None = None  # words between `srun` and the main container's program
    gpus: Literal["nvidia", "rocm"] | None = None
    network: NetworkPlan | None = None  # None: pods use their nodes' networks
