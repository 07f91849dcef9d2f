"""One pod's reconcile loop: look, decide, act, and wait for something to change."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from hpk_kubelet.errors import HPKError
from hpk_kubelet.node import verdict
from hpk_kubelet.node.attending import Attending
from hpk_kubelet.node.changes import Changes
from hpk_kubelet.node.crash import crash_point
from hpk_kubelet.node.decide import Action, Progress, Want, decide
from hpk_kubelet.node.decide import Job as JobView
from hpk_kubelet.node.facts import Object
from hpk_kubelet.node.jobs import active
from hpk_kubelet.node.worker import REFRESH
from hpk_kubelet.slurm.backend import UnreachableError
from hpk_kubelet.spec.plan import AgentEvent, PodState
from hpk_kubelet.spec.status import same_status

log = logging.getLogger(__name__)

_QUIET = 0.25  # seconds for which a Pending status is held back: most are followed by a better one
_QUIET_STARTING = 2.0  # … while the pod is on its way to its job
_PULL_SHOWN = 3.0  # ErrImagePull is shown so long before it becomes ImagePullBackOff
_VERDICT = 20.0  # seconds that Slurm has to say why it told an agent to end
_OWN_RETRY = (Action.PREPARE, Action.SUBMIT, Action.CANCEL)  # their results come later


class Pod(Attending, Changes):
    """Started with `start`; lives until the pod's object, job and directory are gone."""

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Of the kubelet, not of the pod: what was begun is taken up by the next one."""
        for task in (self._task, self._preparation, self._submission, self._refreshing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.stop_changes()

    # --- news

    def changed(self, pod: Object | None) -> None:
        """The API's newest; None when the object is gone."""
        before, self.pod = self.pod, pod
        if pod is not None:
            self.last = pod
            if before is not None and _told_as_files(before) != _told_as_files(pod):
                self._refresh_due = 0.0
            if not self.start_time:
                known = (pod.get("status") or {}).get("startTime")
                self.start_time = verdict.unix(known) if known else time.time()
        else:
            self.asked = 0.0  # the grace is over with the object
            self._said_stop = None
        self.wake()

    def told(self, state: PodState, events: list[AgentEvent]) -> None:
        """The agent's, over its connection."""
        if not self._ran and any("running" in c for c in state["containers"].values()):
            self._ran = True
            crash_point(self.kubelet.site.paths.run, "started")
        if state != self.state:
            self.state = state
        self.told_at = time.monotonic()
        for event in events:
            self.agent_event(event)
        self.wake()

    # --- the loop

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                pause = await self._step()
                if pause is None:
                    return
                self._faults.succeeded()
            except asyncio.CancelledError:
                raise
            except OSError as e:
                pause = self._faults.failed(time.monotonic())
                reason = "HomeFull" if self.kubelet.disk.note(e) else "FailedSync"
                log.warning("pod %s: %s", self._label(), e)
                self.say("Warning", reason, f"{e.filename or self.directory}: {e.strerror}")
            except Exception as e:
                # No fault of one pod may touch another.
                log.exception("pod %s (%s)", self._label(), self.uid)
                pause = self._faults.failed(time.monotonic())
                self.say(
                    "Warning",
                    "FailedSync",
                    f"the kubelet failed at this pod and tries again: {type(e).__name__}: {e}",
                )
            if pause > 0:
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _step(self) -> float | None:
        """One look and one action; answers for how long there is nothing to do, None when there
        will never be again."""
        if self._preparation is not None and self._preparation.done():
            self._prepared(self._preparation)
        if self._submission is not None and self._submission.done():
            self._submitted(self._submission)
        self._look()
        view = self.view()
        action = decide(view)
        pause = self._tell()
        if action is Action.WAIT:
            return min(pause, self._routine())
        retry = self._retries[action]
        if (left := retry.until - time.monotonic()) > 0:
            return min(pause, left)
        try:
            again = await getattr(self, f"_{action.name.lower()}")()
            if action not in _OWN_RETRY:
                retry.succeeded()
        except UnreachableError as e:
            log.info("pod %s: %s waits for Slurm: %s", self._label(), action.name, e)
            again = retry.failed(time.monotonic())
        except HPKError as e:
            log.warning("pod %s: %s: %s", self._label(), action.name, e)
            self.say("Warning", "FailedSync", str(e))
            again = retry.failed(time.monotonic())
        if again is None:
            return None
        return min(self._tell(), float(again), self._routine())

    def _routine(self) -> float:
        """What goes on beside; answers when to come back for it."""
        now = time.monotonic()
        pause = 3600.0
        if (overdue := self.overdue_in()) is not None and overdue > 0:
            pause = overdue
        alive = verdict.progress(self.state) is Progress.STARTED and self.ended is None
        if self.intent is not None and self.agent is None and self.pod is not None:
            job = self.job()
            if alive or (job is not None and job.phase.value == "running"):
                pause = min(pause, self.kubelet.look)
        if not alive:
            self._unwatch()
        elif self.pod is not None:
            self._watch_files(self.pod)
            if now >= self._refresh_due and (self._refreshing is None or self._refreshing.done()):
                self._refresh_due = now + random.uniform(*REFRESH)
                self._refreshing = asyncio.create_task(self._refresh())
            pause = min(pause, max(1.0, self._refresh_due - now))
            pause = min(pause, self.begin_changes())
        return pause

    def _tell(self) -> float:
        """Hands the status to the writer if it says something new; answers when to come back."""
        if self.pod is None:
            return 3600.0
        now = time.monotonic()
        pause = 3600.0
        if self._pull_failed and not self.preparing:
            shown = now - self._pull_failed
            if shown >= _PULL_SHOWN:
                self._back_off()
            else:
                pause = _PULL_SHOWN - shown
        basis = self._basis()
        if basis == self._told:
            return pause
        status = self.compute_status()
        if (left := self._verdict_in(status)) > 0:
            return min(pause, left)
        self._tell_suspension()
        before = self.sent if self.sent is not None else self.pod.get("status")
        if same_status(before, status):
            self._held, self._told = 0.0, basis
        elif status["phase"] == "Pending" and now < (self._held or now) + self._quiet():
            self._held = self._held or now
            return min(pause, self._held + self._quiet() - now)
        else:
            self._held = 0.0
            self.sent = status
            metadata = self.pod["metadata"]
            self.node.statuses.set(metadata["namespace"], metadata["name"], self.uid, status)
        return pause

    def _quiet(self) -> float:
        """Seconds for which a Pending status is held back."""
        untroubled = not self.container_waiting and self.waiting is None
        on_its_way = (self.preparing or self.submitting) and untroubled
        if not untroubled:
            return _QUIET
        # What all of them say at once nobody reads; the last of it is written soon enough.
        return max(_QUIET_STARTING if on_its_way else _QUIET, self.kubelet.rush.left())

    def _verdict_in(self, status: Object) -> float:
        """Seconds for which an end is kept back that Slurm may know better than the agent, which
        was only signalled; 0 once Slurm has said why, or has had the time to."""
        guessed = self.state is not None and self.state.get("reason") in verdict.GUESSED
        if not guessed or status["phase"] not in ("Succeeded", "Failed"):
            return 0.0
        if self.view().want is Want.STOP or self.view().job is JobView.ENDED:
            return 0.0
        now = time.monotonic()
        if not self._verdict_due:
            self._verdict_due = now + _VERDICT
            self.kubelet.jobs.hurry(_VERDICT)
        return self._verdict_due - now

    def _tell_suspension(self) -> None:
        job = self.job()
        words = verdict.suspended(job)
        if words and not self._suspended:
            self.say("Warning", "SlurmSuspended", words)
        elif self._suspended and not words and job is not None and active(job):
            self.say("Normal", "SlurmResumed", f"Slurm job {job.id} goes on")
        self._suspended = bool(words)


def _told_as_files(pod: Object) -> tuple[object, object]:
    """What downwardAPI volumes show and may change while the pod runs."""
    metadata = pod["metadata"]
    return metadata.get("labels"), metadata.get("annotations")
