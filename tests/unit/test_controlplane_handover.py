"""What a successor is submitted with, and when."""

import pytest

from hpk_kubelet.controlplane import handover
from hpk_kubelet.controlplane.job import Job, control_jobs, marker

SHOWN = (
    "JobId=12 JobName=hpk UserId=alice(1000) Account=users QOS=N/A JobState=RUNNING "
    "RunTime=00:04:31 TimeLimit=1-00:00:00 TimeMin=N/A Partition=long NumCPUs=1 CPUs/Task=2 "
    "MinCPUsNode=2 MinMemoryNode=2G MinTmpDiskNode=0 Features=(null) Reservation=night "
    "Licenses=(null) Command=/x/hpk.sbatch WorkDir=/home/alice Comment=hpk control plane in /h "
)


def test_a_successor_is_given_what_the_job_was_given():
    assert sorted(handover.options(SHOWN)) == [
        "--account=users", "--chdir=/home/alice", "--cpus-per-task=2", "--mem=2G",
        "--partition=long", "--reservation=night", "--time=1-00:00:00",
    ]  # fmt: skip


def test_a_successor_does_not_inherit_what_slurm_set():
    own = {"PATH": "/bin", "SLURM_JOB_ID": "12", "SBATCH_PARTITION": "x", "LC_ALL": "C", "A": "b"}
    assert handover.inherited(own) == {"PATH": "/bin", "LC_ALL": "C", "A": "b"}


@pytest.mark.parametrize(
    ("left", "age", "expected"),
    [
        (None, 5.0, 0.0),  # no time limit
        (3600.0, 5.0, 0.0),  # asked for by the user
        (600.0, 86000.0, 0.0),  # warned in time
        (110.0, 10.0, 50.0),  # the whole time is shorter than the warning
    ],
)
def test_a_short_job_still_uses_half_of_its_time(left, age, expected):
    assert handover.patience(left, age) == expected


def test_a_queued_successor_is_a_control_job(tmp_path):
    running = Job(3, "RUNNING", "n1", "None", "hpk", marker(tmp_path))
    waits = Job(4, "PENDING", "", "Priority", "hpk", marker(tmp_path))
    other = Job(5, "PENDING", "", "Priority", "hpk", marker(tmp_path / "other"))
    assert control_jobs([waits, other, running], tmp_path, 3) == [running, waits]
