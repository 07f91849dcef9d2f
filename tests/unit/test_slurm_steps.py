"""Steps of the control job, from what Slurm 24.11.5 printed."""

from pathlib import Path

import pytest

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.backend import Cancel, Job, Submission, SubmitError
from hpk_kubelet.slurm.script import JobRequest, render_script
from hpk_kubelet.slurm.steps import ControlJobBackend, Step, control_partition, steps
from hpk_kubelet.spec.resources import JobResources

SHOWN = (
    "StepId=1.batch UserId=1000 StartTime=1790000000 TimeLimit=UNLIMITED State=RUNNING"
    " Partition=main NodeList=node1 Nodes=1 CPUs=0 Tasks=1 Name=batch Network=(null) TRES=(null)"
    " ResvPorts=(null) CPUFreqReq=Default SrunHost:Pid=(null):0\n"
    "StepId=1.0 UserId=1000 StartTime=1790000001 TimeLimit=UNLIMITED State=RUNNING Partition=main"
    " NodeList=node1 Nodes=1 CPUs=1 Tasks=1 Name=hpk:c:uid:ns/name Network=(null)"
    " TRES=cpu=1,mem=300M,node=1 ResvPorts=(null) CPUFreqReq=Default SrunHost:Pid=head:157\n"
)
CONTROL = Job("1", "RUNNING", nodes="node1", tres="cpu=2,mem=4G,node=1,billing=2")


def test_steps():
    assert steps(SHOWN) == [
        Step("1.batch", "batch", "RUNNING", 1790000000.0, 0),
        Step("1.0", "hpk:c:uid:ns/name", "RUNNING", 1790000001.0, 300),
    ]


def test_the_node_offers_what_the_control_plane_leaves():
    partition = control_partition(CONTROL)
    assert (partition.cpus, partition.memory_mb, partition.control_job) == (2, 3072, "1")


STARTS = (
    "echo 'srun: launching StepId=1.0 on host node1, 1 tasks: 0' >&2;"
    "echo 'srun: launch/slurm: _task_start: Node node1, 1 tasks started' >&2; sleep 60"
)


class Jobs:
    """The backend for everything else."""

    def __init__(self):
        self.asked = []

    async def submit(self, submissions):
        self.asked.append(submissions)
        return ["7"] * len(submissions)

    async def jobs(self):
        return [CONTROL]

    async def cancel(self, cancels):
        self.asked.append(cancels)
        return [None] * len(cancels)

    async def ended(self, ids):
        self.asked.append(ids)
        return []


def submission(control_job="1", memory_mb=300):
    request = JobRequest(
        "ns/name", "hpk:c:uid:ns/name", "main", JobResources(1, memory_mb), Path("/p"), Path("/a"),
        control_job=control_job,
    )  # fmt: skip
    return Submission(request, Path("/p/script.sbatch"))


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands that print what Slurm did; `srun` is a shell script's body."""
    (tmp_path / "steps").write_text(SHOWN)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("T", str(tmp_path))

    def make(name, body):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    make("scontrol", 'cat "$T/steps"')
    make("scancel", 'echo "$*" > "$T/cancelled"')
    backend = ControlJobBackend(Jobs(), 1)
    backend._partition = control_partition(CONTROL)
    return backend, make


async def test_each_goes_its_way(slurm, tmp_path):
    backend, make = slurm
    make("srun", f'echo "$*" > "$T/run"; {STARTS}')
    assert await backend.submit([submission(""), submission()]) == ["7", "1.0"]
    assert "--jobid=1 " in (tmp_path / "run").read_text()
    assert await backend.cancel([Cancel("1.0", "TERM", True), Cancel("7")]) == [None, None]
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 1.0\n"
    await backend.ended(["1.0", "7"])
    assert backend._backend.asked[1:] == [[Cancel("7")], ["7"]]
    found = await backend.jobs()
    assert [(job.id, job.comment, job.nodes) for job in found[1:]] == [
        ("1.0", "hpk:c:uid:ns/name", "node1")
    ]


async def test_no_room_is_no_refusal(slurm):
    backend, make = slurm
    make("srun", "exit 9")
    (answer,) = await backend.submit([submission(memory_mb=3000)])
    assert isinstance(answer, SubmitError)
    assert answer.transient
    assert "3000 MB are wanted and 2772 MB are free" in str(answer)


async def test_what_srun_says(slurm, tmp_path):
    backend, make = slurm
    (tmp_path / "steps").write_text("")
    make("srun", 'echo "srun: error: Unable to create step for job 1: Why" >&2; exit 1')
    (answer,) = await backend.submit([submission()])
    assert isinstance(answer, SubmitError)
    assert not answer.transient
    make("srun", "exit 1")
    (answer,) = await backend.submit([submission()])
    assert isinstance(answer, HPKError)
    assert not isinstance(answer, SubmitError)


def test_the_agent_hears_the_steps_id():
    assert "SLURM_JOB_ID=$SLURM_JOB_ID.$SLURM_STEP_ID" in render_script(submission().request)
    assert "SLURM_STEP_ID" not in render_script(submission("").request)
