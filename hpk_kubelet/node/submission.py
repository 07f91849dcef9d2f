"""From pods that are ready to jobs: alone at once, many of one shape as one job array.

There is a line of pods for each shape (everything sbatch is asked for but names and paths). The
first of a line goes alone and at once; what arrives while that is on its way goes as an array. What
Slurm has no room for at the moment (its limits of submitted jobs) stays in the line, in order, with
Slurm's reason, until jobs have ended or some time has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.arrays import Arrays, array_comment
from hpk_kubelet.node.crash import crash_point
from hpk_kubelet.node.gangs import Gangs
from hpk_kubelet.node.immediate import Immediate
from hpk_kubelet.slurm.backend import (
    Backend,
    Label,
    Limits,
    Submission,
    SubmitError,
    UnreachableError,
)
from hpk_kubelet.slurm.script import JobRequest, render_script, shape
from hpk_kubelet.spec.plan import Intent

log = logging.getLogger(__name__)

_AT_ONCE = 1000  # tasks of one array, and single jobs that are asked for together
_SHORTEST, _LONGEST = 2.0, 30.0  # seconds between two tries while there is no room


@dataclass(eq=False)
class Entry:
    """A pod that waits for its job."""

    request: JobRequest
    script: Path
    intent: Intent
    write_intent: Callable[[Intent], None]  # to the pod's directory, synced
    waits: Callable[[str], None]  # there is no room; why
    sent: bool = False  # sbatch may have happened: it can't be withdrawn any more
    answer: asyncio.Future[str] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def withdraw(self) -> bool:
        """Out of its line; False if it was sent, and its answer must be waited for."""
        if not self.sent:
            self.answer.cancel()
        return not self.sent

    def tell(self, answer: str | BaseException) -> None:
        if self.answer.done():
            return
        if isinstance(answer, str):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)


class Submissions:
    """All lines. `run` is the directory of crash points; `calm` is waited for with what is not
    urgent."""

    def __init__(
        self,
        backend: Backend,
        arrays: Arrays,
        cluster: str,
        run: Path,
        calm: Callable[[], Awaitable[None]],
    ) -> None:
        self.backend = backend
        self.arrays = arrays
        self.cluster = cluster
        self.run = run
        self.immediate = Immediate(backend, run)
        self.gangs = Gangs(self)
        self._lines: dict[tuple[object, ...], Line] = {}
        self._limits: Limits | None = None
        self._calm = calm
        self._labelling: set[asyncio.Task[None]] = set()

    async def submit(self, entry: Entry) -> str:
        """The job's id. SubmitError when Slurm refuses, UnreachableError when the job may or may
        not be there, CancelledError when the entry was withdrawn."""
        if entry.request.gang:
            return await self.gangs.submit(entry)
        key = (entry.request.pythons, entry.request.agent_dir, *shape(entry.request))
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self)
            line.task = asyncio.create_task(self._serve(key, line))
        line.add(entry)
        try:
            return await asyncio.shield(entry.answer)
        finally:
            entry.answer.cancel()
            line.room.set()

    async def _serve(self, key: tuple[object, ...], line: Line) -> None:
        try:
            await line.run()
        except Exception as e:
            log.exception("submitting failed")
            line.fail(e)
        finally:
            del self._lines[key]

    def room(self) -> None:
        """Jobs of this user have ended: Slurm may take others now."""
        for line in self._lines.values():
            line.room.set()

    async def close(self) -> None:
        tasks = [line.task for line in self._lines.values() if line.task] + [*self._labelling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.gangs.close()
        await self.immediate.close()

    async def together(
        self, batch: Sequence[Entry], kind: Literal["array", "gang"]
    ) -> tuple[str, str | SubmitError | UnreachableError]:
        """Asks for one job for all of them, once it is on disk who they are; the name of the
        directory where that is, and the answer."""
        name = await asyncio.to_thread(self.arrays.create, [e.intent for e in batch], kind)
        crash_point(self.run, "intent")
        gang = batch[0].request.gang
        request = replace(
            batch[0].request,
            name=f"{batch[0].intent['namespace']}/{gang.name}" if gang else f"hpk/{name}",
            comment=array_comment(self.cluster, name),
            pod_dir=self.arrays.path(name),
            tasks=len(batch) if kind == "array" else 0,
        )
        script = Path(request.script)
        await asyncio.to_thread(script.write_text, render_script(request))
        (answer,) = await self.backend.submit([Submission(request, script)])
        return name, answer

    async def array_size(self) -> int:
        """Tasks an array may have; below 2 there are none."""
        if self._limits is None:
            try:
                self._limits = await self.backend.limits()
            except HPKError as e:
                log.warning("pods are submitted one by one for now: %s", e)
                return 0
        return min(_AT_ONCE, self._limits.array_size)

    def no_arrays(self, why: str) -> None:
        log.warning("Slurm takes no job arrays, pods are submitted one by one: %s", why)
        self._limits = Limits(array_size=0)

    def label(self, labels: Sequence[Label]) -> None:
        """Gives tasks their pods' names and comments, beside everything else."""
        task = asyncio.create_task(self._label(labels))
        self._labelling.add(task)
        task.add_done_callback(self._labelling.discard)

    async def _label(self, labels: Sequence[Label]) -> None:
        await self._calm()
        try:
            await self.backend.label(labels)
        except HPKError as e:
            log.warning("%d tasks of arrays keep the array's name: %s", len(labels), e)


