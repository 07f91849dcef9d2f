"""The API client against a small HTTP server: errors, retries, pages, watch lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube import client as kube
from hpk_kubelet.kube.client import STRATEGIC, ApiError, Client, Unreachable, pods, resource

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[Client]]


def status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []
    clients: list[Client] = []

    async def start(handler: Handler) -> Client:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}", patience=5)
        clients.append(client)
        return client

    yield start
    for client in clients:
        await client.close()
    for runner in runners:
        await runner.cleanup()


def test_paths() -> None:
    assert pods() == "/api/v1/pods"
    assert pods("ns", "p", "status") == "/api/v1/namespaces/ns/pods/p/status"
    assert kube.nodes("n") == "/api/v1/nodes/n"
    assert resource("a.b/v1", "xs", "ns", "../y") == "/apis/a.b/v1/namespaces/ns/xs/..%2Fy"


async def test_a_request_carries_what_it_should(serve: Serve) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.method, request.raw_path, request.content_type, await request.text()))
        return web.json_response({"kind": "Pod"})

    client = await serve(handler)
    await client.patch(pods("a", "b"), {"x": 1}, STRATEGIC, {"fieldManager": "m n"})
    await client.delete(pods("a", "b"), grace=0, uid="u")
    assert seen[0] == ("PATCH", pods("a", "b") + "?fieldManager=m+n", STRATEGIC, '{"x":1}')
    assert json.loads(seen[1][3]) == {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "gracePeriodSeconds": 0,
        "preconditions": {"uid": "u"},
    }


async def test_an_error_has_the_servers_words(serve: Serve) -> None:
    async def handler(_: web.Request) -> web.Response:
        return status(404, "NotFound", 'pods "x" not found')

    with pytest.raises(ApiError) as caught:
        await (await serve(handler)).get(pods("a", "x"))
    assert caught.value.not_found and not isinstance(caught.value, Unreachable)
    assert (caught.value.reason, str(caught.value)) == ("NotFound", 'pods "x" not found')


@pytest.mark.parametrize("value", ["\udc80", {1, 2, object()}])
async def test_what_is_no_json_is_the_callers_error(value: object) -> None:
    async with Client("http://127.0.0.1:1") as client:
        with pytest.raises(ApiError, match="no JSON"):
            await client.create(pods("a"), {"message": value})


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_it_tries_again_when_the_server_is_busy(serve: Serve, code: int) -> None:
    tries = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal tries
        tries += 1
        return web.json_response({}) if tries > 2 else status(code, "Busy", "later")

    await (await serve(handler)).get("/api")
    assert tries == 3


async def test_retry_after_is_honoured(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(kube.asyncio, "sleep", sleep)
    answers = [web.json_response({}, status=429, headers={"Retry-After": "3"}), web.Response()]

    async def handler(_: web.Request) -> web.Response:
        return answers.pop(0)

    await (await serve(handler)).raw("GET", "/api")
    assert slept == [3.0]


async def test_patience_ends(serve: Serve) -> None:
    async def handler(_: web.Request) -> web.Response:
        return status(503, "ServiceUnavailable", "starting")

    client = await serve(handler)
    with pytest.raises(Unreachable, match="starting"):
        await client.get("/api", patience=0)
    nobody = Client("http://127.0.0.1:1", patience=0.2)
    with pytest.raises(Unreachable) as caught:
        await nobody.get("/api")
    assert caught.value.status == 0
    await nobody.close()


async def test_a_list_is_all_pages_and_items_have_kinds(serve: Serve) -> None:
    expired = False

    async def handler(request: web.Request) -> web.Response:
        nonlocal expired
        token = int(request.query.get("continue", "0"))
        if token == 2 and not expired:
            expired = True
            return status(410, "Expired", "the continue token is too old")
        meta = {"resourceVersion": "7", **({"continue": str(token + 1)} if token < 2 else {})}
        items = [{"metadata": {"name": str(token)}}]
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items}
        )

    listed = await (await serve(handler)).list(pods(), page=1)
    assert [item["metadata"]["name"] for item in listed["items"]] == ["0", "1", "2"]
    assert {(item["kind"], item["apiVersion"]) for item in listed["items"]} == {("Pod", "v1")}
    assert listed["metadata"]["resourceVersion"] == "7"


async def test_watch_lines_may_be_cut_anywhere(serve: Serve) -> None:
    events = [
        {"type": "ADDED", "object": {"n": n, "data": "é" * size}}
        for n, size in enumerate([1, 0, 200_000, 3])
    ]
    text = b"".join(json.dumps(e, ensure_ascii=False).encode() + b"\n" for e in events)

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for start in range(0, len(text), 65_521):
            await answer.write(text[start : start + 65_521])
        return answer

    client = await serve(handler)
    got = [event async for event in client.watch(pods())]
    assert got == [("ADDED", e["object"]) for e in events]


async def test_a_watch_that_breaks_or_is_refused_says_so(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.query.get("resourceVersion"):
            return status(410, "Expired", "too old")
        answer = web.StreamResponse()
        await answer.prepare(request)
        assert request.transport
        request.transport.abort()
        return answer

    client = await serve(handler)
    with pytest.raises(ApiError) as caught:
        [e async for e in client.watch(pods(), {"resourceVersion": "1"})]
    assert caught.value.expired
    with pytest.raises(Unreachable):
        [e async for e in client.watch(pods())]


async def test_no_more_requests_at_once_than_asked_for(serve: Serve) -> None:
    now = most = 0

    async def handler(_: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return web.json_response({})

    address = (await serve(handler)).server
    async with Client(address, concurrency=3) as client:
        await asyncio.gather(*(client.get("/api") for _ in range(12)))
    assert most == 3


async def test_a_kubeconfig_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    with pytest.raises(HPKError, match="does not exist"):
        await Client.from_kubeconfig(path)
    path.write_text("{}")
    with pytest.raises(HPKError, match="not a usable kubeconfig"):
        await Client.from_kubeconfig(path)


async def test_the_token_of_a_kubeconfig_is_used(serve: Serve, tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"token": request.headers.get("Authorization")})

    path = tmp_path / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": (await serve(handler)).server}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    async with await Client.from_kubeconfig(path) as client:
        assert await client.get("/api") == {"token": "Bearer t"}
