"""The API server's way to pods: an HTTP CONNECT proxy between the host's network and the pods'.

The API server's egress selector (HTTPConnect over a Unix socket) asks it for every connection to
a kubelet, a pod, a webhook. Addresses of the cluster are dialled from the control job's place in
the pod network, everything else from the host's network, where the kubelet listens: pasta, which
ends with the node network's owner, is not in between.

A socket belongs to the network namespace it was made in, whoever connects it. So nothing but the
making of sockets happens in the place: a helper (egress_sockets.py) hands them over.

    python -m hpk_kubelet.network.egress LISTENING_FD PLACE_FILE CIDR…
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

from hpk_kubelet.agent.syscalls import peer_uid

log = logging.getLogger(__name__)

CHUNK = 256 << 10
_MAX_HEAD = 16 << 10
_DIAL_TIMEOUT = 30.0
_HELPER = Path(__file__).with_name("egress_sockets.py")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class PlaceError(OSError):
    """There is no way into the pod network at the moment."""


def parse_target(head: bytes) -> tuple[str, int]:
    """Host and port of `CONNECT host:port HTTP/1.1`; ValueError for anything else."""
    method, target, version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
    host, colon, port = target.rpartition(":")
    if method != "CONNECT" or not version.startswith("HTTP/1.") or not colon or not host:
        raise ValueError(f"{method} {target} is no CONNECT request")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_inside(host: str, networks: list[Network]) -> bool:
    """Whether that is an address of the cluster's own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in networks)


class Place:
    """Makes sockets in the place that `file` names (`{"pid": …}`), by a helper that stays there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pid = 0
        self._helper: subprocess.Popen[bytes] | None = None
        self._talk: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def new_socket(self) -> socket.socket:
        """A new TCP socket of the pod network, not connected; PlaceError without one."""
        async with self._lock:
            return await asyncio.to_thread(self._make)

    def _make(self) -> socket.socket:
        try:
            pid = int(json.loads(self._file.read_text())["pid"])
        except FileNotFoundError:
            raise PlaceError("the control job has no place in the pod network yet") from None
        if pid != self._pid or self._helper is None or self._helper.poll() is not None:
            self._start(pid)
        assert self._talk is not None
        try:
            self._talk.send(b"tcp")
            _, fds, _, _ = socket.recv_fds(self._talk, 16, 1)
        except OSError as e:
            raise PlaceError(f"the pod network can't be entered ({e.strerror})") from None
        if not fds:
            raise PlaceError("the pod network can't be entered")
        made = socket.socket(fileno=fds[0])
        made.setblocking(False)
        return made

    def _start(self, pid: int) -> None:
        self.close()
        self._talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._talk.settimeout(5.0)
        argv = ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials", "--"]
        argv += [sys.executable, "-I", "-S", str(_HELPER), str(theirs.fileno())]
        with theirs:
            self._helper = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        self._pid = pid

    def close(self) -> None:
        if self._talk is not None:
            self._talk.close()  # the helper ends with it
            self._talk = None
        if self._helper is not None:
            self._helper.wait()
            self._helper = None


class Proxy:
    """Serves connections to one listening socket."""

    def __init__(self, place: Place, inside: list[Network]) -> None:
        self._place = place
        self._inside = inside

    async def serve(self, listening: socket.socket) -> None:
        """Until cancelled."""
        server = await asyncio.start_unix_server(self._handle, sock=listening, limit=CHUNK)
        async with server:
            await server.serve_forever()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass  # one of the ends is gone, and the other learns it by the close
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # An abstract socket has no mode to keep others out.
        if peer_uid(writer.get_extra_info("socket")) != os.getuid():
            return
        head = await reader.readuntil(b"\r\n\r\n")
        try:
            host, port = parse_target(head)
        except ValueError as e:
            writer.write(_answer(400, str(e)))
            return
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT):
                theirs, ours = await self._dial(host, port)
        except OSError as e:
            words = os.strerror(e.errno) if e.errno else str(e) or "timed out"
            writer.write(_answer(502, f"dial {host}:{port}: {words}"))
            return
        writer.write(_answer(200, "Connection established"))
        try:
            await asyncio.gather(carry(reader, ours), carry(theirs, writer))
        finally:
            ours.close()

    async def _dial(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not is_inside(host, self._inside):
            return await asyncio.open_connection(host, port, limit=CHUNK)
        made = await self._place.new_socket()
        try:
            await asyncio.get_running_loop().sock_connect(made, (host, port))
        except BaseException:
            made.close()
            raise
        return await asyncio.open_connection(sock=made, limit=CHUNK)


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction to its end, which is passed on; the other may go on."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):  # both ends have closed at once
        writer.write_eof()


def _answer(code: int, words: str) -> bytes:
    clean = " ".join(words.split())
    return f"HTTP/1.1 {code} {clean}\r\nContent-Length: 0\r\n\r\n".encode(errors="replace")


def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    listening = socket.socket(fileno=int(argv[0]))
    place = Place(Path(argv[1]))
    networks = [ipaddress.ip_network(word) for word in argv[2:]]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Proxy(place, networks).serve(listening))


if __name__ == "__main__":
    main(sys.argv[1:])
