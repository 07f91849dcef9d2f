"""exec, attach, logs, port-forward and stats, multiplexed over the connection to the kubelet."""

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

from . import logs, wire
from .enter import ExecError, Execution
from .fds import writable
from .sockets import connect

if TYPE_CHECKING:
    from .connection import Connection
    from .pod import Pod
    from .runner import Runner

CHUNK = 1 << 16
MAX_ATTACH_BACKLOG = 8 << 20  # bytes an attached client may be behind before it is let go


class StreamError(Exception):
    """The stream ends with these words."""


class Stream:
    """One stream's two directions, each with its window."""

    def __init__(self, number: int, connection: "Connection") -> None:
        self._number = number
        self._connection = connection
        self._credit = wire.WINDOW
        self._granted = asyncio.Event()
        self.received: "asyncio.Queue[Tuple[int, bytes]]" = asyncio.Queue()

    async def send(self, channel: int, data: bytes) -> None:
        """Waits for the receiver's window."""
        for start in range(0, len(data), CHUNK):
            part = data[start : start + CHUNK]
            while self._credit < len(part):
                self._granted.clear()
                await self._granted.wait()
            self._credit -= len(part)
            self._connection.send(wire.encode_data(self._number, channel, part))
            await self._connection.drained()

    def finish(self, channel: int, data: bytes) -> None:
        """A last small word, for which no window is waited."""
        self._connection.send(wire.encode_data(self._number, channel, data))

    def grant(self, count: int) -> None:
        self._credit += count
        self._granted.set()

    def consumed(self, count: int) -> None:
        self._connection.send(
            wire.encode_message({"type": "window", "stream": self._number, "bytes": count})
        )


class Streams:
    """All streams of one connection; they end with it."""

    def __init__(self, pod: "Pod", connection: "Connection") -> None:
        self._pod = pod
        self._connection = connection
        self._open: Dict[int, Tuple[Stream, "asyncio.Task[None]"]] = {}

    def message(self, message: Dict[str, Any]) -> None:
        kind, number = message["type"], message.get("stream")
        if kind == "open":
            stream = Stream(int(message["stream"]), self._connection)
            task = asyncio.ensure_future(self._serve(stream, message))
            self._open[int(message["stream"])] = (stream, task)
        elif kind == "window" and number in self._open:
            self._open[number][0].grant(int(message["bytes"]))
        elif kind == "closed" and number in self._open:
            self._open.pop(number)[1].cancel()

    def data(self, frame: wire.Frame) -> None:
        if frame.stream in self._open:
            self._open[frame.stream][0].received.put_nowait((frame.channel, frame.payload))

    def close(self) -> None:
        for _, task in self._open.values():
            task.cancel()
        self._open.clear()

    async def _serve(self, stream: Stream, message: Dict[str, Any]) -> None:
        number = message["stream"]
        closed: Dict[str, Any] = {"type": "closed", "stream": number}
        try:
            await _KINDS[message["kind"]](stream, message, self._pod)
        except StreamError as e:
            closed["error"] = str(e)
        except (OSError, KeyError, ValueError) as e:
            closed["error"] = "%s: %s" % (type(e).__name__, e)
        if self._open.pop(number, None):
            self._connection.send(wire.encode_message(closed))


def _runner(message: Dict[str, Any], pod: "Pod") -> "Runner":
    name = message["container"]
    if name not in pod.runners:
        raise StreamError("container %s is not valid for pod %s" % (name, pod.plan["name"]))
    return pod.runners[name]


# --- exec and attach -----------------------------------------------------------------------------


def success() -> bytes:
    return b'{"metadata":{},"status":"Success"}'


def failure(code: int) -> bytes:
    """The Status that tells kubectl a command's exit code."""
    return json.dumps(
        {
            "metadata": {},
            "status": "Failure",
            "message": "command terminated with non-zero exit code: exit status %d" % code,
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        }
    ).encode()


def internal_error(words: str) -> bytes:
    return json.dumps(
        {
            "metadata": {},
            "status": "Failure",
            "message": "Internal error occurred: %s" % words,
            "reason": "InternalError",
            "details": {"causes": [{"message": words}]},
            "code": 500,
        }
    ).encode()


async def _exec(stream: Stream, message: Dict[str, Any], pod: "Pod") -> None:
    runner = _runner(message, pod)
    try:
        execution = Execution(
            runner, message["command"], tty=bool(message.get("tty")),
            stdin=bool(message.get("stdin")),
        )  # fmt: skip
    except ExecError as e:
        stream.finish(wire.ERROR, internal_error("error executing command in container: %s" % e))
        return

    async def output(name: str, data: bytes) -> None:
        await stream.send(wire.STDOUT if name == "stdout" else wire.STDERR, data)

    feeding = asyncio.ensure_future(_feed(stream, execution))
    try:
        code = await execution.finish(output)
        stream.finish(wire.ERROR, failure(code) if code else success())
    except ExecError as e:
        stream.finish(wire.ERROR, internal_error("error executing command in container: %s" % e))
    finally:
        feeding.cancel()
        execution.kill()


async def _feed(stream: Stream, execution: Execution) -> None:
    """The client's input, sizes and end of input, in their order."""
    fd = execution.process.streams.stdin
    while True:
        channel, data = await stream.received.get()
        if channel == wire.STDIN and fd >= 0:
            try:
                await _write(fd, data)
            except OSError:
                fd = -1  # the command reads no more
        elif channel == wire.RESIZE:
            with contextlib.suppress(ValueError, KeyError, OSError):
                size = json.loads(data)
                execution.resize(int(size["Width"]), int(size["Height"]))
        elif channel == wire.CLOSE and data[:1] == b"\0":
            execution.close_stdin()
            fd = -1
        stream.consumed(len(data))


