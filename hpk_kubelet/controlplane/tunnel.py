"""`hpk tunnel`: the API server's port on this node, where the site lets no connection through.

Connections go over the standard streams of one `srun --overlap` step in the control job, framed as
agent/wire.py frames the agents': DATA of a stream on its way, an empty DATA on CLOSE at the end of
one direction, `open` and `closed` messages. Slurm hands a step's output on by whole lines, so a
message that ends one follows whatever is written. TLS is kubectl's and the API server's, end to
end.

    python -m hpk_kubelet.controlplane.tunnel HOST PORT      (the far end)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hpk_kubelet.agent.wire import CLOSE, DATA, STDIN, Decoder, encode_data, encode_message
from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.controlplane.kubeconfig import Control, read_control
from hpk_kubelet.errors import HPKError

CHUNK = 64 << 10
READY = "ready"
_LINE = encode_message({"type": "line"}, end=b"\n")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Mux:
    """Many connections over one pair of streams; both ends are alike but for who opens."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._connections: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0

    def _write(self, frame: bytes) -> None:
        self._writer.write(frame + _LINE)

    def tell(self, kind: str, stream: int = 0) -> None:
        self._write(encode_message({"type": kind, "stream": stream}))

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection of this side, to its end."""
        self._last += 1
        self.tell("open", self._last)
        self._connections[self._last] = writer
        await self._carry(self._last, reader)

    async def run(
        self, dial: Callable[[], Awaitable[Streams]], ready: asyncio.Event | None = None
    ) -> None:
        """Serves until the other end is gone. `dial` makes the connection it opens."""
        decoder = Decoder()
        try:
            while data := await self._reader.read(CHUNK):
                for frame in decoder.feed(data):
                    if frame.kind == DATA:
                        await self._take(frame.stream, frame.channel, frame.payload)
                        continue
                    message = frame.message()
                    if message["type"] == "open":
                        await self._open(int(message["stream"]), dial)
                    elif message["type"] == "closed":
                        self._drop(int(message["stream"]))
                    elif message["type"] == READY and ready is not None:
                        ready.set()
        finally:
            for task in self._tasks:
                task.cancel()
            for stream in list(self._connections):
                self._drop(stream)

    async def _open(self, stream: int, dial: Callable[[], Awaitable[Streams]]) -> None:
        try:
            reader, self._connections[stream] = await dial()
        except OSError as e:
            print(f"hpk: tunnel: {e}", file=sys.stderr)
            self.tell("closed", stream)
            return
        task = asyncio.create_task(self._carry(stream, reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, stream: int, channel: int, data: bytes) -> None:
        writer = self._connections.get(stream)
        if writer is None:
            return
        try:
            if channel == CLOSE:
                writer.write_eof()
            else:
                writer.write(data)
                await writer.drain()
        except OSError:
            self._drop(stream)
            self.tell("closed", stream)

    async def _carry(self, stream: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                self._write(encode_data(stream, STDIN, data))
                await self._writer.drain()
        if stream in self._connections:
            self._write(encode_data(stream, CLOSE, b""))

    def _drop(self, stream: int) -> None:
        if (writer := self._connections.pop(stream, None)) is not None:
            writer.close()


def tunnel_config(kubeconfig: Path, port: int) -> str:
    """The user's kubeconfig with the tunnel's end for the server."""
    config: dict[str, Any] = json.loads(kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
    return json.dumps(config, indent=1) + "\n"


def step(control: Control, api_host: str, api_port: int) -> list[str]:
    """The far end as a step of the control job, beside what runs there."""
    return [
        "srun", f"--jobid={control.job}", "--overlap", "--nodes=1", "--ntasks=1", "--quiet",
        "--mem=0", "--export=NIL", f"--chdir={os.sep}", "--",
        sys.executable, "-m", __spec__.name, api_host, str(api_port),
    ]  # fmt: skip


async def tunnel(paths: Paths, port: int, say: Callable[[str], None]) -> None:
    """Runs until SIGINT or SIGTERM; HPKError when there is nothing to reach."""
    control = read_control(paths)
    if control is None:
        raise HPKError("no control plane runs; start one with: sbatch hpk.sbatch")
    if control.job is None:
        raise HPKError(
            f"the control plane runs outside Slurm on {control.host}, so no job leads there; "
            f"use ssh -L instead"
        )
    host, _, api_port = control.api.rpartition("//")[2].rpartition(":")
    process = await asyncio.create_subprocess_exec(
        *step(control, host, int(api_port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # ^C is for us alone
    )
    assert process.stdin is not None and process.stdout is not None
    mux, ready, stop = Mux(process.stdout, process.stdin), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.create_task(mux.run(_nobody_dials, ready))
    stopping = asyncio.create_task(stop.wait())
    becoming = asyncio.create_task(ready.wait())
    config = paths.home / "kubeconfig-tunnel"
    try:
        await asyncio.wait({running, stopping, becoming}, return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            server = await asyncio.start_server(mux.accept, "127.0.0.1", port)
            local: int = server.sockets[0].getsockname()[1]
            write_private(config, tunnel_config(paths.kubeconfig, local))
            say(f"the API is at 127.0.0.1:{local} until ^C; export KUBECONFIG={config}")
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            server.close()
        if not stop.is_set():
            raise HPKError(f"the step in job {control.job} ended (srun's words are above)")
    finally:
        config.unlink(missing_ok=True)
        for task in (running, stopping, becoming):
            task.cancel()
        process.stdin.close()  # the far end goes, and the step with it
        await process.wait()


async def _nobody_dials() -> Streams:
    raise ConnectionRefusedError("only this end opens connections")


async def far_end(host: str, port: int) -> None:
    """In the control job: opens what the near end asks for."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=CHUNK)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    mux = Mux(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
    mux.tell(READY)

    async def dial() -> Streams:
        made = await asyncio.open_connection(host, port)
        made[1].get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    await mux.run(dial)


if __name__ == "__main__":
    asyncio.run(far_end(sys.argv[1], int(sys.argv[2])))
