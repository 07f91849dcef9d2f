"""The kubelet dies between any two steps of a pod's start: no pod is lost, none runs twice."""

from __future__ import annotations

import pytest
from conftest import Namespace, eventually, pod

pytestmark = pytest.mark.disruptive


def kill_kubelet(ns: Namespace, signal: str = "KILL") -> None:
    """On whichever node the control job runs; waits for one that is being started again."""
    ns.user.sh(
        f"until srun --overlap --jobid=$(squeue --me -h -n hpk -o %i) "
        f"pkill -{signal} -f '[c]li kubelet$'; do sleep 0.2; done"
    )


def test_a_killed_kubelet_adopts_what_runs(ns: Namespace, busybox: str) -> None:
    ns.create(pod("stays", "sh", "-c", "echo up; sleep 5; echo done", image=busybox))
    ns.wait_ready("stays")
    job = ns.job("stays")
    kill_kubelet(ns)
    whole = ns.wait_phase("stays", "Succeeded", "Failed", timeout=90)
    assert whole["status"]["phase"] == "Succeeded"
    assert whole["status"]["containerStatuses"][0]["restartCount"] == 0
    assert ns.job("stays") == job
    assert ns.logs("stays") == "up\ndone\n"


def test_pods_that_end_while_the_kubelet_is_dead_are_told_truthfully(
    ns: Namespace, busybox: str
) -> None:
    for name, code in (("good", 0), ("bad", 5)):
        ns.create(pod(name, "sh", "-c", f"sleep 3; exit {code}", image=busybox))
        ns.wait_ready(name)
    for _ in range(3):
        kill_kubelet(ns)
    ns.wait_phase("good", "Succeeded", timeout=90)
    whole = ns.wait_phase("bad", "Failed", timeout=90)
    assert whole["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 5


CRASH_POINTS = (
    "created", "pulled", "planned", "intent", "allocated", "submitted", "noted", "started"
)  # fmt: skip


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_crash_at_any_step_of_a_start(ns: Namespace, busybox: str, point: str) -> None:
    """`crash-at` in the run directory makes the kubelet exit at the named step, once."""
    mark = f"$HOME/marks-{ns.name}"
    home = ns.user.sh("echo $HOME").out.strip()
    ns.user.sh(f"mkdir -p {mark}; echo {point} > ~/.hpk/run/crash-at")
    ns.create(
        pod("once", "sh", "-c", "echo x >> /marks/ran; sleep 1", image=busybox,
            container={"volumeMounts": [{"name": "m", "mountPath": "/marks"}]},
            volumes=[{"name": "m", "hostPath": {"path": f"{home}/marks-{ns.name}"}}])
    )  # fmt: skip
    ns.wait_phase("once", "Succeeded", timeout=90)
    assert ns.user.sh(f"cat {mark}/ran").out == "x\n"
    assert ns.user.sh("test -e ~/.hpk/run/crash-at", check=False).code != 0, "it never crashed"
    jobs = ns.user.run("squeue", "--me", "-h", "-t", "all", "-o", "%j").out.split()
    assert jobs.count(f"{ns.name}/once") == 1


def test_the_agent_killed_is_a_failed_pod(ns: Namespace, busybox: str) -> None:
    ns.create(pod("agentless", "sleep", "1000", image=busybox))
    ns.wait_ready("agentless")
    uid = ns.pod("agentless")["metadata"]["uid"]
    ns.user.run(
        "srun",
        "--overlap",
        f"--jobid={ns.job('agentless')}",
        "pkill",
        "-KILL",
        "-f",
        f"pods/{uid}$",
    )
    whole = ns.wait_phase("agentless", "Failed", timeout=60)
    assert whole["status"]["reason"]
    assert "terminated" in whole["status"]["containerStatuses"][0]["state"]


def test_malformed_pods_fail_alone(ns: Namespace, busybox: str) -> None:
    weird = pod("weird", "true", image=busybox,
                container={"workingDir": "/a'b\"c $(id)\n", "name": "main"},
                annotations={"slurm-job.hpk.io/flags": "\x01 --x"})  # fmt: skip
    ns.create(weird)
    ns.create(pod("fine", "true", image=busybox))
    ns.wait_phase("fine", "Succeeded")
    eventually("an end with words", lambda: ns.phase("weird") == "Failed")
    assert ns.pod("weird")["status"]["message"]
