"""When a lone pod's job is an allocation, and when it is sbatch's after all."""

import asyncio
from pathlib import Path

import pytest

from hpk_kubelet.node.arrays import Arrays
from hpk_kubelet.node.rush import Rush
from hpk_kubelet.node.submission import Entry, Submissions
from hpk_kubelet.slurm.backend import Limits, UnreachableError
from hpk_kubelet.slurm.script import JobRequest
from hpk_kubelet.spec.plan import Intent
from hpk_kubelet.spec.resources import JobResources


class Slurm:
    """Both a backend and its allocations."""

    def __init__(self, grants=(), inactive=False, ends=True):
        self.grants = list(grants)
        self.inactive = inactive
        self.ends = ends
        self.log = []
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def submit(self, submissions):
        self.log += [f"sbatch {s.request.name}" for s in submissions]
        return [str(100 + len(self.log)) for _ in submissions]

    async def limits(self):
        return Limits(array_size=100, inactive=self.inactive)

    async def label(self, labels):
        pass

    def missing(self):
        return ""

    async def can_end(self, request):
        return self.ends

    async def allocate(self, submission):
        self.log.append(f"salloc {submission.request.name}")
        self.asked.set()
        await asyncio.sleep(0.01)
        grant = self.grants.pop(0)
        if isinstance(grant, Exception):
            raise grant
        return grant

    async def launch(self, job_id, submission):
        await self.go.wait()
        self.log.append(f"srun {job_id}")

    async def occupied(self):
        return {"5"}


@pytest.fixture
def world(tmp_path):
    class World:
        def __init__(self, **slurm):
            self.slurm = Slurm(**slurm)
            arrays = Arrays(tmp_path / "arrays", tmp_path / "pods")
            self.all = Submissions(self.slurm, arrays, "c", tmp_path, Rush().over)
            self.immediate = self.all.immediate
            self.immediate.allocations = self.slurm
            self.written = []

        def submit(self, name, start="auto", **fields):
            request = JobRequest(
                name, f"hpk:c:{name}", "main", JobResources(1, 300), tmp_path / name, Path("/a"),
                start=start, **fields,
            )  # fmt: skip
            intent = Intent(
                uid=name, namespace="ns", name=name, node="main", partition="main", comment=name
            )
            entry = Entry(request, tmp_path / "s", intent, self.written.append, lambda _: None)
            return asyncio.create_task(self.all.submit(entry))

    return World


async def test_granted_and_launched_with_the_intent_on_disk(world):
    w = world(grants=["5"])
    w.slurm.go.clear()
    assert await w.submit("a") == "5"
    assert w.slurm.log == ["salloc a"]
    assert [intent["allocation"] for intent in w.written] == [True]
    assert await w.immediate.occupied("5"), "its agent is on the way"
    assert not await w.immediate.occupied("6")
    w.slurm.go.set()
    await w.all.close()
    assert w.slurm.log == ["salloc a", "srun 5"]


async def test_what_is_not_granted_is_submitted_and_the_next_does_not_try(world):
    w = world(grants=[None])
    assert await w.submit("a") == "102"
    assert [intent.get("allocation") for intent in w.written] == [True, None]
    assert await w.submit("b") == "103"
    assert w.slurm.log == ["salloc a", "sbatch a", "sbatch b"]
    w.immediate._busy.until = 0.0
    w.slurm.grants = ["5"]
    assert await w.submit("c") == "5"


@pytest.mark.parametrize("slurm", [{"inactive": True}, {"ends": False}])
async def test_sites_without_them(world, slurm):
    w = world(**slurm)
    await w.submit("a", start="immediate")
    assert w.slurm.log == ["sbatch a"]


async def test_pods_that_are_batch_jobs(world):
    w = world()
    await w.submit("a", start="batch")
    await w.submit("b", user_flags=("--hold",))
    assert w.slurm.log == ["sbatch a", "sbatch b"]


async def test_many_at_once_are_arrays(world):
    w = world(grants=["5"])
    first = w.submit("a")
    await w.slurm.asked.wait()
    await asyncio.gather(first, w.submit("b"), w.submit("c"))
    assert w.slurm.log[0] == "salloc a"
    assert len([line for line in w.slurm.log if "sbatch" in line]) == 1


async def test_an_answer_that_never_came_is_not_submitted_again(world):
    w = world(grants=[UnreachableError("Socket timed out")])
    with pytest.raises(UnreachableError):
        await w.submit("a")
    assert w.slurm.log == ["salloc a"]
