"""Who watches what, and that it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hpk_kubelet.node.watches import Watches


class Api:
    """Lists with nothing in them; `send` feeds the watch of one object."""

    def __init__(self) -> None:
        self.feeds: dict[str, asyncio.Queue[Any]] = {}
        self.forgotten: list[str] = []

    async def list(self, path: str, params: dict[str, str]) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": []}

    async def watch(self, path: str, params: dict[str, Any]) -> AsyncIterator[tuple[str, Any]]:
        name = params["fieldSelector"].removeprefix("metadata.name=")
        feed = self.feeds[f"{path} {name}"] = asyncio.Queue()
        try:
            while True:
                yield await feed.get()
        finally:
            del self.feeds[f"{path} {name}"]

    def forget(self, namespace: str, kind: str, name: str) -> None:
        self.forgotten.append(name)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_objects_are_watched_once_and_as_long_as_wanted() -> None:
    api = Api()
    watches = Watches(api, api)  # type: ignore[arg-type]
    told: list[str] = []
    c, s = ("ns", "ConfigMap", "c"), ("ns", "Secret", "s")
    watches.want("one", [c, s], lambda: told.append("one"))
    watches.want("two", [c], lambda: told.append("two"))
    paths = {"/api/v1/namespaces/ns/configmaps c", "/api/v1/namespaces/ns/secrets s"}
    await until(lambda: set(api.feeds) == paths)
    meta = {"namespace": "ns", "name": "c", "uid": "u", "resourceVersion": "2"}
    api.feeds["/api/v1/namespaces/ns/configmaps c"].put_nowait(("ADDED", {"metadata": meta}))
    await until(lambda: told == ["one", "two"])
    assert api.forgotten == ["c"]
    watches.want("one", [c], lambda: None)
    await until(lambda: set(api.feeds) == {"/api/v1/namespaces/ns/configmaps c"})
    watches.release("one")
    assert api.feeds
    watches.release("two")
    await until(lambda: not api.feeds)


async def test_what_is_immutable_is_watched_no_more() -> None:
    api = Api()
    watches = Watches(api, api)  # type: ignore[arg-type]
    told: list[str] = []
    watches.want("one", [("ns", "Secret", "s")], lambda: told.append("one"))
    await until(lambda: api.feeds)
    meta = {"namespace": "ns", "name": "s", "uid": "u", "resourceVersion": "2"}
    api.feeds["/api/v1/namespaces/ns/secrets s"].put_nowait(
        ("ADDED", {"metadata": meta, "immutable": True})
    )
    await until(lambda: told and not api.feeds)
    watches.release("one")
    await watches.close()
