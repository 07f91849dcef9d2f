"""SPDY as a client writes it: frames cut anywhere, headers compressed with SPDY's dictionary."""

import asyncio
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpk_kubelet.agent.wire import CLOSE, STDIN, STDOUT
from hpk_kubelet.server import spdy
from hpk_kubelet.server.port_forward import PortForward
from hpk_kubelet.server.spdy_dictionary import HEADERS


class Client:
    """The other end of the framing."""

    def __init__(self):
        self._deflate = zlib.compressobj(zdict=HEADERS)
        self._inflate = zlib.decompressobj(zdict=HEADERS)

    def open(self, stream, fin=False, **headers):
        block = struct.pack(">I", len(headers))
        for pair in headers.items():
            for word in pair:
                block += struct.pack(">I", len(word.encode())) + word.encode()
        packed = self._deflate.compress(block) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        body = struct.pack(">IIBB", stream, 0, 0, 0) + packed
        return struct.pack(">II", 0x80030001, fin << 24 | len(body)) + body

    def headers(self, frame):
        """How many headers a SYN_REPLY has."""
        return struct.unpack(">I", self._inflate.decompress(frame[12:]))[0]


def test_the_dictionary_is_spdys():
    # As zlib names it in a stream's header: RFC 1950's Adler-32.
    assert (len(HEADERS), zlib.adler32(HEADERS)) == (1423, 0xE3C6A7C2)


@given(st.lists(st.integers(1, 40)))
def test_frames_may_be_cut_anywhere(cuts):
    client, session = Client(), spdy.Session()
    sent = (
        client.open(1, streamtype="error", port="80", requestid="0")
        + client.open(3, fin=True, streamtype="data", port="80", requestid="0")
        + spdy.data(3, b"hello")
        + spdy.data(3, b"", fin=True)
        + spdy.pong(7)
        + spdy.reset(1)
    )
    events = []
    for cut in cuts:
        part, sent = sent[:cut], sent[cut:]
        events += session.feed(part)
    events += session.feed(sent)
    headers = {"port": "80", "requestid": "0"}
    assert events == [
        spdy.Opened(1, {"streamtype": "error", **headers}, False),
        spdy.Opened(3, {"streamtype": "data", **headers}, True),
        spdy.Data(3, b"hello", False),
        spdy.Data(3, b"", True),
        spdy.Ping(7),
        spdy.Reset(1),
    ]


def test_replies_share_one_compression():
    client, session = Client(), spdy.Session()
    assert [client.headers(session.reply(n)) for n in (1, 3, 5)] == [0, 0, 0]


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">II", 0x80020001, 0),  # SPDY/2
        struct.pack(">II", 0x80030001, 4) + b"\0\0\0\1",  # a SYN_STREAM that ends too soon
        struct.pack(">II", 0x80030001, 14) + b"\0\0\0\1" + bytes(10),  # headers that are none
    ],
)
def test_a_broken_frame_is_an_error(frame):
    with pytest.raises(spdy.SpdyError):
        spdy.Session().feed(frame)


# --- port-forward


class Pipe:
    def __init__(self):
        self.incoming = asyncio.Queue()
        self.events = asyncio.Queue()

    async def read(self):
        return await self.incoming.get()

    async def write(self, data):
        first = struct.unpack(">I", data[:4])[0]
        if not first >> 31:
            await self.events.put((first, data[8:], bool(data[4])))
        elif first & 0xFFFF == 3:
            await self.events.put((struct.unpack(">I", data[8:12])[0], "reset"))

    async def close(self):
        pass


class Stream:
    """An agent's stream to a port."""

    def __init__(self):
        self.error = ""
        self.sent = asyncio.Queue()
        self.answers = asyncio.Queue()

    async def send(self, channel, data):
        await self.sent.put((channel, data))

    async def receive(self):
        return await self.answers.get()

    def close(self):
        self.answers.put_nowait(None)


class Agent:
    def __init__(self):
        self.opened = asyncio.Queue()  # pairs of port and stream

    def open(self, kind, port):
        stream = Stream()
        self.opened.put_nowait((port, stream))
        return stream


@pytest.fixture
async def forwarding():
    pipe, agent = Pipe(), Agent()
    serving = asyncio.create_task(PortForward(pipe, agent, "p", "uid").serve())
    yield pipe, agent, Client()
    await pipe.incoming.put(b"")
    await asyncio.wait_for(serving, 5)


def pair(client, first, port, request):
    headers = {"port": str(port), "requestid": request}
    return client.open(first, fin=True, streamtype="error", **headers) + client.open(
        first + 2, streamtype="data", **headers
    )


async def test_each_direction_ends_by_itself(forwarding):
    pipe, agent, client = forwarding
    await pipe.incoming.put(pair(client, 1, 80, "0") + spdy.data(3, b"in"))
    await pipe.incoming.put(spdy.data(3, b"", fin=True))
    _, stream = await agent.opened.get()
    assert await stream.sent.get() == (STDIN, b"in")
    assert await stream.sent.get() == (CLOSE, bytes([STDIN]))
    await stream.answers.put((STDOUT, b"out"))
    await stream.answers.put((CLOSE, bytes([STDOUT])))
    assert [await pipe.events.get() for _ in range(3)] == [
        (3, b"out", False), (3, b"", True), (1, b"", True),
    ]  # fmt: skip


async def test_a_refused_port_is_told_and_the_others_go_on(forwarding):
    pipe, agent, client = forwarding
    await pipe.incoming.put(pair(client, 1, 81, "0") + pair(client, 5, 80, "1"))
    (_, refused), (_, stream) = await agent.opened.get(), await agent.opened.get()
    refused.error = "connection refused"
    refused.close()
    words = b"error forwarding port 81 to pod p, uid uid: connection refused"
    assert [await pipe.events.get() for _ in range(3)] == [
        (1, words, False), (1, b"", True), (3, "reset"),
    ]  # fmt: skip
    await pipe.incoming.put(spdy.data(7, b"on"))
    assert await stream.sent.get() == (STDIN, b"on")


@pytest.mark.parametrize("port", ["", "0", "65536", "x", "²"])
async def test_a_port_that_is_none_is_refused(forwarding, port):
    pipe, agent, client = forwarding
    await pipe.incoming.put(client.open(1, streamtype="data", port=port))
    assert await pipe.events.get() == (1, "reset")
    assert agent.opened.empty()


async def test_a_client_that_resets_frees_the_pods_connection(forwarding):
    pipe, agent, client = forwarding
    await pipe.incoming.put(pair(client, 1, 80, "0"))
    _, stream = await agent.opened.get()
    await pipe.incoming.put(spdy.reset(3))
    assert await stream.answers.get() is None
