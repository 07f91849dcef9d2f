"""Jobs that start at once: an allocation (salloc) in which the script is the only step (srun).

slurmctld starts batch jobs in passes, up to three seconds apart (batch_sched_delay of slurm.conf),
but answers who asks for an allocation at once. An allocation lasts until somebody ends it: its
agent does (agent/allocation.py).
"""

from __future__ import annotations

import re
import shutil
import time

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.backend import Submission
from hpk_kubelet.slurm.commands import CommandError, ask, run
from hpk_kubelet.slurm.script import JobRequest, sbatch_arguments
from hpk_kubelet.slurm.srun import start_step

COMMANDS = ("salloc", "srun", "scancel")
# What else a job may wait for than resources, or what salloc reads otherwise, goes by sbatch.
_ALLOWED = frozenset({
    "account", "constraint", "core-spec", "cores-per-socket", "cpus-per-gpu", "cpus-per-task",
    "exclude", "exclusive", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres",
    "gres-flags", "hint", "licenses", "mem", "mem-per-cpu", "mem-per-gpu", "mincpus", "nice",
    "nodelist", "oversubscribe", "partition", "priority", "prefer", "qos", "reservation",
    "sockets-per-node", "threads-per-core", "time", "time-min", "tmp", "wckey",
})  # fmt: skip
_BATCH_ONLY = ("--parsable", "--output=", "--no-requeue", "--export=", "--open-mode=")
_SOON_S = 5.0
"""By so much clocks may differ."""


def not_at_once(request: JobRequest) -> str:
    """Why such a job can only be a batch job; "" if it may be an allocation."""
    if request.control_job:
        return "it is a step of the control job"
    if request.gang:
        return "a gang is one batch job"
    if request.mpi:
        return "MPI ranks are steps of a batch job"
    for flag in (*request.extra_flags, *request.user_flags):
        name = flag.removeprefix("--").partition("=")[0]
        if name not in _ALLOWED:
            return f"--{name} is for batch jobs"
    return ""


def salloc_arguments(request: JobRequest) -> list[str]:
    """sbatch's, as far as salloc knows them. The signal before the time limit goes to every process
    of a step: it is one that only agents listen to."""
    warned = [
        argument.replace("--signal=B:TERM@", "--signal=URG@")
        for argument in sbatch_arguments(request)
        if not argument.startswith(_BATCH_ONLY)
    ]
    return ["--no-shell", "--immediate", *warned]


def srun_arguments(job_id: str, submission: Submission) -> list[str]:
    request = submission.request
    scancel = shutil.which("scancel") or "scancel"
    return [
        f"--jobid={job_id}", f"--job-name={request.name}", f"--chdir={request.pod_dir}",
        "/bin/sh", str(submission.script), "--allocation", scancel,
    ]  # fmt: skip


class Allocations:
    """Talks to Slurm by its commands, whatever the backend is."""

    def missing(self) -> str:
        """Which command there is not; "" if all are there."""
        return next((name for name in COMMANDS if shutil.which(name) is None), "")

    async def can_end(self, request: JobRequest) -> bool:
        """Whether an agent can end its allocation (on this node, and so on the others)."""
        python = next((p for p in request.pythons if shutil.which(p)), "")
        try:
            await run(python, "-I", "-S", str(request.agent_dir), "--can-end", "scancel")
        except HPKError:
            return False
        return True

    async def allocate(self, submission: Submission) -> str | None:
        """The job's id; None if it would have to wait or Slurm refuses it. Nothing runs in the job
        until `launch`. UnreachableError: the job may be there or not, its comment will tell.

        A refused salloc leaves a failed job in the accounting: so Slurm is asked first.
        """
        arguments = sbatch_arguments(submission.request)
        try:
            answer = await run(
                "sbatch", "--test-only", *arguments, "--", str(submission.script), stderr=True
            )
            start = re.search(r"to start at (\d+)", answer)
            if start is None or int(start[1]) > time.time() + _SOON_S:
                return None
            said = await run("salloc", *salloc_arguments(submission.request), stderr=True)
        except CommandError:
            return None
        granted = re.search(r"Granted job allocation (\d+)", said)
        return granted[1] if granted else None

    async def launch(self, job_id: str, submission: Submission) -> None:
        """Starts the script as a step of the job; returns when it runs. HPKError says why not."""
        await start_step(srun_arguments(job_id, submission))

    async def occupied(self) -> set[str]:
        """The jobs of this user in which a step runs. UnreachableError while slurmctld is away."""
        steps = (await ask("squeue", "-s", "--me", "-h", "-o", "%i")).split()
        pairs = [step.strip().rpartition(".") for step in steps]
        return {job_id for job_id, _, step in pairs if step not in ("extern", "batch")}
