"""What is known about a pod besides its API object, when its status is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpk_kubelet.spec.plan import PodState


@dataclass(frozen=True)
class Waiting:
    reason: str  # ErrImagePull, CreateContainerConfigError, SlurmResources, …
    message: str = ""


@dataclass(frozen=True)
class Ended:
    """The job is over and its agent never said that the pod was finished: Slurm's word counts.

    Nothing restarts in a dead job, so the pod fails whatever its restartPolicy.
    """

    reason: str  # NodeFail, OutOfMemory, TimeLimit, Cancelled, …
    message: str
    exit_code: int = 137
    finished_at: float | None = None  # Unix seconds; None: now


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Times are Unix seconds. The previous status is the pod's own `status`."""

    now: float
    start_time: float | None = None  # when the kubelet first saw the pod; None: now
    state: PodState | None = None  # the agent's newest word, over its connection or its journal
    suspended: str = ""  # why nothing of it moves at the moment
    ended: Ended | None = None
    failed: tuple[str, str] | None = None  # (reason, message): given up before anything could run
    waiting: Waiting | None = None  # every container that has no word of its own waits for this
    container_waiting: Mapping[str, Waiting] = field(default_factory=dict)
    image_ids: Mapping[str, str] = field(default_factory=dict)  # container → imageID
    host_ip: str = ""  # of the virtual node, until the agent tells where it runs
