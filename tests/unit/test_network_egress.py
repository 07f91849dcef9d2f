"""The API server's way to pods, with plain sockets in place of namespaces."""

import asyncio
import ipaddress
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpk_kubelet.network import egress
from hpk_kubelet.network.egress import Place, PlaceError, Proxy, is_inside, parse_target

PODS = [ipaddress.ip_network("10.244.0.0/16")]


@pytest.mark.parametrize(
    ("head", "target"),
    [
        (b"CONNECT 10.244.1.2:8080 HTTP/1.1\r\nHost: x\r\n\r\n", ("10.244.1.2", 8080)),
        (b"CONNECT [fd00::1]:443 HTTP/1.1\r\n\r\n", ("fd00::1", 443)),
        (b"CONNECT some.host:1 HTTP/1.0\r\n\r\n", ("some.host", 1)),
    ],
)
def test_a_target_is_read(head: bytes, target: tuple[str, int]) -> None:
    assert parse_target(head) == target


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\n\r\n", b"CONNECT x HTTP/1.1\r\n\r\n", b"\xff\r\n\r\n", b"\r\n\r\n",
             b"CONNECT :80 HTTP/1.1\r\n\r\n", b"CONNECT a:b HTTP/1.1\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_target_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError):
        parse_target(head)


def test_which_addresses_are_pods() -> None:
    assert is_inside("10.244.3.4", PODS)
    assert not any(is_inside(host, PODS) for host in ("10.245.0.1", "node1", "::1"))


class Inside:
    """Makes its sockets where it is, or can't."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.made = 0

    async def new_socket(self) -> socket.socket:
        if self.error:
            raise PlaceError(self.error)
        self.made += 1
        made = socket.socket()
        made.setblocking(False)
        return made


async def talk(place: object, inside: str, target: str, send: bytes) -> bytes:
    """Everything that comes back through a proxy from a request and `send`."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0hpk-test-{os.getpid()}-{id(place)}")
    listening.listen()
    name = listening.getsockname()
    networks = [ipaddress.ip_network(inside)]
    serving = asyncio.create_task(Proxy(place, networks).serve(listening))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_unix_connection(name)
            writer.write(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode() + send)
            writer.write_eof()
            answer = await reader.read()
            writer.close()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    return answer


async def echo() -> tuple[asyncio.Server, int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"<" + await reader.read() + b">")  # after the client's end
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(("inside", "made"), [("127.0.0.0/8", 1), ("10.0.0.0/8", 0)])
async def test_pods_are_dialled_from_inside_and_others_from_outside(inside: str, made: int) -> None:
    server, port = await echo()
    place = Inside()
    answer = await talk(place, inside, f"127.0.0.1:{port}", b"x" * 100_000)
    server.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == b"<" + b"x" * 100_000 + b">"
    assert place.made == made


async def test_what_fails_is_told_in_the_status_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        answer = await talk(Inside(), "127.0.0.0/8", f"127.0.0.1:{port}", b"")
    assert b"502 dial 127.0.0.1" in answer and b"refused" in answer
    answer = await talk(Inside("no place"), "127.0.0.0/8", "127.0.0.1:1", b"")
    assert b"502 dial 127.0.0.1:1: no place" in answer


async def test_another_user_gets_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "peer_uid", lambda sock: os.getuid() + 1)
    try:
        answer = await talk(Inside(), "127.0.0.0/8", "127.0.0.1:1", b"")
    except ConnectionError:
        answer = b""
    assert answer == b""


async def test_without_a_place_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match="no place in the pod network yet"):
        await Place(tmp_path / "place.json").new_socket()


def test_the_helper_hands_sockets_over() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        argv = [sys.executable, "-I", "-S", str(egress._HELPER), str(theirs.fileno())]
        helper = subprocess.Popen(argv, pass_fds=(theirs.fileno(),))
        theirs.close()
        ours.settimeout(10)
        for _ in range(2):
            ours.send(b"tcp")
            _, fds, _, _ = socket.recv_fds(ours, 16, 1)
            with socket.socket(fileno=fds[0]) as made:
                assert (made.family, made.type) == (socket.AF_INET, socket.SOCK_STREAM)
        ours.close()
        assert helper.wait(10) == 0


def test_the_place_file_is_read_each_time(tmp_path: Path) -> None:
    """A place that can't be entered is said to be one, and the next look finds the new one."""
    file = tmp_path / "place.json"
    file.write_text(json.dumps({"pid": 2**22 + 1}))  # above the kernel's greatest
    place = Place(file)
    try:
        with pytest.raises(PlaceError, match="can't be entered"):
            asyncio.run(place.new_socket())
    finally:
        place.close()
