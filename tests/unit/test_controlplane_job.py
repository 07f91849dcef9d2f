"""The control job among others: which are one, which stays, what status and jobs show."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane import job as module
from hpk_kubelet.controlplane.job import Job, claim, control_jobs, marker, parse_jobs
from hpk_kubelet.controlplane.kubeconfig import Control
from hpk_kubelet.controlplane.status import State, count_phases, describe, node_ready, pair, table
from hpk_kubelet.errors import HPKError

HOME = Path("/home/a/.hpk")


def job(id: int, state: str = "RUNNING", name: str = "hpk", comment: str = marker(HOME)) -> Job:
    return Job(id, state, "n1", "None", name, comment)


def test_parse() -> None:
    text = (
        f"12|RUNNING|n1|None|hpk|{marker(HOME)}\n7_3|PENDING||Priority|a|b\n8|PENDING||Res|x|a|b\n"
    )
    assert parse_jobs(text) == [
        Job(12, "RUNNING", "n1", "None", "hpk", marker(HOME)),
        Job(8, "PENDING", "", "Res", "x", "a|b"),
    ]


def test_control_jobs() -> None:
    others = [
        job(1, "COMPLETED"),
        job(2, comment=marker(Path("/elsewhere"))),
        job(3, name="ns/pod", comment="hpk:c:uid:ns/pod"),
    ]
    waiting, extra, running = job(4, "PENDING", comment=""), job(5), job(6, name="mine")
    found = control_jobs([*others, waiting, extra, running], HOME, last=6)
    assert found == [running, extra, waiting]
    elsewhere = control_jobs([*others, waiting, extra, running], HOME, 6, [Path("/elsewhere")])
    assert elsewhere == [running, extra], "the one that waits may be the other's"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes by only in sleep, so that waiting costs none."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))


def scripted(*answers: list[Job]):
    """Answers of squeue one after another, the last one for ever."""
    rest = itertools.chain(answers, itertools.repeat(answers[-1]))
    return lambda: next(rest)


@pytest.mark.usefixtures("clock")
def test_alone() -> None:
    claim(5, HOME, scripted([job(5), job(3, "COMPLETED"), job(2, comment="")]))


@pytest.mark.usefixtures("clock")
def test_the_higher_of_two_leaves_at_once() -> None:
    with pytest.raises(HPKError, match=r"job 4 on n1 \(RUNNING\).*hpk down"):
        claim(5, HOME, scripted([job(4), job(5)], []))


@pytest.mark.usefixtures("clock")
def test_the_lower_stays_when_the_higher_has_left() -> None:
    claim(4, HOME, scripted([job(4), job(5)], [job(4), job(5)], [job(4)]))


@pytest.mark.usefixtures("clock")
def test_the_lower_leaves_when_the_higher_was_first() -> None:
    with pytest.raises(HPKError, match="job 5"):
        claim(4, HOME, scripted([job(4), job(5)]))


@pytest.mark.usefixtures("clock")
def test_a_job_that_never_completes_does_not_hold_for_ever() -> None:
    claim(5, HOME, scripted([job(4, "COMPLETING"), job(5)]))


CONTROL = Control("https://10.0.0.1:1", "n1", 12, 1, "then", "host (no pasta)")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State(None, None, False, False, {}, {}), "sbatch hpk.sbatch"),
        (State(None, job(12, "PENDING"), False, False, {}, {}), "12 is PENDING (None)"),
        (State(CONTROL, job(12), False, False, {}, {}), "does not answer yet"),
        (State(CONTROL, job(12), False, True, {}, {}), "no node has registered"),
        (State(CONTROL, job(12), False, True, {"a": True, "b": False}, {}), "not Ready: node b"),
    ],
)
def test_what_is_missing_is_one_sentence(state: State, words: str) -> None:
    assert words in state.missing()
    assert not state.complete


def test_a_complete_state_as_lines(tmp_path: Path) -> None:
    state = State(CONTROL, job(12), False, True, {"main": True}, {"Running": 2})
    assert state.complete
    lines = "\n".join(describe(Paths(tmp_path), state))
    for word in (
        "12 RUNNING on n1",
        "https://10.0.0.1:1",
        "main Ready",
        "2 Running",
        "host (no pasta)",
    ):
        assert word in lines


def test_readiness_and_phases() -> None:
    def node(status: str) -> dict[str, object]:
        at = "2026-01-02T03:04:05Z"
        ready = {"type": "Ready", "status": status, "lastHeartbeatTime": at}
        return {"status": {"conditions": [ready]}}

    assert node_ready(node("True"), "2026-01-02T03:04:05+00:00")
    assert not node_ready(node("True"), "2026-01-02T03:04:06+00:00")  # of an earlier control job
    assert not node_ready(node("Unknown"), "2026-01-02T03:04:05+00:00")
    assert not node_ready({}, "2026-01-02T03:04:05+00:00")
    assert count_phases([{"status": {"phase": "Running"}}, {}]) == {"Running": 1, "Unknown": 1}


def test_pods_are_paired_with_jobs_by_uid() -> None:
    pods = [
        {"metadata": {"uid": "u1", "namespace": "n", "name": "a"}, "status": {"phase": "Running"}},
        {"metadata": {"uid": "u2", "namespace": "n", "name": "b"}, "status": {"phase": "Pending"}},
    ]
    listing = (
        "31|RUNNING|n1|None|main|2|hpk:c:u1:n/a\n"
        "30_1|PENDING||Priority|main|4|hpk:c:u9:n/gone\n"
        "29|RUNNING|n1|None|main|1|hpk control plane in /h\n"
    )
    rows = pair(listing, pods)
    assert [(r.id, r.where, r.pod, r.phase) for r in rows] == [
        ("31", "n1", "n/a", "Running"),
        ("30_1", "(Priority)", "n/gone", "(deleted)"),
        ("-", "-", "n/b", "Pending"),
    ]
    assert table(rows)[1].split() == ["31", "RUNNING", "n1", "main", "2", "n/a", "Running"]
