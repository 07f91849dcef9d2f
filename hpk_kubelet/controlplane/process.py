"""Component processes: started in order, restarted when they die, stopped in reverse order."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpk_kubelet.errors import HPKError

Ready = Callable[[], Awaitable[bool]]

BACKOFF_FIRST = 0.5
BACKOFF_MAX = 30.0
BACKOFF_RESET = 60.0  # seconds of life after which a death counts as the first again
LOG_LIMIT = 64 << 20  # bytes per component and log file, of which two are kept
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Component:
    """One process of the control plane. `ready` is asked until it says True; it must not raise
    for a component that is merely not up yet."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Ready | None = None
    start_timeout: float = 60.0
    stop_timeout: float = 15.0
    fds: tuple[int, ...] = ()  # it inherits


def backoff(previous: float, lived: float) -> float:
    """Seconds to wait before the next start, from the last wait and the seconds it lived."""
    if previous == 0 or lived >= BACKOFF_RESET:
        return BACKOFF_FIRST
    return min(previous * 2, BACKOFF_MAX)


def rotate(log: Path) -> None:
    """Keeps the log of the last run as `NAME.log.1`."""
    if log.exists() and log.stat().st_size:
        log.replace(log.with_name(log.name + ".1"))


def truncate_large(log: Path) -> None:
    """Moves a too long log aside under the writing process (which appends, so it may stay)."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size <= LOG_LIMIT:
            return
        aside = log.with_name(log.name + ".1")
        with log.open("rb") as source, aside.open("wb") as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)
        os.truncate(log, 0)


def _child() -> None:
    """In the child before exec: dies with us, whatever kills us, and leaves ^C to us."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)


class Process:
    """A component under supervision: `start` returns when it is ready, `stop` when it is gone."""

    def __init__(self, component: Component, logs: Path, say: Callable[[str], None]) -> None:
        self.component = component
        self.log = logs / f"{component.name}.log"
        self.restarts = 0
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process and alive else None

    async def start(self) -> None:
        """Starts it (again, after `stop`) and waits until it is ready; HPKError with its last words
        otherwise."""
        self._stopping = False
        rotate(self.log)
        await self._spawn()
        try:
            await self._until_ready()
        except HPKError:
            await self.stop()
            raise
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self.component.name}")

    async def stop(self) -> None:
        """TERM, then KILL after the component's `stop_timeout`; also when it never started."""
        self._stopping = True
        if self._watcher:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.component.stop_timeout):
                await process.wait()
        except TimeoutError:
            seconds = self.component.stop_timeout
            self._say(f"{self.component.name} was killed, as it did not stop within {seconds:g} s")
            self._signal(signal.SIGKILL)
            await process.wait()

    def _signal(self, number: int) -> None:
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _spawn(self) -> None:
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.component.argv,
                env={**os.environ, **self.component.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                preexec_fn=_child,
                pass_fds=self.component.fds,
            )
        except OSError as e:
            program = self.component.argv[0]
            raise HPKError(f"{self.component.name}: cannot run {program}: {e}") from e
        finally:
            os.close(fd)

    async def _until_ready(self) -> None:
        component, process = self.component, self._process
        assert process is not None
        deadline = time.monotonic() + component.start_timeout
        while component.ready is not None and not await component.ready():
            if process.returncode is not None:
                raise HPKError(
                    f"{component.name} ended at its start ({_how(process.returncode)}): "
                    f"{last_words(self.log)} (all of it: {self.log})"
                )
            if time.monotonic() > deadline:
                raise HPKError(
                    f"{component.name} is not ready after {component.start_timeout:.0f} s: "
                    f"{last_words(self.log)} (all of it: {self.log})"
                )
            # The readiness of another program has no event to wait for.
            await asyncio.sleep(0.02)

    async def _watch(self) -> None:
        wait = 0.0
        while not self._stopping:
            assert self._process is not None
            began = time.monotonic()
            code = await self._process.wait()
            wait = backoff(wait, time.monotonic() - began)
            self.restarts += 1
            self._say(
                f"{self.component.name} ended ({_how(code)}); again in {wait:.1f} s "
                f"(see {self.log})"
            )
            await asyncio.sleep(wait)
            try:
                await self._spawn()
            except HPKError as e:
                self._say(str(e))


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def last_words(log: Path, limit: int = 400) -> str:
    """The last line a process wrote, cut to `limit` characters; for a message to the user."""
    try:
        with log.open("rb") as f:
            f.seek(max(0, log.stat().st_size - 16384))
            lines = f.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return "it wrote nothing"
    texts = [line.strip() for line in lines if line.strip()]
    reasons = [reason for text in texts if (reason := _reason(text))]
    return (reasons or texts or ["it wrote nothing"])[-1][:limit]


def _reason(line: str) -> str:
    """What a line of a Go program's log says of its end; "" for one that says nothing of it.

    klog's "command failed" and F lines, etcd's JSON of level fatal or panic; what follows them
    (goroutines, usage) explains nothing to a user.
    """
    if line.startswith("{"):
        try:
            entry = json.loads(line)
        except ValueError:
            return ""
        if entry.get("level") not in ("fatal", "panic"):
            return ""
        return ": ".join(str(entry[key]) for key in ("msg", "error") if entry.get(key))
    fatal = line.startswith("Error:") or re.match(r"F\d{4} ", line)
    return line if fatal or "command failed" in line else ""
