"""Nonsense at the kubelet's two doors: whoever sends it is turned away, and the others are served.

Each test sends for HPK_FUZZ_SECONDS (default: a moment) from a seed that it prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import time
from typing import Any

import aiohttp
import pytest
from aiohttp.http_exceptions import HttpProcessingError
from test_server_agents import served  # noqa: F401 (fixtures)
from test_server_api import kubelet  # noqa: F401
from yarl import URL

from hpk_kubelet.agent import wire

SECONDS = float(os.environ.get("HPK_FUZZ_SECONDS", "1"))
pytestmark = pytest.mark.timeout(SECONDS + 600)
SEED = int(os.environ.get("HPK_FUZZ_SEED", time.time_ns() % 10**9))


@pytest.fixture
def dice() -> random.Random:
    print("seed", SEED)
    return random.Random(SEED)


@pytest.fixture
async def unhandled() -> Any:
    """What nobody caught: exceptions of tasks and callbacks."""
    found: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(context))
    yield found
    assert found == []


def crashes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged with an exception, but for a request that is no HTTP: aiohttp answers it
    with 400 itself."""
    return [
        record.getMessage() + repr(record.exc_info[1])
        for record in caplog.records
        if record.exc_info and not isinstance(record.exc_info[1], HttpProcessingError)
    ]


def nonsense(dice: random.Random, depth: int = 2) -> Any:
    """Any JSON value."""
    kinds = [
        lambda: None,
        lambda: dice.choice([True, False]),
        lambda: dice.choice([0, -1, 1, 2**31, 2**63, -(2**63), 1e308, 0.5, float(dice.random())]),
        lambda: dice.choice(["", "c", "u", "main", "\x00", "é☃", "../..", "$(id)", "a" * 5000]),
        lambda: "".join(chr(dice.randrange(1, 0x3000)) for _ in range(dice.randrange(20))),
    ]
    if depth:
        kinds += [
            lambda: [nonsense(dice, depth - 1) for _ in range(dice.randrange(4))],
            lambda: {str(nonsense(dice, 0)): nonsense(dice, depth - 1) for _ in range(3)},
        ]
    return dice.choice(kinds)()


FIELDS = {
    "hello": ("uid", "token", "version", "state", "events"),
    "state": ("state",),
    "event": ("event",),
    "refresh": (),
    "opened": ("stream", "error"),
    "closed": ("stream", "error"),
    "window": ("stream", "bytes"),
    "stop": ("grace",),
    "plan": ("plan",),
}


def frame(dice: random.Random) -> bytes:
    kind = dice.randrange(6)
    if kind == 0:
        return dice.randbytes(dice.randrange(200))
    if kind == 1:
        return wire.encode_data(
            dice.randrange(1 << 32), dice.randrange(256), dice.randbytes(dice.randrange(3000))
        )
    if kind == 2:  # a message that is no JSON, or no object
        payload = json.dumps(nonsense(dice)).encode()[: dice.randrange(1, 100)]
        return len(payload).to_bytes(4, "big") + bytes(6) + payload
    name = dice.choice(list(FIELDS))
    message = {"type": name, **{f: nonsense(dice) for f in FIELDS[name] if dice.random() < 0.9}}
    if dice.random() < 0.3:
        message[str(nonsense(dice, 0))] = nonsense(dice)
    return wire.encode_message(message)


async def test_the_agents_door(served: Any, dice: random.Random, unhandled: list[Any]) -> None:  # noqa: F811
    owner, server, dial = served
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        peer = await dial()
        with contextlib.suppress(ConnectionError, OSError):
            if dice.random() < 0.7:
                peer.hello()
            for _ in range(dice.randrange(1, 30)):
                peer.writer.write(frame(dice))
                await peer.writer.drain()
            await asyncio.sleep(0)
        peer.writer.close()
    good = await dial()
    owner.connected.clear()
    good.hello()
    await asyncio.wait_for(owner.connected.wait(), 5)
    assert server.agents["u"] is owner.agent


PATHS = [
    "containerLogs", "exec", "attach", "portForward", "run", "cri", "logs", "pods", "stats",
    "metrics", "healthz", "configz", "debug", "ns", "p", "u", "c", "none", "..", ".", "%2e%2e",
    "%00", "%ff", "resource", "summary", "cadvisor", "probes", "é",
]  # fmt: skip
QUERIES = [
    "follow", "tailLines", "limitBytes", "sinceSeconds", "sinceTime", "timestamps", "previous",
    "command", "input", "stdin", "output", "stdout", "error", "stderr", "tty", "port", "stream",
]  # fmt: skip
VALUES = ["", "0", "1", "-1", "true", "x", "9" * 30, "\x00", "é", "1e9", "2026-01-01T00:00:00Z"]
HEADERS = [
    {}, {"Upgrade": "SPDY/3.1", "Connection": "Upgrade"}, {"Content-Type": "application/json"},
    {"Upgrade": "websocket", "Connection": "Upgrade"}, {"X-Stream-Protocol-Version": "v4"},
    {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
     "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol": "é,v9"},
]  # fmt: skip


async def test_the_kubelets_api(
    kubelet: Any,  # noqa: F811
    dice: random.Random,
    unhandled: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    _, session = kubelet
    api = session()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        path = "/" + "/".join(dice.choice(PATHS) for _ in range(dice.randrange(6)))
        query = "&".join(
            f"{dice.choice(QUERIES)}={URL.build(path=dice.choice(VALUES)).raw_path}"
            for _ in range(dice.randrange(4))
        )
        url = URL(f"{path}?{query}" if query else path, encoded=True)
        method = dice.choice(["GET", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
        body = None if dice.random() < 0.5 else dice.randbytes(dice.randrange(500))
        headers = dice.choice(HEADERS)
        timeout = aiohttp.ClientTimeout(total=60)  # a hang, however busy the machine
        try:
            async with api.request(method, url, data=body, headers=headers, timeout=timeout) as got:
                await got.read()
        except TimeoutError:
            pytest.fail(f"no answer to {method} {url} {headers} {body!r}")
        except (aiohttp.ClientError, ValueError):
            pass  # it was turned away, or could not even be sent
    async with api.get("/healthz") as answer:
        assert (answer.status, await answer.text()) == (200, "ok")
    assert crashes(caplog) == []


async def test_what_an_attached_client_may_send(
    kubelet: Any,  # noqa: F811
    dice: random.Random,
    unhandled: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """exec and port-forward, by WebSocket."""
    from test_server_api import Agent

    caplog.set_level(logging.ERROR)
    pod, session = kubelet
    pod.agent, pod.running = Agent(), True
    api = session()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        path, protocol = dice.choice(
            [
                ("/exec/ns/p/c?command=x&input=1&output=1&error=1", "v5.channel.k8s.io"),
                ("/attach/ns/p/c?input=1&output=1&tty=1", "v5.channel.k8s.io"),
                ("/portForward/ns/p", "SPDY/3.1+portforward.k8s.io"),
            ]
        )
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            async with api.ws_connect(path, protocols=[protocol]) as socket:
                for _ in range(dice.randrange(1, 20)):
                    if dice.random() < 0.1:
                        await socket.send_str(str(nonsense(dice)))
                    else:
                        first = bytes([dice.choice([0, 1, 2, 3, 4, 255, 128, dice.randrange(256)])])
                        await socket.send_bytes(first + dice.randbytes(dice.randrange(300)))
                await socket.close()
    assert crashes(caplog) == []
