"""Whatever Slurm does to a job comes out in Kubernetes as what it was."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Namespace, User, eventually, pod
from slurmadmin import ROOT, configured, scontrol, slurmctld_away, slurmctld_back

FLAGS = "slurm-job.hpk.io/flags"


def waiting(ns: Namespace, name: str) -> dict[str, Any]:
    status = (ns.pod(name).get("status") or {}).get("containerStatuses") or [{}]
    found: dict[str, Any] = (status[0].get("state") or {}).get("waiting") or {}
    return found


def wait_reason(ns: Namespace, name: str, reason: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = waiting(ns, name)
        return found if found.get("reason") == reason else None

    found: dict[str, Any] = eventually(f"{name} waits for {reason}", look)
    return found


def ended(ns: Namespace, name: str, reason: str, timeout: float = 60) -> dict[str, Any]:
    """The pod failed for this reason, says so with its job's id, and an Event says it too."""
    job = ns.job(name)
    whole = ns.wait_phase(name, "Failed", timeout=timeout)
    assert whole["status"]["reason"] == reason, whole["status"]
    if job:
        assert job in whole["status"]["message"]
    for status in whole["status"]["containerStatuses"]:
        assert "terminated" in status["state"] or job == ""
    return whole


def ready(ns: Namespace, name: str) -> str:
    conditions = {c["type"]: c for c in ns.pod(name)["status"]["conditions"]}
    return str(conditions["Ready"]["status"])


def test_held_and_released(ns: Namespace, busybox: str) -> None:
    ns.create(pod("held", "true", image=busybox, annotations={FLAGS: "--hold"}))
    found = wait_reason(ns, "held", "SlurmJobHeldUser")
    assert "scontrol release" in found["message"]
    job = ns.job("held")
    ns.user.run("scontrol", "release", job)
    ns.wait_phase("held", "Succeeded")


def test_cancelled_while_it_runs(ns: Namespace, busybox: str) -> None:
    """A plain scancel, which the agent sees as a TERM and nothing more."""
    ns.create(pod("c", "sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait", image=busybox))
    ns.wait_ready("c")
    ns.user.run("scancel", ns.job("c"))
    ended(ns, "c", "SlurmCancelled")


def test_suspended_and_resumed(ns: Namespace, busybox: str) -> None:
    ns.create(pod("s", "sleep", "1000", image=busybox))
    ns.wait_ready("s")
    job = ns.job("s")
    scontrol("suspend", job)
    eventually("the pod not ready", lambda: ready(ns, "s") == "False")
    assert "SlurmSuspended" in ns.reasons("s")
    assert ns.phase("s") == "Running"
    scontrol("resume", job)
    eventually("the pod ready", lambda: ready(ns, "s") == "True")
    eventually("its Event", lambda: "SlurmResumed" in ns.reasons("s"))


def test_requeued_by_an_administrator(ns: Namespace, busybox: str) -> None:
    """What ran may have done its work: it is not run again, and the job goes."""
    ns.create(pod("r", "sleep", "1000", image=busybox, terminationGracePeriodSeconds=1,
                  annotations={"slurm-job.hpk.io/start": "batch"}))  # fmt: skip
    ns.wait_ready("r")
    job = ns.job("r")
    scontrol("update", f"JobId={job}", "Requeue=1")
    scontrol("requeuehold", job)
    whole = ns.wait_phase("r", "Failed")
    # Slurm signals the agent first: which of the two words comes first is Slurm's timing
    assert whole["status"]["reason"] in ("SlurmRequeued", "Terminated"), whole["status"]
    eventually("the job gone", lambda: ns.job_state(job) in ("CANCELLED", ""))


@pytest.mark.disruptive
def test_a_drained_node_and_a_failed_one(ns: Namespace, busybox: str) -> None:
    control = ns.user.run("squeue", "--me", "-h", "-n", "hpk", "-t", "R", "-o", "%N").out.strip()
    nodes = sorted(set(ns.user.run("sinfo", "-h", "-N", "-o", "%N").out.split()) - {control})
    node = nodes[-1]  # it takes every job with it
    there = {FLAGS: f"--nodelist={node}"}
    ns.create(pod("fails", "sleep", "1000", image=busybox, annotations=there))
    ns.wait_ready("fails")
    try:
        scontrol("update", f"NodeName={node}", "State=DRAIN", "Reason=test")
        ns.create(pod("waits", "true", image=busybox, annotations=there))

        def why() -> dict[str, Any] | None:
            found = waiting(ns, "waits")
            return found if "node" in found.get("message", "") else None

        assert eventually("why it waits", why)["reason"] in (
            "SlurmReqNodeNotAvail",
            "SlurmNodesUnavailable",
            "SlurmNodeDown",
        )
        assert ns.phase("fails") == "Running"
        scontrol("update", f"NodeName={node}", "State=DOWN", "Reason=test")
        ended(ns, "fails", "NodeFail")
    finally:
        scontrol("update", f"NodeName={node}", "State=RESUME")
    ns.wait_phase("waits", "Succeeded")


def test_a_dependency_that_can_never_be(ns: Namespace, busybox: str) -> None:
    failed = ns.user.run("sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap=true")
    before = failed.out.strip()
    flags = f"--dependency=afterok:{before}"
    ns.create(pod("d", "true", image=busybox, annotations={FLAGS: flags}))
    wait_reason(ns, "d", "SlurmDependency")
    ns.user.run("scancel", before)
    wait_reason(ns, "d", "SlurmDependencyNeverSatisfied")


