"""Lone pods whose resources are free start through an allocation, and nobody sees a difference
but in the time it takes."""

from __future__ import annotations

import pytest
import test_slurm
from conftest import Namespace, User, eventually, pod
from netpods import on, quiet_node
from slurmadmin import configured
from test_faults import kill_kubelet

FLAGS, START = "slurm-job.hpk.io/flags", "slurm-job.hpk.io/start"


def shown(ns: Namespace, name: str) -> dict[str, str]:
    """What scontrol says about the pod's job, with its id as JobId."""
    return test_slurm.shown(ns, eventually("its job", lambda: ns.job(name)))


def jobs_of(ns: Namespace, name: str) -> list[str]:
    """Every job that was ever made for the pod, and how far it came."""
    shown = ns.user.run("squeue", "--me", "-h", "-t", "all", "-o", "%j %T").out.splitlines()
    return [line for line in shown if line.startswith(f"{ns.name}/{name} ")]


def test_an_allocation_is_the_pods_one_job(ns: Namespace, busybox: str) -> None:
    ns.create(pod("lone", "sh", "-c", "echo up; sleep 4; exit 3", image=busybox))
    ns.wait_ready("lone")
    fields = shown(ns, "lone")
    assert (fields["BatchFlag"], fields["JobName"]) == ("0", f"{ns.name}/lone")
    assert ns.pod("lone")["metadata"]["uid"] in fields["Comment"]
    control = ns.user.run("squeue", "--me", "-h", "-n", "hpk", "-t", "R", "-o", "%N").out.strip()
    assert ns.user.run("pgrep", "-x", "srun", node=control, check=False).out == ""
    whole = ns.wait_phase("lone", "Failed")
    assert whole["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert ns.logs("lone") == "up\n"
    eventually("the job's end", lambda: jobs_of(ns, "lone") == [f"{ns.name}/lone FAILED"])
    assert shown(ns, "lone")["ExitCode"] == "3:0"


@pytest.mark.disruptive
def test_what_is_not_free_waits_as_a_batch_job(ns: Namespace, busybox: str) -> None:
    other, node = User("bob"), quiet_node(ns.user)
    flags = ("-w", node, "--exclusive", "-o", "/dev/null")
    filler = other.run("sbatch", "--parsable", *flags, "--wrap=sleep 1000").out.strip()
    try:
        eventually("a node that is taken", lambda: ns.job_state(filler) == "RUNNING")
        ns.create(pod("waits", "true", image=busybox, annotations=on(node)))
        assert shown(ns, "waits")["BatchFlag"] == "1"
    finally:
        other.run("scancel", filler)
    ns.wait_phase("waits", "Succeeded")
    eventually("its only job", lambda: jobs_of(ns, "waits") == [f"{ns.name}/waits COMPLETED"])


def test_as_the_annotation_says(ns: Namespace, busybox: str) -> None:
    ns.create(pod("batch", "sleep", "9", image=busybox, annotations={START: "batch"}))
    held = {START: "immediate", FLAGS: "--hold"}
    ns.create(pod("can-not", "true", image=busybox, annotations=held))
    ns.create(pod("wrong", "true", image=busybox, annotations={START: "soon"}))
    assert shown(ns, "batch")["BatchFlag"] == "1"
    assert shown(ns, "can-not")["BatchFlag"] == "1"
    eventually("why", lambda: "SlurmStartBatch" in ns.reasons("can-not"))
    refused = ns.wait_phase("wrong", "Failed")
    assert "'soon' is neither batch, immediate nor auto" in refused["status"]["message"]


def test_what_others_do_to_an_allocation(ns: Namespace, busybox: str) -> None:
    """Slurm can't put it back into its queue; its agent ends the pod in order when it is told."""
    trap = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 1; done"
    ns.create(pod("told", "sh", "-c", trap, image=busybox))
    ns.wait_ready("told")
    job = ns.job("told")
    refused = ns.user.run("scontrol", "requeue", job, check=False)
    assert "Only batch jobs" in refused.err
    assert ns.phase("told") == "Running"
    ns.user.run("scancel", "--signal=URG", job)
    whole = ns.wait_phase("told", "Failed")
    assert whole["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    assert ns.logs("told") == "up\nbye\n"
    eventually("the job's end", lambda: ns.job_state(job) == "FAILED")


@pytest.mark.disruptive
def test_not_where_slurm_ends_idle_allocations(ns: Namespace, busybox: str) -> None:
    with configured("InactiveLimit=60"):
        kill_kubelet(ns)
        ns.create(pod("careful", "true", image=busybox))
        assert shown(ns, "careful")["BatchFlag"] == "1"
    kill_kubelet(ns)
