"""The control job and the hpk command."""

from __future__ import annotations

import pytest
from conftest import Namespace, User, eventually, pod
from slurmadmin import ROOT, scontrol

pytestmark = pytest.mark.disruptive


def control_job(user: User) -> str:
    return user.run(
        "squeue", "--me", "-h", "-n", "hpk", "-t", "RUNNING,PENDING", "-o", "%i"
    ).out.strip()


def test_a_second_control_job_says_so_and_stops(ns: Namespace) -> None:
    job = control_job(ns.user)
    second = ns.user.run("sbatch", "--parsable", "-o", "second.out", "/opt/hpk/src/hpk.sbatch").out
    eventually("it ends", lambda: ns.job_state(second.strip()) == "FAILED")
    said = ns.user.sh("cat second.out").out
    assert job in said and "Traceback" not in said
    assert control_job(ns.user) == job
    ns.user.run("kubectl", "get", "--raw", "/readyz")


def test_the_same_cluster_after_an_end(ns: Namespace, busybox: str) -> None:
    ns.create(pod("lives", "sh", "-c", "echo up; sleep 25; echo end", image=busybox))
    ns.create(pod("before", "echo", "before", image=busybox))
    ns.wait_phase("before", "Succeeded")
    ns.wait_ready("lives")
    job = ns.job("lives")
    ns.user.run("hpk", "down", timeout=90)
    assert control_job(ns.user) == ""
    assert ns.user.run("hpk", "status", check=False).code != 0
    assert ns.job_state(job) == "RUNNING", "pods go on without the control job"
    ns.user.run("sbatch", "/opt/hpk/src/hpk.sbatch")
    ns.user.run("hpk", "status", "--wait", "120", timeout=150)
    # The node's status is the old one until the new kubelet has said where it listens.
    eventually(
        "the log of a pod that ended before",
        lambda: ns.kubectl("logs", "before", check=False).out == "before\n",
    )
    ns.wait_phase("lives", "Succeeded", timeout=90)
    assert ns.logs("lives") == "up\nend\n"
    assert ns.job("lives") == job


def test_files_are_the_users_own(ns: Namespace) -> None:
    mode = ns.user.sh("stat -c %a ~/.hpk/kubeconfig ~/.hpk/pki ~/.hpk").out.split()
    assert mode == ["600", "700", "700"]
    bob = User("bob")
    home = ns.user.sh("echo $HOME").out.strip()
    assert bob.run("ls", f"{home}/.hpk", check=False).code != 0


def test_the_kubelets_port_wants_the_api_servers_certificate(ns: Namespace) -> None:
    node = ns.user.run("kubectl", "get", "nodes", "-o", "json").json()["items"][0]["status"]
    address = next(a["address"] for a in node["addresses"] if a["type"] == "InternalIP")
    port = node["daemonEndpoints"]["kubeletEndpoint"]["Port"]
    refused = ns.user.run("curl", "-sk", f"https://{address}:{port}/pods", check=False)
    assert refused.code != 0 and not refused.out


def test_doctor_tells_what_the_site_offers(ns: Namespace) -> None:
    said = ns.user.run("hpk", "doctor", check=False, timeout=180)
    assert "Traceback" not in said.out + said.err
    for word in ("sbatch", "apptainer", "user namespace", "subordinate", "Python"):
        assert word.lower() in said.out.lower(), word


def test_components_say_where_they_came_from(ns: Namespace) -> None:
    listed = ns.user.run("hpk", "components").out
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl"):
        assert name in listed


def test_jobs_lists_pods_beside_jobs(ns: Namespace, busybox: str) -> None:
    ns.create(pod("shown", "sleep", "1000", image=busybox))
    ns.wait_ready("shown")
    line = next(
        line for line in ns.user.run("hpk", "jobs").out.splitlines() if f"{ns.name}/shown" in line
    )
    assert ns.job("shown") in line and "RUNNING" in line


def test_mistakes_get_one_sentence(ns: Namespace) -> None:
    ns.user.sh("mkdir -p ~/wrong && echo 'ports: [1]' > ~/wrong/config.yaml")
    wrong = ns.user.sh("HPK_HOME=~/wrong hpk serve", check=False)
    assert wrong.code == 1
    assert "config.yaml" in wrong.err and "Traceback" not in wrong.err
    assert len(wrong.err.strip().splitlines()) == 1


def test_the_control_job_hands_over_to_a_job_on_another_node(ns: Namespace, busybox: str) -> None:
    ns.create(pod("lives", "sh", "-c", "while sleep 1; do echo up; done", image=busybox))
    ns.wait_ready("lives")
    own, old = ns.job("lives"), control_job(ns.user)
    before = ns.user.run("squeue", "-h", "-j", old, "-o", "%N").out.strip()
    try:
        scontrol("update", f"NodeName={before}", "State=DRAIN", "Reason=test")
        ns.user.run("hpk", "handover")
        new = eventually(
            "another control job alone",
            lambda: (job := control_job(ns.user)) != old and job.isdigit() and job,
        )
        ns.user.run("hpk", "status", "--wait", "60", timeout=90)
        assert ns.user.run("squeue", "-h", "-j", new, "-o", "%N").out.strip() != before
    finally:
        scontrol("update", f"NodeName={before}", "State=RESUME")
    assert ns.job_state(old) == "COMPLETED"
    assert ns.job("lives") == own
    eventually(
        "exec through the new control plane",
        lambda: ns.kubectl("exec", "lives", "--", "echo", "here", check=False).out == "here\n",
    )
    assert ns.phase("lives") == "Running"


def test_the_control_jobs_node_fails(ns: Namespace, busybox: str) -> None:
    """Slurm starts the control job again on another node; pods elsewhere go on."""
    node = ns.user.run("squeue", "--me", "-h", "-n", "hpk", "-t", "R", "-o", "%N").out.strip()
    job = control_job(ns.user)
    flags = {"slurm-job.hpk.io/flags": f"--exclude={node}"}
    ns.create(pod("lives", "sleep", "1000", image=busybox, annotations=flags))
    ns.wait_ready("lives")
    own = ns.job("lives")
    try:
        scontrol("update", f"NodeName={node}", "State=DOWN", "Reason=test")
        eventually("it waits again", lambda: ns.job_state(job) == "PENDING")
        # Slurm keeps a requeued job for two minutes.
        ns.user.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        eventually(
            "the control job on another node",
            lambda: (
                (now := ns.user.run("squeue", "-h", "-j", job, "-t", "R", "-o", "%N").out.strip())
                and now != node
            ),
            timeout=90,
        )
        ns.user.run("hpk", "status", "--wait", "90", timeout=120)
    finally:
        # a node that answers comes back by itself
        ROOT.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
    assert ns.job("lives") == own
    eventually(
        "exec through the new control plane",
        lambda: ns.kubectl("exec", "lives", "--", "echo", "here", check=False).out == "here\n",
    )
