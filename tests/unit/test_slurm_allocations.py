"""Allocations, from stand-ins for Slurm's commands that say what Slurm 24.11.5 did."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm import parse
from hpk_kubelet.slurm.allocations import Allocations, not_at_once, salloc_arguments
from hpk_kubelet.slurm.backend import Submission, UnreachableError
from hpk_kubelet.slurm.script import JobRequest
from hpk_kubelet.spec.resources import JobResources


def request(*flags, **fields):
    return JobRequest(
        "ns/p", "hpk:c:u:ns/p", "main", JobResources(2, 300), Path("/p"), Path("/a"),
        user_flags=flags, **fields,
    )  # fmt: skip


def test_what_salloc_is_asked_for():
    assert salloc_arguments(request("--time=60")) == [
        "--no-shell", "--immediate", "--job-name=ns/p", "--comment=hpk:c:u:ns/p", "--chdir=/p",
        "--signal=URG@45", "--partition=main", "--nodes=1", "--ntasks=1", "--cpus-per-task=2",
        "--mem=300M", "--time=60",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (request("--time=1", "-A", "a", "--gres=gpu:1"), ""),
        (request("--begin=now+1hour"), "--begin"),
        (request("--dependency=afterok:1"), "--dependency"),
        (request("--nodes=2"), "--nodes"),
        (request(extra_flags=("--hold",)), "--hold"),
        (request("--something-new"), "--something-new"),
        (request(mpi=True), "MPI"),
    ],
)
def test_what_can_not_be_an_allocation(made, why):
    assert (why in not_at_once(made)) and bool(why) == bool(not_at_once(made))


@pytest.mark.parametrize(
    ("shown", "inactive"),
    [("0 sec", False), ("60 sec", True), ("UNLIMITED", True), (None, True)],
)
def test_whether_slurm_ends_allocations_without_their_makers(shown, inactive):
    text = f"InactiveLimit           = {shown}\n" if shown else "MaxArraySize = 1001\n"
    assert parse.limits(text).inactive is inactive


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Makes a command of that name, a shell script's body."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("T", str(tmp_path))

    def make(name, body):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return make


SUBMISSION = Submission(request(), Path("/p/script.sbatch"))


def says(later):
    start = f"$(($(date +%s) + {later}))"
    return f'echo "sbatch: Job 9 to start at {start} using 2 processors on nodes n1" >&2'


async def test_granted(command):
    command("sbatch", says(0))
    command("salloc", "echo 'salloc: Granted job allocation 7' >&2; echo 'salloc: Nodes n1 …' >&2")
    assert await Allocations().allocate(SUBMISSION) == "7"


@pytest.mark.parametrize(
    ("sbatch", "salloc"),
    [
        (says(3600), "exit 9"),  # it would have to wait: salloc is not asked
        ("echo 'allocation failure: Invalid account' >&2; exit 1", "exit 9"),
        (
            says(0),
            "echo 'salloc: error: Unable to allocate resources: Requested nodes are busy' >&2\n"
            "exit 1",
        ),
    ],
)
async def test_not_granted(command, sbatch, salloc):
    command("sbatch", sbatch)
    command("salloc", salloc)
    assert await Allocations().allocate(SUBMISSION) is None


async def test_nobody_knows_whether_it_was_granted(command):
    command("sbatch", says(0))
    command("salloc", "echo 'salloc: error: Socket timed out on send/recv operation' >&2; exit 1")
    with pytest.raises(UnreachableError):
        await Allocations().allocate(SUBMISSION)


def alive(pid):
    """A dead one may not be reaped yet."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_srun_goes_once_the_step_runs(command, tmp_path):
    """With what it has forked, and before it could do anything about it."""
    command("srun", "sleep 60 &\necho $$ $! > $T/pids\ntrap 'touch $T/told' TERM\n"
            "echo 'srun: launching StepId=7.0 on host n1, 1 tasks: 0' >&2\n"
            "echo 'srun: Node n1, 1 tasks started' >&2\nwait")  # fmt: skip
    await Allocations().launch("7", SUBMISSION)
    pids = (tmp_path / "pids").read_text().split()
    for _ in range(1000):  # the kernel ends those that are nobody's children when it likes
        if not any(alive(pid) for pid in pids):
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("srun or what it forked lives on")
    assert not (tmp_path / "told").exists()


async def test_srun_that_starts_nothing_says_why(command):
    command("srun", "echo 'srun: defined options' >&2\necho 'srun: error: Unable to create step "
            "for job 7: Invalid job id specified' >&2\nexit 1")  # fmt: skip
    with pytest.raises(HPKError, match="Unable to create step for job 7: Invalid job id"):
        await Allocations().launch("7", SUBMISSION)


async def test_where_something_runs(command):
    command("squeue", "printf '7.0\\n8.extern\\n9.batch\\n9.1\\n'")
    assert await Allocations().occupied() == {"7", "9"}


END = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hpk_kubelet.agent import allocation
allocation.PAUSES = (0.01, 0.01)
answers = iter(sys.argv[3].split(","))
told = []
def complete(scancel, job, status):
    with open(os.environ["T"] + "/tries", "a") as f:
        f.write("%d %d\\n" % (job, status))
    with open(os.environ["T"] + "/tries") as f:
        return int(sys.argv[3].split(",")[len(f.readlines()) - 1])
allocation._complete = complete
os.environ["SLURM_JOB_ID"] = "7"
allocation.go_on_attended(sys.argv[2])
os._exit(3)
"""


def attended(tmp_path, answers):
    """The exit code of an agent that ends with 3, and how its allocation was ended."""
    script = [sys.executable, "-c", END, str(Path(__file__).parents[2]), str(tmp_path / "scancel")]
    done = subprocess.run([*script, answers], check=False, timeout=30)
    return done.returncode, (tmp_path / "tries").read_text().splitlines()


def test_the_agents_end_is_the_jobs(command, tmp_path):
    command("scancel", "touch $T/cancelled")
    assert attended(tmp_path, "1,1,0") == (3, [f"7 {3 << 8}"] * 3)
    assert not (tmp_path / "cancelled").exists()


def test_an_end_that_can_not_be_told_is_a_cancellation(command, tmp_path):
    command("scancel", "echo $1 > $T/cancelled")
    assert attended(tmp_path, "2") == (3, [f"7 {3 << 8}"])
    assert (tmp_path / "cancelled").read_text() == "7\n"
