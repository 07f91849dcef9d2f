"""The control job as Slurm knows it: which one runs, and that it is the only one.

Slurm is asked, not a lock file: file locks are what shared file systems do differently. A
control job marks itself in its job comment, which slurmctld keeps in one order for all nodes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpk_kubelet.errors import HPKError

# squeue(1), JOB STATE CODES
_RUNS = frozenset(["RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"])
_WAITS = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"]
)


JOB_NAME = "hpk"  # as in hpk.sbatch


class SlurmUnreachable(HPKError):
    """slurmctld did not answer: nothing is known about any job."""


@dataclass(frozen=True)
class Job:
    """A job as squeue lists it."""

    id: int
    state: str
    node: str
    reason: str
    name: str
    comment: str

    @property
    def runs(self) -> bool:
        """Its script runs. Not so when COMPLETING: that may only be Slurm waiting for a node."""
        return self.state in _RUNS

    @property
    def alive(self) -> bool:
        """Its script runs, or is yet to run."""
        return self.runs or self.state in _WAITS


def current_job() -> int | None:
    """The Slurm job this process is in, or None."""
    text = os.environ.get("SLURM_JOB_ID", "")
    return int(text) if text.isdigit() else None


def marker(home: Path) -> str:
    """The job comment of a control job whose state is in `home`."""
    return f"hpk control plane in {home}"


def run_slurm(argv: Sequence[str], timeout: float = 30.0) -> str:
    """Output of a Slurm command; HPKError with Slurm's own words when it fails."""
    if shutil.which(argv[0]) is None:
        raise HPKError(f"Slurm's {argv[0]} is not on PATH here")
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnreachable(f"{argv[0]} gave no answer in {timeout:.0f} s") from None
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        unreachable = ("Unable to contact", "Connection refused", "Socket timed out")
        kind = SlurmUnreachable if any(u in words for u in unreachable) else HPKError
        raise kind(f"{argv[0]}: {words}")
    return done.stdout


_FORMAT = "%i|%T|%N|%r|%j|%k"


def parse_jobs(text: str) -> list[Job]:
    """Parses `squeue -h -o '%i|%T|%N|%r|%j|%k'`; array tasks and other odd ids are left out."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 5)
        if len(fields) == 6 and fields[0].isdigit():
            jobs.append(Job(int(fields[0]), *fields[1:]))
    return jobs


def find_job(job: int) -> Job | None:
    """The job with this id if Slurm still lists it."""
    try:
        found = parse_jobs(run_slurm(["squeue", "-h", "-j", str(job), "-t", "all", "-o", _FORMAT]))
    except SlurmUnreachable:
        raise
    except HPKError as e:
        if "Invalid job id" in str(e):  # long ended: slurmctld has forgotten it
            return None
        raise
    return found[0] if found else None


def my_jobs() -> list[Job]:
    """Every job of this user that has not ended."""
    return parse_jobs(run_slurm(["squeue", "-h", "-u", str(os.getuid()), "-o", _FORMAT]))


def mark(job: int, comment: str) -> None:
    """Sets the comment of one's own job."""
    run_slurm(["scontrol", "update", f"JobId={job}", f"Comment={comment}"])


def already_runs(job: Job, home: Path) -> HPKError:
    """What a second control job says before it stops."""
    return HPKError(
        f"the control plane in {home} already runs: job {job.id} on {job.node or 'no node yet'} "
        f"({job.state}); stop it with: hpk down"
    )


def control_jobs(
    jobs: Sequence[Job], home: Path, last: int | None, others: Sequence[Path] = ()
) -> list[Job]:
    """Those of this user's jobs that are control jobs of `home`: the `last` that made itself
    known before others that run (and will find that they are too many), then those that wait.
    A job that waits is a successor, which was marked when it was submitted, or has not marked
    itself yet and is known by the name that hpk.sbatch gives it, unless it may be that of one of
    the `others` (see `unmarked`)."""
    running = [j for j in jobs if j.comment == marker(home) and j.runs]
    running.sort(key=lambda j: j.id != last)
    waiting = [j for j in jobs if j.comment == marker(home) and j.alive and not j.runs]
    return running + sorted(waiting + ([] if others else unmarked(jobs)), key=lambda j: j.id)


def unmarked(jobs: Sequence[Job]) -> list[Job]:
    """Control jobs that wait for their first start, and do not say in which home yet."""
    named = [j for j in jobs if j.name == JOB_NAME and not j.comment]
    return [j for j in named if j.alive and not j.runs]


def claim(job: int, home: Path, jobs: Callable[[], list[Job]], patience: float = 10.0) -> None:
    """Makes sure that `job` is the only running one marked for `home`; HPKError if it is not.

    Of several that start at once the lowest id stays. The lowest still waits for the others to
    go, since one of them may have looked before this one was marked, and so may stay. A job that
    is COMPLETING is waited for too, but not held to be running for ever.
    """
    deadline = time.monotonic() + patience
    while True:
        marked = [j for j in jobs() if j.comment == marker(home) and j.id != job]
        running = [j for j in marked if j.runs]
        late = time.monotonic() > deadline
        if running and (late or min(j.id for j in running) < job):
            raise already_runs(min(running, key=lambda j: j.id), home)
        if not running and (late or not any(j.state == "COMPLETING" for j in marked)):
            return
        time.sleep(0.5)
