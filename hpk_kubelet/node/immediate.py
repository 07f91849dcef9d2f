"""Lone pods whose resources are free right now: they start without waiting for Slurm's next pass.

Everything that an allocation can't do, and every doubt, ends with sbatch, which has the last word.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.backoff import Backoff
from hpk_kubelet.node.crash import crash_point
from hpk_kubelet.slurm.allocations import Allocations, not_at_once
from hpk_kubelet.slurm.backend import Backend, Submission
from hpk_kubelet.slurm.script import JobRequest
from hpk_kubelet.spec.plan import Intent

log = logging.getLogger(__name__)

_CLOSING = 5.0  # seconds for what is being launched when the kubelet stops


class Entry(Protocol):
    """What is used here of a pod that waits for its job (submission.py)."""

    request: JobRequest
    script: Path
    intent: Intent

    def write_intent(self, intent: Intent, /) -> None: ...


class Immediate:
    """`run` is the directory of crash points."""

    def __init__(self, backend: Backend, run: Path) -> None:
        self.allocations = Allocations()
        self._backend = backend
        self._run = run
        self._why_not: str | None = None  # this site has no allocations; None: not known yet
        self._busy = Backoff(2.0, 300.0)  # Slurm had nothing free
        self._launching: dict[str, asyncio.Task[None]] = {}
        self._asking: asyncio.Task[set[str]] | None = None

    async def start(self, entry: Entry) -> str | None:
        """The id of the pod's job, in which its agent is being started; None: sbatch shall do it.
        UnreachableError: the job may be there or not."""
        if entry.request.start == "batch" or not_at_once(entry.request):
            return None
        if time.monotonic() < self._busy.until or await self._unusable(entry.request):
            return None
        plain = entry.intent
        entry.intent = {**plain, "allocation": True}
        await asyncio.to_thread(entry.write_intent, entry.intent)
        crash_point(self._run, "intent")
        submission = Submission(entry.request, entry.script)
        job_id = await self.allocations.allocate(submission)
        if job_id is None:
            self._busy.failed(time.monotonic())
            entry.intent = plain
            return None
        self._busy.succeeded()
        crash_point(self._run, "allocated")
        self.launch(job_id, submission)
        return job_id

    def launch(self, job_id: str, submission: Submission) -> None:
        """Has the agent started in an allocation; of two, the second finds the first one's journal
        and does nothing."""
        if job_id not in self._launching:
            self._launching[job_id] = asyncio.create_task(self._launch(job_id, submission))

    async def _launch(self, job_id: str, submission: Submission) -> None:
        try:
            await self.allocations.launch(job_id, submission)
        except HPKError as e:
            log.warning("Slurm job %s: %s", job_id, e)
        finally:
            del self._launching[job_id]

    async def occupied(self, job_id: str) -> bool:
        """Whether anything runs, or is about to, in the allocation: one question to Slurm for all
        who want to know at that time. UnreachableError while it is away."""
        if job_id in self._launching:
            return True
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self.allocations.occupied())
        return job_id in await asyncio.shield(self._asking)

    async def _unusable(self, request: JobRequest) -> str:
        """Why this site has no allocations that outlive their makers."""
        if self._why_not is None:
            try:
                limits = await self._backend.limits()
            except HPKError as e:
                return str(e)
            if limits.inactive:
                self._why_not = "InactiveLimit of this cluster ends them"
            elif missing := self.allocations.missing():
                self._why_not = f"{missing} is not on PATH"
            elif not await self.allocations.can_end(request):
                self._why_not = "there is no libslurm to end them with"
            else:
                self._why_not = ""
            log.info("pods start in %s", f"batch jobs: no allocations, {self._why_not}"
                     if self._why_not else "allocations where resources are free")  # fmt: skip
        return self._why_not

    async def close(self) -> None:
        """A launch is not cut short: srun, killed too early, leaves a step without a process."""
        if self._launching:
            _, late = await asyncio.wait(self._launching.values(), timeout=_CLOSING)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
