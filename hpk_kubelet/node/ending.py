"""The way of a pod to its end: ask, insist, report, delete, remove."""

from __future__ import annotations

import asyncio
import time

from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube.client import ApiError, pods
from hpk_kubelet.node import verdict
from hpk_kubelet.node.decide import Action, Progress, Stage
from hpk_kubelet.node.decide import Job as JobView
from hpk_kubelet.node.facts import LOOK
from hpk_kubelet.node.worker import Worker
from hpk_kubelet.slurm.backend import Cancel, UnreachableError

_LAST_WORD = 3.0  # seconds a network file system may take to show a journal's end
_KEPT_WORDS = 4096  # bytes of slurm.out that are looked at
_WRITTEN_ANYWAY = 10.0  # a status that the API refuses does not hold up the deletion longer


class Ending(Worker):
    """Each step's answer is for how long there is nothing to do."""

    async def _report(self) -> float:
        if self.ended is not None or verdict.progress(self.state) is Progress.FINISHED:
            return 3600.0  # the status says so; its writing changes the view
        if self.view().job is JobView.PENDING:
            self.ended = verdict.requeued(self.job_id)
            self.say("Warning", self.ended.reason, self.ended.message, once="ended")
            return 0.0
        return await self._find_end()

    async def _find_end(self) -> float:
        """The job is over and its agent has not said so: waits for the journal, then takes
        Slurm's word."""
        now = time.monotonic()
        self._end_seen = self._end_seen or now
        job_id = self.job_id
        job = self.job()
        if job is None:
            job = next(iter(await self.kubelet.jobs.backend.ended([job_id])), None)
        if job is None or job.state.reason == "AgentLost":
            # The script ended by itself, so that its agent should have had the time to say more.
            left = self._end_seen + _LAST_WORD - now
            if left > 0:
                return min(left, 0.5)
        output = await asyncio.to_thread(self._output)
        self._look()
        if verdict.progress(self.state) is Progress.FINISHED:
            return 0.0
        self.ended = verdict.ended(job, job_id, output)
        self.say("Warning", self.ended.reason, self.ended.message, once="ended")
        return 0.0

    def _output(self) -> str:
        try:
            with self.directory_of.output.open("rb") as f:
                f.seek(max(0, f.seek(0, 2) - _KEPT_WORDS))
                return f.read().decode(errors="replace")
        except OSError:
            return ""

    async def _stop(self) -> float:
        agent = self.agent
        if agent is None:
            return 0.0
        grace = verdict.grace_period(self.pod)
        if self._said_stop is None or self._said_stop != (agent, grace):
            agent.stop(grace)
            self._said_stop = (agent, grace)
        self.asked = self.asked or time.monotonic()
        return self.overdue_in() or 3600.0

    async def _term(self) -> float:
        # A signal would end the whole gang: its agent, when it comes back, ends this pod alone.
        if not self._termed and not self.gang:
            # An allocation has no script; URG means something to its agent alone.
            signal = "URG" if self.allocation else "TERM"
            job_id = self._known_job()
            await self.kubelet.jobs.cancel(Cancel(job_id, signal, batch_only=not self.allocation))
            self._termed = True
        self.asked = self.asked or time.monotonic()
        return min(LOOK, self.overdue_in() or LOOK)

    async def _cancel(self) -> float:
        job_id = self._known_job()
        await self.kubelet.jobs.cancel(Cancel(job_id))
        if verdict.progress(self.state) is Progress.FINISHED:
            words = f"Slurm job {job_id} outlived its pod and was cancelled"
            self.say("Warning", "SlurmJobOutlived", words, once="outlived")
        retry = self._retries[Action.CANCEL]
        retry.initial = 10.0
        return retry.failed(time.monotonic())

    def _known_job(self) -> str:
        job = self.job()
        job_id = self.job_id or (job.id if job else "")
        if not job_id:
            raise UnreachableError("Slurm has not told the pod's job yet")
        return job_id

    async def _finish(self) -> float:
        """The last status first, since controllers count how a pod ended; then the object."""
        assert self.pod is not None
        if self._deleted:
            return 3600.0  # its finalizers hold it
        now = time.monotonic()
        view = self.view()
        if (
            view.stage is Stage.SUBMITTED
            and view.job is JobView.ENDED
            and verdict.progress(self.state) is Progress.STARTED
            and self.ended is None
        ):
            return await self._find_end()
        self._finishing = self._finishing or now
        left = self._finishing + _WRITTEN_ANYWAY - now
        if not self.status_written() and left > 0:
            return left
        metadata = self.pod["metadata"]
        try:
            await self.node.client.delete(
                pods(metadata["namespace"], metadata["name"]), grace=0, uid=self.uid
            )
        except ApiError as e:
            if not (e.not_found or e.conflict):
                raise
        self._deleted = True
        return 3600.0

    async def _remove(self) -> float | None:
        await asyncio.to_thread(self._remove_files)
        self.node.statuses.forget(self.uid)
        self._unwatch()
        self.kubelet.forget(self)
        return None

    def _remove_files(self) -> None:
        try:
            self.directory_of.remove()
        except OSError as e:
            raise HPKError(f"{e.filename}: {e.strerror}") from None
