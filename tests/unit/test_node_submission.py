"""Lines of pods before a Slurm that is scripted: who goes with whom, and who waits."""

import asyncio
from pathlib import Path

import pytest

from hpk_kubelet.node.arrays import Arrays
from hpk_kubelet.node.jobs import snapshot
from hpk_kubelet.node.rush import Rush
from hpk_kubelet.node.submission import Entry, Submissions
from hpk_kubelet.slurm.backend import Job, Limits, SubmitError, UnreachableError
from hpk_kubelet.slurm.script import JobRequest, comment
from hpk_kubelet.spec.plan import Intent
from hpk_kubelet.spec.resources import JobResources


class Slurm:
    """Takes jobs while there is room; `log` holds how many tasks each submission had."""

    def __init__(self, room=10**6, array_size=1000):
        self.room = room
        self.array_size = array_size
        self.log = []
        self.names = []
        self.labels = []
        self.answers = []

    async def submit(self, submissions):
        await asyncio.sleep(0.001)
        return [self._one(s.request) for s in submissions]

    def _one(self, request):
        if self.answers:
            answer = self.answers.pop(0)
            if answer is not None:
                return answer
        tasks = request.tasks or 1
        if tasks > self.room:
            return SubmitError("AssocMaxSubmitJobLimit", transient=True)
        self.room -= tasks
        self.log.append(tasks)
        self.names.append(request.name)
        return str(len(self.log))

    async def limits(self):
        return Limits(self.array_size)

    async def label(self, labels):
        self.labels += labels


@pytest.fixture
def world(tmp_path):
    class World:
        def __init__(self, **slurm):
            self.slurm = Slurm(**slurm)
            self.arrays = Arrays(tmp_path / "arrays", tmp_path / "pods")
            self.all = Submissions(self.slurm, self.arrays, "c", tmp_path, Rush().over)
            self.written, self.waits, self.entries = [], [], {}

        def start(self, name, cpus=1):
            said = comment("c", f"u-{name}", "ns", name)
            request = JobRequest(
                f"ns/{name}", said, "main", JobResources(cpus, 300), tmp_path / name, Path("/a")
            )
            intent = Intent(
                uid=f"u-{name}", namespace="ns", name=name, node="main", partition="main",
                comment=said,
            )  # fmt: skip
            entry = Entry(
                request, tmp_path / "s", intent, self.written.append,
                lambda words: self.waits.append((name, words)),
            )  # fmt: skip
            self.entries[name] = entry
            return asyncio.create_task(self.all.submit(entry))

    return World


async def test_a_lone_pod_goes_alone_with_its_intent(world):
    w = world()
    assert await w.start("a") == "1"
    assert w.slurm.names == ["ns/a"]
    assert [intent["uid"] for intent in w.written] == ["u-a"]


async def test_what_gathers_meanwhile_goes_as_one_array(world):
    w = world()
    first = w.start("a")
    await asyncio.sleep(0)
    rest = [w.start(f"b{i}") for i in range(5)]
    assert await first == "1"
    assert await asyncio.gather(*rest) == [f"2_{i}" for i in range(5)]
    assert w.slurm.log == [1, 5]
    assert [label.name for label in w.slurm.labels] == [f"ns/b{i}" for i in range(5)]
    # A kubelet that knows nothing finds them again.
    again = Arrays(w.arrays.directory, Path("/pods"))
    again.read()
    assert set(again.intents()) == {f"u-b{i}" for i in range(5)}
    (name,) = [path.name for path in w.arrays.directory.iterdir()]
    jobs = [Job("2_3", "PENDING", comment=comment("c", name, "hpk", "array"))]
    assert set(snapshot(1.0, jobs, "c", again.uids).by_uid) == {"u-b3"}
    again.sweep({"u-b3"})
    assert w.arrays.directory.joinpath(name).exists()
    again.sweep({"u-a"})
    assert not w.arrays.directory.joinpath(name).exists()


async def test_other_shapes_do_not_wait_for_each_other(world):
    w = world()
    tasks = [w.start(f"p{i}", cpus=i % 2 + 1) for i in range(6)]
    assert len(set(await asyncio.gather(*tasks))) == 6
    assert w.slurm.log == [3, 3]


async def test_without_arrays_they_go_one_by_one(world):
    w = world(array_size=0)
    tasks = [w.start(f"p{i}") for i in range(4)]
    assert sorted(await asyncio.gather(*tasks)) == ["1", "2", "3", "4"]


async def test_an_array_is_no_larger_than_slurm_takes(world):
    w = world(array_size=4)
    await asyncio.gather(*[w.start(f"p{i}") for i in range(10)])
    assert w.slurm.log == [4, 4, 2]


async def test_without_room_they_wait_in_order(world):
    w = world(room=5)
    tasks = [w.start(f"p{i}") for i in range(8)]
    done = asyncio.gather(*tasks[:5])
    assert len(await asyncio.wait_for(done, 5)) == 5
    assert not any(task.done() for task in tasks[5:])
    assert ("p7", "AssocMaxSubmitJobLimit") in w.waits
    late = w.start("late")
    w.slurm.room = 1
    w.all.room()
    await asyncio.wait_for(tasks[5], 5)
    assert not any(task.done() for task in (*tasks[6:], late))
    for _ in range(5000):
        if w.entries["p6"].withdraw():  # deleted while it waited
            break
        await asyncio.sleep(0.001)  # it was on its way just then
    w.slurm.room = 10
    w.all.room()
    await asyncio.wait_for(asyncio.gather(tasks[7], late), 10)
    assert sum(w.slurm.log) == 8


async def test_what_slurm_refuses_is_refused_for_all_of_the_shape(world):
    w = world()
    w.slurm.answers = [SubmitError("Invalid qos", False), SubmitError("Invalid qos", False)]
    tasks = [w.start(f"p{i}") for i in range(3)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(a) for a in answers] == ["Invalid qos"] * 3
    assert w.slurm.log == []


async def test_a_site_that_refuses_arrays_gets_single_jobs(world):
    w = world()
    w.slurm.answers = [SubmitError("no arrays here", False)]
    tasks = [w.start(f"p{i}") for i in range(3)]
    assert sorted(await asyncio.gather(*tasks)) == ["1", "2", "3"]
    assert not list(w.arrays.directory.iterdir())


async def test_an_answer_that_never_came_is_told_to_all(world):
    w = world()
    w.slurm.answers = [UnreachableError("away")]
    tasks = [w.start(f"p{i}") for i in range(3)]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(a) for a in answers] == [UnreachableError] * 3
    assert set(w.arrays.intents()) == {"u-p0", "u-p1", "u-p2"}
