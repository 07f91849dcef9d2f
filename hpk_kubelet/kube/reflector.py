"""A local copy of one collection, kept up to date by list and watch (client-go's Reflector)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, ValuesView
from typing import Literal, NamedTuple

from hpk_kubelet.kube.client import ApiError, Client, Object, Unreachable

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
WATCH_SECONDS = (300, 600)
"""The range from which each watch's length is drawn, as client-go does."""


class Change(NamedTuple):
    type: Literal["added", "modified", "deleted"]
    old: Object | None
    new: Object | None

    @property
    def object(self) -> Object:
        """The newest form there is: `new`, or of a deleted object its last state."""
        found = self.new if self.new is not None else self.old
        assert found is not None
        return found


def key_of(obj: Object) -> str:
    """`namespace/name`, or `name` for what has no namespace."""
    meta = obj["metadata"]
    namespace = meta.get("namespace")
    return f"{namespace}/{meta['name']}" if namespace else str(meta["name"])


class Reflector:
    """`store` maps `namespace/name` to the newest known object; objects must not be changed.

    Subscribers are called in the event loop, in the order of the API server's events, and must
    not block. What was missed while the API server was away is delivered as the difference
    between two lists; an object deleted and made again under its name comes as two changes.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        *,
        field_selector: str = "",
        label_selector: str = "",
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        self.store: dict[str, Object] = {}
        self.synced = asyncio.Event()
        self._client = client
        self._path = path
        self._selectors = {
            name: value
            for name, value in (
                ("fieldSelector", field_selector),
                ("labelSelector", label_selector),
            )
            if value
        }
        self._subscribers = [on_change] if on_change else []
        self._version = ""  # empty: the next step is a list

    def subscribe(self, on_change: Callable[[Change], None]) -> None:
        self._subscribers.append(on_change)

    def get(self, name: str, namespace: str | None = None) -> Object | None:
        return self.store.get(f"{namespace}/{name}" if namespace else name)

    def values(self) -> ValuesView[Object]:
        return self.store.values()

    async def run(self) -> None:
        """Until cancelled. Every error of the API server is weather: logged once, tried again."""
        loop = asyncio.get_running_loop()
        pause, told = FIRST_PAUSE, ""
        while True:
            started, failure = loop.time(), ""
            try:
                if not self._version:
                    await self._list()
                await self._watch()  # returns when the server ends it: go on from where it was
            except ApiError as e:
                if not isinstance(e, Unreachable):
                    self._version = ""  # expired or refused: only a new list can tell
                if not e.expired:
                    failure = str(e)
            if loop.time() - started > LONGEST_PAUSE:
                pause, told = FIRST_PAUSE, ""
            if failure and failure != told:
                log.warning("%s: %s; trying again", self._path, failure)
                told = failure
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _list(self) -> None:
        listed = await self._client.list(self._path, self._selectors)
        items = {key_of(item): item for item in listed["items"]}
        for key in [key for key in self.store if key not in items]:
            self._remove(key, self.store[key])
        for key, item in items.items():
            self._put(key, item)
        self._version = listed["metadata"]["resourceVersion"]
        self.synced.set()

    async def _watch(self) -> None:
        params: dict[str, str | int] = {
            **self._selectors,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": random.randint(*WATCH_SECONDS),
        }
        async for kind, obj in self._client.watch(self._path, params):
            if kind == "ERROR":
                code, reason = obj.get("code") or 500, obj.get("reason") or ""
                raise ApiError(code, reason, obj.get("message") or "the watch failed", obj)
            version = obj["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self._remove(key_of(obj), obj)
            elif kind != "BOOKMARK":
                self._put(key_of(obj), obj)
            self._version = version

    def _put(self, key: str, new: Object) -> None:
        new["metadata"].pop("managedFields", None)  # half of an object, and nobody here reads it
        old = self.store.get(key)
        if old is not None and old["metadata"]["uid"] != new["metadata"]["uid"]:
            self._remove(key, old)
            old = None
        if old is None:
            self.store[key] = new
            self._tell(Change("added", None, new))
        elif old["metadata"]["resourceVersion"] != new["metadata"]["resourceVersion"]:
            self.store[key] = new
            self._tell(Change("modified", old, new))

    def _remove(self, key: str, last: Object) -> None:
        if self.store.pop(key, None) is not None:
            self._tell(Change("deleted", last, None))

    def _tell(self, change: Change) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber(change)
            except Exception:  # one malformed object must not stop the others
                log.exception("%s: handling %s %s", self._path, change.type, key_of(change.object))
