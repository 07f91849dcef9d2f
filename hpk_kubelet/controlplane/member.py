"""The control job's own place in the pod network: a process of the agent's code (agent/member.py)
holds it; others go in by its process id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.controlplane.process import backoff, last_words, rotate
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.plan import NetworkFacts, NetworkPlan

START_TIMEOUT = 60.0


@dataclass(frozen=True)
class Place:
    ip: str  # in the pod network
    pid: int  # of a process in it
    host_ip: str  # the node's

    def enter(self) -> list[str]:
        """The words before a command that is to run there, as root of its namespaces."""
        return [
            "nsenter", f"--target={self.pid}", "--user", "--net", "--preserve-credentials", "--",
        ]  # fmt: skip


class Member:
    """Keeps the place. `moved` is called (and waited for) with each new one."""

    def __init__(
        self,
        agent: Path,
        plan: NetworkPlan,
        run: Path,
        log: Path,
        say: Callable[[str], None],
        moved: Callable[[Place], Awaitable[None]],
    ) -> None:
        self._agent = agent
        self._plan = plan
        self._spec = run / "member.json"
        self._log = log / "member.log"
        self._say = say
        self._moved = moved
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Joins in the background, again and again if need be."""
        rotate(self._log)
        self._keeper = asyncio.create_task(self._keep(), name="member of the pod network")

    async def tell(self, facts: NetworkFacts) -> None:
        """News for this node's network."""
        self._plan["facts"] = facts
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"facts": facts}).encode() + b"\n")
            with contextlib.suppress(OSError):
                await self._process.stdin.drain()

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(5.0):
                    await process.wait()
            except TimeoutError:
                process.send_signal(signal.SIGKILL)
                await process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        """Returns when the place is there; HPKError if it can't be had."""
        write_private(self._spec, json.dumps(self._plan))
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(self._agent), "member", str(self._spec)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT):
                line = await self._process.stdout.readline()
            found: dict[str, Any] = json.loads(line)
        except (TimeoutError, ValueError):
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            raise HPKError(
                f"the control job can't join the pod network: {last_words(self._log)} "
                f"(all of it: {self._log})"
            ) from None
        await self._moved(Place(found["ip"], found["pid"], found["hostIP"]))
        return self._process

    async def _keep(self) -> None:
        wait = 0.0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                process = await self._spawn()
                await process.wait()
                self._say("the control job lost its place in the pod network")
            except HPKError as e:
                self._say(str(e))
            wait = backoff(wait, loop.time() - began)
            await asyncio.sleep(wait)
