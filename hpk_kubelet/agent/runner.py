"""One container through all its runs."""

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set

from . import probes
from .container import StartError
from .fds import chunks, writable
from .handlers import HookError, run_hook
from .logs import LogWriter, read_log
from .program import read_outcome
from .restart import BackOff, duration, should_restart
from .runs import exit_code, report, resize
from .setup import Run

if TYPE_CHECKING:
    from .pod import Pod

START_FAILED = 128  # runc's exit code for a container whose program could not be executed

Listener = Callable[[str, bytes], None]


class Runner:
    def __init__(self, pod: "Pod", container: Dict[str, Any], init: bool) -> None:
        self.pod = pod
        self.container = container
        self.name: str = container["name"]
        self.init = init
        self.state: Dict[str, Any] = {
            "waiting": {
                "reason": "PodInitializing" if pod.plan["initContainers"] else "ContainerCreating"
            },
            "restartCount": 0,
            "started": False,
            "ready": False,
        }
        self.run: Optional[Run] = None
        self.pid = 0  # the container's first process; 0 while it does not run
        self.log: Optional[LogWriter] = None
        self.started = asyncio.Event()  # of the present run: startup probe and postStart passed
        self.listeners: Set[Listener] = set()  # attached streams
        self.grown = asyncio.Event()  # set (and replaced) when the log grew or the run ended
        self.exit_code: Optional[int] = None  # of the last run
        self.start_error: Optional[StartError] = None  # of a start before the event loop
        self._back_off = BackOff()
        self._next: Optional[Dict[str, Any]] = None  # the container with another image
        self._exited: "Optional[asyncio.Future[int]]" = None
        self._oom_killed = False

    # --- its life ----------------------------------------------------------------------------

    async def live(self) -> None:
        """Runs the container, and again as its policy says, until it is over or the pod stops."""
        while not self.pod.stopping.is_set():
            if self.run is None and not await self._start():
                return
            await self._attend()
            if self.pod.stopping.is_set():
                return
            assert self.exit_code is not None
            if self._next is not None:
                self.state["restartCount"] += 1
                continue
            if not should_restart(self.container, self.exit_code, self.init):
                return
            if not await self._back():
                return

    def replace(self, container: Dict[str, Any]) -> None:
        """Restarts it with another image."""
        present = self._next or self.container
        if container["image"]["reference"] == present["image"]["reference"]:
            return
        self._next = container
        why = "Container %s definition changed, will be restarted" % self.name
        self.pod.spawn_task(self.kill(why, self.pod.grace))

    async def _start(self) -> bool:
        """Starts the next run; keeps trying while the container can't be made."""
        delay = 1.0
        while True:
            if self._next is not None:
                self.container, self._next = self._next, None
                self.state["image"] = self.container["image"]["reference"]
            try:
                error, self.start_error = self.start_error, None
                if error is not None:
                    raise error
                self.run = self.pod.setup.start(
                    self.container, self.state["restartCount"], self._target()
                )
                return True
            except StartError as e:
                self._wait_with(e.reason, str(e))
                self.event("Warning", "Failed", "Error: %s" % e)
            if await self.pod.stops_within(delay):
                return False
            delay = min(delay * 2, 120.0)

    def _target(self) -> int:
        """The first process of the container whose processes this (ephemeral) one shall see."""
        name = self.container.get("targetContainer")
        if not name or self.pod.plan["shareProcessNamespace"]:
            return 0
        target = self.pod.runners.get(name)
        if target is None or not target.pid:
            raise StartError("CreateContainerError", "unable to find target container %s" % name)
        return target.pid

    async def _back(self) -> bool:
        """Waits out the back-off; False if the pod stops meanwhile."""
        wait = self._back_off.wait(self.state["terminated"]["finishedAt"], time.time())
        if wait:
            step = duration(self._back_off.step)
            self._wait_with(
                "CrashLoopBackOff",
                "back-off %s restarting failed container=%s pod=%s"
                % (step, self.name, self.pod.full_name),
            )
            self.event(
                "Warning", "BackOff", "Back-off restarting failed container %s in pod %s"
                % (self.name, self.pod.full_name),
            )  # fmt: skip
            if await self.pod.stops_within(wait):
                return False
        self._back_off.next(time.time())
        self.state["restartCount"] += 1
        return not self.pod.stopping.is_set()

    def _wait_with(self, reason: str, message: str) -> None:
        self._leave_state()
        self.state.update(waiting={"reason": reason, "message": message}, ready=False)
        self.pod.changed()

    def _leave_state(self) -> None:
        last = self.state.get("terminated")
        if last is not None:
            self.state["lastTerminated"] = last
        for key in ("waiting", "running", "terminated"):
            self.state.pop(key, None)

    async def _attend(self) -> None:
        """From the fork of a run to its end, which is in `state` then."""
        run = self.run
        assert run is not None
        loop = asyncio.get_running_loop()
        process = run.process
        self._exited = self.pod.reaper.watch(process.pid)
        self._oom_killed = False
        before = self.pod.oom_kills()
        self.log = LogWriter(run.log, self.pod.note)
        pumps = [
            loop.create_task(self._pump(fd, stream))
            for fd, stream in (
                (process.streams.stdout, "stdout"),
                (process.streams.stderr, "stderr"),
            )
            if fd >= 0
        ]
        if process.streams.stdin >= 0:
            os.set_blocking(process.streams.stdin, False)
        complaints: List[bytes] = []
        pumps.append(loop.create_task(self._collect(process.complaints, complaints)))
        records, pid = await report(process.report)
        outcome = read_outcome(
            records, pid, self.container["argv"][0], self.container["workingDir"]
        )
        work: List["asyncio.Task[None]"] = []
        if outcome.pid and not outcome.failed:
            self.pid = outcome.pid
            started_at = run.spawned
            work = self._began(started_at)
        else:
            started_at = 0.0
        status = await self._exited
        self.pid = 0
        for task in work:
            task.cancel()
        finished_at = time.time()
        await asyncio.wait(pumps)
        self._close()
        words = b"".join(complaints).decode(errors="replace").strip()
        if words:
            self.pod.note("apptainer says of container %s: %s" % (self.name, words))
        self._ended(run, outcome.failed, words, status, started_at, finished_at,
                    self._oom_killed or self.pod.oom_kills() > before)  # fmt: skip
        self.run = None
        self._wake()
        self.pod.setup.forget(self.name, run)

    def _began(self, started_at: float) -> "List[asyncio.Task[None]]":
        """The program runs: says so, and starts what watches it."""
        loop = asyncio.get_running_loop()
        self._leave_state()
        self.state["running"] = {"startedAt": started_at}
        self.event("Normal", "Created", "Container created")
        self.event("Normal", "Started", "Container started")
        self.started.clear()
        waits = bool(
            self.container.get("startupProbe")
            or self.container.get("lifecycle", {}).get("postStart")
        )
        if not waits:
            self._has_started()
        self.pod.changed()
        has_probes = any(kind in self.container for kind in probes.KINDS)
        if not waits and not has_probes:
            return []
        return [loop.create_task(self._watch(started_at))]

    async def _watch(self, started_at: float) -> None:
        """postStart, then the probes, until cancelled at the run's end."""
        hook = self.container.get("lifecycle", {}).get("postStart")
        if hook:
            try:
                await run_hook(hook, self)
            except HookError as e:
                self.event("Warning", "FailedPostStartHook", "PostStartHook failed")
                self.pod.note("postStart of container %s: %s" % (self.name, e))
                self.pod.spawn_task(self.kill("FailedPostStartHook", self.pod.grace))
                return
        if "startupProbe" not in self.container:
            self._has_started()
            self.pod.changed()
        await probes.watch(self, started_at)

    def _has_started(self) -> None:
        self.state["started"] = True
        if "readinessProbe" not in self.container:
            self.state["ready"] = True
        self.started.set()

    def passed_startup(self) -> None:
        self._has_started()
        self.pod.changed()

    def set_ready(self, ready: bool) -> None:
        if self.state["ready"] != ready:
            self.state["ready"] = ready
            self.pod.changed()

    def _ended(
        self, run: Run, failed: str, words: str, status: int, started_at: float,
        finished_at: float, oom: bool,
    ) -> None:  # fmt: skip
        code = exit_code(status)
        rank = ""
        if code and self.container.get("mpi"):
            from .rank import first_failure

            first = first_failure(self.pod.setup.pod_dir, self.name)
            if first:
                code = first["exitCode"]
                rank = "rank %d was the first to fail, with exit code %d" % (first["rank"], code)
        terminated: Dict[str, Any] = {"startedAt": started_at, "finishedAt": finished_at}
        if failed:
            terminated.update(exitCode=START_FAILED, reason="StartError", message=failed)
            self.event("Warning", "Failed", "Error: %s" % failed)
        elif not started_at:
            # apptainer itself could not make the container
            message = words or "apptainer ended with code %d" % code
            terminated.update(exitCode=START_FAILED, reason="ContainerCannotRun", message=message)
            self.event("Warning", "Failed", "Error: %s" % message)
        else:
            reason = "Completed" if code == 0 else "OOMKilled" if oom and code == 137 else "Error"
            words = rank or self._last_words(run, code)
            terminated.update(exitCode=code, reason=reason, message=words)
        self.exit_code = terminated["exitCode"]
        self._leave_state()
        self.state.update(terminated=terminated, ready=False, started=False)
        if self._next is not None and not should_restart(self.container, self.exit_code, self.init):
            # It starts again against its policy: nobody may take this for the pod's end.
            del self.state["terminated"]
            self.state["waiting"] = {"reason": "ContainerCreating"}
        self.pod.changed()

    def _last_words(self, run: Run, code: int) -> str:
        message = self.pod.setup.termination_message(run)
        if message or code == 0 or self.container["terminationMessagePolicy"] == "File":
            return message
        return fallback_message(self.pod.setup.logs, self.name, run.number)

    def oom_killed(self) -> None:
        """It is being killed for its memory."""
        self._oom_killed = True

    # --- its output --------------------------------------------------------------------------

    async def _collect(self, fd: int, into: List[bytes]) -> None:
        os.set_blocking(fd, False)
        async for data in chunks(fd, self._exited):
            into.append(data)
            if len(into) > 64:
                del into[0]

    async def _pump(self, fd: int, stream: str) -> None:
        os.set_blocking(fd, False)
        assert self.log is not None
        async for data in chunks(fd, self._exited):
            self.log.write(stream, data)
            for listener in list(self.listeners):
                listener(stream, data)
            self._wake()
        self.log.end(stream)

    def _wake(self) -> None:
        grown, self.grown = self.grown, asyncio.Event()
        grown.set()

    def _close(self) -> None:
        assert self.run is not None
        process = self.run.process
        for fd in {*process.streams, process.complaints} - {-1}:
            os.close(fd)
        if self.log:
            self.log.close()

    async def write_stdin(self, data: bytes) -> None:
        """From an attached client; dropped if the container has no stdin or reads no more."""
        view = memoryview(data)
        while view and self.run is not None and self.run.process.streams.stdin >= 0:
            fd = self.run.process.streams.stdin
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                await writable(fd)
            except OSError:
                return

    def close_stdin(self) -> None:
        if self.run is not None:
            streams = self.run.process.streams
            if streams.stdin >= 0 and streams.stdin != streams.stdout:
                os.close(streams.stdin)
                process = self.run.process._replace(streams=streams._replace(stdin=-1))
                self.run = self.run._replace(process=process)

    def resize(self, width: int, height: int) -> None:
        if self.run is not None and self.container["tty"]:
            resize(self.run.process.streams.stdout, width, height)

    # --- its end -----------------------------------------------------------------------------

    def event(self, kind: str, reason: str, message: str) -> None:
        self.pod.event(kind, reason, message, self.name, self.init)

    def alive(self) -> bool:
        """Whether the container's first process is there and no zombie."""
        return bool(self.pid) and os.path.exists("/proc/%d/root/." % self.pid)

    def signal(self, number: int) -> None:
        """To the container's first process, or to what is about to make it."""
        if self._exited is None or self._exited.done() or self.run is None:
            return
        mpi = self.container.get("mpi")
        with contextlib.suppress(ProcessLookupError):
            if self.pid and not mpi:
                os.kill(self.pid, number)
            elif mpi or number == signal.SIGKILL:
                os.kill(self.run.process.pid, number)

    async def kill(self, why: str, grace: float) -> None:
        """Ends the present run: preStop, the stop signal, and SIGKILL after `grace` seconds (or
        sooner, when the pod's own end comes first). `why` is the Killing event's text."""
        exited = self._exited
        if self.run is None or exited is None or exited.done():
            return
        deadline = time.monotonic() + grace
        self.event("Normal", "Killing", why)
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook and self.pid and grace > 0:
            task = asyncio.get_running_loop().create_task(run_hook(hook, self))
            await self.pod.wait_until({task, exited}, deadline)
            if task.done() and not task.cancelled() and task.exception():
                self.event("Warning", "FailedPreStopHook", "PreStopHook failed")
            task.cancel()
        if not exited.done():
            # kubelet gives at least two seconds after a preStop hook that took them all
            deadline = max(deadline, time.monotonic() + (2.0 if hook and grace > 0 else 0.0))
            number = getattr(signal, self.container["stopSignal"], signal.SIGTERM)
            if not self.pid:
                await self.pod.wait_until({exited}, min(deadline, time.monotonic() + 0.5))
            self.signal(number)
            await self.pod.wait_until({exited}, deadline)
        while not exited.done():
            self.signal(signal.SIGKILL)
            await asyncio.wait({exited}, timeout=1.0)


def fallback_message(logs: str, name: str, number: int) -> str:
    """The end of the log: at most 80 lines and 2048 bytes."""
    from .logs import LogOptions

    with contextlib.suppress(OSError):
        text = b"".join(read_log(logs, name, number, LogOptions(tail_lines=80)))
        return text[-2048:].decode(errors="replace")
    return ""
