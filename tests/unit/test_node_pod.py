"""The pods' loop against a Slurm and an API that are scripted; images and plans are made up.

A crash is a new `World` on the same directory: everything in memory is gone.
"""

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpk_kubelet.config import Config, Paths
from hpk_kubelet.errors import HPKError
from hpk_kubelet.images.errors import ImagePullError
from hpk_kubelet.kube.reflector import Change
from hpk_kubelet.node import kubelet as kubelet_module
from hpk_kubelet.node import pod as pod_module
from hpk_kubelet.node.decide import Action
from hpk_kubelet.node.kubelet import Kubelet
from hpk_kubelet.node.network import NetworkNews
from hpk_kubelet.node.prepare import Prepared, Site
from hpk_kubelet.node.pulls import PullFailed
from hpk_kubelet.slurm.backend import Job, Limits, Partition, SubmitError, UnreachableError
from hpk_kubelet.slurm.script import comment
from hpk_kubelet.spec.errors import ConfigError

PARTITION = Partition(
    name="main", up=True, default=True, nodes=1, nodes_usable=1, cpus=4, cpus_usable=4,
    memory_mb=4000, memory_usable_mb=4000, largest_cpus=4, largest_memory_mb=4000,
)  # fmt: skip
UID = "uid-1"


class Slurm:
    """A backend that outlives the kubelet."""

    def __init__(self):
        self.queue = {}  # id → Job
        self.submitted = []
        self.cancelled = []
        self.answers = []  # for the next submissions; else a job
        self.away = False
        self.accounting = []
        self.array_size = 0
        self.labels = []

    def add(self, word="PENDING", comment_=None, **fields):
        id_ = str(len(self.submitted) + 1) if comment_ is None else "99"
        text = comment_ or comment("c", UID, "ns", "p")
        self.queue[id_] = Job(id=id_, word=word, comment=text, **fields)
        return id_

    def set(self, id_, word, **fields):
        old = self.queue[id_]
        self.queue[id_] = Job(id=id_, word=word, comment=old.comment, **fields)

    async def submit(self, submissions):
        return [self._submit(s) for s in submissions]

    def _submit(self, submission):
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            return answer
        assert submission.script.exists()
        id_ = self.add()
        self.submitted.append(submission)
        return id_

    async def jobs(self):
        if self.away:
            raise UnreachableError("Unable to contact slurm controller")
        return list(self.queue.values())

    async def limits(self):
        return Limits(array_size=self.array_size)

    async def label(self, labels):
        self.labels += labels

    async def ended(self, ids):
        if self.away:
            raise UnreachableError("Unable to contact slurm controller")
        return [job for job in self.accounting if job.id in ids]

    async def cancel(self, cancels):
        for c in cancels:
            self.cancelled.append((c.job_id, c.signal, c.batch_only))
            if not c.signal and self.queue[c.job_id].word == "PENDING":
                self.set(c.job_id, "CANCELLED")
        return [None for _ in cancels]

    async def partitions(self):
        return [PARTITION]


class Agent:
    def __init__(self):
        self.stopped = []

    def stop(self, grace):
        self.stopped.append(grace)


class Reflected:
    def __init__(self):
        self.synced = asyncio.Event()
        self.synced.set()

    async def run(self):
        await asyncio.Event().wait()

    def values(self):
        return []


class Node:
    """The API's half: statuses land in the object at once and come back by the watch."""

    def __init__(self, world, name):
        self.world = world
        self.name = name
        self.partition = PARTITION
        self.allocatable = {}
        self.host = SimpleNamespace(address="10.0.0.1")
        self.pods = Reflected()
        self.client = self.statuses = self.events = self.objects = self.watches = self

    def tasks(self):
        return []

    async def register(self, unreachable=""):
        pass

    async def update(self, partition, unreachable):
        pass

    async def close(self):
        pass

    def forget(self, uid):
        pass

    def want(self, uid, wanted, changed):
        self.world.watched[uid] = (list(wanted), changed)

    def release(self, uid):
        self.world.watched.pop(uid, None)

    def set(self, namespace, name, uid, status):
        self.world.statuses.append(status)
        if self.world.api is not None:
            self.world.change(status={**self.world.api["status"], **status})
            self.world.kubelet.status_written(uid, self.world.api)

    def record(self, obj, type_, reason, message, **kwargs):
        self.world.events.append((reason, message))

    async def delete(self, path, *, grace, uid):
        assert grace == 0 and uid == UID
        self.world.deletes += 1
        if not self.world.finalizers:
            self.world.vanish()


