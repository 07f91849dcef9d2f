"""What else Slurm hands out: GPUs, licenses, reservations, features."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Namespace, eventually, pod
from slurmadmin import ROOT, configured, scontrol
from test_slurm import shown
from test_truth import FLAGS, wait_reason

LOOK = "ls /dev | grep '^nvidia[0-9]' | tr '\\n' ' '; echo $CUDA_VISIBLE_DEVICES"


def gpus(count: str) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": count}}}


def test_a_pod_sees_the_gpus_it_was_granted_and_no_other(ns: Namespace, busybox: str) -> None:
    nodes = ns.user.run("sinfo", "-h", "-N", "-o", "%N %G").out.split("\n")
    node = next((line.split()[0] for line in nodes if "gpu" in line), "")
    if not node:
        pytest.skip("the sandbox is up without --gpus")
    whole = ns.user.run("kubectl", "get", "nodes", "-o", "json").json()["items"]
    assert any(int(n["status"]["capacity"].get("nvidia.com/gpu", "0")) >= 2 for n in whole)
    place = {FLAGS: f"--nodelist={node}"}
    for name in ("one", "two"):  # at the same time, so each another one
        script = f"{LOOK}; sleep 1000"
        ns.create(
            pod(name, "sh", "-c", script, image=busybox, container=gpus("1"), annotations=place,
                terminationGracePeriodSeconds=0)
        )  # fmt: skip
        ns.wait_ready(name)
    ns.create(pod("none", "sh", "-c", LOOK, image=busybox, annotations=place))
    ns.wait_phase("none", "Succeeded")
    assert ns.logs("none").strip() == ""
    seen = [eventually("what it sees", lambda name=name: ns.logs(name)) for name in ("one", "two")]
    assert sorted(line.split()[0] for line in seen) == ["nvidia0", "nvidia1"]
    assert all(len(line.split()) == 2 for line in seen), "a device and its variable"
    assert shown(ns, ns.job("one"))["TresPerNode"] == "gres/gpu:1"


@pytest.mark.disruptive
def test_a_license_is_waited_for(ns: Namespace, busybox: str) -> None:
    wants = {FLAGS: "--licenses=solver:1"}
    with configured("Licenses=solver:1"):
        ns.create(
            pod("holds", "sleep", "1000", image=busybox, annotations=wants,
                terminationGracePeriodSeconds=0)
        )  # fmt: skip
        ns.wait_ready("holds")
        ns.create(pod("waits", "true", image=busybox, annotations=wants))
        wait_reason(ns, "waits", "SlurmLicenses")
        ns.kubectl("delete", "pod", "holds")
        ns.wait_phase("waits", "Succeeded")


@pytest.mark.disruptive
def test_a_reservation(ns: Namespace, busybox: str) -> None:
    scontrol(
        "create", "reservation", "ReservationName=later", "StartTime=now+1hour", "Duration=10",
        "Users=alice", "Nodes=node2",
    )  # fmt: skip
    try:
        ns.create(pod("waits", "true", image=busybox, annotations={FLAGS: "--reservation=later"}))
        wait_reason(ns, "waits", "SlurmReservation")
        scontrol("update", "ReservationName=later", "StartTime=now")
        ns.wait_phase("waits", "Succeeded", timeout=90)
    finally:
        ROOT.run("scontrol", "delete", "ReservationName=later", check=False)


@pytest.mark.disruptive
def test_a_feature_chooses_the_node(ns: Namespace, busybox: str) -> None:
    scontrol("update", "NodeName=node2", "AvailableFeatures=fast", "ActiveFeatures=fast")
    try:
        label = ("get", "nodes", "-l", "feature.hpk.io/fast=true", "-o", "name")
        eventually("the node's label", lambda: ns.user.run("kubectl", *label).out)
        ns.create(pod("p", "true", image=busybox, nodeSelector={"feature.hpk.io/fast": "true"}))
        ns.wait_phase("p", "Succeeded")
        assert shown(ns, ns.job("p"))["NodeList"] == "node2"
        ns.create(pod("none", "true", image=busybox, nodeSelector={"feature.hpk.io/slow": "true"}))
        eventually("no node has it", lambda: "FailedScheduling" in ns.reasons("none"))
    finally:
        scontrol("update", "NodeName=node2", "AvailableFeatures=", "ActiveFeatures=")
