"""kubectl top, and what the kubelet's port tells of itself, through the API server."""

from __future__ import annotations

import json
import re

from conftest import Namespace, eventually, pod

BUSY = "while :; do :; done & exec sleep 1000"


def test_what_a_pod_uses(ns: Namespace, busybox: str) -> None:
    whole = pod("busy", "sh", "-c", BUSY, image=busybox)
    whole["metadata"]["labels"] = {"app": "busy"}
    whole["spec"]["containers"].append(
        {"name": "idle", "image": busybox, "command": ["sleep", "1000"]}
    )
    ns.create(whole)
    ns.wait_ready("busy")

    def used() -> dict[str, tuple[int, int]]:
        out = ns.kubectl("top", "pod", "-l", "app=busy", "--containers", "--no-headers").out
        rows = re.findall(r"busy\s+(\S+)\s+(\d+)m\s+(\d+)Mi", out)
        return {name: (int(cpu), int(memory)) for name, cpu, memory in rows}

    seen = eventually("the busy container shows", lambda: used().get("main", (0, 0))[0] > 50)
    assert seen
    assert used()["idle"][0] < 50
    assert ns.kubectl("top", "pod", "-l", "app=other", check=False).out == ""
    node = ns.pod("busy")["spec"]["nodeName"]
    nodes = ns.kubectl("top", "node", node, "--no-headers").out.split()
    assert nodes[0] == node and int(nodes[1].removesuffix("m")) > 50

    def raw(path: str) -> str:
        return ns.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy{path}").out

    pods = json.loads(raw("/stats/summary"))["pods"]
    mine = next(p for p in pods if p["podRef"]["namespace"] == ns.name)
    assert {c["name"] for c in mine["containers"]} == {"main", "idle"}
    assert mine["cpu"]["usageCoreNanoSeconds"] > 0 and mine["process_stats"]["process_count"] >= 3
    labels = f'container="main",namespace="{ns.name}",pod="busy"'
    assert f"container_cpu_usage_seconds_total{{{labels}}}" in raw("/metrics/resource")
    assert re.search(r"^kubelet_running_pods [1-9]", raw("/metrics"), re.M)
    assert raw("/healthz") == "ok"
    assert json.loads(raw("/configz"))["kubeletconfig"]["maxPods"] > 0
    names = {p["metadata"]["name"] for p in json.loads(raw("/pods"))["items"]}
    assert "busy" in names
