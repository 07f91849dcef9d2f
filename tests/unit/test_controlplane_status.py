"""`hpk status` and `hpk down` where Slurm or this host can't answer for the control plane."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane import job as jobs
from hpk_kubelet.controlplane import status
from hpk_kubelet.controlplane.files import make_private_dir
from hpk_kubelet.errors import HPKError


def started(home: Path, **values: object) -> Paths:
    paths = Paths(home)
    make_private_dir(paths.run)
    control = {"job": 7, "host": "node9", "pid": 1, "api": "https://127.0.0.1:1", "started": "x"}
    paths.control.write_text(json.dumps(control | values))
    return paths


def away() -> list[jobs.Job]:
    raise jobs.SlurmUnreachable("squeue: Unable to contact slurm controller")


def test_status_without_slurm_shows_what_the_api_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = started(tmp_path)
    monkeypatch.setattr(jobs, "my_jobs", away)

    class Client:
        async def ok(self, _: str) -> bool:
            return True

        async def get_json(self, path: str) -> object:
            return {"items": [{"metadata": {"name": "main"}, "status": {"phase": "Running"}}]}

    monkeypatch.setattr(status.ApiClient, "from_kubeconfig", lambda _: Client())
    lines: list[str] = []
    asyncio.run(status.status(paths, 0, lines.append))
    assert lines[0] == "control job  7 UNKNOWN (squeue: Unable to contact slurm controller)"
    assert "pods         1 Running" in lines


def test_status_without_slurm_and_api_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = started(tmp_path)
    monkeypatch.setattr(jobs, "my_jobs", away)
    with pytest.raises(HPKError, match=r"control job 7 is UNKNOWN \(squeue: Unable to contact"):
        asyncio.run(status.status(paths, 0, lambda _: None))


def test_down_signals_no_process_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = started(tmp_path, job=None)
    monkeypatch.setattr(status, "runs_here", lambda _: True)

    def kill(*_: int) -> None:
        raise AssertionError("a process of this host was signalled")

    monkeypatch.setattr(os, "kill", kill)
    with pytest.raises(HPKError, match="process 1 on node9"):
        status.down(paths, print)


def test_down_stops_a_successor_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = started(tmp_path)
    comment = jobs.marker(tmp_path)
    alive = {n: jobs.Job(n, "RUNNING", "node9", "", jobs.JOB_NAME, comment) for n in (7, 8)}

    def slurm(argv: list[str]) -> str:
        assert argv[:-1] == ["scancel", "--batch", "--signal=TERM"]
        del alive[int(argv[-1])]
        return ""

    monkeypatch.setattr(jobs, "my_jobs", lambda: list(alive.values()))
    monkeypatch.setattr(jobs, "find_job", alive.get)
    monkeypatch.setattr(jobs, "run_slurm", slurm)
    said: list[str] = []
    status.down(paths, said.append)
    assert [line.partition(";")[0] for line in said] == [
        "control job 7 stopped", "control job 8 stopped"
    ]  # fmt: skip
