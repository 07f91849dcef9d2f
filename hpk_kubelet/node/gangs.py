"""Pods that start together or not at all: one Slurm job, over as many nodes as Slurm likes, in
which each of them is a task.

A gang's first pods wait here until the last one is ready; then one sbatch asks for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING

from hpk_kubelet.node.backoff import Backoff
from hpk_kubelet.node.crash import crash_point
from hpk_kubelet.slurm.backend import SubmitError
from hpk_kubelet.slurm.script import shape

if TYPE_CHECKING:
    from hpk_kubelet.node.submission import Entry, Submissions

log = logging.getLogger(__name__)

_SHORTEST, _LONGEST = 2.0, 30.0  # seconds between two tries while Slurm takes no more jobs


class Gangs:
    """All gangs of which pods wait."""

    def __init__(self, submissions: Submissions) -> None:
        self._all = submissions
        self._gathering: dict[Hashable, Gathering] = {}

    async def submit(self, entry: Entry) -> str:
        """As `Submissions.submit`; the job's id is that of the whole gang."""
        request, intent = entry.request, entry.intent
        key = (request.gang, intent["namespace"], intent["node"], shape(request))
        gathering = self._gathering.get(key)
        if gathering is None:
            gathering = self._gathering[key] = Gathering(self._all)
            gathering.task = asyncio.create_task(self._serve(key, gathering))
        gathering.entries.append(entry)
        gathering.changed.set()
        try:
            return await asyncio.shield(entry.answer)
        finally:
            entry.answer.cancel()
            gathering.changed.set()

    async def _serve(self, key: Hashable, gathering: Gathering) -> None:
        try:
            await gathering.run()
        finally:
            del self._gathering[key]

    async def close(self) -> None:
        tasks = [one.task for one in self._gathering.values() if one.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Gathering:
    """The pods of one gang, in the order in which they came."""

    def __init__(self, all_: Submissions) -> None:
        self.task: asyncio.Task[None] | None = None
        self.entries: list[Entry] = []
        self.changed = asyncio.Event()
        self._all = all_

    async def run(self) -> None:
        """Until none waits any more."""
        retry = Backoff(_SHORTEST, _LONGEST)
        while self._remaining():
            self.changed.clear()
            gang = self.entries[0].request.gang
            assert gang is not None
            batch = self.entries[: gang.size]
            pause: float | None = None
            if len(batch) < gang.size:
                words = f"{len(batch)} of the {gang.size} pods of gang {gang.name} are there"
            else:
                refused = await self._ask(batch, gang.name)
                if refused is None:
                    retry.succeeded()
                    continue
                words, pause = f"Slurm takes no more jobs for now: {refused}", retry.failed(0.0)
            for entry in batch:
                entry.sent = False
                entry.waits(words)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.changed.wait()

    def _remaining(self) -> list[Entry]:
        self.entries = [entry for entry in self.entries if not entry.answer.done()]
        return self.entries

    async def _ask(self, batch: list[Entry], name: str) -> SubmitError | None:
        """Why there is no room for them; None once they have their answer."""
        for entry in batch:
            entry.sent = True
            entry.intent = {**entry.intent, "gang": True}
        answer: str | BaseException
        try:
            directory, answer = await self._all.together(batch, "gang")
        except Exception as e:
            log.exception("submitting gang %s failed", name)
            answer = e
        else:
            crash_point(self._all.run, "submitted")
        if isinstance(answer, SubmitError):
            await asyncio.to_thread(self._all.arrays.remove, directory)
            if answer.transient:
                return answer
        for entry in batch:
            entry.tell(answer)
        return None
