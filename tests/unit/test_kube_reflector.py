"""The reflector against a scripted API: what subscribers hear, whatever the server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hpk_kubelet.kube import reflector as module
from hpk_kubelet.kube.client import ApiError, Unreachable
from hpk_kubelet.kube.reflector import Change, Reflector, key_of


def pod(name: str, version: int, uid: str | None = None) -> dict[str, Any]:
    meta = {"namespace": "ns", "name": name, "uid": uid or name, "resourceVersion": str(version)}
    return {"metadata": meta}


class Api:
    """Each list and each watch takes the next step of its script; then watches hang."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self.lists, self.watches, self.asked = lists, watches, []
        self.done = asyncio.Event()

    async def list(self, path: str, params: Any) -> Any:
        self.asked.append("list")
        step = self.lists.pop(0)
        if isinstance(step, Exception):
            raise step
        version, items = step
        return {"metadata": {"resourceVersion": str(version)}, "items": items}

    async def watch(self, path: str, params: Any) -> AsyncIterator[tuple[str, Any]]:
        self.asked.append(int(params["resourceVersion"]))
        if not self.watches:
            self.done.set()
            await asyncio.Event().wait()
        for step in self.watches.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.0)


async def follow(api: Api) -> tuple[list[tuple[str, str]], Reflector]:
    heard: list[tuple[str, str]] = []

    def on_change(change: Change) -> None:
        meta = change.object["metadata"]
        heard.append((change.type, f"{meta['uid']}@{meta['resourceVersion']}"))

    reflector = Reflector(api, "/pods", on_change=on_change)  # type: ignore[arg-type]
    task = asyncio.create_task(reflector.run())
    await asyncio.wait_for(api.done.wait(), 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return heard, reflector


async def test_list_then_watch() -> None:
    api = Api(
        [(5, [pod("a", 3)])],
        [
            [
                ("ADDED", pod("b", 6)),
                ("MODIFIED", pod("a", 7)),
                ("BOOKMARK", {"metadata": {"resourceVersion": "9"}}),
                ("DELETED", pod("b", 10)),
            ]
        ],
    )
    heard, reflector = await follow(api)
    assert heard == [("added", "a@3"), ("added", "b@6"), ("modified", "a@7"), ("deleted", "b@10")]
    assert list(reflector.store) == ["ns/a"] and reflector.get("a", "ns") == pod("a", 7)
    assert api.asked == ["list", 5, 10]  # a watch that ends goes on where it stopped


async def test_a_broken_connection_resumes_without_a_list() -> None:
    broken = Unreachable(0, "Unreachable", "reset")
    api = Api([(5, [])], [[("ADDED", pod("a", 6)), broken], [("ADDED", pod("b", 7))]])
    heard, _ = await follow(api)
    assert heard == [("added", "a@6"), ("added", "b@7")]
    assert api.asked == ["list", 5, 6, 7]


@pytest.mark.parametrize(
    "gone",
    [
        ApiError(410, "Expired", "too old resource version"),
        ("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}),
        ApiError(403, "Forbidden", "not yet"),
    ],
)
async def test_what_was_missed_is_the_difference_of_two_lists(gone: Any) -> None:
    api = Api(
        [
            (5, [pod("same", 1), pod("gone", 2), pod("new", 3), pod("again", 4, "u1")]),
            (20, [pod("same", 1), pod("new", 12), pod("again", 13, "u2"), pod("more", 14)]),
        ],
        [[gone]],
    )
    heard, _ = await follow(api)
    assert heard[4:] == [
        ("deleted", "gone@2"),
        ("modified", "new@12"),
        ("deleted", "u1@4"),
        ("added", "u2@13"),
        ("added", "more@14"),
    ]
    assert api.asked == ["list", 5, "list", 20]


async def test_lists_are_tried_again() -> None:
    api = Api([Unreachable(0, "", "refused"), ApiError(403, "Forbidden", "no"), (1, [])], [])
    _, reflector = await follow(api)
    assert reflector.synced.is_set() and api.asked == ["list", "list", "list", 1]


async def test_an_event_that_is_older_than_known_state_is_told_once() -> None:
    api = Api([(5, [pod("a", 5)])], [[("ADDED", pod("a", 5))]])
    heard, _ = await follow(api)
    assert heard == [("added", "a@5")]


async def test_a_subscriber_that_fails_stops_nobody() -> None:
    api = Api([(5, [pod("a", 1), pod("b", 2)])], [])
    heard: list[str] = []

    def bad(_: Change) -> None:
        raise KeyError("spec")

    reflector = Reflector(api, "/pods", on_change=bad)  # type: ignore[arg-type]
    reflector.subscribe(lambda change: heard.append(key_of(change.object)))
    task = asyncio.create_task(reflector.run())
    await asyncio.wait_for(api.done.wait(), 5)
    task.cancel()
    assert heard == ["ns/a", "ns/b"]
