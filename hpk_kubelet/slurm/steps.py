"""Pods that serve the cluster: steps of the control job, on the virtual node `control`.

A backend around the one that asks Slurm for jobs: what goes to the partition of that name becomes a
step of the control job (srun(1), --overlap). It starts at once, shares the job's CPUs, and ends
with the control job at the latest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm import parse
from hpk_kubelet.slurm.backend import (
    Backend,
    Cancel,
    Job,
    Label,
    Limits,
    Partition,
    Submission,
    SubmitError,
    UnreachableError,
)
from hpk_kubelet.slurm.commands import CommandBackend, ask
from hpk_kubelet.slurm.model import ComputeNode
from hpk_kubelet.slurm.sharing import Amounts, expand, tres
from hpk_kubelet.slurm.srun import start_step

log = logging.getLogger(__name__)

PARTITION = "control"
RESERVED_MB = 1024
"""Of the control job's memory, for the control plane itself (docs/benchmarks.md: 794 MB idle)."""


@dataclass(frozen=True)
class Step:
    """A step of the control job; its name is the pod's comment."""

    id: str  # JOB.STEP
    name: str
    state: str
    started: float
    memory_mb: int


class ControlJobBackend:
    """Implements `backend.Backend`. `job`: the control job's id."""

    def __init__(self, backend: Backend, job: int) -> None:
        self._backend = backend
        self._commands = CommandBackend()
        self._job = str(job)
        self._partition: Partition | None = None
        self._starting = asyncio.Lock()

    async def submit(
        self, submissions: Sequence[Submission]
    ) -> list[str | SubmitError | UnreachableError]:
        jobs = [s for s in submissions if not s.request.control_job]
        answers = iter(await self._backend.submit(jobs) if jobs else [])
        return [
            await self._start(s) if s.request.control_job else next(answers) for s in submissions
        ]

    async def _start(self, submission: Submission) -> str | SubmitError | UnreachableError:
        request = submission.request
        async with self._starting:
            try:
                room = await self._room()
                if room < request.resources.memory_mb:
                    return SubmitError(
                        f"{request.resources.memory_mb} MB are wanted and {max(0, room)} MB are "
                        f"free in the control job (job {self._job}); more with: "
                        "sbatch --mem=… hpk.sbatch",
                        transient=True,
                    )
                return await self._run(submission)
            except UnreachableError as e:
                return e

    async def _room(self) -> int:
        partition = await self._own()
        if partition is None:
            raise UnreachableError(f"Slurm does not know the control job {self._job} any more")
        return partition.memory_mb - sum(step.memory_mb for step in await self._steps())

    async def _run(self, submission: Submission) -> str | SubmitError | UnreachableError:
        try:
            step = await start_step(step_arguments(submission))
        except HPKError as e:
            refused = "nable to create step" in str(e) or "nvalid job id" in str(e)
            return SubmitError(str(e), transient=False) if refused else UnreachableError(str(e))
        # Without a word of srun's, the step's name tells, unless it has ended already.
        own = [s.id for s in await self._steps() if s.name == submission.request.comment]
        return step or (own[0] if own else UnreachableError("srun did not tell the step's id"))

    async def _steps(self) -> list[Step]:
        found = steps(await ask("scontrol", "-o", "show", "step", self._job))
        return [step for step in found if step.name.startswith("hpk:")]

    async def jobs(self) -> list[Job]:
        # One after the other: while slurmctld is away, it is the backend that says so in words.
        jobs, own = await self._backend.jobs(), await self._steps()
        where = next((job.nodes for job in jobs if job.id == self._job), "")
        return jobs + [
            Job(
                step.id, step.state, nodes=where, partition=PARTITION, started=step.started,
                comment=step.name,
            )
            for step in own
        ]  # fmt: skip

    async def ended(self, ids: Sequence[str]) -> list[Job]:
        """Nothing about steps: what their agents wrote down is all there is."""
        return await self._backend.ended([job for job in ids if "." not in job])

    async def cancel(
        self, cancels: Sequence[Cancel]
    ) -> list[SubmitError | UnreachableError | None]:
        jobs = [c for c in cancels if "." not in c.job_id]
        own = [Cancel(c.job_id, c.signal) for c in cancels if "." in c.job_id]
        answers = iter(await self._backend.cancel(jobs) if jobs else [])
        of_steps = iter(await self._commands.cancel(own) if own else [])
        return [next(of_steps if "." in c.job_id else answers) for c in cancels]

    async def label(self, labels: Sequence[Label]) -> None:
        await self._backend.label(labels)

    async def limits(self) -> Limits:
        return await self._backend.limits()

    async def partitions(self) -> list[Partition]:
        found, own = await self._backend.partitions(), await self._own()
        if own is None:
            return found
        if any(partition.name == PARTITION for partition in found):
            log.warning("Slurm has a partition %s itself: there is no node of that name", PARTITION)
            return found
        return [*found, own]

    async def _own(self) -> Partition | None:
        """What hpk.sbatch asked for, as a partition; None once Slurm has forgotten the job."""
        if self._partition is None:
            shown = ("-a", "-O", parse.SQUEUE_FORMAT)
            for job in parse.jobs(await ask("squeue", "-h", "-j", self._job, *shown)):
                self._partition = control_partition(job)
        return self._partition


def step_arguments(submission: Submission) -> list[str]:
    request = submission.request
    return [
        f"--jobid={request.control_job}", f"--job-name={request.comment}",
        f"--chdir={request.pod_dir}", f"--mem={request.resources.memory_mb}M",
        "/bin/sh", str(submission.script),
    ]  # fmt: skip


def control_partition(job: Job) -> Partition:
    has = tres(job.tres).less(Amounts(0, RESERVED_MB, 0))
    node = next(iter(expand(job.nodes)), "")
    return Partition(
        name=PARTITION,
        up=True,
        default=False,
        nodes=1,
        nodes_usable=1,
        cpus=has.cpus,
        cpus_usable=has.cpus,
        memory_mb=has.memory_mb,
        memory_usable_mb=has.memory_mb,
        largest_cpus=has.cpus,
        largest_memory_mb=has.memory_mb,
        members=(ComputeNode(node, True, has.cpus, has.memory_mb),),
        control_job=job.id,
    )


def steps(text: str) -> list[Step]:
    """`scontrol -o show step JOB` with SLURM_TIME_FORMAT=%s."""
    found = []
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "StepId" in fields:
            started = fields.get("StartTime", "")
            found.append(
                Step(
                    fields["StepId"],
                    fields.get("Name", ""),
                    fields.get("State", ""),
                    float(started) if started.isdigit() else 0.0,
                    tres(fields.get("TRES", "")).memory_mb,
                )
            )
    return found
