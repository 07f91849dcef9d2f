"""What the steps of a pod's life share: who they ask, and what they remember between two looks."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from hpk_kubelet.images.errors import ImagePullError
from hpk_kubelet.node.backoff import Backoff
from hpk_kubelet.node.decide import Action
from hpk_kubelet.node.disk import Disk
from hpk_kubelet.node.facts import Facts, Object
from hpk_kubelet.node.jobs import SlurmJobs
from hpk_kubelet.node.objects import Token
from hpk_kubelet.node.prepare import Prepared, Site
from hpk_kubelet.node.rush import Rush
from hpk_kubelet.node.submission import Entry, Submissions
from hpk_kubelet.spec.observed import Waiting
from hpk_kubelet.spec.plan import AgentEvent
from hpk_kubelet.spec.references import volume_files
from hpk_kubelet.volumes import TokenRequest, token_requests

REFRESH = (60.0, 90.0)
"""Seconds between two looks at a running pod's volumes where no watch tells of changes, or where
something went wrong the last time."""
_ADOPTED = 600.0  # seconds over which an earlier kubelet's volumes are looked at
_LONGEST = 3600.0  # between two looks, whatever the tokens say


class Kubelet(Protocol):
    """What a pod needs of the whole."""

    @property
    def site(self) -> Site: ...
    @property
    def jobs(self) -> SlurmJobs: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def submissions(self) -> Submissions: ...
    @property
    def look(self) -> float:
        """Seconds between two looks at a pod whose agent is not connected."""

    @property
    def rush(self) -> Rush: ...
    @property
    def fetching(self) -> asyncio.Semaphore: ...
    @property
    def agent_dir(self) -> Path: ...

    def services(self, namespace: str) -> list[Object]: ...

    def forget(self, pod: Worker) -> None: ...


class Worker(Facts):
    """Nothing that is remembered here is needed to go on after a crash."""

    def attach(self, kubelet: Kubelet) -> None:
        self.kubelet = kubelet
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._preparation: asyncio.Task[Prepared] | None = None
        self._submission: asyncio.Task[str] | None = None
        self._entry: Entry | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._tokens: Mapping[TokenRequest, Token] = {}
        self._watching = False  # its volumes' objects
        self._watched = True  # all of those: nothing changes unsaid
        self._refresh_due = math.inf  # time.monotonic(); known once the pod runs
        self._retries = {action: Backoff(1.0, 60.0) for action in Action}
        self._pulls = Backoff(10.0, 300.0)
        self._pull_failed = 0.0
        self._faults = Backoff(1.0, 60.0)
        self._told: tuple[Any, ...] | None = None  # of what the API's status is made already
        self._held = 0.0  # since when (time.monotonic()) a status waits to be written
        self._said_stop: tuple[object, int] | None = None
        self._termed = False
        self._launches = 0  # of agents in an allocation, after the first
        self._empty_looks = 0  # one after the other, at an allocation in which nothing ran
        self._silent_since = 0.0
        self._verdict_due = 0.0
        self._suspended = False
        self._end_seen = 0.0
        self._finishing = 0.0
        self._deleted = False
        self._told_seq = -1
        self._ran = False
        self._limited: tuple[object, int | None] | None = None  # what an agent was told
        self._handing: dict[str, asyncio.Task[None]] = {}  # containers being prepared
        self._change_retries: dict[str, Backoff] = {}
        self.untold: list[AgentEvent] = []  # of the journal, read before the object was known

    def wake(self) -> None:
        """Something has changed: look again."""
        self._wake.set()

    def _watch_files(self, pod: Object) -> None:
        if self._watching:
            return
        self._watching = True

        def changed() -> None:
            self._refresh_due = 0.0
            self.wake()

        namespace = pod["metadata"]["namespace"]
        self._watched = self.node.watches.want(
            self.uid, [(namespace, kind, name) for kind, name in volume_files(pod)], changed
        )
        self._refresh_due = min(self._refresh_due, self._next_refresh(pod))

    def _next_refresh(self, pod: Object) -> float:
        """When (time.monotonic()) the pod's volumes are due, if nothing changes before."""
        now = time.monotonic()
        if not self._watched:
            return now + random.uniform(*REFRESH)
        if self._tokens:
            left = min(token.refresh for token in self._tokens.values()) - time.time()
            return now + min(max(REFRESH[0], left), _LONGEST)
        if requests := token_requests(pod):
            # As old as may be, a token has a fifth of its life left (volumes.refresh_at).
            least = min(request.expiration_seconds for request in requests) / 5
            return now + random.uniform(REFRESH[0], max(REFRESH[1], min(_ADOPTED, least)))
        return now + _LONGEST

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self.node.watches.release(self.uid)

    def _path_of(self, container: str | None) -> str:
        return self.field_path(container) if container else ""

    def pull_failed(self, name: str, image: str, failure: ImagePullError) -> None:
        """Tells of an image that could not be had, and lets its container wait for it."""
        path = self._path_of(name)
        if failure.reason == "InvalidImageName":
            self.say("Warning", "InspectFailed", str(failure), path)
        elif failure.reason == "ErrImageNeverPull":
            self.say("Warning", "ErrImageNeverPull", str(failure), path)
        else:
            self.say("Warning", "Failed", f'Failed to pull image "{image}": {failure}', path)
        self.say("Warning", "Failed", f"Error: {failure.reason}", path)
        self.container_waiting[name] = Waiting(failure.reason, str(failure))

    def _label(self) -> str:
        if self.last is not None:
            return f"{self.last['metadata']['namespace']}/{self.last['metadata']['name']}"
        return f"{self.intent['namespace']}/{self.intent['name']}" if self.intent else self.uid

    def agent_event(self, event: AgentEvent) -> None:
        """Makes it an Event, unless it was told before."""
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

    def _look(self) -> None:
        """Into the journal of a pod whose agent is not connected."""
        if self.agent is None and self.intent is not None:
            self.untold += self.read_journal()
        if self.untold and self.pod is not None:
            events, self.untold = self.untold, []
            if not _terminal(self.pod):  # else they were told when it ended
                for event in events:
                    self.agent_event(event)


def _terminal(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
