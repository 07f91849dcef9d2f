"""One pod's reconcile loop: look, decide, act, and wait for something to change."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube.client import ApiError, pods
from hpk_kubelet.node import verdict
from hpk_kubelet.node.backoff import Backoff
from hpk_kubelet.node.crash import crash_point
from hpk_kubelet.node.decide import Action, Progress, Stage, decide
from hpk_kubelet.node.decide import Job as JobView
from hpk_kubelet.node.facts import Facts, Object
from hpk_kubelet.node.jobs import SlurmJobs
from hpk_kubelet.node.objects import Token
from hpk_kubelet.node.prepare import (
    Prepared,
    PullFailed,
    Site,
    containers,
    prepare,
    refresh_volumes,
)
from hpk_kubelet.node.request import job_request
from hpk_kubelet.slurm.backend import Cancel, Submission, SubmitError, UnreachableError
from hpk_kubelet.slurm.script import JobRequest, render_script
from hpk_kubelet.spec.annotations import mpi_words
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.observed import Waiting
from hpk_kubelet.spec.plan import AgentEvent, Intent, PodPlan, PodState
from hpk_kubelet.spec.status import same_status
from hpk_kubelet.spec.unsupported import unsupported
from hpk_kubelet.volumes import TokenRequest

log = logging.getLogger(__name__)

_QUIET = 0.25  # seconds for which a Pending status is held back: most are followed by a better one
_LAST_WORD = 3.0  # seconds a network file system may take to show a journal's end
_LOOK = 5.0  # between two looks into the journal of a pod whose agent is not connected
_PULL_SHOWN = 3.0  # ErrImagePull is shown so long before it becomes ImagePullBackOff
_REFRESH = (60.0, 90.0)
_KEPT_WORDS = 4096  # bytes of slurm.out that are looked at
_OWN_RETRY = (Action.PREPARE, Action.SUBMIT, Action.CANCEL)  # their results come later
_WRITTEN_ANYWAY = 10.0  # a status that the API refuses does not hold up the deletion longer


class Kubelet(Protocol):
    """What a pod needs of the whole."""

    @property
    def site(self) -> Site: ...
    @property
    def jobs(self) -> SlurmJobs: ...
    @property
    def agent_dir(self) -> Any: ...

    def services(self, namespace: str) -> list[Object]: ...

    def forget(self, pod: Pod) -> None: ...


class Pod(Facts):
    """Started with `start`; lives until the pod's object, job and directory are gone."""

    def attach(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._preparation: asyncio.Task[Prepared] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._tokens: Mapping[TokenRequest, Token] = {}
        self._refresh_due = time.monotonic() + random.uniform(*_REFRESH)
        self._retries = {action: Backoff(1.0, 60.0) for action in Action}
        self._pulls = Backoff(10.0, 300.0)
        self._pull_failed = 0.0
        self._faults = Backoff(1.0, 60.0)
        self._held = 0.0  # since when (time.monotonic()) a status waits to be written
        self._said_stop: tuple[object, int] | None = None
        self._termed = False
        self._end_seen = 0.0
        self._finishing = 0.0
        self._deleted = False
        self._told_seq = -1
        self._ran = False
        self.untold: list[AgentEvent] = []  # of the journal, read before the object was known

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Of the kubelet, not of the pod: what was begun is taken up by the next one."""
        for task in (self._task, self._preparation, self._refreshing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def wake(self) -> None:
        self._wake.set()

    # --- news

    def changed(self, pod: Object | None) -> None:
        """The API's newest; None when the object is gone."""
        self.pod = pod
        if pod is not None:
            self.last = pod
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
        self.state = state
        for event in events:
            self.agent_event(event)
        self.wake()

    def agent_event(self, event: AgentEvent) -> None:
        if event["seq"] <= self._told_seq:
            return  # by the connection, the journal or a hello before
        self._told_seq = event["seq"]
        container = event.get("container", "")
        self.say(
            event["type"],
            event["reason"],
            event["message"],
            self.field_path(container) if container and self.last else "",
            once=f"{event['seq']:x}",
            time=datetime.fromtimestamp(event["time"], UTC),
        )

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

    def _label(self) -> str:
        if self.last is not None:
            return f"{self.last['metadata']['namespace']}/{self.last['metadata']['name']}"
        return f"{self.intent['namespace']}/{self.intent['name']}" if self.intent else self.uid

    async def _step(self) -> float | None:
        """One look and one action; answers for how long there is nothing to do, None when there
        will never be again."""
        if self._preparation is not None and self._preparation.done():
            self._prepared(self._preparation)
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

    def _look(self) -> None:
        if self.agent is None and self.intent is not None:
            self.untold += self.read_journal()
        if self.untold and self.pod is not None:
            events, self.untold = self.untold, []
            if not _terminal(self.pod):  # else they were told when it ended
                for event in events:
                    self.agent_event(event)

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
                pause = min(pause, _LOOK)
        if alive and self.pod is not None:
            if now >= self._refresh_due and (self._refreshing is None or self._refreshing.done()):
                self._refresh_due = now + random.uniform(*_REFRESH)
                self._refreshing = asyncio.create_task(self._refresh())
            pause = min(pause, max(1.0, self._refresh_due - now))
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
        status = self.compute_status()
        before = self.sent if self.sent is not None else self.pod.get("status")
        if same_status(before, status):
            self._held = 0.0
        elif status["phase"] == "Pending" and now < (self._held or now) + _QUIET:
            self._held = self._held or now
            return min(pause, self._held + _QUIET - now)
        else:
            self._held = 0.0
            self.sent = status
            metadata = self.pod["metadata"]
            self.node.statuses.set(metadata["namespace"], metadata["name"], self.uid, status)
        return pause

    # --- the way to a job

    async def _prepare(self) -> float:
        assert self.pod is not None
        pod = self.pod
        try:
            mpi = mpi_words(pod)
            request = self._request(pod)
        except HPKError as e:
            return self._reject("SlurmRejected", str(e))
        if not self._retries[Action.PREPARE].failures:
            for entry in unsupported(pod):
                self.say("Warning", entry.reason, entry.message)
        self.preparing = True
        self._preparation = asyncio.create_task(
            prepare(
                pod,
                self.node,
                self.kubelet.site,
                self.directory_of,
                start_time=self.start_time,
                say=self.say,
                mpi=mpi,
                gpus=request.resources.gpu_kind,
                script=render_script(request),
                services=self.kubelet.services(pod["metadata"]["namespace"]),
            )
        )
        self._preparation.add_done_callback(lambda _: self.wake())
        return 3600.0

    def _request(self, pod: Object) -> JobRequest:
        site = self.kubelet.site
        return job_request(
            pod,
            site.config,
            cluster=self.kubelet.jobs.cluster,
            partition=self.node.partition,
            pod_dir=self.directory,
            agent_dir=self.kubelet.agent_dir,
        )

    def _prepared(self, task: asyncio.Task[Prepared]) -> None:
        """Takes the result of a preparation that has ended."""
        self._preparation, self.preparing = None, False
        retry = self._retries[Action.PREPARE]
        now = time.monotonic()
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            result = task.result()
            self.plan, self._tokens, self.prepared = result.plan, result.tokens, True
            self.container_waiting, self._pull_failed = {}, 0.0
            retry.succeeded()
        elif isinstance(error, PullFailed):
            self._pulls_failed(error)
            retry.until = now + self._pulls.failed(now)
        elif isinstance(error, ConfigError):
            self.say("Warning", *error.event, self._path_of(error.container))
            if error.container:
                self.container_waiting = {error.container: Waiting(error.reason, error.message)}
            retry.failed(now)
        elif isinstance(error, HPKError):
            log.warning("pod %s: preparing: %s", self._label(), error)
            self.say("Warning", "FailedPrepare", str(error))
            retry.failed(now)
        else:
            retry.failed(now)
            raise error

    def _path_of(self, container: str | None) -> str:
        return self.field_path(container) if container else ""

    def _pulls_failed(self, error: PullFailed) -> None:
        self._pull_failed = time.monotonic()
        images = {c["name"]: c["image"] for c, _ in containers(self.object)}
        self.container_waiting = {}
        for name, failure in error.failures.items():
            path = self._path_of(name)
            if failure.reason == "InvalidImageName":
                message = f'Failed to apply default image tag "{images[name]}": {failure}'
                self.say("Warning", "InspectFailed", message, path)
            elif failure.reason == "ErrImageNeverPull":
                self.say("Warning", "ErrImageNeverPull", str(failure), path)
            else:
                message = f'Failed to pull image "{images[name]}": {failure}'
                self.say("Warning", "Failed", message, path)
            self.say("Warning", "Failed", f"Error: {failure.reason}", path)
            self.container_waiting[name] = Waiting(failure.reason, str(failure))

    def _back_off(self) -> None:
        """The kubelet shows the error of a pull first, and then that it waits with the next."""
        self._pull_failed = 0.0
        images = {c["name"]: c["image"] for c, _ in containers(self.object)}
        for name, shown in list(self.container_waiting.items()):
            if shown.reason in ("ErrImagePull", "RegistryUnavailable"):
                message = f'Back-off pulling image "{images[name]}"'
                self.say("Normal", "BackOff", message, self._path_of(name))
                self.say("Warning", "Failed", "Error: ImagePullBackOff", self._path_of(name))
                message += f": {shown.reason}: {shown.message}"
                self.container_waiting[name] = Waiting("ImagePullBackOff", message)

    async def _abort(self) -> float:
        if self._preparation is not None:
            self._preparation.cancel()
            await asyncio.gather(self._preparation, return_exceptions=True)
        self._preparation, self.preparing = None, False
        return 0.0

    async def _submit(self) -> float:
        assert self.pod is not None
        if self.plan is None:
            return await self._prepare()  # a crash, and the disk lost what was not synced
        run = self.kubelet.site.paths.run
        request = self._request(self.pod)
        metadata = self.pod["metadata"]
        intent = Intent(
            uid=self.uid,
            namespace=metadata["namespace"],
            name=metadata["name"],
            node=self.node.name,
            partition=self.node.partition.name,
            comment=request.comment,
        )
        await asyncio.to_thread(self.directory_of.write_intent, intent)
        crash_point(run, "intent")
        self.intent = intent
        try:
            answer = await self.kubelet.jobs.submit(Submission(request, self.directory_of.script))
        except HPKError as e:
            answer = SubmitError(str(e), transient=True)
        crash_point(run, "submitted")
        self.since = time.monotonic()
        if isinstance(answer, str):
            self._note(answer)
            self._retries[Action.SUBMIT].succeeded()
            self.kubelet.jobs.hurry(1.5)  # to know soon what it waits for
            return 3600.0
        if not answer.transient:
            return self._reject("SlurmRejected", str(answer))
        self.waiting = Waiting("SlurmSubmitFailed", str(answer))
        self.say("Warning", "SlurmSubmitFailed", str(answer))
        self.kubelet.jobs.hurry()
        return self._retries[Action.SUBMIT].failed(self.since)

    def _note(self, job_id: str) -> None:
        assert self.intent is not None
        self.intent = {**self.intent, "jobId": job_id}
        self.directory_of.write_intent(self.intent, sync=False)
        self.waiting = None
        self.say(
            "Normal",
            "SlurmJobSubmitted",
            f"Submitted as Slurm job {job_id} to partition {self.intent['partition']}",
            once="submitted",
        )
        crash_point(self.kubelet.site.paths.run, "noted")

    async def _adopt(self) -> float:
        job = self.job()
        job_id = self.state["jobId"] if self.state is not None else job.id if job else ""
        if not job_id:
            raise HPKError("neither Slurm nor the journal tells the pod's job any more")
        log.info("pod %s is Slurm job %s, submitted before a crash", self._label(), job_id)
        self._note(job_id)
        return 0.0

    def _reject(self, reason: str, words: str) -> float:
        self.rejected = (reason, words)
        self.say("Warning", reason, words)
        return 0.0

    # --- the end

    async def _report(self) -> float:
        if self.ended is not None or verdict.progress(self.state) is Progress.FINISHED:
            return 3600.0  # the status says so; its writing changes the view
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
        if not self._termed:
            await self.kubelet.jobs.cancel(Cancel(self._known_job(), "TERM", batch_only=True))
            self._termed = True
        self.asked = self.asked or time.monotonic()
        return min(_LOOK, self.overdue_in() or _LOOK)

    async def _cancel(self) -> float:
        await self.kubelet.jobs.cancel(Cancel(self._known_job()))
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
        self.kubelet.forget(self)
        return None

    def _remove_files(self) -> None:
        try:
            self.directory_of.remove()
        except OSError as e:
            raise HPKError(f"{e.filename}: {e.strerror}") from None

    # --- while it runs

    async def _refresh(self) -> None:
        pod = self.pod
        if pod is None:
            return
        try:
            self._tokens = await refresh_volumes(
                pod, self.node, self.kubelet.site, self.directory, self._tokens
            )
        except ConfigError as e:
            self.say("Warning", *e.event)
        except HPKError as e:
            log.warning("pod %s: its volumes are not refreshed: %s", self._label(), e)

    async def new_plan(self) -> PodPlan:
        """For an agent that waited long in the queue; HPKError says why there is none."""
        if self.pod is None or self.plan is None:
            raise HPKError("the pod is gone")
        request = self._request(self.pod)
        try:
            result = await prepare(
                self.pod,
                self.node,
                self.kubelet.site,
                self.directory_of,
                start_time=self.start_time,
                say=lambda *_: None,
                mpi=mpi_words(self.pod),
                gpus=request.resources.gpu_kind,
                script=None,
                services=self.kubelet.services(self.pod["metadata"]["namespace"]),
                agent_token=self.plan["agent"]["token"],
            )
        except ConfigError as e:
            self.say("Warning", *e.event, self._path_of(e.container))
            raise
        self.plan, self._tokens = result.plan, result.tokens
        return result.plan


def _terminal(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
