"""The dynamic provisioner of class hpk-home: a claim becomes a directory of the user's home.

It does what sig-storage's external-provisioner and external-resizer do for a driver; the binding
itself is kube-controller-manager's. Home is shared by all nodes, so every access mode is served
(the scheduler sees to ReadWriteOncePod) and no volume is tied to a node.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Any

from hpk_kubelet.config import VolumeConfig
from hpk_kubelet.controllers.claims import (
    SELECTED_NODE,
    capacity,
    class_of,
    is_bound,
    refers_to,
    storage_request,
)
from hpk_kubelet.controllers.volume_binding import STORAGE
from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube.apply import load_manifests
from hpk_kubelet.kube.client import ApiError, Client, Unreachable, resource
from hpk_kubelet.kube.events import EventRecorder
from hpk_kubelet.kube.reflector import Change, Reflector, key_of
from hpk_kubelet.spec.quantity import parse_quantity
from hpk_kubelet.volumes.homes import (
    check_base,
    directory_name,
    make_base,
    make_volume,
    removable,
    space,
)

log = logging.getLogger(__name__)

Object = dict[str, Any]

NAME = "hpk.io/home"
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
_PROVISIONER_OF_CLAIM = "volume.kubernetes.io/storage-provisioner"
_FINALIZER = "hpk.io/home-volume"
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 60.0
_PARALLEL = 4


def storage_class() -> Object:
    text = (files(__package__) / "manifests" / "storage.yaml").read_text()
    return load_manifests(text)[0]


def to_be_provisioned(claim: Object, of_class: Object | None) -> bool:
    """external-provisioner's shouldProvision: ours, unbound, and its pod has a node if it waits
    for one."""
    annotations = claim["metadata"].get("annotations") or {}
    if of_class is None or of_class.get("provisioner") != NAME:
        return False
    if claim["spec"].get("volumeName") or claim["metadata"].get("deletionTimestamp"):
        return False
    if annotations.get(_PROVISIONER_OF_CLAIM) != NAME:
        return False
    waits = of_class.get("volumeBindingMode") == "WaitForFirstConsumer"
    return not waits or bool(annotations.get(SELECTED_NODE))


def refusal(claim: Object) -> str:
    """What of the claim a directory can't be; "" if there is nothing."""
    spec = claim["spec"]
    if spec.get("volumeMode") == "Block":
        return "volumeMode Block is not to be had: a home directory has files, no devices"
    if spec.get("selector"):
        return "claim.Spec.Selector is not supported"
    if spec.get("dataSource") or spec.get("dataSourceRef"):
        return "dataSource is not supported: HPK makes no snapshots and copies no volumes"
    return ""


def volume_name(claim: Object) -> str:
    return f"pvc-{claim['metadata']['uid']}"


def volume_for(claim: Object, of_class: Object, path: Path) -> Object:
    """The PersistentVolume, bound to the claim from the start."""
    meta = claim["metadata"]
    policy = of_class.get("reclaimPolicy") or "Delete"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": volume_name(claim),
            "annotations": {PROVISIONED_BY: NAME},
            "finalizers": [_FINALIZER],
        },
        "spec": {
            "accessModes": claim["spec"].get("accessModes") or ["ReadWriteOnce"],
            "capacity": {"storage": _asked(claim)},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
                "resourceVersion": meta["resourceVersion"],
            },
            "hostPath": {"path": str(path), "type": "Directory"},
            "persistentVolumeReclaimPolicy": policy,
            "storageClassName": of_class["metadata"]["name"],
            "volumeMode": "Filesystem",
        },
    }


def _asked(claim: Object) -> str:
    """The claim's request as its author wrote it."""
    return str(claim["spec"]["resources"]["requests"]["storage"])


def is_ours(volume: Object) -> bool:
    annotations = volume["metadata"].get("annotations") or {}
    return annotations.get(PROVISIONED_BY) == NAME and "hostPath" in volume["spec"]