@pytest.mark.disruptive
def test_a_partition_that_is_down(ns: Namespace, busybox: str) -> None:
    partition = ROOT.run("sinfo", "-h", "-o", "%P").out.split()[0].rstrip("*")
    scontrol("update", f"PartitionName={partition}", "State=DOWN")
    try:
        ns.create(pod("p", "true", image=busybox))
        wait_reason(ns, "p", "SlurmPartitionDown")
    finally:
        scontrol("update", f"PartitionName={partition}", "State=UP")
    ns.wait_phase("p", "Succeeded")


@pytest.mark.disruptive
@pytest.mark.parametrize("mode", ["CANCEL", "REQUEUE"])
def test_preempted(ns: Namespace, busybox: str, mode: str) -> None:
    def idle() -> list[str]:
        return ns.user.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").out.split()

    node = max(eventually("an idle node, whose jobs may be preempted", idle))
    urgent = f"PartitionName=urgent Nodes={node} PriorityTier=100 MaxTime=INFINITE State=UP"
    with configured("PreemptType=preempt/partition_prio", f"PreemptMode={mode}", urgent):
        ns.create(pod("low", "sleep", "1000", image=busybox, terminationGracePeriodSeconds=1,
                      annotations={FLAGS: f"--nodelist={node} --exclusive"}))  # fmt: skip
        ns.wait_ready("low")
        high = ns.user.run("sbatch", "--parsable", "-p", "urgent", "--exclusive", "-o", "/dev/null",
                           "--wrap=sleep 1000").out.strip()  # fmt: skip
        ended(ns, "low", "Preempted", timeout=90)
        ns.user.run("scancel", high)


@pytest.mark.disruptive
def test_slurmctld_restarted_and_away(ns: Namespace, busybox: str) -> None:
    """A pod that runs goes on, one that ends is told, one that is made waits: none twice."""
    ns.create(pod("runs", "sleep", "1000", image=busybox))
    ns.create(pod("ends", "sh", "-c", "sleep 4; exit 3", image=busybox))
    for name in ("runs", "ends"):
        ns.wait_ready(name)
    node = ns.pod("runs")["spec"]["nodeName"]

    def reachable() -> str:
        status = ns.user.run("kubectl", "get", "node", node, "-o", "json").json()["status"]
        found = {c["type"]: c["status"] for c in status["conditions"]}
        assert found["Ready"] == "True"
        return str(found["SlurmReachable"])

    with slurmctld_away():
        ns.create(pod("new", "true", image=busybox))
        eventually("the condition", lambda: reachable() == "False")
        whole = ns.wait_phase("ends", "Failed")
        assert whole["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
        assert ns.phase("runs") == "Running"
        assert ns.phase("new") == "Pending"
        slurmctld_back()
        eventually("the condition", lambda: reachable() == "True")
    ns.wait_phase("new", "Succeeded", timeout=90)
    assert ns.phase("runs") == "Running"
    names = ns.user.run("squeue", "--me", "-h", "-t", "all", "-o", "%j").out.split()
    assert names.count(f"{ns.name}/new") == 1


@pytest.mark.disruptive
def test_a_job_forgotten_by_slurm_is_no_pod(ns: Namespace, busybox: str) -> None:
    """A job without a pod that says it is one of this cluster's is ended."""
    ns.create(pod("real", "sleep", "1000", image=busybox))
    ns.wait_ready("real")
    comment = ns.user.run("squeue", "-h", "-j", ns.job("real"), "-o", "%k").out.strip()
    cluster = comment.split(":")[1]
    stray = ns.user.run(
        "sbatch", "--parsable", "-o", "/dev/null", "--wrap=sleep 1000",
        f"--comment=hpk:{cluster}:00000000-0000-0000-0000-000000000000:{ns.name}/stray",
    ).out.strip()  # fmt: skip
    eventually("the stray job cancelled", lambda: ns.job_state(stray) in ("CANCELLED", ""))
    assert ns.phase("real") == "Running"


def allocatable(ns: Namespace, node: str) -> int:
    status = ns.user.run("kubectl", "get", "node", node, "-o", "json").json()["status"]
    return int(status["allocatable"]["cpu"])


@pytest.mark.disruptive
def test_nodes_offer_what_slurm_has_left(ns: Namespace, busybox: str) -> None:
    """Others' jobs and drained nodes are not offered, pods' own jobs are; and a partition that is
    gone takes its node with it."""
    scontrol("create", "PartitionName=brief", "Nodes=node2", "State=UP", "MaxTime=INFINITE")
    try:
        eventually("the node", lambda: not ns.gone("node", "brief"), timeout=90)
        whole = allocatable(ns, "brief")
        ns.create(pod("own", "sleep", "1000", image=busybox,
                      nodeSelector={"hpk.io/partition": "brief"},
                      container={"resources": {"requests": {"cpu": "3"}}}))  # fmt: skip
        ns.wait_ready("own")
        other = User("bob").run("sbatch", "--parsable", "-w", "node2", "-c", "5", "-o", "/dev/null",
                                "--wrap=sleep 1000").out.strip()  # fmt: skip
        eventually("less", lambda: allocatable(ns, "brief") == whole - 5, timeout=90)
        User("bob").run("scancel", other)
        scontrol("update", "NodeName=node2", "State=DRAIN", "Reason=test")
        eventually("nothing", lambda: allocatable(ns, "brief") == 0, timeout=90)
        ns.kubectl("delete", "pod", "own", "--grace-period=1")
    finally:
        scontrol("update", "NodeName=node2", "State=RESUME")
        scontrol("delete", "PartitionName=brief")
    eventually("the node gone", lambda: ns.gone("node", "brief"), timeout=90)