class World:
    """One life of the kubelet."""

    def __init__(self, home: Path, slurm: Slurm, api: dict | None):
        self.api = api
        self.slurm = slurm
        self.statuses = []
        self.events = []
        self.deletes = 0
        self.watched = {}
        self.finalizers = False
        self.prepared = 0
        self.preparing = asyncio.Event()
        self.preparing.set()
        self.failures = []  # of the next preparations
        self.paths = Paths(home)
        config = Config()
        site = Site(config, self.paths, None, "api", 6443, NetworkNews(self.paths, "c"))
        self.kubelet = Kubelet(site, slurm, "c", Path("/agent"), self.make_node)
        self.kubelet.agents = SimpleNamespace(agents={})

    async def make_node(self, kubelet, name, partition):
        self.node = Node(self, name)
        if self.api is not None:
            kubelet.pod_changed(self.node, Change("added", None, self.api))
        return self.node

    async def prepare(self, pod, node, site, directory, *, start_time, script, services,
                      agent_token="", **_):  # fmt: skip
        await self.preparing.wait()
        self.prepared += 1
        if self.failures:
            raise self.failures.pop(0)
        directory.create()
        plan = {
            "agent": {"token": agent_token or "secret"},
            "startTime": start_time,
            "initContainers": [],
            "containers": [{"name": "main", "image": {"id": "i"}}],
        }
        directory.write_plan(plan, script)
        return Prepared(plan, {})

    def change(self, *, status=None, metadata=None):
        old = self.api
        self.api = {
            **old,
            "status": status or old["status"],
            "metadata": {**old["metadata"], **(metadata or {})},
        }
        self.kubelet.pod_changed(self.node, Change("modified", old, self.api))

    def delete(self, grace=5):
        self.change(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z",
                              "deletionGracePeriodSeconds": grace})  # fmt: skip

    def vanish(self):
        old, self.api = self.api, None
        self.kubelet.pod_changed(self.node, Change("deleted", old, None))

    @property
    def dir(self):
        return self.paths.pod(UID)

    @property
    def pod(self):
        return self.kubelet._pods[UID]

    def connect(self, state):
        agent = Agent()
        agent.uid = UID
        self.kubelet.agents.agents[UID] = agent
        self.kubelet.agent_connected(agent, state, [])
        return agent

    def disconnect(self):
        agent = self.kubelet.agents.agents.pop(UID)
        self.kubelet.agent_gone(agent)

    def reasons(self):
        return [reason for reason, _ in self.events]

    async def until(self, look, seconds=5.0):
        async def poll():
            for _ in range(int(seconds / 0.005)):
                known = UID in self.kubelet._pods or self.api is None
                if known and look():
                    return True
                await asyncio.sleep(0.005)
            return False

        assert await poll(), (self.events, self.statuses[-1:])


def a_pod(**annotations):
    return {
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {"name": "p", "namespace": "ns", "uid": UID, "annotations": annotations},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5,
                 "containers": [{"name": "main", "image": "i"}]},
        "status": {"phase": "Pending", "qosClass": "BestEffort"},
    }  # fmt: skip


def state(kind="running", finished=False, job="1", code=0):
    states = {
        "waiting": {"waiting": {"reason": "ContainerCreating"}},
        "running": {"running": {"startedAt": 1.0}},
        "terminated": {"terminated": {"exitCode": code, "reason": "Completed", "message": "",
                                      "startedAt": 1.0, "finishedAt": 2.0}},
    }  # fmt: skip
    return {
        "jobId": job, "node": "n1", "hostIP": "10.0.0.2", "podIP": "10.0.0.2", "startedAt": 1.0,
        "containers": {"main": {**states[kind], "restartCount": 0, "started": kind == "running",
                                "ready": kind == "running"}},
        "finished": finished,
    }  # fmt: skip


