"""Requests and limits: what a pod asks for is what its job has, and what it may not exceed."""

from __future__ import annotations

import json
from typing import Any

from conftest import Namespace, eventually, pod

EAT = "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo had it all"


def limited(**limits: str) -> dict[str, Any]:
    return {"resources": {"limits": limits, "requests": {"cpu": "10m"}}}


def test_who_takes_too_much_memory_is_killed_and_nobody_else(ns: Namespace, busybox: str) -> None:
    """By the agent's watch, with or without a memory cgroup around the job."""
    # a child eats, the first process would live on; all of the container dies, as in a cgroup
    greedy = pod(
        "greedy", "sh", "-c", f"({EAT}); echo survived; sleep 600", image=busybox,
        container=limited(memory="64Mi"),
    )  # fmt: skip
    other = {
        "name": "other",
        "image": busybox,
        "command": ["sleep", "600"],
        **limited(memory="1Gi"),
    }
    greedy["spec"]["containers"].append(other)
    again = pod(
        "again", "sh", "-c", EAT, image=busybox, container=limited(memory="64Mi"),
        restartPolicy="OnFailure",
    )  # fmt: skip
    ns.create(greedy, again)

    def state(name: str, container: str, key: str = "state") -> dict[str, Any]:
        for status in ns.pod(name)["status"].get("containerStatuses", []):
            if status["name"] == container:
                return dict(status.get(key) or {})
        return {}

    killed = eventually(
        "greedy's container dies", lambda: state("greedy", "main").get("terminated")
    )
    assert (killed["reason"], killed["exitCode"]) == ("OOMKilled", 137)
    assert "survived" not in ns.logs("greedy", "-c", "main")
    assert "running" in state("greedy", "other")
    last = eventually(
        "again restarts", lambda: state("again", "main", "lastState").get("terminated")
    )
    assert last["reason"] == "OOMKilled"
    assert ns.phase("again") == "Running"
    ns.kubectl("delete", "pod", "--all", "--grace-period=0")


def test_what_fits_its_limit_is_left_alone(ns: Namespace, busybox: str) -> None:
    script = "x=$(head -c 20000000 /dev/zero | tr '\\0' x); sleep 3; echo ${#x}"
    ns.create(pod("fits", "sh", "-c", script, image=busybox, container=limited(memory="128Mi")))
    ns.wait_phase("fits", "Succeeded", "Failed")
    assert ns.logs("fits") == "20000000\n"


def test_who_fills_the_disk_is_evicted(ns: Namespace, busybox: str) -> None:
    def writer(name: str, path: str, **more: Any) -> dict[str, Any]:
        script = f"head -c 30000000 /dev/zero > {path}/f; sleep 600"
        mounts = [{"name": "e", "mountPath": "/e"}]
        container = {"volumeMounts": mounts, **more.pop("container", {})}
        empty = more.pop("empty", {})
        return pod(
            name, "sh", "-c", script, image=busybox, container=container,
            volumes=[{"name": "e", "emptyDir": empty}], restartPolicy="Always", **more,
        )  # fmt: skip

    ns.create(
        writer("volume", "/e", empty={"sizeLimit": "10Mi"}),
        writer("layer", "/tmp", container=limited(**{"ephemeral-storage": "10Mi"})),
        writer("whole", "/e", container=limited(**{"ephemeral-storage": "20Mi"})),
        writer("memory", "/e", empty={"medium": "Memory", "sizeLimit": "10Mi"}),
    )
    said = {
        "volume": 'Usage of EmptyDir volume "e" exceeds the limit "10Mi".',
        "layer": "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi.",
        "whole": "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi.",
    }
    for name, words in said.items():
        status = ns.wait_phase(name, "Failed", timeout=60)["status"]
        assert (status["reason"], status["message"].strip()) == ("Evicted", words)
        assert "Evicted" in ns.reasons(name)
    # what is in memory ends at its size
    assert ns.phase("memory") == "Running"
    size = ns.kubectl("exec", "memory", "--", "sh", "-c", "stat -c %s /e/f; df -k /e | tail -1")
    assert size.out.split()[0] == str(10 * 2**20)
    ns.kubectl("delete", "pod", "--all", "--grace-period=0")


def test_requests_reach_slurm_and_the_container(ns: Namespace, busybox: str) -> None:
    fields = ["limits.cpu", "limits.memory", "requests.cpu", "requests.memory"]
    env = [
        {"name": f.replace(".", "_").upper(), "valueFrom": {"resourceFieldRef": {"resource": f}}}
        for f in fields
    ]
    script = "echo $LIMITS_CPU $LIMITS_MEMORY $REQUESTS_CPU $REQUESTS_MEMORY; sleep 600"
    asked = {"requests": {"cpu": "1500m", "memory": "100Mi"}}
    given = {"requests": {"cpu": "2", "memory": "64Mi"}, "limits": {"cpu": "2", "memory": "64Mi"}}
    ns.create(
        pod("burst", "sh", "-c", script, image=busybox,
            container={"resources": asked, "env": env}),
        pod("sure", "sh", "-c", script, image=busybox, container={"resources": given, "env": env}),
        pod("free", "sh", "-c", script, image=busybox, container={"env": env}),
    )  # fmt: skip
    shown = {}
    for name, quality in (("burst", "Burstable"), ("sure", "Guaranteed"), ("free", "BestEffort")):
        assert ns.wait_phase(name, "Running")["status"]["qosClass"] == quality
        eventually("its words", lambda name=name: ns.logs(name))
        shown[name] = ns.logs(name).split()
        job = ns.user.run("scontrol", "show", "job", ns.job(name)).out
        cpus = {"burst": 2, "sure": 2, "free": 1}[name]
        assert f"NumCPUs={cpus} " in job
    # without a limit: all that the job has, since Slurm gives the container no more
    assert shown["burst"][0] == "2"
    assert shown["burst"][1] == str(100 * 2**20)
    assert shown["sure"] == ["2", str(64 * 2**20), "2", str(64 * 2**20)]
    assert shown["free"][0] == "1"
    ns.kubectl("delete", "pod", "--all", "--grace-period=0")


def test_quotas_and_default_limits_hold(ns: Namespace, busybox: str) -> None:
    ns.create(
        {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"},
         "spec": {"limits": [{"type": "Container", "default": {"memory": "96Mi", "cpu": "1"},
                              "max": {"cpu": "2"}}]}},
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
         "spec": {"hard": {"pods": "1", "limits.memory": "128Mi", "persistentvolumeclaims": "0"}}},
    )  # fmt: skip
    eventually("the quota is counted", lambda: ns.get("resourcequota", "q")["status"].get("used"))
    ns.create(pod("one", "sleep", "600", image=busybox))
    limits = ns.pod("one")["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "1", "memory": "96Mi"}
    ns.wait_phase("one", "Running")
    second = pod("two", "true", image=busybox)
    refused = ns.kubectl("create", "-f", "-", stdin=json.dumps(second), check=False)
    assert refused.code != 0 and "exceeded quota: q" in refused.err
    big = pod("big", "true", image=busybox, container=limited(cpu="3"))
    refused = ns.kubectl("create", "-f", "-", stdin=json.dumps(big), check=False)
    assert "maximum cpu usage per Container is 2" in refused.err
    ns.kubectl("delete", "pod", "one", "--grace-period=0")
