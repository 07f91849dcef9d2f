"""Status writer, event recorder and leases against a scripted API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from hpk_kubelet.kube import events as events_module
from hpk_kubelet.kube import leases, status, times
from hpk_kubelet.kube.client import ApiError, Unreachable
from hpk_kubelet.kube.events import EventRecorder, SpamFilter, reference
from hpk_kubelet.kube.status import StatusWriter, status_patch

NOON = datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=UTC)
POD = {
    "kind": "Pod",
    "apiVersion": "v1",
    "metadata": {"namespace": "ns", "name": "p", "uid": "u", "resourceVersion": "7"},
}


class Api:
    """Records calls; `answers` gives an exception to raise, or None, for each in turn."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str, Any]] = []
        self.gate: Callable[[], Awaitable[object]] | None = None

    async def _call(self, verb: str, path: str, body: Any) -> Any:
        self.calls.append((verb, path, body))
        if self.gate:
            await self.gate()
        answer = self.answers.pop(0) if self.answers else None
        if answer:
            raise answer
        return {"metadata": {}}

    async def patch(self, path: str, body: Any, *_: Any, **__: Any) -> Any:
        return await self._call("patch", path, body)

    async def create(self, path: str, body: Any, *_: Any, **__: Any) -> Any:
        return await self._call("create", path, body)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (status, events_module):
        monkeypatch.setattr(module, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(status, "CONFLICT_PAUSE", 0.0)


def test_times() -> None:
    east = NOON.astimezone(timezone(timedelta(hours=2)))
    assert times.rfc3339(east) == "2026-01-02T12:00:00Z"
    assert times.rfc3339_micro(east) == "2026-01-02T12:00:00.123456Z"
    assert times.parse("2026-01-02T12:00:00.123456Z") == NOON


def test_a_status_patch_leaves_nothing_behind() -> None:
    patch = status_patch(
        "u",
        {"phase": "Running", "podIPs": [{"ip": "b"}], "conditions": [{"type": "Ready"}]},
        {"phase": "Pending", "hostIP": "h"},
    )
    assert patch == {
        "metadata": {"uid": "u"},
        "status": {
            "phase": "Running",
            "reason": None,
            "message": None,
            "hostIP": None,
            "podIPs": [{"$patch": "replace"}, {"ip": "b"}],
            "conditions": [{"type": "Ready", "reason": None, "message": None}],
        },
    }


async def writing(writer: StatusWriter) -> asyncio.Task[None]:
    task = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    return task


def phases(api: Api) -> list[str]:
    return [body["status"]["phase"] for _, _, body in api.calls]


async def test_the_latest_status_wins_and_one_is_in_flight_per_pod() -> None:
    api, go = Api(), asyncio.Event()
    api.gate = go.wait
    writer = StatusWriter(api)  # type: ignore[arg-type]
    task = await writing(writer)
    writer.set("ns", "p", "u", {"phase": "1"})
    await asyncio.sleep(0.01)
    for phase in "234":
        writer.set("ns", "p", "u", {"phase": phase})
    await asyncio.sleep(0.01)
    assert phases(api) == ["1"]
    go.set()
    await writer.flush()
    writer.set("ns", "p", "u", {"phase": "4"})  # equal: not written
    await writer.flush()
    assert phases(api) == ["1", "4"]
    assert api.calls[0][1] == "/api/v1/namespaces/ns/pods/p/status"
    task.cancel()


async def test_a_lost_server_is_waited_for_and_the_newest_status_is_kept() -> None:
    api = Api(
        Unreachable(0, "", "refused"),
        ApiError(403, "Forbidden", "roles are not there yet"),
        ApiError(409, "Conflict", "try again"),
    )
    writer = StatusWriter(api)  # type: ignore[arg-type]
    task = await writing(writer)
    writer.set("ns", "p", "u", {"phase": "1"})
    await asyncio.wait_for(writer.flush(), 5)
    assert phases(api) == ["1", "1", "1", "1"]
    task.cancel()


UID_CAUSE = {"details": {"causes": [{"field": "metadata.uid"}]}}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ApiError(404, "NotFound", "gone"), False),
        (ApiError(422, "Invalid", "field is immutable", UID_CAUSE), False),
        (ApiError(409, "Conflict", "Precondition failed: UID in precondition: a"), False),
        (ApiError(422, "Invalid", "phase", {}), True),
    ],
)
async def test_a_refused_status_is_not_repeated(error: ApiError, told: bool) -> None:
    heard: list[str] = []
    api = Api(error)
    writer = StatusWriter(api, on_error=lambda uid, _: heard.append(uid))  # type: ignore[arg-type]
    task = await writing(writer)
    writer.set("ns", "p", "u", {"phase": "1"})
    await asyncio.wait_for(writer.flush(), 5)
    assert len(api.calls) == 1 and heard == (["u"] if told else [])
    if told:
        writer.set("ns", "p", "u", {"phase": "1"})
        writer.set("ns", "p", "u", {"phase": "1"})
        await asyncio.wait_for(writer.flush(), 5)
        assert len(api.calls) == 1
        writer.set("ns", "p", "u", {"phase": "2"})
        await asyncio.wait_for(writer.flush(), 5)
        assert len(api.calls) == 2
    task.cancel()


