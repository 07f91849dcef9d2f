from __future__ import annotations

import json

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
    eventually("the Event", lambda: "InspectFailed" in ns.reasons("bad"))
    said = [e["message"] for e in ns.events("bad") if e["reason"] == "InspectFailed"]
    assert said[0].count("Failed to apply default image tag") == 1


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


def test_pull_secrets(ns: Namespace, registry: str) -> None:
    """The registry on 5001 wants a password: a right one, a wrong one and none that exists."""
    private = registry.replace(":5000", ":5001")
    for secret, password in (("right", "sandbox"), ("wrong", "s3cret-that-is-wrong")):
        ns.kubectl("create", "secret", "docker-registry", secret, f"--docker-server={private}",
                   "--docker-username=sandbox", f"--docker-password={password}")  # fmt: skip
    for name in ("right", "wrong", "absent"):
        ns.create(pod(name, "true", image=f"{private}/busybox:1",
                      container={"imagePullPolicy": "Always"},
                      imagePullSecrets=[{"name": name}]))  # fmt: skip
    ns.wait_phase("right", "Succeeded")
    for name in ("wrong", "absent"):
        eventually(f"{name} is refused", lambda n=name: "401 Unauthorized" in str(waiting(ns, n)))
        assert ns.job(name) == ""
    retrieve = "FailedToRetrieveImagePullSecret"
    eventually("a word on the absent secret", lambda: retrieve in ns.reasons("absent"))
    assert retrieve not in ns.reasons("wrong")
    found = ns.user.sh("grep -rl s3cret-that-is-wrong ~/.hpk --exclude-dir=etcd", check=False)
    assert found.out == ""


def test_a_wrong_digest_is_not_run(ns: Namespace, busybox: str) -> None:
    """Also beside a tag that exists, and when that tag's image is in the cache."""
    ns.create(pod("cached", "true", image=busybox))
    ns.wait_phase("cached", "Succeeded")
    nothing = "sha256:" + "0" * 64
    ns.create(pod("other", "true", image=f"{busybox}@{nothing}"))
    eventually("a refusal", lambda: "404 Not Found" in str(waiting(ns, "other")))


def test_a_killed_pull_leaves_nothing_half(ns: Namespace, registry: str) -> None:
    """SIGKILL to `hpk image pull` at several moments; then two pulls of that image at once."""
    image = f"{registry}/agnhost:2.63.0"
    cache = "$(mktemp -d)"
    script = f"""
    set -e
    export XDG_CACHE_HOME={cache}
    for after in 0.3 0.5 0.6 0.7 0.9; do
        timeout -s KILL $after hpk image pull {image} >/dev/null 2>&1 || true
    done
    hpk image pull {image} & hpk image pull {image} & wait -n; wait -n
    hpk image list -o json
    rm -r "$XDG_CACHE_HOME"
    """
    said = ns.user.sh(script).out
    assert said.count("agnhost@sha256:") >= 2, said
    listed = json.loads(said[said.index("[\n") :])
    assert len(listed) == 1
    assert image in listed[0]["references"]
