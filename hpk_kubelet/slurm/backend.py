"""The interface to Slurm: lists in, lists out, one answer per item in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.script import JobRequest
from hpk_kubelet.slurm.states import Phase, State, state_of


class UnreachableError(HPKError):
    """slurmctld does not answer. Weather, not news: keep everything and ask again later."""


class SubmitError(HPKError):
    """Slurm refused; the message is Slurm's own."""

    def __init__(self, message: str, transient: bool) -> None:
        super().__init__(message)
        self.transient = transient
        """A later try may succeed: the controller is away, a limit of queued jobs is reached."""


@dataclass(frozen=True)
class Submission:
    request: JobRequest
    script: Path


@dataclass(frozen=True)
class Job:
    """What Slurm says about a job of this user. Times are Unix seconds, 0 where there is none."""

    id: str
    word: str  # Slurm's own word for the state
    reason: str = ""  # why it waits or how it failed, in Slurm's word
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""
    partition: str = ""
    submitted: float = 0
    started: float = 0
    ended: float = 0
    comment: str = ""
    state: State = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", state_of(self.word))

    @property
    def phase(self) -> Phase:
        return self.state.phase


@dataclass(frozen=True)
class Cancel:
    job_id: str
    signal: str = ""  # "": end the job; else a name such as TERM
    batch_only: bool = False  # to the script alone, not to every process of the job


@dataclass(frozen=True)
class Partition:
    """Sums over the partition's nodes; memory in MB, `max_time_s` None where unlimited."""

    name: str
    up: bool
    default: bool
    nodes: int
    nodes_usable: int  # not down, drained or failing
    cpus: int
    cpus_usable: int
    memory_mb: int
    memory_usable_mb: int
    largest_cpus: int  # of one node
    largest_memory_mb: int
    gpus: int = 0
    tmp_mb: int = 0
    features: frozenset[str] = frozenset()
    max_time_s: int | None = None


class Backend(Protocol):
    """A way to talk to Slurm. Every method raises UnreachableError while slurmctld is away."""

    async def submit(self, submissions: Sequence[Submission]) -> list[str | SubmitError]:
        """A job id for each, or why not."""

    async def jobs(self) -> list[Job]:
        """Every job of this user that the queue still knows, ended ones included."""

    async def ended(self, ids: Sequence[str]) -> list[Job]:
        """Those of the jobs that only the controller's memory or the accounting still knows."""

    async def cancel(self, cancels: Sequence[Cancel]) -> list[SubmitError | None]:
        """None for each that is done or was over already."""

    async def partitions(self) -> list[Partition]:
        """Every partition this user may see."""
