"""Supervision: ready, restarted, stopped in time, never outliving its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpk_kubelet.controlplane import process as module
from hpk_kubelet.controlplane.process import (
    Component,
    Process,
    backoff,
    last_words,
    rotate,
    truncate_large,
)
from hpk_kubelet.errors import HPKError


def sh(name: str, script: str, **more: object) -> Component:
    return Component(name, ("/bin/sh", "-c", script), **more)  # type: ignore[arg-type]


async def eventually(look) -> None:
    end = time.monotonic() + 10
    while not look():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_backoff_doubles_to_its_limit_and_forgets() -> None:
    waits = [0.0]
    for _ in range(9):
        waits.append(backoff(waits[-1], lived=1))
    assert waits[1:4] == [0.5, 1, 2] and waits[-1] == module.BACKOFF_MAX
    assert backoff(30, lived=module.BACKOFF_RESET) == module.BACKOFF_FIRST


async def test_start_waits_for_readiness(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def ready() -> bool:
        return mark.exists()

    process = Process(sh("x", f"sleep 0.1; touch {mark}; sleep 60", ready=ready), tmp_path, print)
    await process.start()
    assert mark.exists() and process.pid
    pid = process.pid
    await process.stop()
    assert process.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_end_at_the_start_is_said_in_its_own_words(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    process = Process(sh("x", "echo Error: bad flag; exit 3", ready=never), tmp_path, print)
    with pytest.raises(HPKError, match=r"x ended at its start \(exit code 3\): Error: bad flag"):
        await process.start()


async def test_not_ready_in_time(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    component = sh("x", "sleep 60", ready=never, start_timeout=0.1)
    process = Process(component, tmp_path, print)
    with pytest.raises(HPKError, match="not ready"):
        await process.start()
    assert process.pid is None


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    process = Process(Component("x", ("/nowhere/x",)), tmp_path, print)
    with pytest.raises(HPKError, match="cannot run /nowhere/x"):
        await process.start()


async def test_what_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_FIRST", 0.01)
    said: list[str] = []
    process = Process(sh("x", "echo up; sleep 60"), tmp_path, said.append)
    await process.start()
    first = process.pid
    assert first
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: process.pid not in (None, first))
    assert process.restarts == 1 and "SIGKILL" in said[0]
    await process.stop()
    assert process.restarts == 1, "what was stopped is not started again"


async def test_what_ignores_term_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' TERM; sleep 61 & echo $! > {pids}; echo done >> {pids}; wait; wait"
    process = Process(sh("x", script, stop_timeout=0.2), tmp_path, print)
    await process.start()
    await eventually(lambda: pids.exists() and "done" in pids.read_text())
    child = int(pids.read_text().split()[0])
    await process.stop()

    def gone() -> bool:
        stat = Path(f"/proc/{child}/stat")
        return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"

    await eventually(gone)


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from pathlib import Path
from hpk_kubelet.controlplane.process import Component, Process
async def main():
    p = Process(Component("x", ("/bin/sleep", "60")), Path(sys.argv[1]), print)
    await p.start()
    print(p.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert parent.stdout
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while Path(f"/proc/{child}").exists():
        stat = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if stat == "Z":
            break
        assert time.monotonic() < end
        time.sleep(0.01)


def test_last_words_skip_the_noise(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == "it wrote nothing"
    log.write_text('one\nE1121 run.go:72] "command failed" err="no such flag"\nmore\n\n')
    assert "no such flag" in last_words(log)
    log.write_text("plain\nlast\n\n")
    assert last_words(log) == "last"
    log.write_text(
        '{"level":"warn","msg":"slow"}\n'
        '{"level":"panic","msg":"failed to create WAL","error":"no space left on device"}\n'
        "panic: failed to create WAL\n\ngoroutine 1 [running]:\nmain.main()\n\tmain.go:31\n"
    )
    assert last_words(log) == "failed to create WAL: no space left on device"
    log.write_text('For the record\n{"level":"info"}\n{cut sho\nlast')
    assert last_words(log) == "last"


def test_logs_are_kept_twice_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, old = tmp_path / "x.log", tmp_path / "x.log.1"
    log.write_text("first")
    rotate(log)
    assert old.read_text() == "first" and not log.exists()
    monkeypatch.setattr(module, "LOG_LIMIT", 10)
    with log.open("a") as writer:
        writer.write("a" * 20)
        writer.flush()
        truncate_large(log)
        assert old.read_text() == "a" * 20
        writer.write("on")
    assert log.read_text() == "on", "the writer goes on where it is, at the start"
