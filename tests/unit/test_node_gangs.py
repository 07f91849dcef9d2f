"""Pods that start together: who waits for whom, and what is asked for."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.arrays import Arrays, array_comment
from hpk_kubelet.node.jobs import snapshot
from hpk_kubelet.node.rush import Rush
from hpk_kubelet.node.submission import Entry, Submissions
from hpk_kubelet.slurm.backend import Job, SubmitError
from hpk_kubelet.slurm.script import JobRequest, comment, render_script, sbatch_arguments
from hpk_kubelet.spec.annotations import Gang, gang
from hpk_kubelet.spec.plan import Intent
from hpk_kubelet.spec.resources import JobResources

BAND = Gang("band", 3)


class Slurm:
    def __init__(self):
        self.requests = []
        self.answers = []

    async def submit(self, submissions):
        (submission,) = submissions
        self.requests.append(submission.request)
        assert submission.script.exists()
        return [self.answers.pop(0) if self.answers else "7"]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr("hpk_kubelet.node.gangs._SHORTEST", 0.01)

    class World:
        def __init__(self):
            self.slurm = Slurm()
            self.arrays = Arrays(tmp_path / "arrays", tmp_path / "pods")
            self.all = Submissions(self.slurm, self.arrays, "c", tmp_path, Rush().over)
            self.waits, self.entries = [], {}

        def submit(self, name, of=BAND):
            said = comment("c", name, "ns", name)
            request = JobRequest(
                f"ns/{name}", said, "main", JobResources(2, 301), tmp_path / name, Path("/a"),
                gang=of,
            )  # fmt: skip
            intent = Intent(
                uid=name, namespace="ns", name=name, node="main", partition="main", comment=said
            )
            self.entries[name] = Entry(
                request, tmp_path / "s", intent, lambda _: None, self.waits.append
            )
            return asyncio.create_task(self.all.submit(self.entries[name]))

    return World


async def test_one_job_for_all_of_them(world, tmp_path):
    w = world()
    tasks = [w.submit(name) for name in "ab"]
    await asyncio.sleep(0.01)
    assert w.waits[-1] == "2 of the 3 pods of gang band are there"
    assert not w.slurm.requests
    tasks.append(w.submit("c"))
    assert await asyncio.gather(*tasks) == ["7", "7", "7"]
    (request,) = w.slurm.requests
    arguments = sbatch_arguments(request)
    assert {"--job-name=ns/band", "--ntasks=3", "--cpus-per-task=2", "--mem-per-cpu=151M",
            "--signal=URG@45"} <= set(arguments)  # fmt: skip
    assert not any(a.startswith(("--nodes", "--mem=", "--array")) for a in arguments)
    assert "exec srun --ntasks=3 --cpus-per-task=2" in render_script(request)
    # A kubelet that knows nothing finds them by the job's comment.
    again = Arrays(w.arrays.directory, tmp_path / "pods")
    again.read()
    assert {uid: i.get("gang") for uid, i in again.intents().items()} == dict.fromkeys("abc", True)
    seen = snapshot(1.0, [Job("7", "PENDING", comment=request.comment)], "c", again.uids)
    assert set(seen.by_uid) == set("abc")
    assert (seen.gangs, seen.unnamed) == ({"7": ["a", "b", "c"]}, {})
    assert request.comment == array_comment("c", request.pod_dir.name)


async def test_one_that_leaves_is_not_counted(world):
    w = world()
    a = w.submit("a")
    await asyncio.sleep(0.01)
    assert w.entries["a"].withdraw()
    rest = [w.submit(name) for name in "bc"]
    await asyncio.sleep(0.01)
    assert a.cancelled() and not w.slurm.requests
    assert await asyncio.gather(*rest, w.submit("d")) == ["7", "7", "7"]
    assert not w.all.gangs._gathering


async def test_gangs_of_other_names_and_sizes_are_others(world):
    w = world()
    tasks = [w.submit("a"), w.submit("b", Gang("band", 2)), w.submit("c", Gang("other", 3))]
    await asyncio.sleep(0.01)
    assert not w.slurm.requests
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await w.all.close()


async def test_no_room_is_tried_again_and_a_refusal_is_everybodys(world):
    w = world()
    full, never = SubmitError("job queue full", True), SubmitError("Requested node…", False)
    w.slurm.answers = [full, never]
    ends = await asyncio.gather(*(w.submit(name) for name in "abc"), return_exceptions=True)
    assert ends == [never] * 3
    assert "Slurm takes no more jobs for now: job queue full" in w.waits
    assert not list(w.arrays.directory.iterdir())


@pytest.mark.parametrize(
    "fields",
    [{"mpi": True}, {"user_flags": ("--ntasks=2",)}, {"control_job": "4"},
     {"resources": JobResources(1, 1, gpus=1)}],
)  # fmt: skip
def test_what_can_not_be_a_task_among_others(fields):
    plain = JobRequest("n", "c", "main", JobResources(1, 1), Path("/p"), Path("/a"))
    with pytest.raises(HPKError, match="can't be theirs"):
        dataclasses.replace(plain, gang=BAND, **fields)


def annotated(**annotations):
    named = {f"slurm-job.hpk.io/{key.replace('_', '-')}": v for key, v in annotations.items()}
    return {"metadata": {"annotations": named}}


def test_the_annotations():
    assert gang(annotated()) is None
    assert gang(annotated(gang="band", gang_size="3")) == BAND
    for wrong, words in (
        ({"gang": "band"}, "needs the annotation slurm-job.hpk.io/gang-size"),
        ({"gang_size": "3"}, "needs the annotation slurm-job.hpk.io/gang,"),
        ({"gang": "band", "gang_size": "0"}, "not a name and a number"),
    ):
        with pytest.raises(HPKError, match=words):
            gang(annotated(**wrong))
