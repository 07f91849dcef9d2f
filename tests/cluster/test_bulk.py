"""Many pods at once: job arrays, and what Slurm has no room for."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Namespace, eventually, pod
from slurmadmin import ROOT

TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"


def job_of(name: str, count: int, image: str, *command: str, home: str = "") -> dict[str, Any]:
    """A Kubernetes Job of so many pods at once."""
    spec: dict[str, Any] = pod("x", *command, image=image)["spec"]
    if home:
        spec["containers"][0]["volumeMounts"] = [{"name": "m", "mountPath": "/marks"}]
        spec["volumes"] = [{"name": "m", "hostPath": {"path": home}}]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": count,
            "parallelism": count,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": spec},
        },
    }


def succeeded(ns: Namespace, name: str) -> int:
    return int(ns.get("job", name).get("status", {}).get("succeeded", 0))


def test_pods_that_differ_only_in_identity_go_out_as_arrays(ns: Namespace, busybox: str) -> None:
    home = ns.user.sh("echo $HOME").out.strip() + f"/marks-{ns.name}"
    ns.user.run("mkdir", home)
    script = "echo x >>/marks/$JOB_COMPLETION_INDEX; sleep 3"  # a job that has ended keeps its name
    ns.create(job_of("many", 30, busybox, "sh", "-c", script, home=home))
    eventually("all of them", lambda: succeeded(ns, "many") == 30, timeout=90)
    pods = ns.kubectl("get", "pods", "-o", "json").json()["items"]
    listed = ns.user.run("squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%j|%k").out
    rows = [line.split("|") for line in listed.splitlines() if ns.name in line]
    assert len({row[0] for row in rows}) == 30
    assert any("_" in row[0] for row in rows), "no job array"
    for one in pods:
        uid, name = one["metadata"]["uid"], one["metadata"]["name"]
        (row,) = [row for row in rows if uid in row[2]]
        assert row[1] == f"{ns.name}/{name}"
        assert one["status"]["containerStatuses"][0]["restartCount"] == 0
    # each ran once
    assert ns.user.sh(f"cat {home}/* | wc -l; ls {home} | wc -l").out.split() == ["30", "30"]
    assert ns.logs(pods[0]["metadata"]["name"]) == ""


def test_tokens_are_requested_when_pods_start(ns: Namespace, busybox: str) -> None:
    whole = job_of("held", 100, busybox, "sh", "-c", f"test -s {TOKEN}")
    whole["spec"]["template"]["metadata"] = {
        "annotations": {"slurm-job.hpk.io/flags": "--hold --time=5"}
    }
    ns.create(whole)

    def held() -> dict[str, str]:
        shown = ns.user.run("squeue", "--me", "-h", "-r", "-t", "PD", "-o", "%j %i").out
        rows = (line.split() for line in shown.splitlines())
        return {name: job for name, job in rows if name.startswith(f"{ns.name}/")}

    jobs = eventually("all wait in the queue", lambda: len(held()) == 100 and held())
    pods = ns.kubectl("get", "pods", "-o", "json").json()["items"]
    have = ns.user.sh("ls -d ~/.hpk/pods/*/volumes/kube-api-access-*/..data").out
    without = [p["metadata"]["name"] for p in pods if p["metadata"]["uid"] not in have]
    assert without, "each has a token already"
    ns.user.run("scontrol", "release", jobs[f"{ns.name}/{without[0]}"])
    ns.wait_phase(without[0], "Succeeded")


@pytest.mark.disruptive
@pytest.mark.parametrize("point", ["intent", "submitted"])
def test_a_crash_while_an_array_is_submitted(ns: Namespace, busybox: str, point: str) -> None:
    home = ns.user.sh("echo $HOME").out.strip() + f"/marks-{ns.name}"
    ns.user.sh(f"mkdir {home}; echo {point} > ~/.hpk/run/crash-at")
    ns.create(
        job_of("many", 12, busybox, "sh", "-c", "echo x >>/marks/$JOB_COMPLETION_INDEX", home=home)
    )
    eventually("all of them", lambda: succeeded(ns, "many") == 12, timeout=90)
    assert ns.user.sh("test -e ~/.hpk/run/crash-at", check=False).code != 0, "it never crashed"
    assert ns.user.sh(f"cat {home}/* | wc -l; ls {home} | wc -l").out.split() == ["12", "12"]


@pytest.mark.disruptive
def test_what_slurm_has_no_room_for_waits_with_its_reason(ns: Namespace, busybox: str) -> None:
    if ROOT.run("sacctmgr", "-n", "list", "cluster", check=False).code:
        pytest.skip("this Slurm has no accounting, and so no limits")
    running = len(ns.user.run("squeue", "--me", "-h", "-r", "-o", "%i").out.split())
    limit = ["sacctmgr", "-i", "modify", "user", "alice", "set"]
    ROOT.run(*limit, f"MaxSubmitJobs={running + 3}")
    try:
        ns.create(job_of("many", 10, busybox, "sleep", "1"))

        def reasons() -> list[str]:
            pods = ns.kubectl("get", "pods", "-o", "json").json()["items"]
            states = [s["state"] for p in pods for s in p["status"].get("containerStatuses", [])]
            return [state["waiting"].get("message", "") for state in states if "waiting" in state]

        eventually("the limit's name", lambda: any("MaxSubmitJob" in r for r in reasons()))
        eventually("all of them", lambda: succeeded(ns, "many") == 10, timeout=90)
    finally:
        ROOT.run(*limit, "MaxSubmitJobs=-1")
