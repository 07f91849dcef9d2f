"""hostPort: ports of the node that lead to the pod's.

The agent is in the node's network and listens there as the user; each connection is made anew from
inside the pod. The pod sees them come from its own address.
"""

import asyncio
import contextlib
import socket
from typing import Any, Dict, List, Optional, Set, Tuple

from .sockets import connect, pod_socket

CHUNK = 1 << 16
IDLE = 120.0  # seconds after which a UDP client without packets is forgotten (conntrack's)
MOST_CLIENTS = 1024  # of one UDP port

Address = Tuple[str, int]


class HostPorts:
    """Serves bound ports in the event loop until `close`."""

    def __init__(
        self, ports: List[Dict[str, Any]], bound: "List[socket.socket]", netns: int, ip: str
    ) -> None:
        self._ip, self._netns = ip, netns
        self._tasks: "Set[asyncio.Task[None]]" = set()
        self._bound = bound
        for i, port in enumerate(ports):
            serve = self._accept if port["protocol"] == "TCP" else self._relay
            self._start(serve(bound[i], port["target"]))

    def _start(self, work: "Any") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for made in self._bound:
            made.close()

    # --- TCP ---------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket, target: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.1)  # out of descriptors: others end meanwhile
                continue
            self._start(self._serve(client, target))

    async def _serve(self, client: socket.socket, target: int) -> None:
        near = await asyncio.open_connection(sock=client)
        try:
            far = await connect(self._netns, self._ip, target)
        except OSError:
            near[1].transport.abort()  # nobody listens in the pod: reset, as without us
            return
        try:
            await asyncio.gather(_pass(near[0], far[1]), _pass(far[0], near[1]))
        except OSError:
            near[1].transport.abort()
            far[1].transport.abort()
        finally:
            near[1].close()
            far[1].close()

    # --- UDP ---------------------------------------------------------------------------------

    async def _relay(self, listener: socket.socket, target: int) -> None:
        loop = asyncio.get_running_loop()
        clients: Dict[Address, _Client] = {}

        def arrived() -> None:
            with contextlib.suppress(OSError):
                data, peer = listener.recvfrom(CHUNK)
                client = clients.get(peer)
                if client is None:
                    if len(clients) >= MOST_CLIENTS:
                        return
                    client = clients[peer] = _Client(
                        pod_socket(self._netns, socket.AF_INET, socket.SOCK_DGRAM),
                        (self._ip, target), listener, peer,
                    )  # fmt: skip
                client.send(data)

        loop.add_reader(listener, arrived)
        try:
            while True:
                await asyncio.sleep(IDLE / 4)
                for peer, client in list(clients.items()):
                    if loop.time() - client.used > IDLE:
                        clients.pop(peer).close()
        finally:
            loop.remove_reader(listener)
            for client in clients.values():
                client.close()


class _Client:
    """One UDP client of the node's port, and the pod's socket that stands for it."""

    def __init__(
        self, made: socket.socket, pod: Address, listener: socket.socket, peer: Address
    ) -> None:
        self._socket, self._listener, self._peer = made, listener, peer
        self._loop = asyncio.get_running_loop()
        made.setblocking(False)
        made.connect(pod)
        self.used = self._loop.time()
        self._loop.add_reader(made, self._answer)

    def send(self, data: bytes) -> None:
        self.used = self._loop.time()
        with contextlib.suppress(OSError):  # as a network: what can't be passed on is lost
            self._socket.send(data)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.sendto(self._socket.recv(CHUNK), self._peer)
            self.used = self._loop.time()

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes, then the end; the other direction may go on."""
    while True:
        data = await reader.read(CHUNK)
        if not data:
            with contextlib.suppress(OSError):
                writer.write_eof()
            return
        writer.write(data)
        await writer.drain()


def start(setup: Any) -> Optional[HostPorts]:
    """For the pod of this PodSetup, once it is connected."""
    if not setup.bound:
        return None
    ports = setup.plan["hostPorts"]
    return HostPorts(ports, setup.bound, setup.runtime.netns, setup.runtime.fields["podIP"])
