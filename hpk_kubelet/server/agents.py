"""The kubelet's end of the connections that agents dial (agent/wire.py has the protocol)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import deque
from typing import Any, Protocol

from hpk_kubelet.agent.wire import (
    DATA,
    PROTOCOL_VERSION,
    WINDOW,
    Decoder,
    Frame,
    WireError,
    encode_data,
    encode_message,
)
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.plan import AgentEvent, ContainerPlan, NetworkFacts, PodPlan, PodState

log = logging.getLogger(__name__)

_CHUNK = 64 << 10
_HELLO_TIMEOUT = 15.0


# asyncio gives each TLS connection a buffer of this size, 256 KiB by itself, and an agent per pod
# stays connected.
SSLProtocol.max_size = 8 << 10


class Owner(Protocol):
    """Who answers for the pods. None of these may block; all are called in the event loop."""

    def agent_token(self, uid: str) -> str | None:
        """The pod's token; None for a pod that is not known here."""

    def agent_connected(self, agent: Agent, state: PodState, events: list[AgentEvent]) -> None: ...

    def agent_state(self, agent: Agent, state: PodState) -> None: ...

    def agent_event(self, agent: Agent, event: AgentEvent) -> None: ...

    async def agent_plan(self, uid: str) -> PodPlan:
        """A new plan for an agent that has run nothing yet; HPKError says why there is none."""

    def agent_gone(self, agent: Agent) -> None: ...


class AgentGone(HPKError):
    """The connection ended before the stream did."""


class Stream:
    """Bytes by channel to and from one exec, attach, log or port, with flow control."""

    def __init__(self, agent: Agent, number: int) -> None:
        self.error = ""  # why the agent closed it, "" for a plain end
        self._agent = agent
        self._number = number
        self._received: deque[tuple[int, bytes]] = deque()
        self._unacknowledged = 0  # consumed here, not yet told
        self._credit = WINDOW
        self._ended = False
        self._wake = asyncio.Event()  # something received, or the end
        self._may_send = asyncio.Event()

    async def send(self, channel: int, data: bytes) -> None:
        """Waits for the agent's window; AgentGone once the stream has ended."""
        view = memoryview(data)
        first = True
        while first or view:
            first = False
            while self._credit <= 0 and not self._ended:
                self._may_send.clear()
                await self._may_send.wait()
            if self._ended:
                raise AgentGone(self.error or "the stream has ended")
            part = view[: min(_CHUNK, self._credit)]
            view = view[len(part) :]
            self._credit -= len(part)
            await self._agent.send_data(self._number, channel, bytes(part))

    async def receive(self) -> tuple[int, bytes] | None:
        """The next (channel, bytes); None at the end, when `error` may say why."""
        while not self._received:
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()
        channel, data = self._received.popleft()
        self._unacknowledged += len(data)
        if self._unacknowledged >= WINDOW // 4 and not self._ended:
            self._agent.send(
                {"type": "window", "stream": self._number, "bytes": self._unacknowledged}
            )
            self._unacknowledged = 0
        return channel, data

    def close(self) -> None:
        """This side wants no more of it."""
        if not self._ended:
            self._agent.send({"type": "closed", "stream": self._number})
        self._agent.forget_stream(self._number)
        self.end("")

    def feed(self, channel: int, data: bytes) -> None:
        self._received.append((channel, data))
        self._wake.set()

    def grant(self, count: int) -> None:
        self._credit += count
        self._may_send.set()

    def end(self, error: str) -> None:
        if not self._ended:
            self._ended = True
            self.error = error
        self._wake.set()
        self._may_send.set()