def journal(directory, *states):
    with (directory / "journal.jsonl").open("w") as f:
        for seq, one in enumerate(states):
            f.write(json.dumps({"seq": seq, "state": one}) + "\n")


@pytest.fixture
def live(tmp_path, monkeypatch):
    """Starts a life of the kubelet: `async with live(slurm, api) as world`."""
    monkeypatch.setattr(pod_module, "_QUIET", 0.0)
    monkeypatch.setattr("hpk_kubelet.node.ending._LAST_WORD", 0.1)
    monkeypatch.setattr("hpk_kubelet.node.jobs._QUICK", 0.02)
    monkeypatch.setattr("hpk_kubelet.node.jobs._RETRY", 0.02)
    monkeypatch.setattr(kubelet_module, "Reflector", lambda *args: Reflected())

    @contextlib.asynccontextmanager
    async def start(slurm, api):
        world = World(tmp_path, slurm, api)
        world.paths.run.mkdir(exist_ok=True)
        monkeypatch.setattr("hpk_kubelet.node.starting.prepare", world.prepare)
        task = asyncio.create_task(world.kubelet.run({"host": "h", "port": 1}))
        try:
            yield world
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await world.kubelet.close()

    return start


async def test_from_api_to_job_to_its_end(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: slurm.submitted and world.pod.job_id == "1")
        assert json.loads((world.dir / "intent.json").read_text())["jobId"] == "1"
        await world.until(lambda: world.statuses)
        waiting = world.statuses[-1]["containerStatuses"][0]["state"]["waiting"]
        assert waiting["reason"] == "SlurmPending"
        slurm.set("1", "RUNNING")
        world.connect(state())
        await world.until(lambda: world.api["status"]["phase"] == "Running")
        world.kubelet.agent_state(world.kubelet.agents.agents[UID], state("terminated", True))
        await world.until(lambda: world.api["status"]["phase"] == "Succeeded")
        assert world.dir.exists(), "its logs stay while the object does"
        world.disconnect()
        slurm.set("1", "COMPLETED")
        world.delete()
        await world.until(lambda: UID not in world.kubelet._pods)
        assert not world.dir.exists()
        assert (len(slurm.submitted), slurm.cancelled, world.deletes) == (1, [], 1)


async def test_a_crash_after_sbatch_is_found_by_the_comment(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        api, directory = world.api, world.dir
    intent = json.loads((directory / "intent.json").read_text())
    del intent["jobId"]
    (directory / "intent.json").write_text(json.dumps(intent))
    async with live(slurm, api) as world:
        await world.until(lambda: world.pod.job_id == "1")
        assert len(slurm.submitted) == 1
        assert world.prepared == 0


async def test_a_crash_before_sbatch_submits_once(live):
    slurm = Slurm()
    slurm.answers = [SubmitError("later", transient=True)]
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: (world.dir / "intent.json").exists())
        api = world.api
    assert slurm.submitted == []
    async with live(slurm, api) as world:
        await world.until(lambda: world.pod.job_id == "1")
        assert world.prepared == 0, "the plan is on disk"
    assert len(slurm.submitted) == 1


async def test_nothing_is_submitted_while_slurm_can_not_be_asked(live):
    slurm = Slurm()
    slurm.answers = [UnreachableError("no answer")]
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.waiting)
        assert world.pod.waiting.reason == "SlurmSubmitFailed"
        api = world.api
    slurm.away = True
    slurm_job = slurm.add("RUNNING")  # it was taken after all
    async with live(slurm, api) as world:
        await world.until(lambda: world.kubelet.jobs.unreachable)
        await asyncio.sleep(0.1)
        assert slurm.submitted == []
        slurm.away = False
        await world.until(lambda: world.pod.job_id == slurm_job, seconds=10)
    assert slurm.submitted == []


