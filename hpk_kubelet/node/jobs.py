"""Slurm as all pods share it: one bulk query per interval.

A snapshot says something about a job only if its query began after the job was submitted, so each
carries the time it began. While slurmctld is away the last one stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpk_kubelet.slurm.backend import (
    Backend,
    Cancel,
    Job,
    UnreachableError,
)
from hpk_kubelet.slurm.script import parse_comment
from hpk_kubelet.slurm.states import Phase

log = logging.getLogger(__name__)

_QUICK = 1.0  # seconds between queries while a change is expected that no agent will tell
_RESTS = 10  # times what a query of many jobs took is left between two
_IDLE = 3  # times the interval, while no job waits in the queue
_RETRY, _SLOWEST = 1.0, 15.0  # the first (doubled) and longest pause while slurmctld is away


@dataclass(frozen=True)
class Snapshot:
    """Every job of this user that carries our comment."""

    began: float  # time.monotonic()
    by_id: dict[str, Job] = field(default_factory=dict)
    by_uid: dict[str, list[Job]] = field(default_factory=dict)
    unnamed: dict[str, str] = field(default_factory=dict)  # id → uid of tasks without their comment
    gangs: dict[str, list[str]] = field(default_factory=dict)  # id → uids


def snapshot(
    began: float,
    jobs: Sequence[Job],
    cluster: str,
    members: Callable[[str, str], list[str]] = lambda name, job_id: [],
) -> Snapshot:
    """`members` answers the pod of an array's task that does not carry its own comment yet, and
    those of a gang."""
    result = Snapshot(began)
    for job in jobs:
        parts = parse_comment(job.comment)
        if parts is None or parts[0] != cluster:
            continue
        uids = members(parts[1], job.id)
        if "_" in job.id:
            result.unnamed.update((job.id, uid) for uid in uids)
        elif uids:
            result.gangs[job.id] = uids
        result.by_id[job.id] = job
        for uid in uids or [parts[1]]:
            result.by_uid.setdefault(uid, []).append(job)
    return result


class SlurmJobs:
    """Keeps the snapshot fresh. `on_change` is told the uids whose jobs look different."""

    def __init__(
        self,
        backend: Backend,
        cluster: str,
        interval: float,
        on_change: Callable[[set[str]], None],
        members: Callable[[str, str], list[str]] = lambda name, job_id: [],
    ) -> None:
        self.backend = backend
        self.cluster = cluster
        self.last: Snapshot | None = None
        self.unreachable = ""  # why, in Slurm's words; "" while it answers
        self._interval = interval
        self._on_change = on_change
        self._members = members
        self._quick_until = 0.0
        self._took = 0.0  # seconds, the last query
        self._poke = asyncio.Event()
        self._cancels: list[tuple[Cancel, asyncio.Future[None]]] = []
        self._cancelling: asyncio.Task[None] | None = None

    def hurry(self, seconds: float = 5.0) -> None:
        """For so long, a change is expected that only Slurm will tell."""
        self._quick_until = max(self._quick_until, time.monotonic() + seconds)
        self._poke.set()

    async def run(self) -> None:
        """Queries until cancelled."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._query(began)
                failures = 0
            except UnreachableError as e:
                failures += 1
                if not self.unreachable:
                    log.warning("Slurm does not answer, everything is kept as it is: %s", e)
                self.unreachable = str(e)
            except Exception:
                failures += 1
                log.exception("asking Slurm for all jobs failed")
            await self._pause(began, failures)

    async def _query(self, began: float) -> None:
        jobs = await self.backend.jobs()
        if self.unreachable:
            log.info("Slurm answers again")
            self.unreachable = ""
        before, self.last = self.last, snapshot(began, jobs, self.cluster, self._members)
        self._on_change(changed(before, self.last))
        self._took = time.monotonic() - began

    async def _pause(self, began: float, failures: int) -> None:
        if failures:
            await asyncio.sleep(min(_SLOWEST, _RETRY * 2**failures))
            return
        while (now := time.monotonic()) < began + _IDLE * self._interval:
            quick = max(_QUICK, _RESTS * self._took)
            due = began + (quick if now < self._quick_until else max(quick, self._calm()))
            if now >= due:
                return
            self._poke.clear()
            # Not wait_for, which before Python 3.12 may lose a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - now):
                    await self._poke.wait()

    def _calm(self) -> float:
        """Seconds between two queries while nothing is expected: jobs that wait in the queue are
        Slurm's to start, those that run have agents that tell more and sooner."""
        waiting = self.last is None or any(
            job.phase is Phase.PENDING for job in self.last.by_id.values()
        )
        return self._interval if waiting else _IDLE * self._interval

    async def cancel(self, cancel: Cancel) -> None:
        """HPKError when Slurm refuses or is away. What arrives while others are being cancelled
        goes together after them."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cancels.append((cancel, future))
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = asyncio.create_task(self._cancel_all())
        await future
        self.hurry()

    async def _cancel_all(self) -> None:
        while self._cancels:
            batch, self._cancels = self._cancels, []
            answers: Sequence[BaseException | None]
            try:
                answers = await self.backend.cancel([cancel for cancel, _ in batch])
            except Exception as e:
                answers = [e] * len(batch)
            for (_, future), error in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)


def changed(before: Snapshot | None, after: Snapshot) -> set[str]:
    """The uids whose jobs came, went or differ; all of them after the first query."""
    if before is None:
        return set(after.by_uid)
    return {
        uid
        for uid in before.by_uid.keys() | after.by_uid.keys()
        if before.by_uid.get(uid) != after.by_uid.get(uid)
    }


def active(job: Job) -> bool:
    return job.phase is not Phase.ENDED
