"""The interface to Slurm: lists in, lists out, one answer per item in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.model import Job as Job
from hpk_kubelet.slurm.model import Limits as Limits
from hpk_kubelet.slurm.model import Partition as Partition
from hpk_kubelet.slurm.script import JobRequest


class UnreachableError(HPKError):
    """slurmctld does not answer. Weather, not news: keep everything and ask again later."""


class SubmitError(HPKError):
    """Slurm refused; the message is Slurm's own. Nothing was changed."""

    def __init__(self, message: str, transient: bool) -> None:
        super().__init__(message)
        self.transient = transient
        """A later try may succeed: a limit of queued jobs is reached, slurmctld is overloaded."""


@dataclass(frozen=True)
class Submission:
    """One job, or with `request.tasks` an array: its tasks are ID_0, ID_1, …"""

    request: JobRequest
    script: Path


@dataclass(frozen=True)
class Label:
    """The name and the comment a job shall have."""

    job_id: str
    name: str
    comment: str


@dataclass(frozen=True)
class Cancel:
    job_id: str
    signal: str = ""  # "": end the job; else a name such as TERM
    batch_only: bool = False  # to the script alone, not to every process of the job


class Backend(Protocol):
    """A way to talk to Slurm."""

    async def submit(
        self, submissions: Sequence[Submission]
    ) -> list[str | SubmitError | UnreachableError]:
        """A job id for each, or why there is none. UnreachableError: slurmctld may have taken the
        job or not, its comment will tell."""

    async def jobs(self) -> list[Job]:
        """Every job of this user that slurmctld knows: for some minutes, ended ones too (and those
        it refused at once). UnreachableError while it is away."""

    async def ended(self, ids: Sequence[str]) -> list[Job]:
        """Those of the jobs that slurmctld has forgotten and the accounting knows: none where
        there is no accounting. UnreachableError while it is away."""

    async def cancel(
        self, cancels: Sequence[Cancel]
    ) -> list[SubmitError | UnreachableError | None]:
        """None for each that is done or was over already, else why not."""

    async def label(self, labels: Sequence[Label]) -> None:
        """Renames jobs, as far as they are still there; for people who look at the queue."""

    async def limits(self) -> Limits:
        """UnreachableError while slurmctld is away."""

    async def partitions(self) -> list[Partition]:
        """Every partition this user may see. UnreachableError while slurmctld is away."""