async def test_a_journal_alone_proves_the_job(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        api, directory = world.api, world.dir
    intent = json.loads((directory / "intent.json").read_text())
    del intent["jobId"]
    (directory / "intent.json").write_text(json.dumps(intent))
    journal(directory, state(), state("terminated", True, code=5))
    slurm.queue.clear()
    async with live(slurm, api) as world:
        await world.until(lambda: world.api["status"]["phase"] == "Failed")
        terminated = world.api["status"]["containerStatuses"][0]["state"]["terminated"]
        assert terminated["exitCode"] == 5
    assert len(slurm.submitted) == 1


async def test_a_plan_that_the_disk_lost_is_made_again(live):
    slurm = Slurm()
    slurm.answers = [SubmitError("later", transient=True)]
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: (world.dir / "intent.json").exists())
        api, directory = world.api, world.dir
    (directory / "plan.json").write_text("")
    async with live(slurm, api) as world:
        await world.until(lambda: world.pod.job_id == "1")
        assert world.prepared == 1


@pytest.mark.parametrize(
    ("word", "reason"), [("NODE_FAIL", "NodeFail"), ("TIMEOUT", "SlurmTimeout"),
                         ("CANCELLED", "SlurmCancelled"), ("COMPLETED", "AgentLost")],
)  # fmt: skip
async def test_a_job_that_ends_without_a_word(live, word, reason):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        slurm.set("1", "RUNNING")
        world.connect(state())
        await world.until(lambda: world.api["status"]["phase"] == "Running")
        slurm.set("1", word)
        world.disconnect()
        await world.until(lambda: world.api["status"]["phase"] == "Failed")
        assert world.api["status"]["reason"] == reason
        assert reason in world.reasons()


async def test_the_journals_last_word_counts_more_than_slurms(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        slurm.set("1", "RUNNING")
        world.connect(state())
        await world.until(lambda: world.api["status"]["phase"] == "Running")
        journal(world.dir, state(), state("terminated", True))
        slurm.set("1", "COMPLETED")
        world.disconnect()
        await world.until(lambda: world.api["status"]["phase"] == "Succeeded")


async def test_what_slurm_refuses_fails_the_pod_with_its_words(live):
    slurm = Slurm()
    slurm.answers = [SubmitError("Invalid partition name specified", transient=False)]
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.api["status"]["phase"] == "Failed")
        assert world.api["status"]["reason"] == "SlurmRejected"
        assert world.api["status"]["message"] == "Invalid partition name specified"
        await asyncio.sleep(0.1)
    assert slurm.submitted == []


async def test_a_bad_annotation_never_reaches_slurm(live):
    slurm = Slurm()
    async with live(slurm, a_pod(**{"slurm-job.hpk.io/flags": "--wrap=x"})) as world:
        await world.until(lambda: world.api["status"]["phase"] == "Failed")
        assert "--wrap" in world.api["status"]["message"]
        assert world.prepared == 0


async def test_an_image_that_fails_and_then_comes(live, monkeypatch):
    monkeypatch.setattr(pod_module, "_PULL_SHOWN", 0.05)
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        world.failures = [PullFailed({"main": ImagePullError("not found")})]
        await world.until(lambda: "BackOff" in world.reasons())
        shown = [s["containerStatuses"][0]["state"]["waiting"]["reason"] for s in world.statuses]
        assert shown[-2:] == ["ErrImagePull", "ImagePullBackOff"]
        world.pod._retries[Action.PREPARE].until = 0
        world.pod.wake()
        await world.until(lambda: world.pod.job_id)


async def test_a_config_error_is_shown_and_tried_again(live):
    async with live(Slurm(), a_pod()) as world:
        world.failures = [ConfigError('configmap "x" not found', container="main")]
        await world.until(lambda: world.pod.job_id)
        assert ("Failed", 'Error: configmap "x" not found') in world.events


async def test_an_error_nobody_thought_of_is_told_and_survived(live):
    async with live(Slurm(), a_pod()) as world:
        world.failures = [ZeroDivisionError("oops")]
        await world.until(lambda: world.pod.job_id)
        assert "FailedSync" in world.reasons()


# --- deletion


