"""Watches of the single ConfigMaps and Secrets that running pods have as files.

Like the kubelet's (pkg/kubelet/util/manager/watch_based_manager.go): the Node authorizer lets a
node watch what its pods name, one object at a time. What changes is told to the pods that want it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hpk_kubelet.kube.client import Client, resource
from hpk_kubelet.kube.reflector import Change, Reflector
from hpk_kubelet.node.objects import PLURALS, ObjectCache

log = logging.getLogger(__name__)

MOST = 500
"""Watches at a time, each a connection; what is beyond it the pods look after from time to time."""

Wanted = tuple[str, str, str]  # namespace, kind, name


@dataclass
class _Watch:
    task: asyncio.Task[None] | None
    pods: dict[str, Callable[[], None]] = field(default_factory=dict)  # by uid


class Watches:
    def __init__(self, client: Client, objects: ObjectCache) -> None:
        self._client = client
        self._objects = objects
        self._watches: dict[Wanted, _Watch] = {}

    def want(self, uid: str, wanted: Iterable[Wanted], changed: Callable[[], None]) -> bool:
        """The pod is told of changes of exactly these objects from now on; False if there are too
        many watches for all of them."""
        keys = set(wanted)
        for key in [k for k, w in self._watches.items() if uid in w.pods and k not in keys]:
            self._drop(key, uid)
        for key in keys:
            watch = self._watches.get(key)
            if watch is None:
                if len(self._watches) >= MOST:
                    continue
                watch = self._watches[key] = _Watch(asyncio.create_task(self._follow(key)))
            watch.pods[uid] = changed
        return all(key in self._watches for key in keys)

    def release(self, uid: str) -> None:
        self.want(uid, (), lambda: None)

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop(self, key: Wanted, uid: str) -> None:
        watch = self._watches[key]
        del watch.pods[uid]
        if not watch.pods:
            if watch.task is not None:
                watch.task.cancel()
            del self._watches[key]

    async def _follow(self, key: Wanted) -> None:
        namespace, kind, name = key

        def changed(change: Change) -> None:
            self._objects.forget(namespace, kind, name)
            watch = self._watches.get(key)
            if watch is None:
                return
            for tell in list(watch.pods.values()):
                tell()
            if change.new is not None and change.new.get("immutable") and watch.task is not None:
                watch.task.cancel()  # nothing more will come
                watch.task = None

        path = resource("v1", PLURALS[kind], namespace)
        reflector = Reflector(
            self._client, path, field_selector=f"metadata.name={name}", on_change=changed
        )
        await reflector.run()