async def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            await writable(fd)


async def _attach(stream: Stream, message: Dict[str, Any], pod: "Pod") -> None:
    runner = _runner(message, pod)
    run = runner.run
    if run is None or not runner.pid:
        raise StreamError("container %s not running" % runner.name)
    backlog: "asyncio.Queue[Tuple[int, bytes]]" = asyncio.Queue()
    waiting = 0

    def listen(name: str, data: bytes) -> None:
        nonlocal waiting
        waiting += len(data)
        if waiting > MAX_ATTACH_BACKLOG:
            runner.listeners.discard(listen)
            return
        backlog.put_nowait((wire.STDOUT if name == "stdout" else wire.STDERR, data))

    async def forward() -> None:
        nonlocal waiting
        while True:
            channel, data = await backlog.get()
            if channel == wire.ERROR:
                return
            await stream.send(channel, data)
            waiting -= len(data)

    runner.listeners.add(listen)
    tasks = [asyncio.ensure_future(forward())]
    if message.get("stdin"):
        tasks.append(asyncio.ensure_future(_attached_input(stream, runner)))
    try:
        # a run is another value, with the same number, once its stdin is closed
        while runner.run is not None and runner.run.number == run.number:
            await runner.grown.wait()
        backlog.put_nowait((wire.ERROR, b""))  # the end
        await tasks[0]
        stream.finish(wire.ERROR, success())
    finally:
        runner.listeners.discard(listen)
        for task in tasks:
            task.cancel()


async def _attached_input(stream: Stream, runner: "Runner") -> None:
    while True:
        channel, data = await stream.received.get()
        if channel == wire.STDIN:
            await runner.write_stdin(data)
        elif channel == wire.RESIZE:
            with contextlib.suppress(ValueError, KeyError, OSError):
                size = json.loads(data)
                runner.resize(int(size["Width"]), int(size["Height"]))
        elif channel == wire.CLOSE and data[:1] == b"\0" and runner.container["stdinOnce"]:
            runner.close_stdin()
        stream.consumed(len(data))


# --- logs ----------------------------------------------------------------------------------------


def log_options(message: Dict[str, Any]) -> logs.LogOptions:
    since = message.get("sinceTime")
    return logs.LogOptions(
        tail_lines=message.get("tailLines"),
        since=logs.parse_time(since) if since else None,
        limit_bytes=message.get("limitBytes"),
        timestamps=bool(message.get("timestamps")),
    )


async def _logs(stream: Stream, message: Dict[str, Any], pod: "Pod") -> None:
    runner = _runner(message, pod)
    number = _log_number(runner, bool(message.get("previous")))
    try:
        log = logs.LogFile(logs.path_of(pod.setup.logs, runner.name, number), log_options(message))
    except FileNotFoundError:
        raise StreamError(
            'container "%s" in pod "%s" is waiting to start: %s'
            % (runner.name, pod.plan["name"], runner.state.get("waiting", {}).get("reason", ""))
        ) from None
    try:
        while True:
            grown = runner.grown
            over = runner.run is None or runner.run.number != number
            text = log.read()
            if text:
                await stream.send(wire.STDOUT, text)
            elif log.full or over or not message.get("follow"):
                return
            else:
                await grown.wait()
    finally:
        log.close()


def _log_number(runner: "Runner", previous: bool) -> int:
    """Which run's log is meant: the newest there is, or the one before."""
    there = logs.runs(runner.pod.setup.logs, runner.name)
    wanted = there[-1] - 1 if there and previous else there[-1] if there else 0
    if previous and wanted not in there:
        raise StreamError(
            'previous terminated container "%s" in pod "%s" not found'
            % (runner.name, runner.pod.plan["name"])
        )
    return wanted


# --- ports ---------------------------------------------------------------------------------------


async def _port_forward(stream: Stream, message: Dict[str, Any], pod: "Pod") -> None:
    port = int(message["port"])
    try:
        reader, writer = await _connect_local(pod.setup.runtime.netns, port)
    except OSError as e:
        raise StreamError(
            "failed to connect to localhost:%d of pod %s: %s"
            % (port, pod.plan["name"], os.strerror(e.errno).lower() if e.errno else e)
        ) from None

    async def inward() -> None:
        while True:
            channel, data = await stream.received.get()
            if channel == wire.CLOSE:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            stream.consumed(len(data))

    async def outward() -> None:
        while True:
            data = await reader.read(CHUNK)
            if not data:
                break
            await stream.send(wire.STDOUT, data)
        stream.finish(wire.CLOSE, bytes([wire.STDOUT]))

    # Each direction ends by itself; a broken connection ends both.
    tasks = [asyncio.ensure_future(inward()), asyncio.ensure_future(outward())]
    try:
        await asyncio.gather(*tasks)
    except OSError as e:
        raise StreamError("port %d: %s" % (port, os.strerror(e.errno) if e.errno else e)) from None
    finally:
        for task in tasks:
            task.cancel()
        writer.close()


async def _connect_local(
    netns: int, port: int
) -> Tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The pod's loopback, IPv4 before IPv6."""
    error: Optional[OSError] = None
    for host in ("127.0.0.1", "::1"):
        try:
            return await connect(netns, host, port)
        except OSError as e:
            error = error or e
    assert error is not None
    raise error


async def _stats(stream: Stream, message: Dict[str, Any], pod: "Pod") -> None:
    from .stats import pod_stats

    await stream.send(wire.STDOUT, json.dumps(pod_stats(pod)).encode())


_KINDS = {
    "exec": _exec, "attach": _attach, "logs": _logs, "portForward": _port_forward,
    "stats": _stats,
}  # fmt: skip
