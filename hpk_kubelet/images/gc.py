"""What the cache may forget: images no pod refers to, and what crashes left behind."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpk_kubelet.errors import HPKError
from hpk_kubelet.images.store import ImageStore, StoredImage, StoredReference

UNUSED = 600.0  # seconds: a pod may have asked for the image and not have a plan yet
STALE = 3600.0  # seconds without the heartbeat of a pull (fetch.HEARTBEAT), clocks' skew included


class Listed(NamedTuple):
    references: list[str]  # by tag first; none: left behind by a tag that moved on
    digest: str
    size: int  # bytes as the registry stores it
    disk: int  # bytes unpacked
    used: float  # Unix seconds
    ids: frozenset[str]  # every digest that stands for it, its index's included


class Collected(NamedTuple):
    images: list[Listed]
    leftovers: int  # of pulls that never ended


def digests_in_use(pods: Path) -> set[str]:
    """The images of every pod that has a plan: digests in `pods/*/plan.json`, and those of
    ephemeral containers in `pods/*/ephemeral.NAME.json`.

    Raises HPKError for a plan that can't be read: nothing may be removed on a guess.
    """
    digests: set[str] = set()
    for plan in (*pods.glob("*/plan.json"), *pods.glob("*/ephemeral.*.json")):
        try:
            digests.update(_digests(json.loads(plan.read_bytes())))
        except FileNotFoundError:
            continue  # the pod went away just now
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise HPKError(f"{plan}: can't tell which images are in use: {e}") from None
    return digests


def _digests(plan: dict[str, Any]) -> Iterator[str]:
    for container in (*plan.get("initContainers", ()), *plan.get("containers", ())):
        yield container["image"]["digest"]
    for volume in plan.get("volumes", {}).values():
        if "digest" in volume:
            yield volume["digest"]


def images(store: ImageStore) -> list[Listed]:
    """Everything in the cache, last used first."""
    references: dict[str, list[StoredReference]] = {}
    for path in store.refs.glob("*.json"):
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=StoredReference)
        except (FileNotFoundError, msgspec.MsgspecError):  # unreadable: pulled again when wanted
            continue
        references.setdefault(stored.digest, []).append(stored)
    found = []
    for directory in store.digests.glob("*-*"):
        digest = directory.name.replace("-", ":", 1)
        try:
            image = msgspec.json.decode((directory / "image.json").read_bytes(), type=StoredImage)
            used = (directory / "used").stat().st_mtime
        except (FileNotFoundError, msgspec.MsgspecError):
            continue
        names = references.get(digest, [])
        ids = frozenset({digest, *(name.id.rpartition("@")[2] for name in names)})
        by_tag = sorted((n.reference for n in names), key=lambda name: ("@" in name, name))
        found.append(Listed(by_tag, digest, image.size, image.disk, used, ids))
    return sorted(found, key=lambda image: -image.used)


def collect(
    store: ImageStore, in_use: Collection[str], unused: float = UNUSED, stale: float = STALE
) -> Collected:
    """Removes images that are not in `in_use` and were not asked for in `unused` seconds.

    Blocks for as long as the file system takes. Safe beside pulls, here or on another node.
    """
    now = time.time()
    removed = []
    for image in images(store):
        if image.ids.isdisjoint(in_use) and now - image.used >= unused:
            _forget(store, {image.digest})
            directory = store.directory(image.digest)
            condemned = store.tmp / f"gc-{uuid.uuid4().hex}"
            store.tmp.mkdir(mode=0o700, exist_ok=True)
            try:
                directory.rename(condemned)  # whole, so that nobody finds half an image
            except FileNotFoundError:
                continue  # another gc was first
            _forget(store, {image.digest})  # a pull may have found it until a moment ago
            shutil.rmtree(condemned)
            removed.append(image)
    leftovers = 0
    for path in store.tmp.glob("*"):
        try:
            old = now - path.stat().st_mtime >= stale
        except FileNotFoundError:
            continue
        if old:
            leftovers += 1
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return Collected(removed, leftovers)


def _forget(store: ImageStore, digests: Collection[str]) -> None:
    """References go first: who asks for one then pulls, instead of finding nothing behind it."""
    for path in store.refs.glob("*.json"):
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=StoredReference)
        except (FileNotFoundError, msgspec.MsgspecError):
            continue
        if stored.digest in digests:
            path.unlink(missing_ok=True)
