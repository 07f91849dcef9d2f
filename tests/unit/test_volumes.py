from __future__ import annotations

import base64
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_samples import Object, container, pod

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.volumes import (
    File,
    TokenRequest,
    VolumeInputs,
    refresh_at,
    resolve_volumes,
    token_requests,
    write_volumes,
)
from hpk_kubelet.volumes.atomic import check_path, write_files
from hpk_kubelet.volumes.claim import plan as claim_plan

OBJECTS: dict[tuple[str, str], Object | None] = {
    ("ConfigMap", "c"): {"data": {"k": "v\n", "é": "ü"}, "binaryData": {"b": "/wA="}},
    ("Secret", "s"): {"data": {"k": base64.b64encode(b"secret\xff").decode()}},
    ("ConfigMap", "kube-root-ca.crt"): {"data": {"ca.crt": "PEM"}},
    ("ConfigMap", "gone"): None,
}
TOKEN = TokenRequest("v", "token", "", 3607)


def inputs(**changes: Any) -> VolumeInputs:
    arguments: Object = {
        "objects": OBJECTS,
        "allocatable": {"cpu": "8", "memory": "16Gi"},
        "pod_dir": Path("/h/.hpk/pods/u-1"),
        "hpk_home": Path("/h/.hpk"),
        "tokens": {TOKEN: "eyJ.token"},
    }
    return VolumeInputs(**(arguments | changes))


def files(**source: Any) -> dict[str, File] | None:
    whole = pod(
        container(resources={"limits": {"cpu": "1500m"}}),
        metadata={"labels": {"b": 'two "x"\n\t\x01é\U0001f600\u200b\\', "a": "1"}},
        volumes=[{"name": "v", **source}],
    )
    volume = resolve_volumes(whole, inputs())["v"]
    assert volume.plan == {"kind": "directory", "path": "/h/.hpk/pods/u-1/volumes/v"}
    return volume.files


