"""SPDY/3 frames, as far as Kubernetes uses them: bytes in, events out; no I/O.

The protocol is draft-mbelshe-httpbis-spdy-00; what of it is used, github.com/moby/spdystream shows:
streams that the client opens, data, half-closes, resets, pings. Flow control it leaves to the
connection below, and so does this.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hpk_kubelet.server.spdy_dictionary import HEADERS

MAX_FRAME = 1 << 24  # the length field has 24 bits

_VERSION = 3
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _GOAWAY = 1, 2, 3, 6, 7
_FIN = 1
_PROTOCOL_ERROR, _CANCEL = 1, 5
_HEADER = struct.Struct(">II")  # stream or type; flags and length
_WORD = struct.Struct(">I")


class SpdyError(Exception):
    """The peer does not speak this protocol; the connection must be closed."""


@dataclass(frozen=True)
class Opened:
    """The client has opened a stream. Header names are in small letters."""

    stream: int
    headers: Mapping[str, str]
    fin: bool


@dataclass(frozen=True)
class Data:
    stream: int
    data: bytes
    fin: bool


@dataclass(frozen=True)
class Reset:
    stream: int


@dataclass(frozen=True)
class Ping:
    number: int


@dataclass(frozen=True)
class GoAway:
    pass


Event = Opened | Data | Reset | Ping | GoAway


def data(stream: int, payload: bytes, fin: bool = False) -> bytes:
    """`payload` has less than MAX_FRAME bytes."""
    return _HEADER.pack(stream, fin << 24 | len(payload)) + payload


def reset(stream: int, cancel: bool = True) -> bytes:
    """Ends a stream in both directions at once."""
    return _control(_RST_STREAM, struct.pack(">II", stream, _CANCEL if cancel else _PROTOCOL_ERROR))


def pong(number: int) -> bytes:
    """The answer to a Ping of that number."""
    return _control(_PING, _WORD.pack(number))


def _control(kind: int, body: bytes) -> bytes:
    return _HEADER.pack(1 << 31 | _VERSION << 16 | kind, len(body)) + body


class Session:
    """The server's side of one connection: what must be remembered between frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._inflate = zlib.decompressobj(zdict=HEADERS)
        self._deflate = zlib.compressobj(zdict=HEADERS)

    def reply(self, stream: int) -> bytes:
        """Accepts an opened stream. To be sent in the order of the calls (compression)."""
        none = self._deflate.compress(_WORD.pack(0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return _control(_SYN_REPLY, _WORD.pack(stream) + none)

    def feed(self, received: bytes) -> list[Event]:
        """The events that `received` completes, however it was cut."""
        self._buffer += received
        events: list[Event] = []
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            first, second = _HEADER.unpack_from(self._buffer, at)
            flags, length = second >> 24, second & 0xFFFFFF
            end = at + _HEADER.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[at + _HEADER.size : end])
            at = end
            if first >> 31:
                event = self._control_frame(first, flags, body)
                if event is not None:
                    events.append(event)
            else:
                events.append(Data(first, body, bool(flags & _FIN)))
        del self._buffer[:at]
        return events

    def _control_frame(self, first: int, flags: int, body: bytes) -> Event | None:
        version, kind = first >> 16 & 0x7FFF, first & 0xFFFF
        if version != _VERSION:
            raise SpdyError(f"a frame of SPDY version {version}")
        try:
            if kind == _SYN_STREAM:
                stream = _WORD.unpack_from(body)[0] & 0x7FFFFFFF
                return Opened(stream, self._headers(body[10:]), bool(flags & _FIN))
            if kind == _RST_STREAM:
                return Reset(_WORD.unpack_from(body)[0] & 0x7FFFFFFF)
            if kind == _PING:
                return Ping(_WORD.unpack_from(body)[0])
            if kind == _GOAWAY:
                return GoAway()
        except (struct.error, zlib.error, UnicodeDecodeError) as e:
            raise SpdyError(f"a broken frame of type {kind}: {e}") from None
        return None  # SETTINGS, HEADERS, WINDOW_UPDATE: nothing here depends on them

    def _headers(self, compressed: bytes) -> dict[str, str]:
        block = self._inflate.decompress(compressed, 1 << 16)
        if self._inflate.unconsumed_tail:
            raise SpdyError("headers of more than 64 KiB")
        (count,) = _WORD.unpack_from(block)
        at = _WORD.size
        words = []
        for _ in range(2 * count):
            (length,) = _WORD.unpack_from(block, at)
            at += _WORD.size
            if at + length > len(block):
                raise SpdyError("headers that end too soon")
            words.append(block[at : at + length].decode())
            at += length
        return {name.lower(): value for name, value in zip(words[::2], words[1::2], strict=True)}
