"""Steps that outlive the srun which starts them.

srun need not live as long as its step: killed together with the process that it forks to watch it,
it leaves the step alone. What the step writes to its standard output is lost from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Sequence

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.commands import environment

_STARTED = re.compile(rb"\btasks? started")
_STEP = re.compile(rb"StepId=(\d+\.\d+)")


async def start_step(arguments: Sequence[str]) -> str:
    """The step's id (JOB.STEP), "" if srun did not tell it; returns when its one task runs.
    HPKError says why it does not."""
    try:
        process = await asyncio.create_subprocess_exec(
            "srun", "-v", "--overlap", "--nodes=1", "--ntasks=1", "--export=NIL", "--mpi=none",
            "--input=none", "--output=none", "--error=none", "--cpu-bind=none", *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment(dict(os.environ)),
            start_new_session=True,
        )  # fmt: skip
    except OSError as e:
        raise HPKError(f"srun can't be run: {e.strerror}") from None
    assert process.stderr is not None
    step, said = "", []
    async for line in process.stderr:
        if found := _STEP.search(line):
            step = found[1].decode()
        if _STARTED.search(line):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            return step
        said.append(line.decode(errors="replace").strip())
    await process.wait()
    errors = [line for line in said if "error:" in line] or said[-1:]
    raise HPKError(f"srun did not start the pod's agent: {'; '.join(errors)}")
