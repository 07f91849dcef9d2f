"""Both ends of the tunnel, joined by a socket in place of srun."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane.kubeconfig import Control
from hpk_kubelet.controlplane.tunnel import Mux, _nobody_dials, step, tunnel, tunnel_config
from hpk_kubelet.errors import HPKError


async def joined(dial):
    """The near end of a tunnel whose far end dials so, and what stops both."""
    ends = [await asyncio.open_connection(sock=s) for s in socket.socketpair()]
    near, far = (Mux(*end) for end in ends)
    tasks = [asyncio.create_task(near.run(_nobody_dials)), asyncio.create_task(far.run(dial))]

    async def stop():
        for _, writer in ends:
            writer.close()
        await asyncio.gather(*tasks)

    return near, stop


async def through(mux, payload):
    """What comes back when a client sends `payload` and half-closes."""
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(mux.accept(*await asyncio.open_connection(sock=theirs)))
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(payload)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    await serving
    return answer


async def test_many_connections_and_half_closes():
    async def handle(reader, writer):
        writer.write(b"<" + await reader.read() + b">")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    near, stop = await joined(lambda: asyncio.open_connection("127.0.0.1", port))
    payloads = [bytes([65 + n]) * (1 + n * 50_000) for n in range(8)]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*(through(near, payload) for payload in payloads))
        await stop()
    server.close()
    assert answers == [b"<" + payload + b">" for payload in payloads]


async def test_a_refused_connection_is_closed(capsys):
    async def refuse():
        raise ConnectionRefusedError("nobody is there")

    near, stop = await joined(refuse)
    async with asyncio.timeout(10):
        assert await through(near, b"hello") == b""
        await stop()
    assert "nobody is there" in capsys.readouterr().err


def test_the_kubeconfig_leads_to_the_tunnel(tmp_path: Path):
    whole = {"clusters": [{"cluster": {"server": "https://10.0.0.1:6443", "x": 1}}], "users": [1]}
    (tmp_path / "k").write_text(json.dumps(whole))
    whole["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:7"
    assert json.loads(tunnel_config(tmp_path / "k", 7)) == whole


def test_the_step_is_beside_the_control_plane():
    words = step(Control("https://h:1", "node1", 5, 7, "now"), "h", 1)
    assert words[:3] == ["srun", "--jobid=5", "--overlap"]
    assert words[-3:] == ["hpk_kubelet.controlplane.tunnel", "h", "1"]


async def test_without_a_job_there_is_a_sentence(tmp_path: Path):
    paths = Paths(tmp_path)
    with pytest.raises(HPKError, match="no control plane runs"):
        await tunnel(paths, 0, print)
    paths.run.mkdir()
    paths.control.write_text(Control("https://h:1", "node1", None, 7, "now").to_json())
    with pytest.raises(HPKError, match="outside Slurm on node1"):
        await tunnel(paths, 0, print)
