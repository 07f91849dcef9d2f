"""The node `control`: pods that serve the cluster, inside the control job."""

from __future__ import annotations

import re
from typing import Any

import pytest
from conftest import Namespace, eventually, pod
from test_control import control_job
from test_faults import kill_kubelet

from hpk_kubelet.spec.quantity import parse_quantity

pytestmark = pytest.mark.disruptive

PLACE: dict[str, Any] = {
    "nodeSelector": {"kubernetes.io/hostname": "control"},
    "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
    "terminationGracePeriodSeconds": 1,
}
SMALL = {"resources": {"requests": {"memory": "64Mi"}}}


def steps(ns: Namespace) -> dict[str, str]:
    """Step → pod, of those in the control job."""
    shown = ns.user.run("squeue", "--me", "-s", "-h", "-o", "%i %j").out
    pairs = (line.split() for line in shown.splitlines())
    return {step: name.split(":")[-1] for step, name in pairs if name.startswith("hpk:")}


def test_a_pod_is_a_step_of_the_control_job(ns: Namespace, busybox: str) -> None:
    loop = ("sh", "-c", "echo begins; while :; do sleep 1; done")
    ns.create(pod("serves", *loop, image=busybox, container=SMALL, **PLACE))
    ns.wait_ready("serves")
    assert ns.job("serves") == "", "no job of its own"
    step = next(step for step, name in steps(ns).items() if name == f"{ns.name}/serves")
    assert step.startswith(f"{control_job(ns.user)}.")
    assert step in ns.user.run("hpk", "jobs").out
    assert ns.kubectl("exec", "serves", "--", "hostname").out == "serves\n"
    assert ns.logs("serves") == "begins\n"

    # A pod of the partition reaches it, as it reaches any other.
    address = ns.pod("serves")["status"]["podIP"]
    ns.create(pod("asks", "ping", "-c", "1", "-W", "5", address, image=busybox))
    ns.wait_phase("asks", "Succeeded")

    # The kubelet dies; the pod does not notice.
    kill_kubelet(ns)
    eventually(
        "exec works again",
        lambda: ns.kubectl("exec", "serves", "--", "true", check=False).code == 0,
    )
    assert ns.pod("serves")["status"]["containerStatuses"][0]["restartCount"] == 0
    assert step in steps(ns)

    ns.kubectl("delete", "pod", "serves")
    eventually("its step has ended", lambda: step not in steps(ns))


def test_what_does_not_fit_waits_and_says_so(ns: Namespace, busybox: str) -> None:
    # one of these fits into what the control job has left, two don't
    offers = ns.user.run("kubectl", "get", "node", "control", "-o", "json").json()
    memory = int(parse_quantity(offers["status"]["allocatable"]["memory"])) >> 20
    shown = ns.user.run("scontrol", "-o", "show", "step", control_job(ns.user)).out
    free = memory - sum(int(size) for size in re.findall(r"TRES=\S*mem=(\d+)M", shown))
    big = {"resources": {"requests": {"memory": f"{free // 2 + 20 - 192}Mi"}}}
    for name in ("first", "second"):
        ns.create(pod(name, "sleep", "600", image=busybox, container=big, **PLACE))
    ns.wait_ready("first")
    eventually("its reason", lambda: "SlurmSubmitLimit" in ns.reasons("second"))
    said = next(e["message"] for e in ns.events("second") if e["reason"] == "SlurmSubmitLimit")
    assert "free in the control job" in said
    ns.kubectl("delete", "pod", "first")
    ns.wait_ready("second")

    flags = {"slurm-job.hpk.io/flags": "--nice=5"}
    ns.create(pod("flags", "true", image=busybox, annotations=flags, **PLACE))
    refused = ns.wait_phase("flags", "Failed")
    assert "takes no Slurm flags" in refused["status"]["message"]


def test_it_ends_with_the_control_job_and_its_deployment_goes_on(
    ns: Namespace, busybox: str
) -> None:
    template = pod("x", "sleep", "600", image=busybox, container=SMALL, **PLACE)
    template["spec"]["restartPolicy"] = "Always"
    template["metadata"] = {"labels": {"app": "op"}}
    ns.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "op"},
            "spec": {
                "selector": {"matchLabels": {"app": "op"}},
                "template": {"metadata": template["metadata"], "spec": template["spec"]},
            },
        }
    )
    ns.kubectl("rollout", "status", "deployment/op", "--timeout=60s")
    before = ns.kubectl("get", "pods", "-o", "name").out.strip()
    ns.user.run("hpk", "down", timeout=90)
    ns.user.run("sbatch", "/opt/hpk/src/hpk.sbatch")
    ns.user.run("hpk", "status", "--wait", "120", timeout=150)
    eventually("the old pod has failed", lambda: _phase(ns, before) in ("Failed", ""))
    ns.kubectl("rollout", "status", "deployment/op", "--timeout=60s")
    assert [name for name in steps(ns).values() if name.startswith(f"{ns.name}/op")]


def _phase(ns: Namespace, pod_name: str) -> str:
    shown = ("-o", "jsonpath={.status.phase}", "--ignore-not-found")
    return ns.kubectl("get", pod_name, *shown).out
