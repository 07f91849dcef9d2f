"""The backend that runs Slurm's commands: sbatch, squeue, scontrol, sacct, scancel, sinfo.

Works from Slurm 21.08 on; output is taken in formats without JSON. Each command is one process
and each question is asked once for all jobs.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm import parse
from hpk_kubelet.slurm.backend import Cancel, Job, Partition, Submission, SubmitError
from hpk_kubelet.slurm.backend import UnreachableError as UnreachableError
from hpk_kubelet.slurm.script import sbatch_arguments

TIMEOUT_S = 60.0
_PARALLEL_SUBMISSIONS = 4
# Slurm's own words for "later, perhaps" (slurm/slurm_errno.c).
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Connection timed out|"
    r"Transport endpoint|Slurm backup controller in standby|Zero Bytes were transmitted|"
    r"Communication connection failure|Unable to establish"
)
_TRANSIENT = re.compile(
    r"Slurm temporarily unable to accept job|Resource temporarily unavailable|"
    r"Job violates accounting/QOS policy|AssocMaxSubmitJobLimit|QOSMaxSubmitJob|MaxJobCount|"
    r"Protocol authentication error|I/O error writing script"
)


class Failed(HPKError):
    """A command ended with an error; the message is what it printed."""


def _environment() -> dict[str, str]:
    """The kubelet's own, less what the control job's Slurm put there: sbatch would obey it."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SCANCEL_"))
        or name in ("SLURM_CONF", "SLURM_CONF_SERVER")
    }
    return own | {"LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s"}


async def _run(*argv: str) -> str:
    """The command's output; Failed or UnreachableError with what it printed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )
    except FileNotFoundError:
        raise HPKError(f"{argv[0]} is not on PATH: is this a node of a Slurm cluster?") from None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UnreachableError(f"{argv[0]} gave no answer within {TIMEOUT_S:g} s") from None
    except asyncio.CancelledError:
        # Slurm may have taken the job already; the pod's comment finds it.
        process.kill()
        raise
    if process.returncode == 0:
        return out.decode(errors="replace")
    words = parse.error_words(err.decode(errors="replace") or out.decode(errors="replace"))
    if _UNREACHABLE.search(words):
        raise UnreachableError(words)
    raise Failed(words or f"{argv[0]} exited with code {process.returncode}")


class CommandBackend:
    """Implements `backend.Backend`."""

    def __init__(self) -> None:
        self._submitting = asyncio.Semaphore(_PARALLEL_SUBMISSIONS)
        self._accounting = True

    async def submit(self, submissions: Sequence[Submission]) -> list[str | SubmitError]:
        return await asyncio.gather(*(self._submit(submission) for submission in submissions))

    async def _submit(self, submission: Submission) -> str | SubmitError:
        async with self._submitting:
            try:
                out = await _run(
                    "sbatch", *sbatch_arguments(submission.request), str(submission.script)
                )
            except UnreachableError as e:
                return SubmitError(str(e), transient=True)
            except Failed as e:
                return SubmitError(str(e), transient=bool(_TRANSIENT.search(str(e))))
        # `--parsable`: JOBID or JOBID;CLUSTER, after whatever a site's job_submit plugin says
        return out.strip().splitlines()[-1].partition(";")[0]

    async def jobs(self) -> list[Job]:
        return parse.squeue(
            await _run("squeue", "--me", "-h", "-a", "-t", "all", "-O", parse.SQUEUE_FORMAT)
        )

    async def ended(self, ids: Sequence[str]) -> list[Job]:
        found: list[Job] = []
        for job_id in ids:  # scontrol takes one id; few jobs ever need this
            try:
                found += parse.scontrol_jobs(await _run("scontrol", "-o", "show", "job", job_id))
            except Failed:
                continue  # purged from the controller's memory
        missing = sorted(set(ids) - {job.id for job in found})
        if missing and self._accounting:
            try:
                found += parse.sacct(
                    await _run(
                        "sacct", "-X", "-n", "-P", "-D", "-j", ",".join(missing),
                        "-o", parse.SACCT_FORMAT,
                    )
                )  # fmt: skip
            except Failed as e:
                if "accounting storage is disabled" in str(e):
                    self._accounting = False
                else:
                    raise UnreachableError(f"sacct: {e}") from None
        return found

    async def cancel(self, cancels: Sequence[Cancel]) -> list[SubmitError | None]:
        kinds: dict[tuple[str, bool], list[str]] = {}
        for cancel in cancels:
            kinds.setdefault((cancel.signal, cancel.batch_only), []).append(cancel.job_id)
        answers: dict[str, SubmitError | None] = {}
        for (signal, batch_only), ids in kinds.items():
            options = [f"--signal={signal}"] * bool(signal) + ["--batch"] * batch_only
            try:
                await _run("scancel", *options, *ids)
            except Failed as e:
                # One bad id fails the command, after all the others were done.
                answers |= {
                    job_id: SubmitError(str(e), transient=False)
                    for job_id in ids
                    if not re.search(r"Invalid job id|already complet", str(e))
                }
        return [answers.get(cancel.job_id) for cancel in cancels]

    async def partitions(self) -> list[Partition]:
        shown, nodes = await asyncio.gather(
            _run("scontrol", "-o", "show", "partition"), _run("scontrol", "-o", "show", "node")
        )
        return parse.partitions(shown, nodes)
