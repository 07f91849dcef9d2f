"""Pods that start together or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import test_truth
from conftest import Namespace, eventually, pod
from test_faults import kill_kubelet

GANG, SIZE = "slurm-job.hpk.io/gang", "slurm-job.hpk.io/gang-size"


def member(name: str, image: str, *command: str, size: int = 3, **spec: Any) -> dict[str, Any]:
    annotations = {GANG: "band", SIZE: str(size), **spec.pop("annotations", {})}
    return pod(name, *command, image=image, annotations=annotations,
               terminationGracePeriodSeconds=1, **spec)  # fmt: skip


def jobs(ns: Namespace) -> list[list[str]]:
    """The gang's jobs: id, state, number of tasks, name, comment."""
    shown = ns.user.run("squeue", "--me", "-h", "-t", "all", "-o", "%i|%T|%D|%C|%j|%k").out
    return [row.split("|") for row in shown.splitlines() if f"|{ns.name}/band|" in row]


def waiting(ns: Namespace, name: str) -> str:
    found = test_truth.waiting(ns, name)
    return f"{found.get('reason')}: {found.get('message')}"


def test_one_job_once_all_are_there(ns: Namespace, busybox: str) -> None:
    script = "echo here; test $(hostname) = a && exit 4; sleep 4; echo end"
    # More than half of a node each: they can't be on one.
    half = {"resources": {"requests": {"cpu": "17"}}}
    for name in ("a", "b"):
        ns.create(member(name, busybox, "sh", "-c", script, size=2, container=half))
        if name == "a":
            eventually("it waits", lambda: "1 of the 2 pods of gang band" in waiting(ns, "a"))
            assert waiting(ns, "a").startswith("SlurmGangWaiting")
            assert jobs(ns) == []
    for name, phase, log in (("a", "Failed", "here\n"), ("b", "Succeeded", "here\nend\n")):
        whole = ns.wait_phase(name, "Succeeded", "Failed", timeout=90)
        assert whole["status"]["phase"] == phase, "each ends as its own containers do"
        assert ns.logs(name) == log
    ((_, state, nodes, cpus, _, _),) = jobs(ns)
    assert (nodes, cpus) == ("2", "34")
    eventually("the job's end", lambda: jobs(ns)[0][1] == "FAILED")
    assert state in ("RUNNING", "COMPLETING", "FAILED")


def test_what_happens_to_the_job_happens_to_all(ns: Namespace, busybox: str) -> None:
    ns.create(*(member(name, busybox, "sleep", "1000") for name in "abc"))
    for name in "abc":
        ns.wait_ready(name)
    ns.kubectl("delete", "pod", "a", timeout=60)
    ((job, state, *_),) = jobs(ns)
    assert state == "RUNNING" and ns.phase("b") == "Running", "a deleted one goes alone"
    ns.kubectl("exec", "c", "--", "true")
    ns.user.run("scancel", job)
    for name in "bc":
        whole = ns.wait_phase(name, "Failed")
        assert whole["status"]["reason"] == "SlurmCancelled"


def test_all_or_none(ns: Namespace, busybox: str) -> None:
    """They fit alone, and not together: one more than there are nodes, of more than half a node."""
    big = {"resources": {"requests": {"cpu": "20"}}}
    nodes = set(ns.user.run("sinfo", "-h", "-N", "-o", "%N").out.split())
    names = [f"m{i}" for i in range(len(nodes) + 1)]
    whole = [member(name, busybox, "true", size=len(names), container=big) for name in names]
    ns.create(*whole)
    eventually("why", lambda: "SlurmRejected" in str(ns.pod("m0")["status"].get("reason")))
    for name in names:
        assert ns.wait_phase(name, "Failed")["status"]["reason"] == "SlurmRejected"


@pytest.mark.parametrize(
    ("annotations", "words"),
    [({SIZE: "many"}, "not a name and a number"), ({"slurm-job.hpk.io/mpi-flag": ""}, "MPI ranks"),
     ({"slurm-job.hpk.io/flags": "--ntasks=4"}, "--ntasks")],
)  # fmt: skip
def test_what_a_gang_can_not_be(
    ns: Namespace, busybox: str, annotations: dict[str, str], words: str
) -> None:
    ns.create(member("wrong", busybox, "true", annotations=annotations))
    assert words in ns.wait_phase("wrong", "Failed")["status"]["message"]


@pytest.mark.disruptive
@pytest.mark.parametrize("point", ["intent", "submitted", ""])
def test_a_gang_and_a_crash(ns: Namespace, busybox: str, point: str) -> None:
    home = ns.user.sh("echo $HOME").out.strip() + f"/marks-{ns.name}"
    ns.user.sh(f"mkdir {home}; [ -z '{point}' ] || echo {point} > ~/.hpk/run/crash-at")
    mounts = {"volumeMounts": [{"name": "m", "mountPath": "/marks"}]}
    volumes = [{"name": "m", "hostPath": {"path": home}}]
    script = "echo x >> /marks/$(hostname); sleep 3"
    ns.create(*(member(name, busybox, "sh", "-c", script, container=mounts, volumes=volumes)
                for name in "abc"))  # fmt: skip
    if not point:
        for name in "abc":
            ns.wait_ready(name)
        kill_kubelet(ns)
    for name in "abc":
        ns.wait_phase(name, "Succeeded", timeout=90)
    assert ns.user.sh(f"cat {home}/*").out.split() == ["x"] * 3
    assert len(jobs(ns)) == 1
    assert ns.user.sh("test -e ~/.hpk/run/crash-at", check=False).code != 0, "it never crashed"
