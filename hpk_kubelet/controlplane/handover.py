"""The control job's successor, so that a cluster outlives any job's time limit.

On SIGUSR1 (sbatch --signal=B:USR1@… before the time limit, or `hpk handover`) the control job
submits the same script again and goes on. The successor, once it runs, tells it to end and takes
over the state; if the successor is still queued when the time is up, it starts later from the
state that was left in order.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane import job as jobs
from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.commands import environment
from hpk_kubelet.slurm.script import parse_time_limit

FROM = "HPK_HANDOVER_FROM"
"""In a successor's environment: the job that it takes over from."""
LEAST_LEFT = 60.0
"""Seconds before the time limit at which a control plane without a successor stops in order."""
_PATIENCE = 75.0  # seconds a predecessor gets to stop in order
_RETRY = 30.0
_LEAD = 700.0  # seconds: a little more than the time in hpk.sbatch's --signal
# scontrol show job → sbatch
_OPTIONS = {
    "Partition": "partition",
    "Account": "account",
    "QOS": "qos",
    "TimeLimit": "time",
    "CPUs/Task": "cpus-per-task",
    "MinMemoryNode": "mem",
    "MinMemoryCPU": "mem-per-cpu",
    "Features": "constraint",
    "Reservation": "reservation",
    "Licenses": "licenses",
    "WorkDir": "chdir",
}


def options(shown: str) -> list[str]:
    """What `scontrol -o show job` says a job was given, as sbatch's options."""
    fields = dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(\S*)", shown))
    return [
        f"--{option}={fields[field]}"
        for field, option in _OPTIONS.items()
        if fields.get(field, "") not in ("", "(null)", "N/A", "None", "0")
    ]


def submit(paths: Paths, job: int, own: Mapping[str, str]) -> int:
    """Submits this job's script once more, with what this job was given; the new job's id."""
    shown = jobs.run_slurm(["scontrol", "-o", "show", "job", str(job)])
    script = paths.run / "hpk.sbatch"
    write_private(script, jobs.run_slurm(["scontrol", "write", "batch_script", str(job), "-"]))
    argv = [
        "sbatch", "--parsable", f"--comment={jobs.marker(paths.home)}", *options(shown),
        str(script),
    ]  # fmt: skip
    where = own.get("SLURM_SUBMIT_DIR", "")
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**inherited(own), FROM: str(job)},
            # hpk.sbatch looks for hpk where sbatch was called
            cwd=where if Path(where).is_dir() else None,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise HPKError(f"sbatch: {e}") from None
    answer = (done.stdout.strip().splitlines() or [""])[-1].partition(";")[0]
    if done.returncode or not answer.isdigit():
        raise HPKError(f"sbatch: {' '.join(done.stderr.split()) or done.stdout.strip()}")
    return int(answer)


def inherited(own: Mapping[str, str]) -> dict[str, str]:
    """The environment a successor starts in: what the user submitted the first one with."""
    kept = environment(dict(own))
    for name in ("LC_ALL", "SLURM_TIME_FORMAT"):  # set for parsing alone
        kept.pop(name, None)
        if name in own:
            kept[name] = own[name]
    return kept


def time_left(job: int) -> float | None:
    """Seconds until the job's time limit; None where it has none."""
    text = jobs.run_slurm(["squeue", "-h", "-j", str(job), "-o", "%L"]).strip()
    left = parse_time_limit(text)
    return None if left is None else float(left)


def successor(paths: Paths, job: int) -> jobs.Job | None:
    """A job that waits or runs to take over from this one."""
    marker = jobs.marker(paths.home)
    return next((j for j in jobs.my_jobs() if j.comment == marker and j.id > job and j.alive), None)


def take_over(paths: Paths, own: Mapping[str, str], say: Callable[[str], None]) -> None:
    """In a successor: ends the predecessor, if it still runs, and waits until it is gone."""
    text = own.get(FROM, "")
    before = jobs.find_job(int(text)) if text.isdigit() else None
    if before is None or not before.runs or before.comment != jobs.marker(paths.home):
        return
    say(f"taking over from control job {before.id} on {before.node}")
    # To the script alone: a plain scancel would hit etcd and the kubelet at the same moment.
    jobs.run_slurm(["scancel", "--batch", "--signal=TERM", text])
    deadline = time.monotonic() + _PATIENCE
    while (now := jobs.find_job(before.id)) is not None and now.runs:
        if time.monotonic() > deadline:
            say(f"control job {before.id} does not stop; cancelling it")
            jobs.run_slurm(["scancel", text])
            return  # claim() waits for its end, and refuses if there is none
        time.sleep(0.2)


async def hand_over(
    paths: Paths, job: int, asked: asyncio.Event, stop: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Whenever it is `asked`: makes sure of a successor, and sets `stop` before this job's time
    is over. Runs until cancelled."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        watch: asyncio.Task[None] | None = None
        while True:
            await asked.wait()
            asked.clear()
            try:
                left = await asyncio.to_thread(time_left, job)
                if left is not None and watch is None:
                    watch = group.create_task(_stop_in_time(job, left, stop, say))
                await asyncio.sleep(patience(left, time.monotonic() - began))
                there = await asyncio.to_thread(successor, paths, job)
                new = there.id if there else await asyncio.to_thread(submit, paths, job, os.environ)
                say(f"control job {new} will take over from this one")
            except HPKError as e:
                say(f"no successor yet: {e}; trying again in {_RETRY:.0f} s")
                asyncio.get_running_loop().call_later(_RETRY, asked.set)


def patience(left: float | None, age: float) -> float:
    """Seconds to wait with the successor. A job whose whole time is shorter than Slurm's warning
    is warned at its start; it still uses half of its time."""
    if left is None or left > _LEAD or age >= left:
        return 0.0
    return (left - age) / 2


async def _stop_in_time(
    job: int, left: float, stop: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Stops in order before Slurm kills everything at once; the limit may be moved meanwhile."""
    margin = min(LEAST_LEFT, left / 4)
    while left > margin:
        await asyncio.sleep(min(left - margin, 60.0))
        try:
            now = await asyncio.to_thread(time_left, job)
        except HPKError:
            now = left - min(left - margin, 60.0)
        if now is None:
            return
        left = now
    say("the time limit is near, and no successor has taken over yet: stopping")
    stop.set()