async def test_a_forgotten_pod_is_not_written() -> None:
    api = Api()
    writer = StatusWriter(api)  # type: ignore[arg-type]
    writer.set("ns", "p", "u", {"phase": "1"})
    writer.forget("u")
    task = await writing(writer)
    await asyncio.wait_for(writer.flush(), 5)
    assert api.calls == []
    task.cancel()


def test_a_reference() -> None:
    ref = reference(POD, "spec.containers{main}")
    assert ref["fieldPath"] == "spec.containers{main}" and ref["uid"] == "u"
    assert reference(ref) == ref


def test_the_spam_filter_allows_a_burst_then_one_in_five_minutes() -> None:
    spam = SpamFilter(burst=3, refill_seconds=300)
    assert [spam.allow("a", 0) for _ in range(5)] == [True, True, True, False, False]
    assert spam.allow("b", 0)
    assert [spam.allow("a", t) for t in (299, 301, 302)] == [False, True, False]


async def record(api: Api, *records: dict[str, Any]) -> None:
    recorder = EventRecorder(api, host="h", clock=lambda: NOON, monotonic=lambda: 0)  # type: ignore[arg-type]
    for kwargs in records:
        recorder.record(POD, "Normal", **kwargs)
    task = asyncio.create_task(recorder.run())
    await asyncio.wait_for(recorder.flush(), 5)
    task.cancel()


async def test_an_event_as_the_kubelet_sends_it() -> None:
    api = Api()
    await record(api, {"reason": "Pulled", "message": "m", "field_path": "spec.containers{c}"})
    [(verb, path, event)] = api.calls
    assert (verb, path) == ("create", "/api/v1/namespaces/ns/events")
    assert event["metadata"]["name"].startswith("p.") and event["metadata"]["namespace"] == "ns"
    assert event["source"] == {"component": "hpk-kubelet", "host": "h"}
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-01-02T12:00:00Z"
    assert event["involvedObject"]["fieldPath"] == "spec.containers{c}"


async def test_the_same_event_again_raises_the_count() -> None:
    api = Api()
    same = {"reason": "BackOff", "message": "m"}
    await record(api, same, same, {"reason": "BackOff", "message": "other"}, same)
    assert [verb for verb, _, _ in api.calls] == ["create", "patch", "create", "patch"]
    assert api.calls[3][2] == {"count": 3, "lastTimestamp": "2026-01-02T12:00:00Z"}
    assert api.calls[1][1].endswith("/" + api.calls[0][2]["metadata"]["name"])


async def test_an_event_that_expired_meanwhile_is_made_anew() -> None:
    api = Api(None, ApiError(404, "NotFound", "gone"))
    same = {"reason": "BackOff", "message": "m"}
    await record(api, same, same)
    assert [verb for verb, _, _ in api.calls] == ["create", "patch", "create"]


async def test_events_outlive_the_api_server_and_an_own_name_is_made_once() -> None:
    api = Api(Unreachable(0, "", "refused"), None, ApiError(409, "AlreadyExists", "exists"))
    await record(
        api, {"reason": "A", "message": "a"}, {"reason": "B", "message": "b", "name": "p.started"}
    )
    assert [body["reason"] for _, _, body in api.calls] == ["A", "A", "B"]
    assert api.calls[2][2]["metadata"]["name"] == "p.started"


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (ApiError(403, "Forbidden", "no role"), events_module.FORBIDDEN_TRIES),
        (
            ApiError(
                403,
                "Forbidden",
                "going",
                {"details": {"causes": [{"reason": "NamespaceTerminating"}]}},
            ),
            1,
        ),
        (ApiError(422, "Invalid", "bad"), 1),
    ],
)
async def test_a_refused_event_is_given_up(error: ApiError, times: int) -> None:
    api = Api(*[error] * 10)
    await record(api, {"reason": "A", "message": "a"})
    assert len(api.calls) == times


async def test_a_long_message_is_cut() -> None:
    api = Api()
    await record(api, {"reason": "A", "message": "x" * 5000})
    assert len(api.calls[0][2]["message"]) == 1024


async def test_a_lease_is_renewed_or_made() -> None:
    api = Api(ApiError(404, "NotFound", "no lease"))
    await leases.renew(api, "n", "uid", 40, NOON)  # type: ignore[arg-type]
    (_, path, renewal), (verb, where, whole) = api.calls
    assert path == "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n"
    assert renewal == {
        "spec": {
            "holderIdentity": "n",
            "leaseDurationSeconds": 40,
            "renewTime": "2026-01-02T12:00:00.123456Z",
        }
    }
    assert (verb, where) == ("create", path.removesuffix("/n"))
    assert whole["metadata"]["ownerReferences"][0]["uid"] == "uid"


async def test_a_heartbeat_tells_how_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RETRY_PAUSE", 0.0)
    api = Api(Unreachable(0, "", "refused"), None)
    heard: asyncio.Queue[ApiError | None] = asyncio.Queue()
    beat = asyncio.create_task(leases.heartbeat(api, "n", on_result=heard.put_nowait))  # type: ignore[arg-type]
    assert isinstance(await heard.get(), Unreachable) and await heard.get() is None
    beat.cancel()
