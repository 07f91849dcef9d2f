"""What is known about one pod: the API's object, the directory, Slurm's answer, the agent's word.

No action is taken here; `view` is what `decide` sees and `compute_status` what the API shall see.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpk_kubelet.node import verdict
from hpk_kubelet.node.decide import Job as JobView
from hpk_kubelet.node.decide import Progress, Stage, View, Want
from hpk_kubelet.node.jobs import Snapshot
from hpk_kubelet.node.pulls import containers, ephemeral_containers
from hpk_kubelet.node.store import PodDir
from hpk_kubelet.node.virtual_node import VirtualNode
from hpk_kubelet.server.agents import Agent
from hpk_kubelet.slurm.backend import Job
from hpk_kubelet.spec.observed import Ended, Observed, Waiting
from hpk_kubelet.spec.plan import AgentEvent, ContainerPlan, Intent, PodPlan, PodState
from hpk_kubelet.spec.status import build_status, same_status

if TYPE_CHECKING:
    from datetime import datetime

Object = dict[str, Any]

LOOK = 5.0  # seconds between two looks at a pod whose agent is not connected
_SLACK_AGENT = 10.0  # seconds after the grace in which an agent may still be writing its last word
_SLACK = 3.0
_LINGER = 60.0  # seconds a job may take to end after its agent's last word


@dataclass(eq=False)
class Facts:
    uid: str
    directory_of: PodDir
    node: VirtualNode
    snapshot: Callable[[], Snapshot | None]
    connection: Callable[[str], Agent | None]
    pod: Object | None = None  # the newest one; None once the object is gone
    last: Object | None = None  # the newest there was
    intent: Intent | None = None
    plan: PodPlan | None = None
    prepared: bool = False  # by this process
    preparing: bool = False
    submitting: bool = False
    since: float = 0.0  # time.monotonic() of the last sbatch by this process
    state: PodState | None = None
    told_at: float = 0.0  # time.monotonic() when the agent or its journal last had news
    finished_at: float = 0.0  # time.monotonic() when it was first seen that the agent is done
    ended: Ended | None = None
    rejected: tuple[str, str] | None = None
    waiting: Waiting | None = None  # while there is no job
    container_waiting: dict[str, Waiting] = field(default_factory=dict)
    # by name: ephemeral containers and those with another image than at first
    changed_plans: dict[str, ContainerPlan] = field(default_factory=dict)
    # time.monotonic() from which an allocation without an agent's connection is looked after
    attend_from: float = field(default_factory=lambda: time.monotonic() + LOOK)
    asked: float = 0.0  # time.monotonic() when the pod was first asked to end
    start_time: float = 0.0
    sent: Object | None = None  # the status that was computed last
    written: Object | None = None  # what the API answered to the last write of a status

    # --- what the server needs (server.api.ServedPod)

    @property
    def object(self) -> Object:
        assert self.last is not None
        return self.last

    @property
    def status(self) -> Object:
        return verdict.merged(self.object.get("status") or {}, self.sent)

    @property
    def agent(self) -> Agent | None:
        return self.connection(self.uid)

    @property
    def directory(self) -> Path:
        return self.directory_of.path

    @property
    def running(self) -> bool:
        view = self.view()
        return view.progress is not Progress.FINISHED and view.job is not JobView.ENDED

    # --- reading

    @property
    def job_id(self) -> str:
        return self.intent.get("jobId", "") if self.intent is not None else ""

    @property
    def allocation(self) -> bool:
        """Whether its job is one, not a batch job."""
        return self.intent is not None and self.intent.get("allocation", False)

    @property
    def gang(self) -> bool:
        """Whether it shares its job with the other pods of its gang."""
        return self.intent is not None and self.intent.get("gang", False)

    def job(self) -> Job | None:
        return verdict.find_job(self.snapshot(), self.uid, self.job_id)

    def awaits_slurm(self) -> bool:
        """Whether any answer of Slurm, also one without this pod's job, may lead it further."""
        if self.intent is None or verdict.progress(self.state) is Progress.FINISHED:
            return self.pod is None
        return self.job() is None or verdict.want(self.pod, False) in (Want.STOP, Want.GONE)

    @property
    def stage(self) -> Stage:
        if self.preparing or self.submitting:
            return Stage.PREPARING
        if self.intent is not None:
            return Stage.SUBMITTED if self.job_id else Stage.INTENDED
        return Stage.PREPARED if self.prepared else Stage.NEW

    def view(self) -> View:
        agent = self.agent is not None
        due = self._due()
        return View(
            want=verdict.want(self.pod, self.rejected is not None),
            stage=self.stage,
            job=verdict.job_view(self.snapshot(), self.uid, self.job_id, self.since, self.told_at),
            progress=verdict.progress(self.state),
            agent=agent,
            overdue=due is not None and time.monotonic() >= due,
            unattended=self.allocation and time.monotonic() >= self.attend_from,
        )

    def overdue_in(self) -> float | None:
        """Seconds until `overdue`; None where nobody was asked to end."""
        due = self._due()
        return None if due is None else max(0.0, due - time.monotonic())

    def _due(self) -> float | None:
        """When (time.monotonic()) the job must have ended; None while it need not."""
        if verdict.progress(self.state) is Progress.FINISHED:
            self.finished_at = self.finished_at or time.monotonic()
            return None if self.gang else self.finished_at + _LINGER
        if not self.asked:
            return None
        slack = _SLACK_AGENT if self.agent is not None else _SLACK
        return self.asked + verdict.grace_period(self.pod) + slack

    def read_journal(self) -> list[AgentEvent]:
        """For a pod whose agent is not connected. What a lived connection said stands until the
        journal says more: a network file system may show an older end of it."""
        events = self.directory_of.journal.read()
        told = self.directory_of.journal.state
        if told is not None and (self.state is None or told["finished"] or events):
            if told != self.state:
                self.told_at = time.monotonic()
            self.state = told
        return events

    # --- telling

    def _basis(self) -> tuple[Any, ...]:
        """All that the status is made of but the time."""
        return (
            self.pod, self.sent, self.state, self.job(), self.view(), self.ended, self.rejected,
            self.waiting, tuple(self.container_waiting.items()), self.plan,
            tuple(self.changed_plans),
        )  # fmt: skip

    def compute_status(self) -> Object:
        assert self.pod is not None
        previous = {**self.pod, "status": self.status}
        return build_status(previous, self._observed())

    def status_written(self) -> bool:
        """Whether the API has the status that was computed last."""
        if self.pod is None or self.sent is None:
            return True
        api = self.pod.get("status") or {}
        return same_status(api, self.sent) or (
            self.written is not None and same_status(self.written, self.sent)
        )

    def _observed(self) -> Observed:
        waiting = self.waiting
        if self.state is None and self.job_id:
            waiting = verdict.waiting(self.job(), self.job_id)
        failed = self.rejected
        nothing_ran = self.state is None and self.ended is None
        if failed is None and nothing_ran and self.view().want is Want.STOP and not self.running:
            failed = ("Deleted", "the pod was deleted before it started")
        return Observed(
            now=time.time(),
            start_time=self.start_time,
            state=verdict.judged(self.state, self.job()),
            suspended=verdict.suspended(self.job()),
            ended=self.ended,
            failed=failed,
            waiting=waiting,
            container_waiting=self.container_waiting,
            image_ids=self._image_ids(),
            host_ip=self.node.host.address,
        )

    def _image_ids(self) -> dict[str, str]:
        plans: list[ContainerPlan] = []
        if self.plan is not None:
            plans += (*self.plan["initContainers"], *self.plan["containers"])
        plans += self.changed_plans.values()
        return {c["name"]: c["image"]["id"] for c in plans}

    def say(
        self,
        type_: Any,
        reason: str,
        message: str,
        field_path: str = "",
        *,
        once: str = "",
        time: datetime | None = None,
    ) -> None:
        """An Event on the pod; `once` makes it exist once whatever happens to this process."""
        if self.last is None:
            return
        name = f"{self.last['metadata']['name'][:200]}.{self.uid[:8]}.{once}" if once else None
        self.node.events.record(
            self.last, type_, reason, message, field_path=field_path, name=name, time=time
        )

    def field_path(self, container: str) -> str:
        assert self.last is not None
        known = [*containers(self.last), *ephemeral_containers(self.last)]
        return next((path for c, path in known if c["name"] == container), "")
