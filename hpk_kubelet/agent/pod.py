"""The pod: init containers in order, sidecars, main containers, and the common end."""

import asyncio
import contextlib
import os
import time
from typing import Any, Callable, Coroutine, Dict, List, Optional, Set

from .fds import within
from .journal import Journal, note, own_job
from .runner import Runner
from .setup import PodSetup
from .volumes import VolumeError

Publish = Callable[[Dict[str, Any], List[Dict[str, Any]]], None]


class Reaper:
    """Tells the ends of the agent's children."""

    def __init__(self) -> None:
        self._watched: "Dict[int, asyncio.Future[int]]" = {}

    def watch(self, pid: int) -> "asyncio.Future[int]":
        """A future of the wait status; to be asked once for each child."""
        future = self._watched[pid] = asyncio.get_running_loop().create_future()
        self._look(pid)
        return future

    def collect(self) -> None:
        """On SIGCHLD."""
        for pid in list(self._watched):
            self._look(pid)

    def _look(self, pid: int) -> None:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            future = self._watched.pop(pid)
            if not future.done():
                future.set_result(status)


class Pod:
    def __init__(
        self, plan: Dict[str, Any], setup: PodSetup, journal: Journal, started_at: float
    ) -> None:
        self.plan = plan
        self.setup = setup
        self.journal = journal
        self.full_name = "%s_%s(%s)" % (plan["name"], plan["namespace"], plan["uid"])
        self.grace = float(plan["terminationGracePeriodSeconds"])
        self.reaper = Reaper()
        self.stopping = asyncio.Event()
        self.publish: Optional[Publish] = None
        self.runners: Dict[str, Runner] = {}
        for init, containers in ((True, plan["initContainers"]), (False, plan["containers"])):
            for container in containers:
                self.runners[container["name"]] = Runner(self, container, init)
        self._deadline = float("inf")  # monotonic: when everything is killed
        self._deadline_moved = asyncio.Event()
        self._limit: Optional[asyncio.TimerHandle] = None
        self._reason: Dict[str, str] = {}
        self._finished = False
        self._started_at = started_at
        self._events: List[Dict[str, Any]] = []
        self._flush_due = False
        self._tasks: Set["asyncio.Task[Any]"] = set()
        self._lives: "Dict[str, asyncio.Task[None]]" = {}  # of the containers that began
        self._awaited: Set[str] = set(plan.get("misconfigured", ()))  # main ones yet to be told of
        self._initialized = False
        self._taken = asyncio.Event()  # set (and replaced) when a main one was told of

    # --- what others read and say ------------------------------------------------------------

    def state(self) -> Dict[str, Any]:
        """PodState."""
        return {
            "jobId": own_job(os.environ),
            "node": self.setup.node_name,
            "hostIP": self.setup.host_ip,
            "podIP": self.setup.runtime.fields["podIP"],
            "startedAt": self._started_at,
            "containers": {name: dict(runner.state) for name, runner in self.runners.items()},
            "finished": self._finished,
            **self._reason,
        }

    def changed(self) -> None:
        """The state will be written (once) when the loop has time."""
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def event(
        self, kind: str, reason: str, message: str, container: str = "", init: bool = False
    ) -> None:
        event: Dict[str, Any] = {
            "time": time.time(), "type": kind, "reason": reason, "message": message[:1024],
        }  # fmt: skip
        if container:
            event.update(container=container, init=init)
        self._events.append(event)
        self.changed()

    def flush(self) -> None:
        if not self._flush_due:
            return
        self._flush_due = False
        events, self._events = self._events, []
        state = self.state()
        self.journal.write(state, events)
        if self.publish:
            self.publish(state, events)

    def note(self, sentence: str) -> None:
        note(sentence)

    def spawn_task(self, work: "Coroutine[Any, Any, Any]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- time --------------------------------------------------------------------------------

    async def stops_within(self, seconds: float) -> bool:
        """Waits; True as soon as the pod is to stop."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(seconds, self.stopping.wait())
        return self.stopping.is_set()

    async def wait_until(self, futures: "Set[asyncio.Future[Any]]", deadline: float) -> None:
        """Until one of the futures is done, or the deadline (monotonic) or the pod's own is over,
        which may be moved meanwhile."""
        while not any(future.done() for future in futures):
            left = min(deadline, self._deadline) - time.monotonic()
            if left <= 0:
                return
            moved = asyncio.ensure_future(self._deadline_moved.wait())
            try:
                await asyncio.wait(
                    {*futures, moved}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                moved.cancel()

    def stop(self, grace: float, reason: str = "", message: str = "") -> None:
        """Ends the pod within `grace` seconds; again with less shortens it."""
        if self._finished:
            return
        deadline = time.monotonic() + grace
        if deadline < self._deadline:
            self._deadline = deadline
            moved, self._deadline_moved = self._deadline_moved, asyncio.Event()
            moved.set()
        if not self.stopping.is_set():
            if reason:
                self._reason = {"reason": reason, "message": message}
            self.stopping.set()
            self.changed()

    def oom_kills(self) -> int:
        return oom_kills()

    # --- its life ----------------------------------------------------------------------------

    async def run(self, volume_error: Optional[VolumeError]) -> None:
        """From the first container to the last; then the state is final and written."""
        self.limit(self.plan.get("activeDeadlineSeconds"))
        self.changed()
        if volume_error:
            await self._wait_for_volumes(volume_error)
        sidecars: List[Runner] = []
        lives = self._lives
        try:
            if await self._initialize(sidecars, lives):
                self._initialized = True
                for container in self.plan["containers"]:
                    self._begin(container["name"])
                await self._outlive_main()
        finally:
            await self._end(sidecars, lives)
        self._finished = True
        self.changed()
        self.flush()

    def _begin(self, name: str) -> None:
        self._lives[name] = asyncio.ensure_future(self.runners[name].live())

    async def _outlive_main(self) -> None:
        """Until the main containers are over, those yet to come included, or the pod stops."""
        stopping = asyncio.ensure_future(self.stopping.wait())
        over: "Set[asyncio.Future[Any]]" = set()
        while not stopping.done():
            main = {self._lives[container["name"]] for container in self.plan["containers"]}
            if main <= over and not self._awaited:
                break
            taken = asyncio.ensure_future(self._taken.wait())
            done, _ = await asyncio.wait(
                (main - over) | {stopping, taken}, return_when=asyncio.FIRST_COMPLETED
            )
            taken.cancel()
            for task in done & main:
                task.result()
            over |= done
        stopping.cancel()

    async def _wait_for_volumes(self, error: VolumeError) -> None:
        """kubelet's way: try again, less and less often, and say so."""
        delay = 0.5
        while True:
            self.event("Warning", "FailedMount", str(error))
            if await self.stops_within(delay):
                return
            delay = min(delay * 2, 122.0)
            try:
                self.setup.prepare_volumes()
                return
            except VolumeError as e:
                error = e

    async def _initialize(
        self, sidecars: List[Runner], lives: "Dict[str, asyncio.Task[None]]"
    ) -> bool:
        """Runs the init containers; True if the main ones may start."""
        for container in self.plan["initContainers"]:
            if self.stopping.is_set():
                return False
            runner = self.runners[container["name"]]
            life = lives[runner.name] = asyncio.ensure_future(runner.live())
            stopping = asyncio.ensure_future(self.stopping.wait())
            waits: "Set[asyncio.Future[Any]]" = {life, stopping}
            if container["sidecar"]:
                sidecars.append(runner)
                waits.add(asyncio.ensure_future(runner.started.wait()))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits - {life}:
                wait.cancel()
            if life.done():
                life.result()
            if self.stopping.is_set() or (not container["sidecar"] and runner.exit_code != 0):
                return False
        return not self.stopping.is_set()

    async def _end(self, sidecars: List[Runner], lives: "Dict[str, asyncio.Task[None]]") -> None:
        """Everything is told to end: the main (and init) containers together, then the sidecars,
        the last started first; nothing outlives the grace period."""
        asked = self.stopping.is_set()
        self.stopping.set()
        grace = max(0.0, self._deadline - time.monotonic()) if asked else self.grace
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + grace
        others = [self.runners[name] for name in lives if self.runners[name] not in sidecars]
        await asyncio.gather(
            *(runner.kill("Stopping container %s" % runner.name, grace) for runner in others)
        )
        await asyncio.gather(*(lives[r.name] for r in others), return_exceptions=True)
        for runner in reversed(sidecars):
            # a sidecar always has the time to hear of it (KEP-753: at least two seconds)
            left = max(self._deadline - time.monotonic(), 2.0)
            self._deadline = max(self._deadline, time.monotonic() + left)
            await runner.kill("Stopping container %s" % runner.name, left)
            await asyncio.gather(lives[runner.name], return_exceptions=True)
        for task in list(self._tasks):
            task.cancel()

    def take_container(self, container: Dict[str, Any]) -> None:
        """One that is new is started: an ephemeral one, for which nothing waits and which ends with
        the others, or a main one that could not be configured before. One with another image than
        it runs with is restarted."""
        name = container["name"]
        if self.stopping.is_set():
            return
        if name in self.runners:
            self.runners[name].replace(container)
            return
        runner = self.runners[name] = Runner(self, container, False)
        runner.state["image"] = container["image"]["reference"]
        is_main = name in self._awaited
        if is_main:
            self._awaited.discard(name)
            self.plan["containers"].append(container)
        if self._initialized or not is_main:
            runner.state["waiting"] = {"reason": "ContainerCreating"}
            self._begin(name)
        if is_main:
            taken, self._taken = self._taken, asyncio.Event()
            taken.set()
        self.changed()

    def limit(self, active: Optional[int]) -> None:
        """Sets activeDeadlineSeconds, which may be shortened while the pod runs; None: none."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if active is not None:
            left = self.plan["startTime"] + active - time.time()
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(max(0.0, left), self._deadline_exceeded)

    def _deadline_exceeded(self) -> None:
        message = "Pod was active on the node longer than the specified deadline"
        if not self.stopping.is_set():
            self.event("Normal", "DeadlineExceeded", message)
            self.stop(self.grace, "DeadlineExceeded", message)

    def fail(self, message: str) -> None:
        """The agent itself came to grief."""
        self._reason = {"reason": "AgentError", "message": message}
        self._finished = True
        self._flush_due = True
        self.flush()

    def exit_status(self) -> int:
        """The job's: 0 if the pod succeeded, else the first failed main container's code."""
        if self._reason:
            return 1
        codes = [self.runners[c["name"]].exit_code for c in self.plan["containers"]]
        for code in codes:
            if code:
                return code
        return 1 if None in codes else 0


def oom_kills() -> int:
    """How many processes the kernel killed for memory in this job's cgroup, so far."""
    try:
        with open("/proc/self/cgroup") as f:
            lines = [line.rstrip("\n").split(":", 2) for line in f]
    except OSError:
        return 0
    for _, controllers, path in lines:
        if controllers == "":
            files = ["/sys/fs/cgroup%s/memory.events" % path]
        elif "memory" in controllers.split(","):
            files = ["/sys/fs/cgroup/memory%s/memory.oom_control" % path]
        else:
            continue
        for file in files:
            with contextlib.suppress(OSError, ValueError), open(file) as f:
                for line in f:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
    return 0