def refused(**source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_volumes(pod(volumes=[{"name": "v", **source}]), inputs())
    error = caught.value
    assert (error.reason, error.container) == ("ContainerCreating", None)
    assert error.event == (
        "FailedMount",
        f'MountVolume.SetUp failed for volume "v" : {error.message}',
    )
    return error.message


def test_config_maps_and_secrets() -> None:
    assert files(configMap={"name": "c"}) == {
        "k": File(b"v\n", 0o644),
        "é": File("ü".encode(), 0o644),
        "b": File(b"\xff\0", 0o644),
    }
    items = [{"key": "k", "path": "a/./x"}, {"key": "b", "path": "y", "mode": 0o400}]
    assert files(configMap={"name": "c", "defaultMode": 0o440, "items": items}) == {
        "a/x": File(b"v\n", 0o440),
        "y": File(b"\xff\0", 0o400),
    }
    assert files(configMap={"name": "gone", "optional": True}) == {}
    items = [{"key": "zz", "path": "x"}]
    assert files(configMap={"name": "c", "optional": True, "items": items}) == {}
    assert files(secret={"secretName": "s", "defaultMode": 0}) == {"k": File(b"secret\xff", 0)}


def test_downward_api() -> None:
    items = [
        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
        {"path": "name", "mode": 0o600, "fieldRef": {"fieldPath": "metadata.name"}},
        {"path": "cpu", "resourceFieldRef": {
            "containerName": "main", "resource": "limits.cpu", "divisor": "1m"}},
        {"path": "mem", "resourceFieldRef": {
            "containerName": "main", "resource": "limits.memory", "divisor": "1Gi"}},
    ]  # fmt: skip
    quoted = 'a="1"\nb="two \\"x\\"\\n\\t\\x01é\U0001f600\\u200b\\\\"'
    assert files(downwardAPI={"items": items}) == {
        "labels": File(quoted.encode(), 0o644),
        "name": File(b"p", 0o600),
        "cpu": File(b"1500", 0o644),
        "mem": File(b"16", 0o644),
    }


def test_the_service_account_volume() -> None:
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt",
                       "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [
            {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
        {"secret": {"name": "s"}},
    ]  # fmt: skip
    assert files(projected={"sources": sources, "defaultMode": 0o420}) == {
        "token": File(b"eyJ.token", 0o420),
        "ca.crt": File(b"PEM", 0o420),
        "namespace": File(b"ns", 0o420),
        "k": File(b"secret\xff", 0o420),
    }
    other = [{"serviceAccountToken": {"path": "t", "audience": "vault"}}]
    whole = pod(
        volumes=[
            {"name": "v", "projected": {"sources": sources}},
            {"name": "w", "projected": {"sources": other}},
        ]
    )
    assert token_requests(whole) == [TOKEN, TokenRequest("w", "t", "vault", 3600)]


def test_tokens_are_refreshed_in_time() -> None:
    assert refresh_at(100.0, 1100.0) == 900.0
    assert refresh_at(0.0, 365 * 86400.0) == 86400.0


def test_secrets_are_not_shown() -> None:
    resolved = resolve_volumes(
        pod(volumes=[{"name": "v", "secret": {"secretName": "s"}}]), inputs()
    )
    assert "secret\\xff" not in repr(resolved) and "eyJ" not in repr(inputs())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"configMap": {"name": "gone"}}, 'configmap "gone" not found'),
        ({"secret": {"secretName": "zz"}}, 'secret "zz" not found'),
        ({"configMap": {"name": "c", "items": [{"key": "zz", "path": "x"}]}},
         "configmap references non-existent config key: zz"),
        ({"secret": {"secretName": "s", "items": [{"key": "zz", "path": "x"}]}},
         "references non-existent secret key: zz"),
        ({"projected": {"sources": [{"configMap": {"name": "gone"}},
                                    {"secret": {"name": "zz"}}]}},
         '[configmap "gone" not found, secret "zz" not found]'),
        ({"downwardAPI": {"items": [{"path": "x", "fieldRef": {"fieldPath": "status.podIP"}}]}},
         "unsupported fieldPath: status.podIP"),
        ({"configMap": {"name": "c", "items": [{"key": "k", "path": "a/../../x"}]}},
         "invalid path: must not contain '..': a/../../x"),
        ({"configMap": {"name": "c", "items": [{"key": "k", "path": "/etc/x"}]}},
         "invalid path: must be relative path: /etc/x"),
        ({"configMap": {"name": "c", "items": [{"key": "k", "path": "..data/x"}]}},
         "invalid path: must not start with '..': ..data/x"),
        ({"hostPath": {"path": "/h/.hpk"}},
         "hostPath /h/.hpk is refused: it is inside HPK's own directory, /h/.hpk"),
        ({"hostPath": {"path": "//h/x/..//.hpk/pki/"}},
         "hostPath /h/.hpk/pki is refused: it is inside HPK's own directory, /h/.hpk"),
        ({"hostPath": {"path": "rel"}}, "hostPath 'rel' is not an absolute path"),
        ({"emptyDir": {"sizeLimit": "big"}},
         "'big' is not a quantity such as 500m, 2 or 1.5Gi"),
    ],
)  # fmt: skip
def test_what_can_not_be_mounted(source: Object, message: str) -> None:
    assert refused(**source) == message


def test_unknown_types_are_named() -> None:
    for kind in ("nfs", "csi"):
        assert refused(**{kind: {"x": 1}}).startswith(
            f"volume type {kind} is not supported by HPK, which has configMap, downwardAPI, "
            "emptyDir, ephemeral, hostPath, image, persistentVolumeClaim, projected, secret;"
        )
    assert "clusterTrustBundle is not supported" in refused(
        projected={"sources": [{"clusterTrustBundle": {}}]}
    )
    assert "no token for path" in refused(
        projected={"sources": [{"serviceAccountToken": {"path": "other"}}]}
    )


def test_what_the_agent_makes() -> None:
    whole = pod(
        volumes=[
            {"name": "a", "emptyDir": {}},
            {"name": "b", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "c", "hostPath": {"path": "/data//x/", "type": "Directory"}},
            {"name": "d", "hostPath": {"path": "/h/.hpkx"}},
            {"name": "e"},
        ]
    )
    resolved = resolve_volumes(whole, inputs())
    assert {name: volume.plan for name, volume in resolved.items()} == {
        "a": {"kind": "emptyDir", "medium": ""},
        "b": {"kind": "emptyDir", "medium": "Memory", "sizeLimit": 1048576},
        "c": {"kind": "hostPath", "path": "/data/x", "type": "Directory"},
        "d": {"kind": "hostPath", "path": "/h/.hpkx", "type": ""},
        "e": {"kind": "emptyDir", "medium": ""},
    }
    assert all(volume.files is None for volume in resolved.values())


