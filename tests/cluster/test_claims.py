"""PersistentVolumeClaims: data in the user's home that outlives pods, and goes when it should."""

from __future__ import annotations

from typing import Any

from conftest import Namespace, eventually, pod


def claim(name: str, size: str = "1Mi", mode: str = "ReadWriteOnce", **spec: Any) -> dict[str, Any]:
    resources = {"requests": {"storage": size}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": [mode], "resources": resources, **spec},
    }


def mounted(name: str, script: str, image: str, **spec: Any) -> dict[str, Any]:
    """A pod with the claim `data` at /data."""
    container = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    return pod(
        name, "sh", "-c", script, image=image,
        **{"volumes": volumes, "container": container, **spec},
    )  # fmt: skip


def directory(ns: Namespace, name: str = "data") -> str:
    """Where a bound claim's data is, as `kubectl get pv` tells."""
    volume = ns.get("pvc", name)["spec"]["volumeName"]
    return str(ns.get("pv", volume)["spec"]["hostPath"]["path"])


def exists(ns: Namespace, path: str) -> bool:
    return ns.user.run("test", "-e", path, check=False).code == 0


def unschedulable(ns: Namespace, name: str) -> str:
    for condition in ns.pod(name).get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition["message"])
    return ""


def events(ns: Namespace, name: str, reason: str) -> str:
    return "\n".join(e["message"] for e in ns.events(name) if e["reason"] == reason)


def test_data_passes_from_pod_to_pod_and_goes_with_its_claim(ns: Namespace, busybox: str) -> None:
    # written by two users of whom neither is alice on the node
    write = "mkdir -m 700 /data/sub && echo kept > /data/sub/file && stat -c '%u %g %a' /data/sub"
    ns.create(
        claim("data", mode="ReadWriteMany"),
        mounted("writer", write, busybox, securityContext={"runAsUser": 1234, "fsGroup": 777}),
    )
    ns.wait_phase("writer", "Succeeded", "Failed")
    assert ns.logs("writer") == "1234 777 700\n"
    path = directory(ns)
    home = ns.user.sh("echo $HOME").out.strip()
    assert path.startswith(f"{home}/.hpk/volumes/{ns.name}_data_pvc-")
    found = ns.get("pvc", "data")
    assert found["spec"]["storageClassName"] == "hpk-home"
    assert found["status"]["capacity"] == {"storage": "1Mi"}
    ns.kubectl("delete", "pod", "writer")
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}}]
    ns.create(
        mounted("reader", "cat /data/sub/file; touch /data/new || echo refused", busybox,
                volumes=volumes)
    )  # fmt: skip
    ns.wait_phase("reader", "Succeeded", "Failed")
    assert ns.logs("reader").splitlines()[0] == "kept"
    assert "refused" in ns.logs("reader")
    ns.kubectl("delete", "pod", "reader")
    ns.kubectl("delete", "pvc", "data")
    eventually("the data is removed", lambda: not exists(ns, path))
    eventually("the volume is gone", lambda: ns.gone("pv", found["spec"]["volumeName"]))


def test_a_retained_volume_and_one_that_grows(ns: Namespace, busybox: str) -> None:
    ns.create(
        {
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": {"name": ns.name}, "provisioner": "hpk.io/home",
            "reclaimPolicy": "Retain", "volumeBindingMode": "Immediate",
            "allowVolumeExpansion": True,
        },
        claim("data", storageClassName=ns.name),
        claim("huge", "1Pi", storageClassName=ns.name),
        claim("block", volumeMode="Block", storageClassName=ns.name),
    )  # fmt: skip
    try:
        ns.kubectl("wait", "pvc/data", "--for=jsonpath={.status.phase}=Bound", "--timeout=30s")
        path = directory(ns)
        ns.kubectl(
            "patch", "pvc", "data", "-p", '{"spec":{"resources":{"requests":{"storage":"3Mi"}}}}'
        )
        eventually(
            "the claim grows",
            lambda: ns.get("pvc", "data")["status"]["capacity"]["storage"] == "3Mi",
        )
        eventually(
            "why there is no petabyte",
            lambda: "less than the 1.0Pi asked for" in events(ns, "huge", "ProvisioningFailed"),
        )
        assert "volumeMode Block" in events(ns, "block", "ProvisioningFailed")
        assert ns.get("pvc", "huge")["status"]["phase"] == "Pending"
        volume = ns.get("pvc", "data")["spec"]["volumeName"]
        ns.kubectl("delete", "pvc", "data")
        eventually(
            "the volume is released",
            lambda: ns.get("pv", volume)["status"]["phase"] == "Released",
        )
        ns.kubectl("delete", "pv", volume)
        assert exists(ns, path)
        ns.user.run("rmdir", path)
    finally:
        ns.kubectl("delete", "storageclass", ns.name)