async def test_deleted_while_it_is_prepared(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        world.preparing.clear()
        await world.until(lambda: UID in world.kubelet._pods and world.pod.preparing)
        world.delete()
        await world.until(lambda: UID not in world.kubelet._pods)
        assert world.statuses[-1]["phase"] == "Failed"
    assert slurm.submitted == []


async def test_deleted_while_queued(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        world.delete()
        await world.until(lambda: UID not in world.kubelet._pods)
        assert slurm.cancelled == [("1", "", False)]
        assert not world.dir.exists()


async def test_deleted_while_running_the_agent_is_asked_once_and_again_for_less(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        slurm.set("1", "RUNNING")
        agent = world.connect(state())
        world.delete(5)
        await world.until(lambda: agent.stopped)
        world.change(metadata={"labels": {"a": "b"}})
        world.delete(1)
        await world.until(lambda: len(agent.stopped) == 2)
        assert agent.stopped == [5, 1]
        world.kubelet.agent_state(agent, state("terminated", True, code=143))
        await world.until(lambda: world.api is None)
        assert world.dir.exists(), "the job may still write"
        slurm.set("1", "COMPLETED")
        await world.until(lambda: UID not in world.kubelet._pods, seconds=10)
        assert slurm.cancelled == []


async def test_deleted_without_its_agent_the_script_is_signalled_then_the_job_ends(
    live, monkeypatch
):
    monkeypatch.setattr("hpk_kubelet.node.facts._SLACK", 0.1)
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        slurm.set("1", "RUNNING")
        await world.until(lambda: world.pod.view().job.name == "RUNNING")
        world.delete(0)
        await world.until(lambda: len(slurm.cancelled) == 2)
        assert slurm.cancelled == [("1", "TERM", True), ("1", "", False)]
        slurm.set("1", "CANCELLED")
        await world.until(lambda: UID not in world.kubelet._pods)


async def test_force_deleted_the_job_is_cancelled_and_the_directory_follows_it(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        slurm.set("1", "RUNNING")
        await world.until(lambda: world.pod.view().job.name == "RUNNING")
        world.vanish()
        await world.until(lambda: slurm.cancelled == [("1", "", False)])
        assert world.dir.exists()
        slurm.set("1", "CANCELLED")
        await world.until(lambda: UID not in world.kubelet._pods)
        assert not world.dir.exists()


async def test_finalizers_hold_the_object_and_it_is_deleted_once(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        world.finalizers = True
        await world.until(lambda: world.pod.job_id)
        world.delete()
        await world.until(lambda: world.deletes)
        world.change(metadata={"labels": {"a": "b"}})
        await asyncio.sleep(0.05)
        assert world.deletes == 1
        world.vanish()
        await world.until(lambda: UID not in world.kubelet._pods)


async def test_deleted_while_the_kubelet_was_away(live):
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        slurm.set("1", "RUNNING")
        directory = world.dir
    async with live(slurm, None) as world:
        await world.until(lambda: slurm.cancelled)
        slurm.set("1", "CANCELLED")
        await world.until(lambda: not directory.exists())


async def test_a_job_without_a_pod_is_cancelled(live):
    slurm = Slurm()
    slurm.add("RUNNING", comment_=comment("c", "nobody", "ns", "p"))
    async with live(slurm, None) as world:
        world.kubelet.jobs.hurry()
        await world.until(lambda: slurm.cancelled == [("99", "", False)])


async def test_a_journal_newer_than_slurms_answer_is_no_requeue(live, monkeypatch):
    """A short pod's journal can be read before Slurm is asked again and before its agent calls."""
    monkeypatch.setattr("hpk_kubelet.node.kubelet.LOOK", 0.1)
    slurm = Slurm()
    async with live(slurm, a_pod()) as world:
        await world.until(lambda: world.pod.job_id and world.pod.job() is not None)
        assert world.pod.job().word == "PENDING"
        slurm.away = True
        journal(world.dir, state())
        world.pod.wake()
        await world.until(lambda: world.api["status"]["phase"] == "Running")
        assert "SlurmRequeued" not in world.reasons()
        slurm.away = False  # and now it waits again
        world.kubelet.jobs.hurry()
        await world.until(lambda: "SlurmRequeued" in world.reasons(), seconds=10)
        assert world.api["status"]["phase"] == "Failed"


class Steps:
    """Allocations after a crash: what is launched in them, and in which something runs."""

    def __init__(self):
        self.launched = []
        self.jobs = set()

    async def launch(self, job_id, submission):
        assert submission.script.exists()
        self.launched.append(job_id)

    async def occupied(self):
        return self.jobs


@pytest.fixture
def allocation(live, monkeypatch):
    """A new kubelet, which finds a pod's allocation running and nobody connected."""
    for module in ("facts", "starting", "attending", "kubelet"):
        monkeypatch.setattr(f"hpk_kubelet.node.{module}.LOOK", 0.05)

    @contextlib.asynccontextmanager
    async def found(steps, *journal):
        slurm = Slurm()
        async with live(slurm, a_pod()) as world:
            await world.until(lambda: world.pod.job_id)
            api, directory = world.api, world.dir
        intent = json.loads((directory / "intent.json").read_text())
        (directory / "intent.json").write_text(json.dumps({**intent, "allocation": True}))
        lines = [json.dumps({"seq": i, "state": s}) + "\n" for i, s in enumerate(journal)]
        (directory / "journal.jsonl").write_text("".join(lines)) if journal else None
        slurm.set("1", "RUNNING")
        async with live(slurm, api) as world:
            world.kubelet.submissions.immediate.allocations = steps
            yield world, slurm

    return found


async def test_an_allocation_in_which_nothing_was_started_yet(allocation):
    steps = Steps()
    async with allocation(steps) as (world, slurm):
        await world.until(lambda: steps.launched == ["1"])
        steps.jobs = {"1"}
        world.connect(state())
        await world.until(lambda: world.api["status"]["phase"] == "Running")
        await asyncio.sleep(0.2)
        assert (steps.launched, slurm.cancelled) == (["1"], [])


async def test_an_allocation_in_which_no_agent_comes_up(allocation):
    steps = Steps()
    async with allocation(steps) as (world, slurm):
        (world.dir / "slurm.out").write_text("hpk: no Python\n")
        await world.until(lambda: world.api["status"]["phase"] == "Failed")
        assert steps.launched == ["1", "1"]
        assert world.api["status"]["reason"] == "AgentLost"
        assert world.api["status"]["message"].endswith("its last words: hpk: no Python")
        assert slurm.cancelled[0] == ("1", "", False)


async def test_an_allocation_whose_agent_was_killed_with_all_it_ran(allocation):
    steps = Steps()
    async with allocation(steps, state()) as (world, slurm):
        await world.until(lambda: world.api["status"]["phase"] == "Failed")
        assert world.api["status"]["reason"] == "AgentLost"
        assert steps.launched == []
        assert slurm.cancelled[0] == ("1", "", False)


async def test_an_allocation_whose_agent_only_lost_its_connection(allocation):
    steps = Steps()
    steps.jobs = {"1"}
    async with allocation(steps, state()) as (world, slurm):
        await world.until(lambda: world.api["status"]["phase"] == "Running")
        await asyncio.sleep(0.3)
        assert (steps.launched, slurm.cancelled) == ([], [])
        world.delete()
        await world.until(lambda: slurm.cancelled)
        assert slurm.cancelled[0] == ("1", "URG", False)


async def test_jobs_of_another_cluster_are_left_alone(live):
    slurm = Slurm()
    slurm.add("RUNNING", comment_=comment("other", "nobody", "ns", "p"))
    async with live(slurm, None) as world:
        world.kubelet.jobs.hurry()
        await asyncio.sleep(0.2)
    assert slurm.cancelled == []


async def test_a_new_plan_keeps_the_agents_token(live):
    async with live(Slurm(), a_pod()) as world:
        await world.until(lambda: world.pod.job_id)
        plan = await world.kubelet.agent_plan(UID)
        assert plan["agent"]["token"] == "secret"
        assert world.kubelet.agent_token(UID) == "secret"
        assert world.kubelet.agent_token("other") is None
        with pytest.raises(HPKError):
            await world.kubelet.agent_plan("other")
