"""The virtual kubelet: all nodes and pods of one user, bound together."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube.client import ApiError, services
from hpk_kubelet.kube.reflector import Change, Reflector
from hpk_kubelet.node import verdict
from hpk_kubelet.node.arrays import Arrays
from hpk_kubelet.node.decide import Progress
from hpk_kubelet.node.disk import Disk
from hpk_kubelet.node.facts import LOOK, Object
from hpk_kubelet.node.jobs import SlurmJobs, active
from hpk_kubelet.node.nodes import missing_partition, node_name
from hpk_kubelet.node.pod import Pod
from hpk_kubelet.node.prepare import Site
from hpk_kubelet.node.rush import Rush
from hpk_kubelet.node.store import PodDir, pod_dirs
from hpk_kubelet.node.submission import Submissions
from hpk_kubelet.node.virtual_node import VirtualNode
from hpk_kubelet.node.worker import Worker
from hpk_kubelet.server.agents import Agent, AgentServer
from hpk_kubelet.slurm.backend import Backend, Cancel, Label, Partition, UnreachableError
from hpk_kubelet.slurm.sharing import POLICIES, Amounts, held, offered
from hpk_kubelet.spec.plan import AgentEvent, NetworkFacts, PodPlan, PodState, kept

log = logging.getLogger(__name__)

_NODE_INTERVAL = 15.0  # between two looks at the partitions; longer where one takes long:
_NODE_SHARE = 0.01  # of the time may be spent with them
_LOOKS = 50  # looks in a second at pods whose agents are not connected
_FETCHING = 4  # pods whose tokens are requested at once, while their jobs wait
_NODE_HURRY = 2.0  # between two looks at whether Slurm answers

MakeNode = Callable[["Kubelet", str, Partition], Awaitable[VirtualNode]]


class Kubelet:
    """Owner of the agents' server, pods of the API server's. `run` returns only by an error."""

    def __init__(
        self,
        site: Site,
        backend: Backend,
        cluster: str,
        agent_dir: Path,
        make_node: MakeNode,
    ) -> None:
        self.site = site
        self.agent_dir = agent_dir
        self.disk = Disk(site.paths.home)
        self.arrays = Arrays(site.paths.arrays, site.paths.pods)
        self.jobs = SlurmJobs(
            backend,
            cluster,
            site.config.slurm.poll_interval,
            self._jobs_changed,
            self.arrays.uids,
        )
        self.rush = Rush()
        self.fetching = asyncio.Semaphore(_FETCHING)
        self.submissions = Submissions(
            backend, self.arrays, cluster, site.paths.run, self.rush.over
        )
        self.nodes: dict[str, VirtualNode] = {}
        self._dropped: list[VirtualNode] = []
        self.agents: AgentServer  # set by whoever makes the server, which needs this object
        self._pods: dict[str, Pod] = {}  # by uid
        self._by_name: dict[str, Pod] = {}  # by namespace/name: the newest of that name
        self._make_node = make_node
        self._adopting = True
        self._named: set[str] = set()  # tasks of arrays that were named last
        self._suspects: set[str] = set()  # jobs that no pod owned at the last look
        self._services: Reflector | None = None
        self._group: asyncio.TaskGroup

    # --- life

    async def run(self, address: dict[str, Any]) -> None:
        """`address` goes to `run/kubelet.json` once agents may come."""
        async with asyncio.TaskGroup() as self._group:
            partitions = await self._first_partitions()
            directories = await asyncio.to_thread(self._read_directories)
            await self._make_nodes(partitions, directories)
            self._adopt(directories)
            write_private(self.site.paths.kubelet, json.dumps(address), sync=False)
            self._group.create_task(self.jobs.run())
            self._group.create_task(self.site.network.watch(self._network_changed))
            reflectors = [node.pods for node in self.nodes.values()]
            if reflectors:
                # Service addresses become variables of pods; any node may see all Services.
                self._services = Reflector(next(iter(self.nodes.values())).client, services())
                self._group.create_task(self._services.run())
                reflectors.append(self._services)
            await asyncio.gather(*(reflector.synced.wait() for reflector in reflectors))
            self._adopting = False
            for pod in list(self._pods.values()):
                pod.start()
            log.info("%d nodes, %d pods", len(self.nodes), len(self._pods))
            self._group.create_task(self._keep_nodes(partitions))

    async def close(self) -> None:
        """What was begun stays on disk for the next kubelet."""
        for pod in list(self._pods.values()):
            await pod.stop()
        await self.submissions.close()
        for node in (*self.nodes.values(), *self._dropped):
            await node.close()

    async def _first_partitions(self) -> list[Partition]:
        pause = 1.0
        while True:
            try:
                return self._chosen(await self.jobs.backend.partitions())
            except UnreachableError as e:
                log.warning("Slurm does not answer, the nodes wait for it: %s", e)
                await asyncio.sleep(pause)
                pause = min(30.0, pause * 2)

    def _chosen(self, found: Iterable[Partition]) -> list[Partition]:
        wanted = self.site.config.slurm.partitions
        partitions = [p for p in found if not wanted or p.name in wanted or p.control_job]
        if (gpus := self.site.config.slurm.gpu_resource) != "auto":
            partitions = [replace(p, gpu_resource=gpus) for p in partitions]
        if missing := set(wanted) - {p.name for p in partitions}:
            raise HPKError(
                f"{self.site.paths.config}: slurm.partitions names {', '.join(sorted(missing))}, "
                "which Slurm does not show; sinfo lists the partitions"
            )
        return partitions

    def _read_directories(self) -> dict[str, tuple[PodDir, Any, Any, list[AgentEvent]]]:
        found = {}
        self.arrays.read()
        tasks = self.arrays.intents()
        for uid, directory in pod_dirs(self.site.paths.pods).items():
            events = directory.journal.read()
            intent = directory.intent() or tasks.get(uid)
            found[uid] = (directory, intent, directory.plan(), events)
        return found

    async def _make_nodes(self, partitions: list[Partition], directories: Any) -> None:
        by_node = {node_name(p.name): p for p in partitions}
        # A partition may be hidden or gone for now; its pods must not be taken for deleted.
        for _, intent, _, _ in directories.values():
            if intent is not None and intent["node"] not in by_node:
                by_node[intent["node"]] = missing_partition(intent["partition"])

        # One that went while no kubelet ran has an object still, which goes as its last pod does.
        for name, gone in self._read_nodes().items():
            by_node.setdefault(name, missing_partition(gone))
        await asyncio.gather(*(self._make_one(name, p) for name, p in by_node.items()))
        self._write_nodes()

    async def _make_one(self, name: str, partition: Partition) -> None:
        node = await self._make_node(self, name, partition)
        self.nodes[name] = node
        await node.register(self.jobs.unreachable)
        node.running = [self._group.create_task(task) for task in node.tasks()]

    def _read_nodes(self) -> dict[str, str]:
        """Node → partition, as the last kubelet had them."""
        try:
            found = json.loads(self.site.paths.nodes.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return {str(name): str(partition) for name, partition in found.items()}

    def _write_nodes(self) -> None:
        names = {name: node.partition.name for name, node in self.nodes.items()}
        write_private(self.site.paths.nodes, json.dumps(names), sync=False)

    def offered(self, partition: Partition) -> Amounts:
        """What pods may have of it: without what others hold and what is not usable."""
        jobs = self.jobs.last.by_id.values() if self.jobs.last is not None else ()
        return offered(partition, held(jobs), POLICIES[self.site.config.slurm.sharing])

    def _adopt(self, directories: Any) -> None:
        """A pod for every directory: those whose objects the API still has hear of them soon."""
        anyone = next(iter(self.nodes.values()), None)
        for uid, (directory, intent, plan, events) in directories.items():
            node = self.nodes.get(intent["node"]) if intent is not None else anyone
            if node is None or uid in self._pods:
                if uid in self._pods:
                    self._remember(self._pods[uid], directory, intent, plan, events)
                continue
            self._remember(self._new(uid, node), directory, intent, plan, events)

    def _remember(
        self, pod: Pod, directory: PodDir, intent: Any, plan: Any, events: list[AgentEvent]
    ) -> None:
        pod.directory_of, pod.intent = directory, intent
        pod.plan = kept(plan) if plan is not None else None
        pod.state = directory.journal.state
        pod.untold = events
        if plan is not None:
            pod.start_time = pod.start_time or plan["startTime"]

    def _new(self, uid: str, node: VirtualNode) -> Pod:
        pod = Pod(
            uid=uid,
            directory_of=PodDir(self.site.paths.pod(uid)),
            node=node,
            snapshot=lambda: self.jobs.last,
            connection=lambda uid: self.agents.agents.get(uid),
        )
        pod.attach(self)
        self._pods[uid] = pod
        return pod

    def services(self, namespace: str) -> list[Object]:
        if self._services is None:
            return []
        return [s for s in self._services.values() if s["metadata"]["namespace"] == namespace]

    @property
    def look(self) -> float:
        """A look opens a file: no more than so many in a second, however many agents are away."""
        return max(LOOK, (len(self._pods) - len(self.agents.agents)) / _LOOKS)

    def forget(self, pod: Worker) -> None:
        self.rush.end(pod.uid)
        self._pods.pop(pod.uid, None)
        for key in [key for key, known in self._by_name.items() if known is pod]:
            del self._by_name[key]

    # --- news

    def pod_changed(self, node: VirtualNode, change: Change) -> None:
        metadata = change.object["metadata"]
        uid, key = metadata["uid"], f"{metadata['namespace']}/{metadata['name']}"
        pod = self._pods.get(uid)
        if change.new is None:
            if pod is not None:
                pod.changed(None)
            return
        if pod is None:
            pod = self._new(uid, node)
            if not self._adopting:
                pod.start()
        pod.node = node
        self._by_name[key] = pod
        pod.changed(change.new)

    def status_written(self, uid: str, written: Object) -> None:
        if (pod := self._pods.get(uid)) is not None:
            pod.written = written.get("status") or {}
            if pod.pod is not None and pod.pod["metadata"].get("deletionTimestamp"):
                pod.wake()

    def status_refused(self, uid: str, error: ApiError) -> None:
        if (pod := self._pods.get(uid)) is not None:
            log.error("pod %s: its status was refused: %s", uid, error)
            pod.wake()

    def _jobs_changed(self, changed: set[str]) -> None:
        for uid, pod in self._pods.items():
            if uid in changed or pod.awaits_slurm():
                pod.wake()
        self.submissions.room()
        if not self._adopting:
            self._cancel_orphans()
            self._name_tasks()
            self.arrays.sweep(self._pods)

    def _name_tasks(self) -> None:
        """Tasks of arrays that were submitted before a crash have the array's name and comment."""
        assert self.jobs.last is not None
        labels = []
        for job_id, uid in self.jobs.last.unnamed.items():
            pod = self._pods.get(uid)
            if job_id in self._named or pod is None or pod.intent is None or pod.submitting:
                continue
            name = f"{pod.intent['namespace']}/{pod.intent['name']}"
            if active(self.jobs.last.by_id[job_id]):
                labels.append(Label(job_id, name, pod.intent["comment"]))
        if labels:
            self._named = {label.job_id for label in labels}
            self.submissions.label(labels)

    def _cancel_orphans(self) -> None:
        """Jobs that say they are ours and whose pod neither the API nor the disk knows, if two
        looks agree: a pod may have been removed since the query began."""
        assert self.jobs.last is not None
        now = {
            job.id
            for uid, jobs in self.jobs.last.by_uid.items()
            if uid not in self._pods
            for job in jobs
            if active(job) and self._pods.keys().isdisjoint(self.jobs.last.gangs.get(job.id, ()))
        }
        if now - self._suspects:
            self.jobs.hurry()
        for job_id in now & self._suspects:
            log.warning("Slurm job %s belongs to no pod any more: cancelled", job_id)
            self._group.create_task(self._cancel(job_id))
        self._suspects = now

    async def _cancel(self, job_id: str) -> None:
        try:
            await self.jobs.cancel(Cancel(job_id))
        except HPKError as e:
            log.warning("Slurm job %s: %s", job_id, e)

    async def _keep_nodes(self, partitions: list[Partition]) -> None:
        """Capacity as Slurm has it, and whether it answers."""
        looked, reachable, interval = time.monotonic(), True, _NODE_INTERVAL
        while True:
            await asyncio.sleep(_NODE_HURRY)
            if time.monotonic() - looked < interval and reachable == (not self.jobs.unreachable):
                continue
            looked, reachable = time.monotonic(), not self.jobs.unreachable
            # Not waited for: it takes as long as the file system, which the condition then says.
            probing = self._group.create_task(asyncio.to_thread(self.disk.probe))
            await asyncio.wait({probing}, timeout=_NODE_HURRY)
            try:
                if reachable:
                    partitions = self._chosen(await self.jobs.backend.partitions())
                    took = time.monotonic() - looked
                    interval = max(_NODE_INTERVAL, took / _NODE_SHARE)
                by_node = {node_name(p.name): p for p in partitions}
                for name, node in self.nodes.items():
                    partition = by_node.get(name) or missing_partition(node.partition.name)
                    await node.update(partition, self.jobs.unreachable)
                for name in by_node.keys() - self.nodes.keys():
                    log.info("new partition %s", by_node[name].name)
                    await self._make_one(name, by_node[name])
                    self._write_nodes()
                if reachable:
                    await self._drop_nodes(self.nodes.keys() - by_node.keys())
            except HPKError as e:
                log.warning("the nodes keep their status: %s", e)

    async def _drop_nodes(self, names: set[str]) -> None:
        """Those whose partition is gone and that no pod needs any more."""
        for name in names - {pod.node.name for pod in self._pods.values()}:
            log.info("partition %s is gone, and so is its node", self.nodes[name].partition.name)
            node = self.nodes.pop(name)
            self._dropped.append(node)  # its client may still be read from: see `_services`
            await node.unregister()
            self._write_nodes()

    # --- server.agents.Owner

    def agent_token(self, uid: str) -> str | None:
        pod = self._pods.get(uid)
        return pod.plan["agent"]["token"] if pod is not None and pod.plan is not None else None

    def agent_connected(self, agent: Agent, state: PodState, events: list[AgentEvent]) -> None:
        if (pod := self._pods.get(agent.uid)) is not None:
            pod.told(state, events)
        if self.site.network.facts is not None:
            agent.network(self.site.network.facts)

    def _network_changed(self, facts: NetworkFacts) -> None:
        for agent in self.agents.agents.values():
            agent.network(facts)

    def agent_state(self, agent: Agent, state: PodState) -> None:
        if (pod := self._pods.get(agent.uid)) is not None:
            pod.told(state, [])

    def agent_event(self, agent: Agent, event: AgentEvent) -> None:
        if (pod := self._pods.get(agent.uid)) is not None:
            pod.agent_event(event)

    async def agent_plan(self, uid: str) -> PodPlan:
        pod = self._pods.get(uid)
        if pod is None:
            raise HPKError("the pod is gone")
        return await pod.new_plan()

    def agent_gone(self, agent: Agent) -> None:
        pod = self._pods.get(agent.uid)
        if pod is not None:
            if verdict.progress(pod.state) is not Progress.FINISHED:
                self.jobs.hurry(30.0)  # only Slurm can tell now whether the job lives
            pod.wake()

    # --- server.api.Pods

    def find(self, namespace: str, name: str) -> Pod | None:
        return self._by_name.get(f"{namespace}/{name}")

    def allocatable(self) -> dict[str, dict[str, str]]:
        """By virtual node."""
        return {name: node.allocatable for name, node in self.nodes.items()}

    def served(self) -> Iterable[Pod]:
        return [pod for pod in self._pods.values() if pod.pod is not None]
