"""What the agent measures and what it makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpk_kubelet.agent import usage
from hpk_kubelet.agent.limits import disk_excess, has_disk_limits, quantity


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (1500, "1500"), (64 * 2**20, "64Mi"), (2**10, "1Ki"), (2**60, "1024Pi")],
)
def test_quantities(amount: int, text: str) -> None:
    assert quantity(amount) == text


def test_processes_are_found_below_what_was_forked() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        try:
            while not (grandchildren := usage.children(process.pid)):
                assert process.poll() is None
            run = SimpleNamespace(process=SimpleNamespace(pid=process.pid))
            runners: Any = {
                "main": SimpleNamespace(pid=grandchildren[0], run=run),
                "ended": SimpleNamespace(pid=0, run=None),
            }
            found = usage.processes(runners)
            assert {*found} == {"main"}
            assert {process.pid, grandchildren[0]} <= {*found["main"]}
            assert usage.resident(found["main"]) >= usage.proportional(found["main"]) > 2**20
        finally:
            for pid in grandchildren:
                os.kill(pid, signal.SIGKILL)


def test_what_is_gone_uses_nothing(tmp_path: Path) -> None:
    assert usage.resident([2**22 + 1]) == usage.proportional([2**22 + 1]) == 0
    assert usage.children(2**22 + 1) == []
    assert usage.disk(str(tmp_path / "nothing")) == 0


def test_the_disk_counts_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(bytes(1 << 20))
    (tmp_path / "link").symlink_to("/")
    os.link(tmp_path / "d" / "f", tmp_path / "again")
    assert 1 << 20 <= usage.disk(str(tmp_path)) < (1 << 20) + (1 << 16)


def test_limits_of_the_disk(tmp_path: Path) -> None:
    for name in ("v", "logs/main", "run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "f").write_bytes(bytes(1 << 16))
    container: dict[str, Any] = {}
    runner = SimpleNamespace(container=container, run=SimpleNamespace(folder=str(tmp_path / "run")))
    plan: dict[str, Any] = {"volumes": {"v": {"kind": "emptyDir"}, "h": {"kind": "hostPath"}}}
    setup = SimpleNamespace(paths={"v": str(tmp_path / "v")}, logs=str(tmp_path / "logs"))
    pod: Any = SimpleNamespace(plan=plan, setup=setup, runners={"main": runner})
    assert not has_disk_limits(pod)
    container["storageLimit"] = 1 << 20
    assert has_disk_limits(pod) and disk_excess(pod) == ""
    container["storageLimit"] = 1 << 16
    assert disk_excess(pod) == (
        'Container main exceeded its local ephemeral storage limit "64Ki". '
    )
    plan["storageLimit"] = 1 << 17
    assert disk_excess(pod).startswith("Pod ephemeral local storage usage exceeds the total limit")
    plan["volumes"]["v"]["sizeLimit"] = 1 << 15
    assert disk_excess(pod) == 'Usage of EmptyDir volume "v" exceeds the limit "32Ki". '
