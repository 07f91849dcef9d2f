"""The scheduler's hand in storage: sees claims, volumes and classes, and has claims bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from hpk_kubelet.controllers.claims import (
    BOUND_BY_CONTROLLER,
    SELECTED_NODE,
    Claims,
    Object,
    Step,
    Storage,
    binding,
    users,
)
from hpk_kubelet.kube.client import ApiError, Client, pods, resource
from hpk_kubelet.kube.reflector import Change, Reflector, key_of

log = logging.getLogger(__name__)

STORAGE = "storage.k8s.io/v1"


class VolumeBinder:
    """`on_claim` hears the key of each claim that changed, `on_storage` that something else did."""

    def __init__(
        self,
        client: Client,
        on_claim: Callable[[str], None],
        on_storage: Callable[[], None],
    ) -> None:
        self._client = client
        self._claims = Reflector(
            client,
            resource("v1", "persistentvolumeclaims"),
            on_change=lambda change: on_claim(key_of(change.object)),
        )

        def changed(_: Change) -> None:
            on_storage()

        self._volumes = Reflector(client, resource("v1", "persistentvolumes"), on_change=changed)
        self._classes = Reflector(client, resource(STORAGE, "storageclasses"), on_change=changed)
        self.single = asyncio.Lock()
        """Held from the look at who uses a ReadWriteOncePod claim to the pod's binding."""

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [reflector.run() for reflector in self._all]

    @property
    def _all(self) -> tuple[Reflector, ...]:
        return (self._claims, self._volumes, self._classes)

    async def storage(self) -> Storage:
        """What there is now; waits for the first look."""
        for reflector in self._all:
            await reflector.synced.wait()
        return Storage(self._claims.store, self._volumes.store, self._classes.store)

    async def bind(self, claims: Claims, node: Object) -> None:
        """Has the delayed claims bound for this node; the claims' change tells when they are."""
        for step in binding(claims, node, await self.storage()):
            await self._take(step, node["metadata"]["name"])

    async def _take(self, step: Step, node: str) -> None:
        meta = step.claim["metadata"]
        if step.volume is None:
            path = resource("v1", "persistentvolumeclaims", meta["namespace"], meta["name"])
            change: Object = {
                "resourceVersion": meta["resourceVersion"],
                "annotations": {SELECTED_NODE: node},
            }
            body: Object = {"metadata": change}
        else:
            volume = step.volume["metadata"]
            path = resource("v1", "persistentvolumes", None, volume["name"])
            change = {
                "resourceVersion": volume["resourceVersion"],
                "annotations": {BOUND_BY_CONTROLLER: "yes"},
            }
            ref = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
            ref |= {key: meta[key] for key in ("namespace", "name", "uid", "resourceVersion")}
            body = {"metadata": change, "spec": {"claimRef": ref}}
        try:
            await self._client.patch(path, body)
        except ApiError as e:
            if not (e.conflict or e.not_found):
                raise
            log.info("%s: somebody was faster, its change tells how to go on", path)

    async def in_use(self, pod: Object, claims: Claims) -> bool:
        """Whether another pod uses one of the claims that one pod alone may use."""
        meta = pod["metadata"]
        others = (await self._client.list(pods(meta["namespace"])))["items"]
        return users(others, claims.once_per_pod, meta["uid"])