def test_a_link_does_not_lead_into_hpks_directory(tmp_path: Path) -> None:
    home = tmp_path / "hpk"
    home.mkdir()
    (tmp_path / "link").symlink_to(home)
    whole = pod(volumes=[{"name": "v", "hostPath": {"path": f"{tmp_path}/link/pki"}}])
    with pytest.raises(ConfigError, match="is refused"):
        resolve_volumes(whole, inputs(hpk_home=home))


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """What a container sees: the writer's own names left out, links followed."""
    return {
        str(path.relative_to(directory)): (stat.S_IMODE(path.stat().st_mode), path.read_bytes())
        for root, _, names in os.walk(directory, followlinks=True)
        for path in (Path(root) / name for name in names)
        if not path.relative_to(directory).parts[0].startswith("..")
    }


def test_files_change_all_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "volumes" / "v"
    old = os.umask(0o077)
    try:
        assert write_files(directory, {"a": File(b"1", 0o640), "d/x": File(b"2", 0o400)})
    finally:
        os.umask(old)
    assert tree(directory) == {"a": (0o640, b"1"), "d/x": (0o400, b"2")}
    assert (directory / "a").readlink() == Path("..data/a")
    assert (directory / "d").readlink() == Path("..data/d")
    first = (directory / "..data").readlink()
    for path in (directory, directory / first, directory / first / "d"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755

    assert not write_files(directory, {"a": File(b"1", 0o640), "d/x": File(b"2", 0o400)})
    assert (directory / "..data").readlink() == first

    assert write_files(directory, {"a": File(b"new", 0o640), "e": File(b"", 0o644)})
    assert tree(directory) == {"a": (0o640, b"new"), "e": (0o644, b"")}
    second = (directory / "..data").readlink()
    assert {entry.name for entry in directory.iterdir()} == {"..data", str(second), "a", "e"}

    assert write_files(directory, {})
    assert tree(directory) == {}


def test_an_interrupted_write_is_made_good(tmp_path: Path) -> None:
    wanted = {"a": File(b"1", 0o644)}
    write_files(tmp_path, {"old": File(b"0", 0o644)})
    (tmp_path / "..2020_01_01_00_00_00.abc").mkdir()
    (tmp_path / "..2020_01_01_00_00_00.abc" / "half").write_text("h")
    (tmp_path / "..data_tmp").symlink_to("..2020_01_01_00_00_00.abc")
    write_files(tmp_path, wanted)
    assert tree(tmp_path) == {"a": (0o644, b"1")}
    # killed after the rename, before the links
    (tmp_path / "a").unlink()
    assert not write_files(tmp_path, wanted)
    assert tree(tmp_path) == {"a": (0o644, b"1")}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_path_that_is_file_and_directory(tmp_path: Path) -> None:
    for order in (["a", "a/b"], ["a/b", "a"]):
        with pytest.raises(HPKError, match="is a file and a directory"):
            write_files(tmp_path / order[0][-1], {path: File(b"", 0o644) for path in order})


def test_nested_mounts_find_their_directories(tmp_path: Path) -> None:
    mounts = [
        {"name": "cm", "mountPath": "/etc/app"},
        {"name": "x", "mountPath": "/etc/app/extra/deep"},
        {"name": "x", "mountPath": "/etc/app/extra/deep/er"},
        {"name": "x", "mountPath": "/etc/app/d/in"},
        {"name": "x", "mountPath": "/etc/app/k", "subPath": "f"},
        {"name": "x", "mountPath": "/etc/application"},
    ]
    whole = pod(
        container(volumeMounts=mounts),
        volumes=[
            {"name": "cm", "configMap": {"name": "c", "items": [
                {"key": "k", "path": "k"}, {"key": "b", "path": "d/b"}]}},
            {"name": "x", "emptyDir": {}},
        ],
    )  # fmt: skip
    volumes = resolve_volumes(whole, inputs(pod_dir=tmp_path))
    assert volumes["cm"].mount_points == ("d/in", "extra/deep", "k")
    write_volumes(volumes)
    write_volumes(volumes)
    directory = tmp_path / "volumes" / "cm"
    assert tree(directory) == {"k": (0o644, b"v\n"), "d/b": (0o644, b"\xff\0")}
    assert (directory / "extra" / "deep").is_dir() and (directory / "d" / "in").is_dir()


def test_an_fs_group_can_read(tmp_path: Path) -> None:
    whole = pod(volumes=[{"name": "v", "secret": {"secretName": "s", "defaultMode": 0o400}}])
    given: list[Path] = []

    def give(path: Path) -> bool:
        given.append(path)
        assert (path / "k").read_bytes() == b"secret\xff"
        assert not (tmp_path / "volumes" / "v" / "..data").exists()  # nobody sees it yet
        return True

    write_volumes(resolve_volumes(whole, inputs(pod_dir=tmp_path)), give)
    assert tree(tmp_path / "volumes" / "v") == {"k": (0o440, b"secret\xff")}
    write_volumes(resolve_volumes(whole, inputs(pod_dir=tmp_path)), give)
    assert len(given) == 1  # it is up to date
    # where there is no such group, all of the pod may read
    elsewhere = inputs(pod_dir=tmp_path / "other")
    write_volumes(resolve_volumes(whole, elsewhere), lambda path: False)
    assert tree(tmp_path / "other" / "volumes" / "v") == {"k": (0o444, b"secret\xff")}


PATHS = st.text(max_size=12) | st.text(alphabet="./ab", max_size=12)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(PATHS, st.binary(max_size=5), max_size=4))
def test_any_path_stays_inside_or_is_refused(tmp_path: Path, content: dict[str, bytes]) -> None:
    whole = pod(
        volumes=[{"name": "v", "configMap": {"name": "c", "items": [
            {"key": str(i), "path": path} for i, path in enumerate(content)]}}]
    )  # fmt: skip
    data = {str(i): base64.b64encode(v).decode() for i, v in enumerate(content.values())}
    given_inputs = inputs(pod_dir=tmp_path, objects={("ConfigMap", "c"): {"binaryData": data}})
    try:
        write_volumes(resolve_volumes(whole, given_inputs))
    except HPKError:
        return
    found = {path: content for path, (_, content) in tree(tmp_path / "volumes" / "v").items()}
    assert found == {os.path.normpath(path): value for path, value in content.items()}
    assert [entry.name for entry in tmp_path.iterdir()] == ["volumes"]


