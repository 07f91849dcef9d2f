"""GET as probes make it: what is sent, what of the answer counts, which redirects are followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hpk_kubelet.agent.httpget import Answer, HttpError, address, get, parse, request


async def ask(answers: Callable[[str], bytes], path: str = "/") -> tuple[Answer, list[str]]:
    """(what came of it, the paths that were asked for)"""
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split()[1].decode())
        writer.write(answers(asked[-1]))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await get(-1, f"http://127.0.0.1:{port}{path}", []), asked
    finally:
        server.close()


def said(status: int, *headers: str, body: str = "") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Words", *headers, "", body]).encode()


async def test_status_and_body() -> None:
    answer, asked = await ask(lambda _: said(503, "Server: x", body="later"), "/healthz?a=b")
    assert answer == Answer(503, "", "later")
    assert asked == ["/healthz?a=b"]


async def test_a_local_redirect_is_followed() -> None:
    answer, asked = await ask(
        lambda path: said(302, "Location: /there") if path == "/" else said(500)
    )
    assert (answer.status, asked) == (500, ["/", "/there"])


async def test_another_hosts_is_not() -> None:
    answer, asked = await ask(lambda _: said(302, "Location: http://0.0.0.0/x", body="gone"))
    assert (answer.status, answer.body, asked) == (302, "gone", ["/"])


@pytest.mark.parametrize("text", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
async def test_no_http_is_an_error(text: bytes) -> None:
    with pytest.raises(HttpError, match="EOF"):
        await ask(lambda _: text)


async def test_redirects_end() -> None:
    with pytest.raises(HttpError, match="stopped after 10 redirects"):
        await ask(lambda _: said(301, "Location: /"))


def test_what_is_sent() -> None:
    url, headers = address(
        {"port": 80, "path": "x?y=1", "scheme": "HTTPS", "httpHeaders": [
            {"name": "host", "value": "h"}, {"name": "X-A", "value": "b"}]}, "fd00::1",
    )  # fmt: skip
    assert url == "https://[fd00::1]:80/x?y=1"
    lines = request(url, headers).decode().split("\r\n")
    assert lines[0] == "GET /x?y=1 HTTP/1.1"
    assert "host: h" in lines and "X-A: b" in lines and not any(x.startswith("Host") for x in lines)


def test_headers_are_read() -> None:
    assert parse(b"HTTP/1.0 204 No\r\nA: b:c\r\njunk") == (204, {"a": "b:c"})