class Agent:
    """One agent's connection, from its hello on."""

    def __init__(self, uid: str, writer: asyncio.StreamWriter) -> None:
        self.uid = uid
        self._writer = writer
        self._streams: dict[int, Stream] = {}
        self._next = 1
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    async def send_data(self, stream: int, channel: int, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_data(stream, channel, data))
            await self._writer.drain()

    def stop(self, grace: int) -> None:
        """Asks for the pod's end; again with a smaller grace shortens it."""
        self.send({"type": "stop", "gracePeriodSeconds": grace})

    def limit(self, active: int | None) -> None:
        """activeDeadlineSeconds, counted from the pod's startTime as ever."""
        self.send({"type": "limit", "activeDeadlineSeconds": active})

    def take_container(self, plan: ContainerPlan) -> None:
        """An ephemeral container, or another image for one of the pod's. Again without effect."""
        self.send({"type": "container", "container": plan})

    def network(self, facts: NetworkFacts) -> None:
        """Tells the newest facts of the pod network."""
        self.send({"type": "network", "facts": facts})

    def open(self, kind: str, **arguments: Any) -> Stream:
        """Opens a stream; `arguments` as wire.py lists them for the kind."""
        number = self._next
        self._next += 1
        stream = self._streams[number] = Stream(self, number)
        self.send({"type": "open", "stream": number, "kind": kind, **arguments})
        return stream

    def forget_stream(self, number: int) -> None:
        self._streams.pop(number, None)

    def close(self) -> None:
        self._writer.close()

    def take(self, frame: Frame, owner: Owner) -> None:
        """Acts on a frame after the hello; WireError for what no agent of ours would send."""
        if frame.kind == DATA:
            stream = self._streams.get(frame.stream)
            if stream is not None:  # else it crossed our `closed`
                stream.feed(frame.channel, frame.payload)
            return
        message = frame.message()
        try:
            match message["type"]:
                case "state":
                    owner.agent_state(self, message["state"])
                case "event":
                    owner.agent_event(self, message["event"])
                case "refresh":
                    task = asyncio.create_task(self._refresh(owner))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case "window":
                    if stream := self._streams.get(message["stream"]):
                        stream.grant(int(message["bytes"]))
                case "closed":
                    if stream := self._streams.pop(message["stream"], None):
                        stream.end(str(message.get("error") or ""))
                case other:
                    log.warning("agent of pod %s sent an unknown message %r", self.uid, other)
        except (KeyError, TypeError, ValueError) as e:
            raise WireError(f"a {message['type']} message lacks or mistypes {e}") from None

    async def _refresh(self, owner: Owner) -> None:
        try:
            answer: dict[str, Any] = {"plan": await owner.agent_plan(self.uid)}
        except HPKError as e:
            answer = {"error": str(e)}
        except Exception:
            log.exception("a new plan for pod %s failed", self.uid)
            answer = {"error": "the kubelet failed to make a new plan; its log says more"}
        self.send({"type": "plan", **answer})

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for stream in self._streams.values():
            stream.end("the connection to the pod's agent was lost")
        self._streams.clear()
        self._writer.close()


class AgentServer:
    """Accepts agents. `agents` has the newest connection of each pod."""

    def __init__(self, owner: Owner, context: ssl.SSLContext) -> None:
        self.agents: dict[str, Agent] = {}
        self._owner = owner
        self._context = context
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listens; answers the port (of the system's choice when `port` is 0)."""
        self._server = await asyncio.start_server(
            self._serve,
            host,
            port,
            ssl=self._context,
            ssl_handshake_timeout=30.0,
            backlog=1024,
            limit=1 << 20,
        )
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        peer = writer.get_extra_info("peername")
        _keep_alive(writer.get_extra_info("socket"))
        try:
            await self._converse(reader, writer)
        except WireError as e:
            log.warning("connection from %s dropped: %s", peer, e)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as e:
            log.info("connection from %s lost: %s", peer, e or type(e).__name__)
        except asyncio.CancelledError:
            pass  # the server is closing; streams' own callback would print this as an error
        except Exception:
            log.exception("connection from %s dropped", peer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder()
        frames: list[Frame] = []
        async with asyncio.timeout(_HELLO_TIMEOUT):
            while not frames:
                data = await reader.read(_CHUNK)
                if not data:
                    return
                frames = decoder.feed(data)
        hello = frames[0].message() if frames[0].kind != DATA else {"type": "data"}
        agent = self._admit(hello, writer)
        try:
            for frame in frames[1:]:
                agent.take(frame, self._owner)
            while data := await reader.read(_CHUNK):
                for frame in decoder.feed(data):
                    agent.take(frame, self._owner)
        finally:
            agent.end()
            if self.agents.get(agent.uid) is agent:
                del self.agents[agent.uid]
                self._owner.agent_gone(agent)

    def _admit(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> Agent:
        if hello["type"] != "hello":
            raise WireError(f"the first message is {hello['type']}, not hello")
        uid, token = str(hello.get("uid")), str(hello.get("token"))
        known = self._owner.agent_token(uid)
        # Compared also when there is no such pod: the time taken says nothing.
        if not hmac.compare_digest((known or "").encode(), token.encode()) or not known:
            raise WireError(f"no such pod, or not its token (pod {uid!r})")
        if hello.get("version") != PROTOCOL_VERSION:
            raise WireError(
                f"the agent of pod {uid} speaks version {hello.get('version')} of the protocol, "
                f"this kubelet {PROTOCOL_VERSION}"
            )
        state, events = hello.get("state"), hello.get("events", [])
        if not isinstance(state, dict) or not isinstance(events, list):
            raise WireError(f"the hello of pod {uid} has no state")
        agent = Agent(uid, writer)
        before = self.agents.get(uid)
        self.agents[uid] = agent
        if before is not None:
            before.close()  # a connection whose other end is gone, without the news having come
        agent.send({"type": "welcome"})
        self._owner.agent_connected(agent, state, events)  # type: ignore[arg-type]
        return agent


def _keep_alive(sock: socket.socket) -> None:
    """A node that died silently is noticed within a minute and a half."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
