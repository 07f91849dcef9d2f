"""Pods that try to reach what is not theirs, and what becomes of them when they are mended."""

from __future__ import annotations

from typing import Any

from conftest import Namespace, eventually, pod


def mounting(name: str, path: str, image: str, script: str, *sub_paths: str) -> dict[str, Any]:
    mounts = [
        {"name": "host", "mountPath": f"/host{i or ''}", "subPath": sub_path}
        for i, sub_path in enumerate(sub_paths or ("",))
    ]
    return pod(
        name, "sh", "-c", script, image=image,
        container={"volumeMounts": mounts},
        volumes=[{"name": "host", "hostPath": {"path": path}}],
    )  # fmt: skip


def test_no_host_path_leads_to_hpks_own_directory(ns: Namespace, busybox: str) -> None:
    """Straight, by a link, by /proc, from above it, by a link inside the volume."""
    home = ns.user.sh("echo $HOME").out.strip()
    ns.user.sh(f"mkdir -p ~/{ns.name}; ln -s ~/.hpk ~/{ns.name}/link")
    look = "cat /host/.hpk/kubeconfig /host/link/kubeconfig /host/kubeconfig; ls -A /host/.hpk"
    paths = {
        "straight": f"{home}/.hpk",
        "deeper": f"{home}/.hpk/pki",
        "linked": f"{home}/{ns.name}/link",
        "proc": f"/proc/self/root{home}/.hpk",
    }
    for name, path in paths.items():
        ns.create(mounting(name, path, busybox, look))
    ns.create(mounting("above", home, busybox, look))
    ns.create(mounting("inside", f"{home}/{ns.name}", busybox, look))
    for name in paths:
        eventually(f"{name} is refused", lambda n=name: "FailedMount" in ns.reasons(n))
        said = [e["message"] for e in ns.events(name) if e["reason"] == "FailedMount"]
        assert "inside HPK's own directory" in said[0]
        assert ns.job(name) == ""
    for name in ("above", "inside"):
        ns.wait_phase(name, "Succeeded", "Failed")
        assert "client-key" not in ns.logs(name)
    ns.user.sh(f"rm -r ~/{ns.name}")


def test_a_sub_path_that_leads_out_is_refused_until_it_does_not(
    ns: Namespace, busybox: str
) -> None:
    home = ns.user.sh("echo $HOME").out.strip()
    place = f"{home}/{ns.name}"
    ns.user.sh(f"mkdir -p {place}/good; ln -s /etc {place}/bad")
    ns.create(mounting("out", place, busybox, "touch /host1/here; echo fine", "good", "bad"))

    def waiting() -> dict[str, Any]:
        statuses = ns.pod("out")["status"].get("containerStatuses") or [{"state": {}}]
        state: dict[str, Any] = statuses[0]["state"].get("waiting") or {}
        return state

    eventually("a refusal", lambda: waiting().get("reason") == "CreateContainerConfigError")
    assert "subPath 'bad' leads out of the volume" in waiting()["message"]
    ns.user.sh(f"rm {place}/bad; mkdir {place}/bad")
    ns.wait_phase("out", "Succeeded", timeout=40)
    assert ns.logs("out") == "fine\n"
    ns.user.sh(f"test -e {place}/bad/here; rm -r {place}")