class Line:
    """The pods of one shape, in order."""

    def __init__(self, all_: Submissions) -> None:
        self.task: asyncio.Task[None] | None = None
        self.room = asyncio.Event()
        self._all = all_
        self._entries: list[Entry] = []
        self._full = ""  # why there is no room, in Slurm's words
        self._most = _AT_ONCE

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if self._full:
            entry.waits(self._full)

    def fail(self, error: Exception) -> None:
        for entry in self._entries:
            entry.tell(error)

    async def run(self) -> None:
        """Until the line is empty."""
        pause = _SHORTEST
        while self._remaining():
            arrays = await self._all.array_size() if len(self._entries) > 1 else 0
            most = min(self._most, arrays if arrays > 1 else _AT_ONCE)
            batch = self._remaining()[:most]
            self.room.clear()
            for entry in batch:
                entry.sent = True
            if len(batch) > 1 and arrays > 1 and not batch[0].request.control_job:
                refused = await self._array(batch)
            else:
                refused = await self._singles(batch)
            if refused is None:
                self._full, pause = "", _SHORTEST
                self._most = min(_AT_ONCE, 2 * self._most)
                continue
            self._full, self._most = str(refused), max(1, self._most // 2)
            for entry in self._remaining():
                entry.sent = False
                entry.waits(self._full)
            if len(batch) == 1:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self.room.wait()
                pause = min(_LONGEST, 2 * pause)
            else:
                self._most = max(1, len(batch) // 2)

    def _remaining(self) -> list[Entry]:
        self._entries = [entry for entry in self._entries if not entry.answer.done()]
        return self._entries

    async def _singles(self, batch: Sequence[Entry]) -> SubmitError | None:
        alone = len(batch) == 1
        answers = await asyncio.gather(*(self._single(entry, alone) for entry in batch))
        return next((answer for answer in answers if answer is not None), None)

    async def _single(self, entry: Entry, alone: bool = False) -> SubmitError | None:
        """Why there is no room for it; None once it has its answer."""
        try:
            if alone and (job_id := await self._all.immediate.start(entry)):
                crash_point(self._all.run, "submitted")
                entry.tell(job_id)
                return None
            await asyncio.to_thread(entry.write_intent, entry.intent)
            crash_point(self._all.run, "intent")
            (answer,) = await self._all.backend.submit([Submission(entry.request, entry.script)])
        except Exception as e:
            entry.tell(e)
            return None
        crash_point(self._all.run, "submitted")
        if isinstance(answer, SubmitError) and answer.transient:
            return answer
        entry.tell(answer)
        return None

    async def _array(self, batch: Sequence[Entry]) -> SubmitError | None:
        """Why there is no room for all of them; None once they have their answers."""
        try:
            name, answer = await self._all.together(batch, "array")
        except Exception as e:
            for entry in batch:
                entry.tell(e)
            return None
        crash_point(self._all.run, "submitted")
        if isinstance(answer, SubmitError):
            await asyncio.to_thread(self._all.arrays.remove, name)
            return answer if answer.transient else await self._one_first(batch, answer)
        if isinstance(answer, UnreachableError):
            for entry in batch:
                entry.tell(answer)
            return None
        for index, entry in enumerate(batch):
            entry.tell(f"{answer}_{index}")
        self._all.label(
            [
                Label(f"{answer}_{index}", entry.request.name, entry.request.comment)
                for index, entry in enumerate(batch)
            ]
        )
        return None

    async def _one_first(self, batch: Sequence[Entry], error: SubmitError) -> SubmitError | None:
        """After an array was refused: is it what is asked for, or that it is an array?"""
        full = await self._single(batch[0])
        if full is not None:
            return full
        alone = batch[0].answer.exception()
        if alone is None:
            self._all.no_arrays(str(error))
            return await self._singles(batch[1:])
        for entry in batch[1:]:
            entry.tell(alone)
        return None