def test_pods_wait_for_their_claims(ns: Namespace, busybox: str) -> None:
    """And volumes made by hand are bound, of both binding modes."""
    home = ns.user.sh(f"mkdir -p ~/made-{ns.name} && echo mine > ~/made-{ns.name}/f; echo $HOME")
    path = f"{home.out.strip()}/made-{ns.name}"
    ns.create(mounted("early", "cat /data/f", busybox))
    eventually(
        "the pod says what it misses",
        lambda: 'persistentvolumeclaim "data" not found' in unschedulable(ns, "early"),
    )
    ns.create(claim("data", storageClassName=""))
    eventually(
        "the pod says that the claim is unbound",
        lambda: "pod has unbound immediate PersistentVolumeClaims" in unschedulable(ns, "early"),
    )
    ns.create(
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": ns.name},
            "spec": {
                "capacity": {"storage": "2Mi"}, "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": path}, "claimRef": {"namespace": ns.name, "name": "data"},
            },
        }
    )  # fmt: skip
    ns.wait_phase("early", "Succeeded")
    assert ns.logs("early") == "mine\n"
    # a local volume, which the scheduler itself binds
    late = {"name": "data", "persistentVolumeClaim": {"claimName": "late"}}
    terms = [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "Exists"}]}]
    ns.create(
        {
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": {"name": ns.name}, "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"l-{ns.name}"},
            "spec": {
                "capacity": {"storage": "2Mi"}, "accessModes": ["ReadWriteOnce"],
                "storageClassName": ns.name, "local": {"path": path},
                "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
            },
        },
        claim("late", storageClassName=ns.name),
        mounted("local", "cat /data/f", busybox, volumes=[late]),
    )  # fmt: skip
    try:
        ns.wait_phase("local", "Succeeded")
        assert ns.logs("local") == "mine\n"
    finally:
        ns.kubectl("delete", "storageclass", ns.name)
        ns.kubectl("delete", "pv", ns.name, f"l-{ns.name}", "--wait=false")


def test_a_claim_for_one_pod_alone(ns: Namespace, busybox: str) -> None:
    ns.create(
        claim("data", mode="ReadWriteOncePod"),
        mounted("first", "until test -e /data/go; do sleep 0.2; done", busybox),
    )
    ns.wait_phase("first", "Running")
    ns.create(mounted("second", "ls /data", busybox))
    eventually(
        "the second pod waits",
        lambda: "ReadWriteOncePod access mode already in-use" in unschedulable(ns, "second"),
    )
    ns.kubectl("exec", "first", "--", "touch", "/data/go")
    ns.wait_phase("second", "Succeeded")
    assert ns.logs("second") == "go\n"


def test_a_volume_that_lives_as_long_as_its_pod(ns: Namespace, busybox: str) -> None:
    template = {"spec": claim("x")["spec"]}
    volumes = [{"name": "data", "ephemeral": {"volumeClaimTemplate": template}}]
    ns.create(mounted("short", "echo x > /data/f; sleep 600", busybox, volumes=volumes))
    ns.wait_phase("short", "Running")
    path = directory(ns, "short-data")
    eventually("the file", lambda: exists(ns, f"{path}/f"))
    ns.kubectl("delete", "pod", "short", "--grace-period=0")
    eventually("the claim is gone", lambda: ns.gone("pvc", "short-data"))
    eventually("the data is gone", lambda: not exists(ns, path))


def test_a_stateful_set_keeps_each_ones_own(ns: Namespace, busybox: str) -> None:
    script = "test -e /data/who || hostname > /data/who; cat /data/who; sleep 600"
    template = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": busybox, "command": ["sh", "-c", script],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
        },
    }  # fmt: skip
    ns.create(
        {
            "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s"},
            "spec": {
                "replicas": 2, "serviceName": "s", "selector": {"matchLabels": {"a": "b"}},
                "podManagementPolicy": "Parallel", "template": template,
                "volumeClaimTemplates": [{**claim("data"), "metadata": {"name": "data"}}],
            },
        }
    )  # fmt: skip
    for name in ("s-0", "s-1"):
        eventually(f"{name} runs", lambda name=name: not ns.gone("pod", name))
        ns.wait_ready(name)
    ns.kubectl("delete", "pod", "s-1")
    eventually("s-1 is back", lambda: ns.pod("s-1")["status"].get("phase") == "Running")
    assert (ns.logs("s-0"), ns.logs("s-1")) == ("s-0\n", "s-1\n")
