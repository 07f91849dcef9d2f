"""The pass-through scheduler and Services without ClusterIP."""

from __future__ import annotations

from conftest import Namespace, eventually, pod


def service(name: str, **spec: object) -> dict:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"selector": {"app": "x"}, "ports": [{"port": 80}], **spec}}  # fmt: skip


def test_a_node_per_partition_with_slurms_capacity(ns: Namespace) -> None:
    partitions = {p.rstrip("*") for p in ns.user.run("sinfo", "-h", "-o", "%P").out.split()}
    selector = ("-l", "kubernetes.io/hostname!=control")
    nodes = ns.user.run("kubectl", "get", "nodes", *selector, "-o", "json").json()["items"]
    assert {node["metadata"]["labels"]["hpk.io/partition"] for node in nodes} == partitions
    for node in nodes:
        partition = node["metadata"]["labels"]["hpk.io/partition"]
        cpus = ns.user.run("sinfo", "-h", "-p", partition, "-o", "%C").out.strip().split("/")[-1]
        assert node["status"]["capacity"]["cpu"] == cpus
        ready = next(c for c in node["status"]["conditions"] if c["type"] == "Ready")
        assert ready["status"] == "True"


def test_a_pod_nobody_fits_says_why(ns: Namespace, busybox: str) -> None:
    ns.create(pod("picky", "true", image=busybox, nodeSelector={"planet": "mars"}))
    eventually("the event", lambda: "FailedScheduling" in ns.reasons("picky"))
    whole = ns.pod("picky")
    scheduled = next(c for c in whole["status"]["conditions"] if c["type"] == "PodScheduled")
    assert scheduled["status"] == "False" and scheduled["reason"] == "Unschedulable"
    assert "node affinity/selector" in scheduled["message"]
    assert ns.job("picky") == ""


def test_an_oversized_pod_says_so(ns: Namespace, busybox: str) -> None:
    ns.create(pod("huge", "true", image=busybox,
                  container={"resources": {"requests": {"cpu": "100000"}}}))  # fmt: skip
    eventually("the event", lambda: "FailedScheduling" in ns.reasons("huge"))
    assert "Insufficient cpu" in ns.kubectl("describe", "pod", "huge").out


def test_another_scheduler_is_left_its_pods(ns: Namespace, busybox: str) -> None:
    ns.create(pod("others", "true", image=busybox, schedulerName="somebody-else"))
    ns.create(pod("ours", "true", image=busybox))
    ns.wait_phase("ours", "Succeeded")
    assert "nodeName" not in ns.pod("others")["spec"]


def test_services_become_headless(ns: Namespace) -> None:
    done = ns.create(
        service("plain"), service("node", type="NodePort"),
        service("lb", type="LoadBalancer", externalTrafficPolicy="Local"),
        service("none", clusterIP="None"),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "ext"},
         "spec": {"type": "ExternalName", "externalName": "example.org"}},
    )  # fmt: skip
    for name in ("plain", "node", "lb", "none"):
        spec = ns.get("service", name)["spec"]
        assert (spec["clusterIP"], spec["type"]) == ("None", "ClusterIP"), name
    assert ns.get("service", "ext")["spec"]["type"] == "ExternalName"
    assert "NodePort" in done.err and "LoadBalancer" in done.err and "Warning" in done.err
    ns.kubectl("patch", "service", "plain", "-p", '{"spec":{"type":"NodePort"}}')
    assert ns.get("service", "plain")["spec"]["clusterIP"] == "None"


def test_endpoints_follow_readiness(ns: Namespace, busybox: str) -> None:
    whole = pod("serves", "sleep", "1000", image=busybox)
    whole["metadata"]["labels"] = {"app": "x"}
    ns.create(service("svc"), whole)
    ns.wait_ready("serves")
    address = ns.pod("serves")["status"]["podIP"]
    eventually(
        "the endpoint",
        lambda: address in ns.kubectl("get", "endpointslices", "-o", "jsonpath={..addresses}").out,
    )
