"""What each volume type becomes on disk. One module per type; the two tables here name them all.

A type is either a set of files that the kubelet writes into the pod's directory and keeps up to
date (FILES), or something that the agent makes or finds on the compute node (PLANS).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.errors import ConfigError, volume_error
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.plan import VolumePlan
from hpk_kubelet.volumes import (
    claim,
    configmap,
    downwardapi,
    emptydir,
    hostpath,
    image,
    projected,
    secret,
)
from hpk_kubelet.volumes.atomic import check_path, write_files
from hpk_kubelet.volumes.base import File, Files, TokenRequest, Volume, VolumeInputs
from hpk_kubelet.volumes.image import image_volumes
from hpk_kubelet.volumes.projected import refresh_at

__all__ = [
    "File",
    "TokenRequest",
    "Volume",
    "VolumeInputs",
    "image_volumes",
    "refresh_at",
    "resolve_files",
    "resolve_volumes",
    "token_requests",
    "write_volumes",
]

Give = Callable[[Path], bool]
"""Gives a directory to a group; False if that can't be."""

FILES: dict[str, Callable[[Object, Object, VolumeInputs], Files]] = {
    "configMap": configmap.files,
    "secret": secret.files,
    "downwardAPI": downwardapi.files,
    "projected": projected.files,
}
PLANS: dict[str, Callable[[Object, Object, VolumeInputs], VolumePlan]] = {
    "emptyDir": emptydir.plan,
    "ephemeral": claim.plan,
    "hostPath": hostpath.plan,
    "image": image.plan,
    "persistentVolumeClaim": claim.plan,
}


def resolve_volumes(pod: Object, inputs: VolumeInputs) -> dict[str, Volume]:
    """Every volume of the pod by name. Writes nothing.

    ConfigError, in kubelet's words, for what is missing and not optional, and for a volume type
    that HPK does not have.
    """
    volumes = {}
    for volume in pod["spec"].get("volumes") or []:
        try:
            volumes[volume["name"]] = _resolve(pod, volume, inputs)
        except HPKError as e:
            raise volume_error(volume["name"], str(e)) from None
    return volumes


def resolve_files(pod: Object, inputs: VolumeInputs) -> tuple[dict[str, Volume], list[ConfigError]]:
    """The volumes that are files, for a pod that runs: what can't be had now is among the errors,
    and the volume stays as it is."""
    volumes, errors = {}, []
    for volume in pod["spec"].get("volumes") or []:
        if FILES.keys() & volume.keys():
            try:
                volumes[volume["name"]] = _resolve(pod, volume, inputs)
            except HPKError as e:
                errors.append(volume_error(volume["name"], str(e)))
    return volumes, errors


def write_volumes(volumes: Mapping[str, Volume], give: Give | None = None) -> None:
    """Puts the files of all volumes in place; blocks on the disk.

    Each volume changes in one step, and one that is up to date is not touched, so this may be
    called again at any time. `give` hands a directory's files to the pod's fsGroup.
    """
    for volume in volumes.values():
        if volume.files is not None:
            files = volume.files
            finish = None
            if give is not None:
                files = {path: File(f.content, f.mode | 0o440) for path, f in files.items()}
                finish = partial(_give, give)
            write_files(Path(volume.plan["path"]), files, volume.mount_points, finish)


def _give(give: Give, version: Path) -> None:
    """Where files can't be given to the group, all users of the pod may read them: nobody else
    can enter its directory."""
    if not give(version):
        for path in version.rglob("*"):
            if path.is_file():
                path.chmod(path.stat().st_mode | 0o444)


def token_requests(pod: Object) -> list[TokenRequest]:
    """Each token that a volume of the pod wants; see TokenRequest and refresh_at."""
    return list(projected.token_requests(pod))


def _resolve(pod: Object, volume: Object, inputs: VolumeInputs) -> Volume:
    name = volume["name"]
    kinds = [key for key, source in volume.items() if key != "name" and source is not None]
    kind = kinds[0] if kinds else "emptyDir"  # as the API defaults it
    if kind in PLANS:
        return Volume(PLANS[kind](pod, {kind: {}} | volume, inputs))
    if kind not in FILES:
        known = ", ".join(sorted([*PLANS, *FILES]))
        raise HPKError(
            f"volume type {kind} is not supported by HPK, which has {known}; "
            "a file system that compute nodes have mounted can be reached as a hostPath"
        )
    check_path(name)
    if "/" in name:
        raise HPKError(f"invalid volume name: {name}")
    files = {}
    for path, file in FILES[kind](pod, volume, inputs).items():
        check_path(path)
        path = posixpath.normpath(path)
        check_path(path)  # `./..data` is a name of the writer's own, too
        files[path] = file
    directory = inputs.pod_dir / "volumes" / name
    return Volume(
        VolumePlan(kind="directory", path=str(directory)), files, _mount_points(pod, name)
    )


def _mount_points(pod: Object, name: str) -> tuple[str, ...]:
    """Where other volumes are mounted inside this one, relative to it: a read-only volume must
    have these directories beforehand (pkg/volume/util/nested_volumes.go)."""
    found: dict[str, None] = {}
    spec = pod["spec"]
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        mounts = [
            (mount["name"], posixpath.normpath(posixpath.join("/", mount["mountPath"])))
            for mount in container.get("volumeMounts") or []
        ]
        paths = sorted(path for _, path in mounts)
        for mine in [path for other, path in mounts if other == name]:
            nested: list[str] = []
            for path in paths:
                below = path.startswith(mine.rstrip("/") + "/") and path != mine
                if below and not any(path.startswith(seen + "/") for seen in nested):
                    nested.append(path)
                    found[posixpath.relpath(path, mine)] = None
    return tuple(found)
