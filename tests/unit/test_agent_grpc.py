"""The health check over HTTP/2, against a server that speaks just enough of it."""

from __future__ import annotations

import asyncio
import struct

import pytest

from hpk_kubelet.agent import grpc


def answer(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


async def ask(*frames: bytes, service: str = "") -> tuple[str, bytes]:
    """(the client's verdict, what it sent) with a server that says these frames."""
    heard = bytearray()
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.readexactly(len(grpc.PREFACE)))
        for frame in frames:
            writer.write(frame)
        writer.write_eof()
        heard.extend(await reader.read())
        writer.close()
        done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        state = await grpc.check(-1, "127.0.0.1", port, service)
        await done.wait()
    finally:
        server.close()
    return state, bytes(heard)


HEADERS = grpc.frame(grpc.HEADERS, grpc.END_HEADERS, grpc.STREAM, b"\x88")


@pytest.mark.parametrize(
    ("message", "state"),
    [(b"\x08\x01", "SERVING"), (b"\x08\x02", "NOT_SERVING"), (b"", "UNKNOWN"), (b"\x08\x09", "9")],
)
async def test_the_state_is_the_servers(message: bytes, state: str) -> None:
    body = answer(message)
    said, _ = await ask(
        grpc.frame(grpc.SETTINGS, 0, 0, b"\0\3\0\0\0\x64"),
        grpc.frame(grpc.PING, 0, 0, b"12345678"),
        HEADERS,
        # in two pieces, the first of them padded
        grpc.frame(grpc.DATA, grpc.PADDED, grpc.STREAM, b"\2" + body[:3] + b"\0\0"),
        grpc.frame(grpc.DATA, 0, grpc.STREAM, body[3:]),
        grpc.frame(grpc.HEADERS, grpc.END_HEADERS | grpc.END_STREAM, grpc.STREAM, b""),
    )
    assert said == state


async def test_settings_and_pings_are_acknowledged() -> None:
    _, heard = await ask(
        grpc.frame(grpc.SETTINGS, 0, 0, b""),
        grpc.frame(grpc.PING, 0, 0, b"12345678"),
        HEADERS,
        grpc.frame(grpc.DATA, grpc.END_STREAM, grpc.STREAM, answer(b"\x08\x01")),
        service="a-service",
    )
    assert heard.startswith(grpc.PREFACE)
    assert b"a-service" in heard
    assert grpc.frame(grpc.PING, grpc.ACK, 0, b"12345678") in heard
    assert grpc.frame(grpc.SETTINGS, grpc.ACK, 0, b"") in heard


@pytest.mark.parametrize(
    "frames",
    [
        (grpc.frame(grpc.HEADERS, grpc.END_HEADERS | grpc.END_STREAM, grpc.STREAM, b"\x88"),),
        (HEADERS, grpc.frame(grpc.RST_STREAM, 0, grpc.STREAM, b"\0\0\0\1")),
        (grpc.frame(grpc.GOAWAY, 0, 0, bytes(8)),),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
        (),
    ],
    ids=["an error", "a reset", "goaway", "HTTP/1", "nothing"],
)
async def test_no_state_is_an_error(frames: tuple[bytes, ...]) -> None:
    with pytest.raises(grpc.GrpcError):
        await ask(*frames)


def test_integers_are_those_of_the_rfc() -> None:
    assert grpc.integer(10, 5) == b"\x0a"
    assert grpc.integer(1337, 5) == b"\x1f\x9a\x0a"
    assert grpc.varint(300) == b"\xac\x02"
