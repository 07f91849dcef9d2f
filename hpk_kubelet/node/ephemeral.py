"""Ephemeral containers (`kubectl debug`): prepared while the pod runs and handed to its agent."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import Any

from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.backoff import Backoff
from hpk_kubelet.node.facts import Object
from hpk_kubelet.node.prepare import PullFailed, prepare_ephemeral
from hpk_kubelet.node.worker import Worker
from hpk_kubelet.server.agents import Agent
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.observed import Waiting
from hpk_kubelet.spec.plan import ContainerPlan

log = logging.getLogger(__name__)


class Ephemeral(Worker):
    """Each container is prepared once; an agent that does not know it is told."""

    def begin_ephemeral(self) -> float:
        """Starts what is due; answers for how long there is nothing to do."""
        assert self.pod is not None
        agent, pause = self.agent, 3600.0
        known = self.state["containers"] if self.state is not None else {}
        if agent is None:
            return pause
        for container in self.pod["spec"].get("ephemeralContainers") or ():
            name = container["name"]
            if name in known or name in self._handing:
                continue
            retry = self._ephemeral_retries.setdefault(name, Backoff(2.0, 60.0))
            if (left := retry.until - time.monotonic()) > 0:
                pause = min(pause, left)
                continue
            work = self._hand_over(self.pod, container, agent, retry)
            self._handing[name] = task = asyncio.create_task(work)
            task.add_done_callback(functools.partial(self._handed, name))
        return pause

    def _handed(self, name: str, _: object) -> None:
        self._handing.pop(name, None)
        self.wake()

    async def _hand_over(
        self, pod: Object, container: Object, agent: Agent, retry: Backoff
    ) -> None:
        name = container["name"]
        path = self.field_path(name)
        waiting: Waiting | None = None
        try:
            plan = self.ephemeral_plans.get(name) or await self._plan_of(pod, container)
            self.ephemeral_plans[name] = plan
            agent.start_container(plan)
            # Until its state comes; an agent that was lost meanwhile is told again.
            retry.until = time.monotonic() + 2.0
        except PullFailed as e:
            failure = e.failures[name]
            waiting = Waiting(failure.reason, str(failure))
            message = f'Failed to pull image "{container["image"]}": {failure}'
            self.say("Warning", "Failed", message, path)
        except ConfigError as e:
            waiting = Waiting(e.reason, e.message)
            self.say("Warning", *e.event, path)
        except HPKError as e:
            log.warning("pod %s: ephemeral container %s: %s", self._label(), name, e)
            self.say("Warning", "FailedSync", str(e), path)
        if waiting is not None:
            self.container_waiting[name] = waiting
            retry.failed(time.monotonic())

    async def _plan_of(self, pod: Object, container: Object) -> ContainerPlan:
        return await prepare_ephemeral(
            pod,
            container,
            self.node,
            self.kubelet.site,
            self.directory_of,
            say=self.say,
            services=self.kubelet.services(pod["metadata"]["namespace"]),
        )

    async def stop_ephemeral(self) -> None:
        tasks: list[asyncio.Task[Any]] = list(self._handing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
