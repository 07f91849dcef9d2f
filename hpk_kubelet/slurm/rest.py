"""The backend that submits and cancels through slurmrestd, and asks by Slurm's commands.

Measured with 24.11 (docs/slurm.md): a submission takes less than half of sbatch's time, 500 tasks
of an array are cancelled in the time scancel takes for seven. Questions stay with the commands:
squeue has slurmctld pick this user's jobs, slurmrestd can only hand out everybody's.

Only a plain yes is taken from slurmrestd. What it refuses, and what it can't express, the commands
are asked for, so that the words and their meaning are theirs; what may or may not have happened is
an UnreachableError, and the job's comment will tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpk_kubelet.slurm.backend import Submission, SubmitError, UnreachableError
from hpk_kubelet.slurm.commands import CommandBackend
from hpk_kubelet.slurm.rest_job import Submitter, job_fields
from hpk_kubelet.slurm.rest_service import NotDoneError, Service

_PARALLEL = 4
_FIRST = 2.0  # seconds it is waited for at the start
_IDS_PER_REQUEST = 2000
_OVER = (2017, 2021)  # ESLURM_INVALID_JOB_ID, ESLURM_ALREADY_DONE


class RestBackend(CommandBackend):
    """Implements `backend.Backend`. Uses the service whenever it is up."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service
        self._at_once = asyncio.Semaphore(_PARALLEL)
        self._submitter = Submitter.this()
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._running = asyncio.create_task(self._service.run(self.limits))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST):
                await self._service.settled.wait()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def way(self) -> str:
        if self._service.version:
            return f"slurmrestd {self._service.version}"
        return f"{super().way()} ({self._service.trouble})"

    async def _submit(self, submission: Submission) -> str | SubmitError | UnreachableError:
        fields = job_fields(submission.request, self._submitter)
        if fields is None or not self._service.version:
            return await super()._submit(submission)
        try:
            body = await asyncio.to_thread(_body, fields, submission.script)
            async with self._at_once:
                answer = await self._service.call("POST", "job/submit", body)
        except (NotDoneError, UnicodeError):
            return await super()._submit(submission)
        except UnreachableError as e:
            return e
        job_id = answer.get("job_id")
        return str(job_id) if job_id else UnreachableError("slurmrestd answered without a job id")

    async def _signal(
        self, signal: str, batch_only: bool, ids: Sequence[str]
    ) -> dict[str, SubmitError | UnreachableError]:
        if not self._service.version:
            return await super()._signal(signal, batch_only, ids)
        left: list[str] = []
        answers: dict[str, SubmitError | UnreachableError] = {}
        for start in range(0, len(ids), _IDS_PER_REQUEST):
            some = ids[start : start + _IDS_PER_REQUEST]
            try:
                left += await self._delete(signal, batch_only, some)
            except UnreachableError as e:
                answers |= dict.fromkeys(some, e)
        return answers | await super()._signal(signal, batch_only, left)

    async def _delete(self, signal: str, batch_only: bool, ids: Sequence[str]) -> Sequence[str]:
        """Those that scancel must be asked for."""
        body: dict[str, Any] = {"jobs": list(ids)}
        if signal:
            body["signal"] = signal
        if batch_only:
            body["flags"] = ["BATCH_JOB"]
        try:
            answer = await self._service.call("DELETE", "jobs/", json.dumps(body).encode())
        except NotDoneError:
            return ids
        failed = {
            str(status.get("step_id"))
            for status in answer.get("status") or ()
            if (status.get("error") or {}).get("code") not in (None, 0, *_OVER)
        }
        return ids if failed - {*ids} else [job for job in ids if job in failed]


def _body(fields: dict[str, Any], script: Path) -> bytes:
    """UnicodeError where a path or the script is no UTF-8, which JSON must be."""
    job = {**fields, "script": script.read_text(encoding="utf-8"), "argv": [str(script)]}
    return json.dumps({"job": job}, ensure_ascii=False).encode()
