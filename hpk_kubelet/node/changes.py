"""What may change in a pod that runs: ephemeral containers (`kubectl debug`) come, containers that
could not be configured can be, images are replaced, activeDeadlineSeconds is shortened."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import Any

from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.backoff import Backoff
from hpk_kubelet.node.facts import Object
from hpk_kubelet.node.prepare import prepare_container
from hpk_kubelet.node.pulls import PullFailed
from hpk_kubelet.node.worker import Worker
from hpk_kubelet.server.agents import Agent
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.observed import Waiting
from hpk_kubelet.spec.plan import ContainerPlan

log = logging.getLogger(__name__)


class Changes(Worker):
    """Compares the spec with what the agent says; what it does not know or have yet it is told."""

    def begin_changes(self) -> float:
        """Starts what is due; answers for how long there is nothing to do."""
        agent, pause = self.agent, 3600.0
        if agent is None:
            return pause
        self._limit(agent)
        for container in self._wanted():
            name = container["name"]
            if name in self._handing:
                continue
            retry = self._change_retries.setdefault(name, Backoff(2.0, 60.0))
            if (left := retry.until - time.monotonic()) > 0:
                pause = min(pause, left)
                continue
            assert self.pod is not None
            work = self._hand_over(self.pod, container, agent, retry)
            self._handing[name] = task = asyncio.create_task(work)
            task.add_done_callback(functools.partial(self._handed, name))
        return pause

    def _wanted(self) -> list[Object]:
        """Containers the agent does not run yet, or with another image."""
        assert self.pod is not None
        spec = self.pod["spec"]
        known = self.state["containers"] if self.state is not None else {}
        planned = {c["name"]: c for c in self.plan["containers"]} if self.plan is not None else {}
        late = self.plan.get("misconfigured", {}) if self.plan is not None else {}
        new = [*(spec.get("ephemeralContainers") or ())]
        new += [c for c in spec["containers"] if c["name"] in late]
        found = [c for c in new if c["name"] not in known]
        for container in spec["containers"]:
            plan, state = planned.get(container["name"]), known.get(container["name"])
            if state is None or (plan is not None and "mpi" in plan):
                continue
            first = plan["image"]["reference"] if plan is not None else container["image"]
            if container["image"] != state.get("image", first):
                found.append(container)
        return found

    def _limit(self, agent: Agent) -> None:
        """activeDeadlineSeconds may be set or shortened while the pod runs."""
        assert self.pod is not None
        if self.plan is None:
            return
        active = self.pod["spec"].get("activeDeadlineSeconds")
        known = self.plan.get("activeDeadlineSeconds")
        if self._limited is not None and self._limited[0] is agent:
            known = self._limited[1]
        if active != known:
            agent.limit(active)
            self._limited = (agent, active)

    def _handed(self, name: str, _: object) -> None:
        self._handing.pop(name, None)
        self.wake()

    async def _hand_over(
        self, pod: Object, container: Object, agent: Agent, retry: Backoff
    ) -> None:
        name, image = container["name"], container["image"]
        path = self.field_path(name)
        try:
            plan = self.changed_plans.get(name)
            if plan is None or plan["image"]["reference"] != image:
                plan = self.changed_plans[name] = await self._plan_of(pod, container)
            agent.take_container(plan)
            self.container_waiting.pop(name, None)
            # Until its state comes; an agent that was lost meanwhile is told again.
            retry.until = time.monotonic() + 5.0
            return
        except PullFailed as e:
            self.pull_failed(name, image, e.failures[name])
        except ConfigError as e:
            self.container_waiting[name] = Waiting(e.reason, e.message)
            self.say("Warning", *e.event, path)
        except HPKError as e:
            log.warning("pod %s: container %s: %s", self._label(), name, e)
            self.say("Warning", "FailedSync", str(e), path)
        retry.failed(time.monotonic())

    async def _plan_of(self, pod: Object, container: Object) -> ContainerPlan:
        return await prepare_container(
            pod,
            container,
            self.field_path(container["name"]),
            self.node,
            self.kubelet.site,
            self.directory_of,
            say=self.say,
            services=self.kubelet.services(pod["metadata"]["namespace"]),
        )

    async def stop_changes(self) -> None:
        tasks: list[asyncio.Task[Any]] = list(self._handing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
