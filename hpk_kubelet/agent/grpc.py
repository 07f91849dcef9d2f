"""gRPC's health check, as much of HTTP/2 (RFC 9113) as one call of it needs.

The request's headers go out as plain literals (HPACK without its tables). Of the answer only the
message is read: a server that has one to give says SERVING or not in it, and an error has none.
"""

import asyncio
import contextlib
import struct
from typing import List, Tuple

from .connection import resolved
from .sockets import connect

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATH = "/grpc.health.v1.Health/Check"
STATES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
MAX_ANSWER = 1 << 16  # bytes

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
STREAM = 1


class GrpcError(Exception):
    """The call failed; the text says how."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def integer(value: int, bits: int) -> bytes:
    """An HPACK integer (RFC 7541, 5.1) whose prefix has `bits` bits, all others zero."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    out = [most]
    value -= most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def header_block(headers: List[Tuple[str, str]]) -> bytes:
    """HPACK: every header a literal that is not indexed, name and value without Huffman's code."""
    out = bytearray()
    for pair in headers:
        out += b"\0"
        for text in pair:
            data = text.encode()
            out += integer(len(data), 7) + data
    return bytes(out)


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    out.append(value)
    return bytes(out)


def request(service: str, authority: str) -> bytes:
    """Everything the client says of its own: preface, settings, headers, the one message."""
    name = service.encode()
    message = b"\x0a" + varint(len(name)) + name if name else b""
    headers = [
        (":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", authority),
        ("content-type", "application/grpc"), ("user-agent", "kube-probe/1.36"), ("te", "trailers"),
    ]  # fmt: skip
    return b"".join(
        [
            PREFACE,
            frame(SETTINGS, 0, 0, b""),
            frame(HEADERS, END_HEADERS, STREAM, header_block(headers)),
            frame(DATA, END_STREAM, STREAM, struct.pack(">BI", 0, len(message)) + message),
        ]
    )


def health(body: bytes) -> str:
    """The state in a HealthCheckResponse with gRPC's five bytes before it; GrpcError for none."""
    if len(body) < 5 or body[0] or len(body) - 5 < struct.unpack(">I", body[1:5])[0]:
        raise GrpcError("the server gave no answer to the health check")
    message = body[5 : 5 + struct.unpack(">I", body[1:5])[0]]
    if not message:
        return STATES[0]  # a field that has its default is left out
    if message[0] != 0x08 or len(message) < 2:
        raise GrpcError("the server's answer is no HealthCheckResponse")
    return STATES.get(message[1], str(message[1]))


async def check(netns: int, host: str, port: int, service: str) -> str:
    """The state the server tells of the service; OSError or GrpcError if it tells none."""
    reader, writer = await connect(netns, resolved(host), port)
    try:
        writer.write(request(service, "%s:%d" % (host, port)))
        return health(await _answer(reader, writer))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise GrpcError("the server closed the connection before it answered") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The body of the answer on our stream."""
    body = bytearray()
    while len(body) < MAX_ANSWER:
        head = await reader.readexactly(9)
        length = struct.unpack(">I", b"\0" + head[:3])[0]
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        if length > MAX_ANSWER:
            raise GrpcError("the server does not speak HTTP/2")
        payload = await reader.readexactly(length)
        if kind in (SETTINGS, PING) and not flags & ACK:
            writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == GOAWAY or (kind == RST_STREAM and stream == STREAM):
            raise GrpcError("the server refused the call")
        elif kind == DATA and stream == STREAM:
            if flags & PADDED and payload:
                payload = payload[1 : len(payload) - payload[0]]
            body += payload
        if kind in (DATA, HEADERS) and stream == STREAM and flags & END_STREAM:
            break
    return bytes(body)
