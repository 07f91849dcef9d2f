"""The way of a pod to its job: prepare, submit, adopt."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.crash import crash_point
from hpk_kubelet.node.decide import Action
from hpk_kubelet.node.facts import LOOK, Object
from hpk_kubelet.node.objects import written_tokens
from hpk_kubelet.node.prepare import Prepared, prepare, refresh_volumes
from hpk_kubelet.node.pulls import PullFailed, Say, containers
from hpk_kubelet.node.request import job_request
from hpk_kubelet.node.submission import Entry
from hpk_kubelet.node.worker import Worker
from hpk_kubelet.slurm.allocations import not_at_once
from hpk_kubelet.slurm.backend import SubmitError
from hpk_kubelet.slurm.script import JobRequest, render_script
from hpk_kubelet.slurm.states import Phase
from hpk_kubelet.spec.admission import rejection
from hpk_kubelet.spec.annotations import mpi_words
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.observed import Waiting
from hpk_kubelet.spec.plan import Intent, PodPlan, kept
from hpk_kubelet.spec.unsupported import unsupported

log = logging.getLogger(__name__)

_NOT_SEEN = ("", "None")  # reasons of a job that Slurm has not looked at yet


class Starting(Worker):
    """Each step's answer is for how long there is nothing to do."""

    async def _prepare(self) -> float:
        assert self.pod is not None
        pod = self.pod
        try:
            mpi = mpi_words(pod)
            request = self._request(pod)
        except HPKError as e:
            return self._reject("SlurmRejected", str(e))
        site = self.kubelet.site
        if refused := rejection(pod, site.config.security.allowed_unsafe_sysctls):
            reason, why = refused
            return self._reject(reason, why, f"Pod was rejected: {why}")
        if not self._retries[Action.PREPARE].failures:
            own_network = self.kubelet.site.network.plan() is not None
            for entry in unsupported(pod, own_network=own_network):
                self.say("Warning", entry.reason, entry.message)
            if request.start == "immediate" and (why := not_at_once(request)):
                self.say("Warning", "SlurmStartBatch", f"the pod waits for Slurm's queue: {why}")
        self.kubelet.rush.begin(self.uid)
        later = self.kubelet.rush.left() > 0
        self.preparing = True
        self._preparation = asyncio.create_task(
            self._prepare_as(request, mpi, self.say, render_script(request), tokens_later=later)
        )
        self._preparation.add_done_callback(lambda _: self.wake())
        return 3600.0

    async def _prepare_as(
        self,
        request: JobRequest,
        mpi: Sequence[str] | None,
        say: Say,
        script: str | None,
        agent_token: str = "",
        tokens_later: bool = False,
    ) -> Prepared:
        assert self.pod is not None
        return await prepare(
            self.pod,
            self.node,
            self.kubelet.site,
            self.directory_of,
            start_time=self.start_time,
            say=say,
            mpi=mpi,
            gpus=request.resources.gpu_kind,
            script=script,
            services=self.kubelet.services(self.pod["metadata"]["namespace"]),
            agent_token=agent_token,
            tokens_later=tokens_later,
        )

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
        if error is not None:
            self.kubelet.rush.end(self.uid)
        if error is None:
            result = task.result()
            self.plan, self._tokens, self.prepared = kept(result.plan), result.tokens, True
            self.container_waiting, self._pull_failed = {}, 0.0
            for name, why in result.plan.get("misconfigured", {}).items():
                self.container_waiting[name] = Waiting(**why)
                self.say("Warning", "Failed", f"Error: {why['message']}", self._path_of(name))
            retry.succeeded()
            self._pulls.succeeded()
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

    def _pulls_failed(self, error: PullFailed) -> None:
        self._pull_failed = time.monotonic()
        images = {c["name"]: c["image"] for c, _ in containers(self.object)}
        self.container_waiting = {}
        for name, failure in error.failures.items():
            self.pull_failed(name, images[name], failure)

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
        self.kubelet.rush.end(self.uid)
        if self._submission is not None:
            if self._entry is not None and not self._entry.withdraw():
                return 3600.0  # the job may be there already: its answer comes
            await asyncio.gather(self._submission, return_exceptions=True)
        self._submission, self.submitting = None, False
        return 0.0

    async def _submit(self) -> float:
        assert self.pod is not None
        if self.plan is None:
            return await self._prepare()  # a crash, and the disk lost what was not synced
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
        self._entry = Entry(
            request,
            self.directory_of.script,
            intent,
            self.directory_of.write_intent,
            self._waits_for_others if request.gang else self._waits,
        )
        self.submitting = True
        self._submission = asyncio.create_task(self.kubelet.submissions.submit(self._entry))
        self._submission.add_done_callback(lambda _: self.wake())
        return 3600.0

    def _waits_for_others(self, words: str) -> None:
        self.waiting = Waiting("SlurmGangWaiting", words)
        self.wake()

    def _waits(self, words: str) -> None:
        self.kubelet.rush.end(self.uid)
        if self.waiting is None:
            self.say("Warning", "SlurmSubmitLimit", words)
        self.waiting = Waiting("SlurmSubmitLimit", f"Slurm takes no more jobs for now: {words}")
        self.wake()

    def _submitted(self, task: asyncio.Task[str]) -> None:
        """Takes the answer to a submission."""
        assert self._entry is not None
        entry, self._entry, self._submission, self.submitting = self._entry, None, None, False
        self.since = time.monotonic()
        self.kubelet.rush.end(self.uid)
        if task.cancelled():
            return
        if entry.sent:
            self.intent = entry.intent
        error = task.exception()
        if error is None:
            self._note(task.result())
            self._retries[Action.SUBMIT].succeeded()
            self.kubelet.jobs.hurry(1.5)  # to know soon what it waits for
            if self.plan is not None and self.plan.get("awaits"):
                self._refreshing = asyncio.create_task(self._fetch_tokens())
        elif isinstance(error, SubmitError) and not error.transient:
            self._reject("SlurmRejected", str(error))
        elif isinstance(error, HPKError):
            self.waiting = Waiting("SlurmSubmitFailed", str(error))
            self.say("Warning", "SlurmSubmitFailed", str(error))
            self.kubelet.jobs.hurry()
            self._retries[Action.SUBMIT].failed(self.since)
        else:
            self._retries[Action.SUBMIT].failed(self.since)
            raise error

    async def _fetch_tokens(self) -> None:
        """For a job that may start at any moment. One that Slurm has looked at and lets wait, and
        one that was faster: their agents ask."""
        await self.kubelet.rush.over()
        async with self.kubelet.fetching:
            job = self.job()
            waits = job is not None and job.phase is Phase.PENDING and job.reason not in _NOT_SEEN
            if not waits and self.state is None and self.ended is None:
                await self._refresh()

    async def _refresh(self) -> None:
        pod = self.pod
        if pod is None:
            return
        try:
            if not self._tokens:
                self._tokens = await asyncio.to_thread(written_tokens, pod, self.directory)
            self._tokens, errors = await refresh_volumes(
                pod, self.node, self.kubelet.site, self.directory, self._tokens
            )
            for error in errors:
                self.say("Warning", *error.event)
            if not errors and self._refresh_due:  # else something has changed meanwhile
                self._refresh_due = self._next_refresh(pod)
        except ConfigError as e:
            self.say("Warning", *e.event)
        except HPKError as e:
            log.warning("pod %s: its volumes are not refreshed: %s", self._label(), e)

    def _note(self, job_id: str) -> None:
        assert self.intent is not None
        self.intent = {**self.intent, "jobId": job_id}
        self.attend_from = time.monotonic() + LOOK
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

    def _reject(self, reason: str, words: str, message: str = "") -> float:
        self.rejected = (reason, message or words)
        self.say("Warning", reason, words)
        return 0.0

    async def new_plan(self) -> PodPlan:
        """For an agent that waited long in the queue; HPKError says why there is none."""
        if self.pod is None or self.plan is None:
            raise HPKError("the pod is gone")
        request = self._request(self.pod)
        try:
            result = await self._prepare_as(
                request, mpi_words(self.pod), lambda *_: None, None, self.plan["agent"]["token"]
            )
        except ConfigError as e:
            self.say("Warning", *e.event, self._path_of(e.container))
            raise
        self.plan, self._tokens = kept(result.plan), result.tokens
        return result.plan
