"""Where Slurm gives jobs a memory cgroup (`bootstrap/sandbox up --cgroup`), the kernel kills."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Namespace, User, eventually, pod
from netpods import address, http, on, owner, quiet_node, server

pytestmark = pytest.mark.disruptive

EAT = "echo eats; x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo had it all"
SMALL = {"resources": {"requests": {"memory": "32Mi"}}}  # and no limit but the job's own


@pytest.fixture(autouse=True)
def limits(alice: User) -> None:
    if "task/cgroup" not in alice.run("scontrol", "show", "config").out:
        pytest.skip("Slurm enforces no memory limits here: the sandbox is up without --cgroup")


def container(ns: Namespace, name: str, which: str) -> dict[str, Any]:
    statuses = ns.pod(name)["status"].get("containerStatuses", [])
    return next((dict(status) for status in statuses if status["name"] == which), {})


def test_a_container_over_the_jobs_memory_dies_and_the_agent_lives(
    ns: Namespace, busybox: str
) -> None:
    eats = pod(
        "eats", "sh", "-c", f"[ -e /e/ate ] && sleep 600; touch /e/ate; {EAT}", image=busybox,
        container={**SMALL, "volumeMounts": [{"name": "e", "mountPath": "/e"}]},
        restartPolicy="OnFailure", volumes=[{"name": "e", "emptyDir": {}}],
    )  # fmt: skip
    calm = {"name": "calm", "image": busybox, "command": ["sleep", "600"], **SMALL}
    eats["spec"]["containers"].append(calm)
    ns.create(eats)
    last = eventually(
        "the kernel's kill is told",
        lambda: container(ns, "eats", "main").get("lastState", {}).get("terminated"),
    )
    assert (last["reason"], last["exitCode"]) == ("OOMKilled", 137)
    ns.wait_ready("eats")
    assert container(ns, "eats", "calm")["restartCount"] == 0
    assert "had it all" not in ns.logs("eats", "-c", "main", "--previous")
    assert ns.kubectl("exec", "eats", "-c", "calm", "--", "echo", "lives").out == "lives\n"
    ns.kubectl("delete", "pod", "eats", "--grace-period=1")


def test_the_node_networks_owner_is_killed_for_memory(
    ns: Namespace, busybox: str, agnhost: str, alice: User
) -> None:
    free = quiet_node(alice)
    other = next(node for node in ("node2", "node1") if node != free)
    script = f"while [ ! -e /tmp/now ]; do sleep 0.2; done; {EAT}"
    ns.create(
        pod("owner", "sh", "-c", script, image=busybox, container=SMALL, annotations=on(free))
    )
    ns.wait_ready("owner")
    ns.create(server("stays", agnhost, free), server("asks", agnhost, other))
    for name in ("stays", "asks"):
        ns.wait_ready(name)
    assert owner(alice, free)[0] == ns.job("owner")
    ns.kubectl("exec", "owner", "--", "touch", "/tmp/now")
    ns.wait_phase("owner", "Failed")
    assert container(ns, "owner", "main")["state"]["terminated"]["reason"] == "OOMKilled"
    eventually("another owner", lambda: owner(alice, free)[:1] == (ns.job("stays"),))
    assert http(ns, "asks", address(ns, "stays")) == "stays"
