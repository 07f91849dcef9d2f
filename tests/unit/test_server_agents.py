import asyncio
import ssl

import pytest

from hpk_kubelet.agent import wire
from hpk_kubelet.controlplane.pki import Pki, kubelet_server
from hpk_kubelet.errors import HPKError
from hpk_kubelet.server import agents
from hpk_kubelet.server.agents import AgentGone, AgentServer
from hpk_kubelet.server.api import server_context

STATE = {"jobId": "1", "containers": {}, "finished": False}


class Owner:
    def __init__(self):
        self.heard = []
        self.plans = {}
        self.connected = asyncio.Event()

    def agent_token(self, uid):
        return {"u": "right"}.get(uid)

    def agent_connected(self, agent, state, events):
        self.agent = agent
        self.heard.append(("connected", state, events))
        self.connected.set()

    def agent_state(self, agent, state):
        self.heard.append(("state", state))

    def agent_event(self, agent, event):
        self.heard.append(("event", event))

    async def agent_plan(self, uid):
        if uid not in self.plans:
            raise HPKError("configmap x not found")
        return self.plans[uid]

    def agent_gone(self, agent):
        self.heard.append(("gone",))


class Peer:
    """The agent's side, as the protocol describes it."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.decoder, self.frames = wire.Decoder(), []

    def say(self, **message):
        self.writer.write(wire.encode_message(message))

    def hello(self, token="right", uid="u", version=wire.PROTOCOL_VERSION, **more):
        self.say(type="hello", uid=uid, token=token, version=version, state=STATE, events=[],
                 **more)  # fmt: skip

    async def frame(self):
        """None at the end of the connection."""
        while not self.frames:
            data = await asyncio.wait_for(self.reader.read(65536), 5)
            if not data:
                return None
            self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    async def message(self):
        frame = await self.frame()
        return None if frame is None else frame.message()


@pytest.fixture
async def served(tmp_path):
    pki = Pki(tmp_path)
    pair = kubelet_server(pki, ["hpk-kubelet"])
    owner = Owner()
    server = AgentServer(owner, server_context(pair.cert, pair.key))
    port = await server.start("127.0.0.1", 0)
    peers = []

    async def dial():
        context = ssl.create_default_context(cafile=pki.ca.cert)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="hpk-kubelet"
        )
        peers.append(Peer(reader, writer))
        return peers[-1]

    yield owner, server, dial
    for peer in peers:
        peer.writer.close()
    await server.close()


@pytest.mark.parametrize(
    "hello",
    [
        {"token": "wrong"},
        {"token": ""},
        {"uid": "unknown"},
        {"uid": "unknown", "token": ""},
        {"version": 99},
    ],
)
async def test_who_proves_nothing_is_dropped(served, hello):
    owner, server, dial = served
    peer = await dial()
    peer.hello(**hello)
    assert await peer.frame() is None
    assert owner.heard == [] and server.agents == {}


@pytest.mark.parametrize("bytes_", [b"GET / HTTP/1.1\r\n\r\n", wire.encode_data(0, 1, b"x")])
async def test_a_stranger_is_dropped(served, bytes_):
    _, server, dial = served
    peer = await dial()
    peer.writer.write(bytes_)
    assert await peer.frame() is None
    assert server.agents == {}


async def test_an_agent_is_heard(served):
    owner, server, dial = served
    peer = await dial()
    peer.hello()
    assert await peer.message() == {"type": "welcome"}
    peer.say(type="event", event={"seq": 1})
    peer.say(type="state", state={"finished": True})
    peer.say(type="something new")
    peer.say(type="refresh")
    assert await peer.message() == {"type": "plan", "error": "configmap x not found"}
    owner.plans["u"] = {"version": 1}
    peer.say(type="refresh")
    assert await peer.message() == {"type": "plan", "plan": {"version": 1}}
    assert owner.heard == [
        ("connected", STATE, []),
        ("event", {"seq": 1}),
        ("state", {"finished": True}),
    ]
    server.agents["u"].stop(7)
    assert await peer.message() == {"type": "stop", "gracePeriodSeconds": 7}
    peer.say(type="state")  # none of our agents says that
    assert await peer.frame() is None
    assert owner.heard[-1] == ("gone",) and server.agents == {}


async def test_a_second_connection_takes_the_place_of_the_first(served):
    owner, server, dial = served
    first, second = await dial(), await dial()
    first.hello()
    await first.message()
    second.hello()
    await second.message()
    assert await first.frame() is None
    assert list(server.agents) == ["u"] and ("gone",) not in owner.heard


async def test_a_stream_carries_both_ways_and_ends_after_its_data(served):
    owner, _, dial = served
    peer = await dial()
    peer.hello()
    await peer.message()
    await owner.connected.wait()
    stream = owner.agent.open("exec", container="main", command=["cat"])
    opened = await peer.message()
    assert opened == {"type": "open", "stream": 1, "kind": "exec", "container": "main",
                      "command": ["cat"]}  # fmt: skip
    await stream.send(wire.STDIN, b"in")
    await stream.send(wire.CLOSE, b"\x00")
    assert await peer.frame() == wire.Frame(wire.DATA, 1, wire.STDIN, b"in")
    assert await peer.frame() == wire.Frame(wire.DATA, 1, wire.CLOSE, b"\x00")
    peer.writer.write(wire.encode_data(1, wire.STDOUT, b"out"))
    peer.say(type="closed", stream=1, error="why")
    assert await stream.receive() == (wire.STDOUT, b"out")
    assert await stream.receive() is None
    assert stream.error == "why"
    with pytest.raises(AgentGone):
        await stream.send(wire.STDIN, b"more")


async def test_no_more_than_the_window_is_on_the_way(served, monkeypatch):
    owner, _, dial = served
    monkeypatch.setattr(agents, "_CHUNK", 1000)
    peer = await dial()
    peer.hello()
    await peer.message()
    await owner.connected.wait()
    stream = owner.agent.open("attach")
    await peer.message()
    sending = asyncio.create_task(stream.send(wire.STDIN, bytes(wire.WINDOW + 500)))
    got = 0
    while got < wire.WINDOW:
        got += len((await peer.frame()).payload)
    await asyncio.sleep(0.05)
    assert got == wire.WINDOW and not sending.done()
    peer.say(type="window", stream=1, bytes=500)
    assert len((await peer.frame()).payload) == 500
    await sending


async def test_what_was_consumed_is_granted_again(served):
    owner, _, dial = served
    peer = await dial()
    peer.hello()
    await peer.message()
    await owner.connected.wait()
    stream = owner.agent.open("logs")
    await peer.message()
    for _ in range(2):
        peer.writer.write(wire.encode_data(1, wire.STDOUT, bytes(wire.WINDOW // 8)))
    await stream.receive()
    await stream.receive()
    assert await peer.message() == {"type": "window", "stream": 1, "bytes": wire.WINDOW // 4}
    stream.close()
    assert await peer.message() == {"type": "closed", "stream": 1}


async def test_a_lost_connection_ends_its_streams(served):
    owner, _, dial = served
    peer = await dial()
    peer.hello()
    await peer.message()
    await owner.connected.wait()
    stream = owner.agent.open("logs")
    peer.writer.close()
    assert await asyncio.wait_for(stream.receive(), 5) is None
    assert "lost" in stream.error