@pytest.mark.parametrize("path", ["x" * 255, "a/..b", ".a", "é" * 127])
def test_paths_that_are_fine(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize("path", ["x" * 256, "é" * 128, "a/" * 2049, ".", "./", "\0", "\ud800"])
def test_paths_that_are_not(path: str) -> None:
    with pytest.raises(HPKError, match="invalid path"):
        check_path(path)


def bound(**source: Any) -> dict[tuple[str, str], Any]:
    """A claim `c` and the volume it is bound to."""
    claim = {
        "metadata": {"name": "c", "uid": "u", "ownerReferences": [{"uid": "uid-p"}]},
        "spec": {"volumeName": "v"},
        "status": {"phase": "Bound"},
    }
    volume = {"metadata": {"name": "v"}, "spec": {"claimRef": {"uid": "u"}, **source}}
    return {("PersistentVolumeClaim", "c"): claim, ("PersistentVolume", "v"): volume}


def of_claim(objects: dict[tuple[str, str], Any], **source: Any) -> Any:
    its_pod = {"metadata": {"namespace": "ns", "name": "p", "uid": "uid-p"}}
    given = VolumeInputs(
        objects=objects, allocatable={}, pod_dir=Path("/h/pods/x"), hpk_home=Path("/h")
    )
    return claim_plan(
        its_pod, {"name": "d", "persistentVolumeClaim": {"claimName": "c", **source}}, given
    )


def test_claims_are_what_they_are_bound_to() -> None:
    assert of_claim(bound(hostPath={"path": "/h/volumes/x"})) == {
        "kind": "claim", "path": "/h/volumes/x",
    }  # fmt: skip
    assert of_claim(bound(local={"path": "/data/"}), readOnly=True) == {
        "kind": "claim", "path": "/data", "readOnly": True,
    }  # fmt: skip
    assert of_claim(bound(hostPath={"path": "/data", "type": "Directory"})) == {
        "kind": "hostPath", "path": "/data", "type": "Directory",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({}, 'persistentvolumeclaims "c" not found'),
        ({**bound(), ("PersistentVolume", "v"): None}, 'persistentvolumes "v" not found'),
        (bound(nfs={"path": "/", "server": "s"}), "of type nfs, which HPK does not have"),
        (bound(hostPath={"path": "/h/pki"}), "inside HPK's own directory"),
        (bound(hostPath={"path": "/h/volumes/../pki"}), "inside HPK's own directory"),
        (bound(volumeMode="Block", local={"path": "/dev/sda"}), "block device"),
        (bound(claimRef={"uid": "other"}), "bound to another claim"),
    ],
)
def test_claims_that_can_not_be_had(objects: dict[tuple[str, str], Any], said: str) -> None:
    with pytest.raises(HPKError, match=said):
        of_claim(objects)
