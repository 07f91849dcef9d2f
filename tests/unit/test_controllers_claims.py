"""Which claims a pod waits for, which volumes suit them, and what the provisioner makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpk_kubelet.controllers.claims import (
    BIND_COMPLETED,
    SELECTED_NODE,
    Step,
    Storage,
    Unschedulable,
    binding,
    claim_keys,
    claims_of,
    conflicts,
    find_volume,
    users,
)
from hpk_kubelet.controllers.provisioner import (
    NAME,
    refusal,
    storage_class,
    to_be_provisioned,
    volume_for,
)
from hpk_kubelet.errors import HPKError
from hpk_kubelet.volumes.homes import (
    check_base,
    directory_name,
    make_base,
    make_volume,
    removable,
    space,
)

Object = dict[str, Any]


def claim(name: str, *, bound: str = "", of_class: str = "hpk-home", **spec: Any) -> Object:
    annotations = {BIND_COMPLETED: "yes"} if bound else {}
    return {
        "metadata": {"namespace": "ns", "name": name, "uid": f"uid-{name}",
                     "resourceVersion": "7", "annotations": annotations},
        "spec": {"storageClassName": of_class, "volumeName": bound,
                 "accessModes": ["ReadWriteOnce"],
                 "resources": {"requests": {"storage": "1Gi"}}, **spec},
        "status": {"phase": "Bound" if bound else "Pending"},
    }  # fmt: skip


def volume(name: str, size: str = "1Gi", of_class: str = "static", **spec: Any) -> Object:
    return {
        "metadata": {"name": name, "resourceVersion": "3", "labels": {"kind": name}},
        "spec": {"storageClassName": of_class, "capacity": {"storage": size},
                 "accessModes": ["ReadWriteOnce", "ReadWriteMany"], **spec},
        "status": {"phase": "Available"},
    }  # fmt: skip


def storage(*objects: Object) -> Storage:
    classes = {
        "hpk-home": storage_class(),
        "static": {"provisioner": "kubernetes.io/no-provisioner",
                   "volumeBindingMode": "WaitForFirstConsumer"},
        "now": {"provisioner": NAME, "volumeBindingMode": "Immediate"},
    }  # fmt: skip
    claims = {f"ns/{o['metadata']['name']}": o for o in objects if "namespace" in o["metadata"]}
    volumes = {o["metadata"]["name"]: o for o in objects if "namespace" not in o["metadata"]}
    return Storage(claims, volumes, classes)


def pod(*names: str, **more: Any) -> Object:
    volumes: list[Object] = [{"name": n, "persistentVolumeClaim": {"claimName": n}} for n in names]
    return {
        "metadata": {"namespace": "ns", "name": "p", "uid": "p"},
        "spec": {"volumes": [*volumes, *more.pop("volumes", [])], **more},
    }


NODE: Object = {"metadata": {"name": "main", "labels": {"zone": "a"}}}


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ([], 'persistentvolumeclaim "c" not found'),
        ([{**claim("c"), "status": {"phase": "Lost"}}], "bound to non-existent"),
        ([claim("c", of_class="now")], "pod has unbound immediate PersistentVolumeClaims"),
        ([claim("c", volumeName="asked")], "pod has unbound immediate PersistentVolumeClaims"),
        ([claim("c", of_class="nobody")], "pod has unbound immediate PersistentVolumeClaims"),
    ],
)
def test_what_a_pod_waits_for(objects: list[Object], said: str) -> None:
    with pytest.raises(Unschedulable, match=said):
        claims_of(pod("c"), storage(*objects))


def test_a_deleted_claim_is_not_used() -> None:
    going = claim("c", bound="v")
    going["metadata"]["deletionTimestamp"] = "now"
    with pytest.raises(Unschedulable, match='"c" is being deleted'):
        claims_of(pod("c"), storage(going))


def test_an_ephemeral_claim_must_be_the_pods_own() -> None:
    wants = pod(volumes=[{"name": "scratch", "ephemeral": {}}])
    assert claim_keys(wants) == {"ns/p-scratch"}
    with pytest.raises(Unschedulable, match="waiting for ephemeral volume controller"):
        claims_of(wants, storage())
    made = claim("p-scratch", bound="v")
    with pytest.raises(Unschedulable, match="pod is not owner"):
        claims_of(wants, storage(made))
    made["metadata"]["ownerReferences"] = [{"controller": True, "uid": "p"}]
    assert claims_of(wants, storage(made)).bound == [made]


def test_a_claim_of_the_home_class_is_told_its_node() -> None:
    waiting = claim("c")
    having = storage(waiting)
    claims = claims_of(pod("c"), having)
    assert (claims.bound, claims.delayed) == ([], [waiting])
    assert binding(claims, NODE, having) == [Step(waiting)]
    waiting["metadata"]["annotations"][SELECTED_NODE] = "main"
    assert binding(claims, NODE, having) == []
    waiting["metadata"]["annotations"][SELECTED_NODE] = "other"
    assert conflicts(claims, NODE, having) == [
        "node(s) didn't find available persistent volumes to bind"
    ]


def test_the_smallest_suitable_volume_is_taken_once() -> None:
    first, second = claim("a", of_class="static"), claim("b", of_class="static")
    elsewhere = {"required": {"nodeSelectorTerms": [{"matchExpressions": [
        {"key": "zone", "operator": "In", "values": ["b"]}]}]}}  # fmt: skip
    having = storage(
        first, second, volume("big", "5Gi"), volume("fit", "2Gi"), volume("small", "1Mi"),
        volume("far", nodeAffinity=elsewhere), volume("block", volumeMode="Block"),
        volume("other", of_class="hpk-home"), volume("taken", claimRef={"name": "x"}),
    )  # fmt: skip
    claims = claims_of(pod("a", "b"), having)
    steps = binding(claims, NODE, having)
    assert [step.volume and step.volume["metadata"]["name"] for step in steps] == ["fit", "big"]
    del having.volumes["big"]  # type: ignore[attr-defined]
    assert conflicts(claims, NODE, having) != []


def test_selectors_and_volumes_kept_for_a_claim() -> None:
    wants = claim("c", of_class="static", selector={"matchLabels": {"kind": "second"}})
    having = storage(wants, volume("first"), volume("second"))
    assert find_volume(wants, NODE, having, set()) is having.volumes["second"]
    mine = volume("mine", claimRef={"namespace": "ns", "name": "c"})
    assert find_volume(wants, NODE, storage(wants, volume("second"), mine), set()) is mine


def test_a_bound_volume_ties_the_pod_to_its_nodes() -> None:
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu"]}]}]
    tied = volume("v", nodeAffinity={"required": {"nodeSelectorTerms": terms}})
    having = storage(claim("c", bound="v"), tied)
    claims = claims_of(pod("c"), having)
    assert conflicts(claims, NODE, having) == [
        "node(s) didn't match PersistentVolume's node affinity"
    ]
    assert conflicts(claims, {"metadata": {"name": "gpu"}}, having) == []
    assert "non-existent pv" in conflicts(claims, NODE, storage(claim("c", bound="v")))[0]


def test_who_uses_a_claim() -> None:
    user = pod("c", nodeName="main")
    user["metadata"]["uid"] = "other"
    assert users([user], ["c"], "p")
    assert not users([user], ["d"], "p")
    assert not users([user], ["c"], "other")
    assert not users([{**user, "status": {"phase": "Succeeded"}}], ["c"], "p")


def test_which_claims_are_provisioned() -> None:
    waiting, of_class = claim("c"), storage_class()
    notes = waiting["metadata"]["annotations"]
    assert not to_be_provisioned(waiting, of_class)
    notes["volume.kubernetes.io/storage-provisioner"] = NAME
    assert not to_be_provisioned(waiting, of_class)
    notes[SELECTED_NODE] = "main"
    assert to_be_provisioned(waiting, of_class)
    assert not to_be_provisioned(waiting, {**of_class, "provisioner": "other"})
    assert not to_be_provisioned(waiting, None)
    assert "Block" in refusal(claim("c", volumeMode="Block"))
    assert refusal(claim("c")) == ""


def test_the_volume_is_the_claims_from_the_start() -> None:
    made = volume_for(claim("c"), storage_class(), Path("/h/volumes/x"))
    assert made["metadata"]["name"] == "pvc-uid-c"
    spec = made["spec"]
    assert spec["claimRef"]["uid"] == "uid-c"
    assert spec["capacity"] == {"storage": "1Gi"}
    assert spec["persistentVolumeReclaimPolicy"] == "Delete"
    assert spec["hostPath"] == {"path": "/h/volumes/x", "type": "Directory"}


def test_where_volumes_may_be_kept(tmp_path: Path) -> None:
    home = tmp_path / ".hpk"
    (home / "pki").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home / "pki")
    for wrong in (home, home / "pki", home / "volumes" / "x", tmp_path / "link", Path("rel")):
        with pytest.raises(HPKError, match="volumes can't be kept in"):
            check_base(wrong, home)
    for right in (home / "volumes", tmp_path / "data"):
        check_base(right, home)
        make_base(right)
        assert right.stat().st_mode & 0o7777 == 0o700
        assert space(right).free > 0
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(HPKError, match="others may enter it"):
        make_base(tmp_path / "open")
    with pytest.raises(HPKError, match="can't be kept in"):
        (tmp_path / "file").write_text("")
        make_base(tmp_path / "file" / "x")


def test_only_what_was_made_is_removed(tmp_path: Path) -> None:
    home = tmp_path / ".hpk"
    make_base(home / "volumes")
    name = directory_name("ns", "c" * 253, "pvc-1")
    assert len(name) < 255
    path = home / "volumes" / name
    make_volume(path)
    make_volume(path)
    assert path.stat().st_mode & 0o777 == 0o777
    assert removable(path, "pvc-1", home)
    assert not removable(path, "pvc-2", home)
    assert not removable(home, "pvc-1", home)
    (tmp_path / "x_pvc-1").symlink_to(path)
    assert not removable(tmp_path / "x_pvc-1", "pvc-1", home)
