"""The agent's connection to the kubelet: dialled in the background, again and again.

Nothing waits for it. What it carries is also in the journal, which is the truth.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from . import wire
from .fds import within
from .journal import note

if TYPE_CHECKING:
    from .pod import Pod

SERVER_NAME = "hpk-kubelet"
FIRST_RETRY, LONGEST_RETRY = 0.2, 10.0
DIAL_TIMEOUT = 10.0
MAX_EVENTS = 500  # told again after a reconnection: the newest ones

Channel = Tuple[asyncio.StreamReader, asyncio.StreamWriter]


def read_address(path: str) -> Dict[str, Any]:
    with open(path, encoding="utf-8") as f:
        address: Dict[str, Any] = json.load(f)
    return address


async def dial(agent: Dict[str, Any]) -> Channel:
    """Connects to where the kubelet is now; OSError (ssl's included) or ValueError if it fails."""
    address = read_address(agent["kubelet"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(agent["ca"])
    host = resolved(address["host"])
    return await within(
        DIAL_TIMEOUT,
        asyncio.open_connection(
            host, int(address["port"]), ssl=context, server_hostname=SERVER_NAME,
            limit=1 << 18,
        ),
    )  # fmt: skip


def resolved(host: str) -> str:
    """An address: the event loop would look a name up in a thread, which the agent can't have."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def hello(plan: Dict[str, Any], state: Dict[str, Any], events: List[Dict[str, Any]]) -> bytes:
    return wire.encode_message(
        {
            "type": "hello", "uid": plan["uid"], "token": plan["agent"]["token"],
            "version": wire.PROTOCOL_VERSION, "state": state, "events": events[-MAX_EVENTS:],
        }
    )  # fmt: skip


DIAL_ERRORS = (OSError, ValueError, KeyError, asyncio.TimeoutError, EOFError)


class Connection:
    def __init__(self, pod: "Pod") -> None:
        self._pod = pod
        self._writer: Optional[asyncio.StreamWriter] = None
        self._dialling = False
        self._told = asyncio.Event()  # the newest state is on its way
        self._complained = False

    def publish(self, state: Dict[str, Any], events: List[Dict[str, Any]]) -> None:
        """Sends what was just written to the journal, if the kubelet is there."""
        self._told.clear()
        if self._writer is None:
            return
        for event in events:
            self.send(wire.encode_message({"type": "event", "event": event}))
        self.send(wire.encode_message({"type": "state", "state": state}))
        self._told.set()

    def send(self, frame: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    async def drained(self) -> None:
        """Waits while much is on its way."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.drain()

    async def run(self) -> None:
        """Keeps a connection until cancelled."""
        delay = FIRST_RETRY
        while True:
            self._dialling = True
            try:
                reader, writer = await dial(self._pod.plan["agent"])
            except DIAL_ERRORS as e:
                self._dialling = False
                if not self._complained:
                    note("the kubelet can't be reached (%s); trying on" % (e or type(e).__name__))
                    self._complained = True
                await asyncio.sleep(delay)
                delay = min(delay * 2, LONGEST_RETRY)
                continue
            self._complained = False
            connected = time.monotonic()
            try:
                await self._talk(reader, writer)
            except (*DIAL_ERRORS, wire.WireError) as e:
                note("the connection to the kubelet ended: %s" % (e or type(e).__name__))
            finally:
                self._writer = None
                writer.close()
            # one that is refused right away (a wrong token) must not be asked all the time
            delay = FIRST_RETRY if time.monotonic() - connected > 5 else min(delay * 2, 10.0)
            await asyncio.sleep(delay)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from .streams import Streams

        self._pod.flush()
        writer.write(hello(self._pod.plan, self._pod.state(), self._pod.journal.events))
        self._writer = writer
        self._dialling = False
        self._told.set()
        streams = Streams(self._pod, self)
        decoder = wire.Decoder()
        try:
            while True:
                data = await reader.read(1 << 16)
                if not data:
                    return
                for frame in decoder.feed(data):
                    if frame.kind == wire.DATA:
                        streams.data(frame)
                        continue
                    message = frame.message()
                    if message["type"] == "stop":
                        self._pod.stop(float(message["gracePeriodSeconds"]))
                    elif message["type"] == "limit":
                        self._pod.limit(message["activeDeadlineSeconds"])
                    elif message["type"] == "container":
                        self._pod.take_container(message["container"])
                    elif message["type"] == "network":
                        if self._pod.setup.network is not None:
                            self._pod.setup.network.tell(message["facts"])
                    else:
                        streams.message(message)
        finally:
            streams.close()

    async def deliver(self, patience: float) -> None:
        """Gives the last state to a kubelet that is there, or about to be."""
        if self._writer is None and not self._dialling:
            return
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await within(patience, self._told.wait())
            if self._writer is not None:
                writer = self._writer
                writer.close()  # what was written is sent first
                await within(patience, writer.wait_closed())
