"""What changes in the API changes in running containers, and nothing is seen half-written."""

from __future__ import annotations

from typing import Any

from conftest import Namespace, eventually, pod


def source(kind: str, name: str, **data: str) -> dict[str, Any]:
    body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
    return {**body, "stringData" if kind == "Secret" else "data": data}


def test_running_pods_see_changes(ns: Namespace, busybox: str) -> None:
    projected = {
        "sources": [
            {"configMap": {"name": "c", "items": [{"key": "a", "path": "dir/a"}]}},
            {"secret": {"name": "late", "optional": True}},
            {"downwardAPI": {"items": [
                {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        ]
    }  # fmt: skip
    mounts = [
        {"name": "c", "mountPath": "/c"},
        {"name": "c", "mountPath": "/fixed", "subPath": "a"},
        {"name": "s", "mountPath": "/s"},
        {"name": "p", "mountPath": "/p"},
    ]
    watch = pod(
        "watch", "sleep", "600", image=busybox, container={"volumeMounts": mounts},
        volumes=[
            {"name": "c", "configMap": {"name": "c"}},
            {"name": "s", "secret": {"secretName": "s", "defaultMode": 0o400}},
            {"name": "p", "projected": projected},
        ],
    )  # fmt: skip
    watch["metadata"]["labels"] = {"version": "1"}
    ns.create(source("ConfigMap", "c", a="1", b="1"), source("Secret", "s", k="1"), watch)
    ns.wait_phase("watch", "Running")

    def inside(script: str) -> str:
        return ns.kubectl("exec", "watch", "--", "sh", "-c", script, check=False).out

    look = "cat /c/a /s/k /p/dir/a /p/labels; ls /c; cat /p/x; cat /fixed"
    assert inside("cat /c/a /s/k /p/dir/a /p/labels; ls /p") == '111version="1"dir\nlabels\n'
    ns.kubectl("patch", "configmap", "c", "-p", '{"data":{"a":"2","b":null,"n":"2"}}')
    ns.kubectl("patch", "secret", "s", "-p", '{"stringData":{"k":"2"}}')
    ns.kubectl("label", "pod", "watch", "version=2", "--overwrite")
    ns.create(source("Secret", "late", x="2"))
    # a subPath keeps what it was, as on any Kubernetes
    eventually(
        "every change is there", lambda: inside(look) == '222version="2"a\nn\n21', timeout=15
    )
    assert inside("stat -L -c %a /s/k") == "400\n"
    ns.kubectl("delete", "secret", "late")
    eventually("what was optional goes", lambda: inside("ls /p") == "dir\nlabels\n", timeout=15)
    ns.kubectl("delete", "secret", "s")
    eventually("the kubelet says what it misses", lambda: "FailedMount" in ns.reasons("watch"))
    assert inside("cat /s/k") == "2"
    ns.kubectl("delete", "pod", "watch", "--grace-period=0")


def test_a_change_is_seen_whole(ns: Namespace, busybox: str) -> None:
    """Two keys that always agree are never seen to differ by who reads through one directory."""
    script = """
        while :; do
          cd /c/..data && a=$(cat a) && b=$(cat b) && test "$a" != "$b" && echo "$a $b"
          if [ "$a" = last ]; then exit; fi
        done 2>/dev/null
    """
    ns.create(
        source("ConfigMap", "c", a="first", b="first"),
        pod(
            "reader", "sh", "-c", script, image=busybox,
            container={"volumeMounts": [{"name": "c", "mountPath": "/c"}]},
            volumes=[{"name": "c", "configMap": {"name": "c"}}],
        ),
    )  # fmt: skip
    ns.wait_phase("reader", "Running")
    for value in ("second", "third", "last"):
        ns.kubectl("patch", "configmap", "c", "-p", f'{{"data":{{"a":"{value}","b":"{value}"}}}}')
    ns.wait_phase("reader", "Succeeded", "Failed")
    assert ns.logs("reader") == ""


def test_an_image_is_a_volume(ns: Namespace, busybox: str, registry: str) -> None:
    mounts = [
        {"name": "i", "mountPath": "/image"},
        {"name": "i", "mountPath": "/one", "subPath": "etc"},
    ]
    volumes = [{"name": "i", "image": {"reference": busybox, "pullPolicy": "IfNotPresent"}}]
    script = "ls /image/bin/busybox /one/passwd && touch /image/x || echo refused"
    missing = [{"name": "i", "image": {"reference": f"{registry}/no-such-image:1"}}]
    ns.create(
        pod("reads", "sh", "-c", script, image=busybox, container={"volumeMounts": mounts},
            volumes=volumes),
        pod("waits", "true", image=busybox, container={"volumeMounts": mounts}, volumes=missing),
    )  # fmt: skip
    ns.wait_phase("reads", "Succeeded", "Failed")
    assert ns.logs("reads").splitlines()[:2] == ["/image/bin/busybox", "/one/passwd"]
    assert "refused" in ns.logs("reads")

    def why() -> str:
        status = ns.pod("waits")["status"].get("containerStatuses") or [{"state": {}}]
        return str((status[0]["state"].get("waiting") or {}).get("reason"))

    eventually("why the other waits", lambda: why() in ("ErrImagePull", "ImagePullBackOff"))


def test_a_home_directory_shows_nothing_of_the_cluster(ns: Namespace, busybox: str) -> None:
    home = ns.user.sh(f"echo there > ~/file-{ns.name}; echo $HOME").out.strip()
    script = (
        f"cat /home/me/file-{ns.name}; ls -A /home/me/.hpk; "
        "touch /home/me/.hpk/x 2>/dev/null || echo no; "
        f"echo back > /home/me/file-{ns.name}"
    )
    ns.create(
        pod("sees", "sh", "-c", script, image=busybox,
            container={"volumeMounts": [{"name": "h", "mountPath": "/home/me"}]},
            volumes=[{"name": "h", "hostPath": {"path": home, "type": "Directory"}}])
    )  # fmt: skip
    ns.wait_phase("sees", "Succeeded", "Failed")
    lines = ns.logs("sees").splitlines()
    assert lines == ["there", "no"]
    assert ns.user.sh(f"cat ~/file-{ns.name}").out == "back\n"