class Provisioner:
    """`run()` until cancelled. `agent`: the agent's directory, which removes what is written by
    the containers' users."""

    def __init__(self, client: Client, config: VolumeConfig, hpk_home: Path, agent: Path) -> None:
        self._client = client
        self._home = hpk_home
        self._base = Path(config.path).expanduser() if config.path else hpk_home / "volumes"
        self._promised = parse_quantity(config.capacity) if config.capacity else None
        self._agent = agent
        self._events = EventRecorder(client, component=NAME)
        self._claims = Reflector(
            client, resource("v1", "persistentvolumeclaims"), on_change=self._claim_changed
        )
        self._volumes = Reflector(
            client, resource("v1", "persistentvolumes"), on_change=self._volume_changed
        )
        self._classes = Reflector(
            client, resource(STORAGE, "storageclasses"), on_change=self._class_changed
        )
        self._queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._queued: set[tuple[str, str]] = set()
        self._busy: set[tuple[str, str]] = set()
        self._failures: dict[tuple[str, str], int] = {}
        self._space = asyncio.Lock()  # from the look at the free space to the volume that takes it

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            group.create_task(self._make_class())
            reflectors = (self._claims, self._volumes, self._classes)
            for reflector in reflectors:
                group.create_task(reflector.run())
            for reflector in reflectors:
                await reflector.synced.wait()
            for _ in range(_PARALLEL):
                group.create_task(self._work())

    async def _make_class(self) -> None:
        """Once: a class of this name that is there is the user's."""
        told = ""
        while True:
            try:
                await self._client.create(resource(STORAGE, "storageclasses"), storage_class())
                return
            except ApiError as e:
                if e.already_exists:
                    return
                if str(e) != told:  # forbidden until the API server has read its own roles
                    log.warning("the storage class can't be made yet: %s", e)
                told = str(e)
            await asyncio.sleep(_FIRST_RETRY)

    # --- what there is to do

    def _claim_changed(self, change: Change) -> None:
        if change.new is not None:
            self._enqueue(("claim", key_of(change.new)))

    def _volume_changed(self, change: Change) -> None:
        if change.new is not None and is_ours(change.new):
            self._enqueue(("volume", key_of(change.new)))
            ref = change.new["spec"].get("claimRef") or {}
            self._enqueue(("claim", f"{ref.get('namespace')}/{ref.get('name')}"))

    def _class_changed(self, change: Change) -> None:
        for key, claim in self._claims.store.items():
            if class_of(claim) == change.object["metadata"]["name"]:
                self._enqueue(("claim", key))

    def _enqueue(self, item: tuple[str, str]) -> None:
        if item not in self._queued:
            self._queued.add(item)
            self._queue.put_nowait(item)

    async def _work(self) -> None:
        while True:
            item = await self._queue.get()
            self._queued.discard(item)
            if item in self._busy:
                self._later(item, 0.1)
                continue
            self._busy.add(item)
            try:
                kind, key = item
                await (self._claim(key) if kind == "claim" else self._volume(key))
                self._failures.pop(item, None)
            except HPKError as e:
                self._failed(item, e)
            except Exception:  # one malformed object must not end the others
                log.exception("%s %s", *item)
            finally:
                self._busy.discard(item)

    def _failed(self, item: tuple[str, str], error: HPKError) -> None:
        count = self._failures[item] = self._failures.get(item, 0) + 1
        if isinstance(error, Unreachable) or (isinstance(error, ApiError) and error.conflict):
            log.info("%s %s: %s", *item, error)
        else:
            log.warning("%s %s: %s", *item, error)
            reflector = self._claims if item[0] == "claim" else self._volumes
            if (obj := reflector.store.get(item[1])) is not None:
                self._events.record(obj, "Warning", self._reason(item[0], obj), str(error))
        self._later(item, min(_FIRST_RETRY * 2 ** min(count - 1, 10), _LONGEST_RETRY))

    @staticmethod
    def _reason(kind: str, obj: Object) -> str:
        if kind == "volume":
            return "VolumeFailedDelete"
        return "VolumeResizeFailed" if is_bound(obj) else "ProvisioningFailed"

    def _later(self, item: tuple[str, str], pause: float) -> None:
        asyncio.get_running_loop().call_later(pause, self._enqueue, item)

    # --- claims

    async def _claim(self, key: str) -> None:
        claim = self._claims.store.get(key)
        if claim is None:
            return
        of_class = self._classes.store.get(class_of(claim))
        if to_be_provisioned(claim, of_class):
            assert of_class is not None
            await self._provision(claim, of_class)
        elif is_bound(claim):
            volume = self._volumes.store.get(claim["spec"]["volumeName"])
            if volume is not None and is_ours(volume):
                await self._resize(claim, volume)

    async def _provision(self, claim: Object, of_class: Object) -> None:
        if volume_name(claim) in self._volumes.store:
            return
        if why := refusal(claim):
            raise HPKError(why)
        meta = claim["metadata"]
        key = f"{meta['namespace']}/{meta['name']}"
        base = self._base_of(of_class)
        self._events.record(
            claim,
            "Normal",
            "Provisioning",
            f'External provisioner is provisioning volume for claim "{key}"',
        )
        path = base / directory_name(meta["namespace"], meta["name"], volume_name(claim))
        async with self._space:
            await self._check_space(base, storage_request(claim))
            await asyncio.to_thread(make_volume, path)
            try:
                await self._client.create(
                    resource("v1", "persistentvolumes"), volume_for(claim, of_class, path)
                )
            except ApiError as e:
                if not e.already_exists:
                    raise
        self._events.record(
            claim,
            "Normal",
            "ProvisioningSucceeded",
            f"Successfully provisioned volume {volume_name(claim)}",
        )

    def _base_of(self, of_class: Object) -> Path:
        parameters = of_class.get("parameters") or {}
        if unknown := sorted(set(parameters) - {"path"}):
            raise HPKError(
                f"StorageClass {of_class['metadata']['name']}: {NAME} knows no parameter "
                f"{', '.join(unknown)}; it has: path"
            )
        return Path(parameters["path"]).expanduser() if "path" in parameters else self._base

    async def _check_space(self, base: Path, more: Fraction) -> None:
        """HPKError where so much more can't be promised honestly."""
        check_base(base, self._home)
        await asyncio.to_thread(make_base, base)
        free = (await asyncio.to_thread(space, base)).free
        if more > free:
            raise HPKError(
                f"{base} has {_bytes(free)} free, which is less than the {_bytes(more)} asked for"
            )
        if self._promised is not None and base == self._base:
            given = sum(
                (
                    capacity(volume)
                    for volume in self._volumes.values()
                    if is_ours(volume) and Path(volume["spec"]["hostPath"]["path"]).parent == base
                ),
                Fraction(0),
            )
            if given + more > self._promised:
                raise HPKError(
                    f"{_bytes(given)} of volumes.capacity ({_bytes(self._promised)}) are given to "
                    f"other claims, which leaves less than the {_bytes(more)} asked for"
                )

    async def _resize(self, claim: Object, volume: Object) -> None:
        """A directory grows by saying so."""
        wanted, has = storage_request(claim), capacity(volume)
        meta = claim["metadata"]
        if wanted > has:
            base = Path(volume["spec"]["hostPath"]["path"]).parent
            async with self._space:
                await self._check_space(base, wanted - has)
                await self._client.patch(
                    resource("v1", "persistentvolumes", None, volume["metadata"]["name"]),
                    {"spec": {"capacity": {"storage": _asked(claim)}}},
                )
            has = wanted
        status = claim.get("status") or {}
        told = parse_quantity((status.get("capacity") or {}).get("storage", "0"))
        if told and told < wanted == has:
            await self._client.patch(
                resource("v1", "persistentvolumeclaims", meta["namespace"], meta["name"], "status"),
                {"status": {"capacity": {"storage": _asked(claim)}, "conditions": None}},
            )
            self._events.record(
                claim, "Normal", "VolumeResizeSuccessful", "Resize volume succeeded"
            )

    # --- volumes

    async def _volume(self, name: str) -> None:
        """Removes what nobody claims any more, if that is its policy."""
        volume = self._volumes.store.get(name)
        if volume is None or _FINALIZER not in (volume["metadata"].get("finalizers") or ()):
            return
        phase = (volume.get("status") or {}).get("phase")
        going = bool(volume["metadata"].get("deletionTimestamp"))
        ref = volume["spec"].get("claimRef") or {}
        claim = self._claims.store.get(f"{ref.get('namespace')}/{ref.get('name')}")
        if phase not in ("Released", "Failed") and not (going and phase == "Available"):
            return
        if claim is not None and ref.get("uid") and refers_to(ref, claim):
            return
        delete = volume["spec"].get("persistentVolumeReclaimPolicy") == "Delete"
        if delete:
            await self._remove(Path(volume["spec"]["hostPath"]["path"]), name)
        if delete or going:
            path = resource("v1", "persistentvolumes", None, name)
            meta = volume["metadata"]
            rest = [f for f in meta["finalizers"] if f != _FINALIZER]
            try:
                await self._client.patch(
                    path,
                    {"metadata": {"resourceVersion": meta["resourceVersion"], "finalizers": rest}},
                )
                if not going:
                    await self._client.delete(path, uid=meta["uid"])
            except ApiError as e:
                if not e.not_found:
                    raise

    async def _remove(self, path: Path, name: str) -> None:
        if not path.is_symlink() and not path.exists():
            return
        if not removable(path, name, self._home):
            raise HPKError(f"{path} is no directory that HPK made for {name}: it is left alone")
        # Files belong to the containers' users, so it takes their user namespace.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(self._agent), "--remove", str(path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, words = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            said = words.decode(errors="replace").strip().removeprefix("hpk: ")
            raise HPKError(f"{path} can't be removed: {said}")


def _bytes(amount: Fraction | int) -> str:
    """12.3Gi: for people."""
    value = float(amount)
    for unit in ("", "Ki", "Mi", "Gi", "Ti"):
        if value < 1024:
            return f"{value:.1f}{unit}" if unit else f"{value:.0f}"
        value /= 1024
    return f"{value:.1f}Pi"
