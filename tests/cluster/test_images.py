from __future__ import annotations

import pytest
from conftest import Namespace, eventually, pod


def waiting(ns: Namespace, name: str) -> dict:
    statuses = ns.pod(name)["status"].get("containerStatuses", [])
    return statuses[0]["state"].get("waiting", {}) if statuses else {}


def test_an_unknown_image_backs_off_with_the_registrys_words(ns: Namespace, registry: str) -> None:
    ns.create(pod("unknown", "true", image=f"{registry}/no/such:1"))
    eventually("a pull error", lambda: waiting(ns, "unknown").get("reason") == "ErrImagePull")
    assert "no/such" in waiting(ns, "unknown")["message"]
    eventually("back-off", lambda: waiting(ns, "unknown").get("reason") == "ImagePullBackOff")
    assert ns.job("unknown") == ""
    assert {"Pulling", "Failed", "BackOff"} <= ns.reasons("unknown")
    ns.kubectl("delete", "pod", "unknown", timeout=30)


@pytest.mark.parametrize("reference", ["UPPER/Case:1", "bad image"])
def test_an_impossible_reference(ns: Namespace, reference: str) -> None:
    ns.create(pod("bad", "true", image=reference))
    eventually("words", lambda: waiting(ns, "bad").get("reason") == "InvalidImageName")


def test_never_pulls_when_told_never(ns: Namespace, registry: str) -> None:
    ns.create(pod("never", "true", image=f"{registry}/busybox:nope",
                  container={"imagePullPolicy": "Never"}))  # fmt: skip
    eventually("the reason", lambda: waiting(ns, "never").get("reason") == "ErrImageNeverPull")


def test_by_digest(ns: Namespace, busybox: str) -> None:
    ns.create(pod("tag", "true", image=busybox))
    whole = ns.wait_phase("tag", "Succeeded")
    image = whole["status"]["containerStatuses"][0]["imageID"]
    ns.create(pod("digest", "echo", "same", image=image))
    ns.wait_phase("digest", "Succeeded")
    assert ns.logs("digest") == "same\n"


def test_the_login_nodes_cache_is_the_same(ns: Namespace, busybox: str) -> None:
    ns.create(pod("pulls", "true", image=busybox))
    ns.wait_phase("pulls", "Succeeded")
    assert busybox in ns.user.run("hpk", "image", "list").out.replace("\n", " ")
    bad = ns.user.run("hpk", "image", "pull", f"{busybox}-nope", check=False)
    assert bad.code == 1
    assert "Traceback" not in bad.err and len(bad.err.strip().splitlines()) == 1
