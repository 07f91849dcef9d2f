"""Ephemeral containers, as `kubectl debug` makes them."""

from __future__ import annotations

from conftest import Namespace, eventually, pod


def debuggers(ns: Namespace, name: str) -> list[dict]:
    return ns.pod(name)["status"].get("ephemeralContainerStatuses", [])


def test_kubectl_debug_looks_into_a_running_pod(ns: Namespace, busybox: str) -> None:
    ns.create(pod("app", "sleep", "1000", image=busybox))
    ns.wait_ready("app")
    seen = "ps -o pid,args; cat /proc/1/root/etc/hostname /proc/1/cmdline; exit 3"
    ns.kubectl(
        "debug", "app", f"--image={busybox}", "--target=main", "-c", "beside", "--profile=general",
        "--", "sh", "-c", seen,
    )  # fmt: skip
    ns.kubectl("debug", "app", f"--image={busybox}", "-c", "apart", "--", "sh", "-c", "ps; id -u")
    ended = eventually(
        "both debuggers ended",
        lambda: (
            len(found := debuggers(ns, "app")) == 2
            and all("terminated" in one["state"] for one in found)
            and {one["name"]: one["state"]["terminated"]["exitCode"] for one in found}
        ),
    )
    assert ended == {"beside": 3, "apart": 0}
    assert "sleep\x001000" in ns.logs("app", "-c", "beside")
    assert "sleep 1000" not in ns.logs("app", "-c", "apart")
    whole = ns.pod("app")
    assert whole["status"]["phase"] == "Running"
    assert whole["status"]["containerStatuses"][0]["restartCount"] == 0
    paths = {event["involvedObject"].get("fieldPath") for event in ns.events("app")}
    assert "spec.ephemeralContainers{beside}" in paths


def test_a_debugger_whose_image_is_missing_says_so(ns: Namespace, busybox: str) -> None:
    ns.create(pod("app", "sleep", "1000", image=busybox))
    ns.wait_ready("app")
    missing = busybox.rpartition("/")[0] + "/no-such-image:1"
    ns.kubectl("debug", "app", f"--image={missing}", "-c", "look", "--", "sh")
    waiting = eventually(
        "the reason is shown",
        lambda: next((s["state"].get("waiting") for s in debuggers(ns, "app")), None),
    )
    eventually(
        "the pull's error is shown",
        lambda: (
            debuggers(ns, "app")[0]["state"]["waiting"]["reason"]
            in ("ErrImagePull", "ImagePullBackOff")
        ),
    )
    assert waiting and ns.pod("app")["status"]["phase"] == "Running"
