"""Runs in the sandbox, as the user: a backend's methods by lines of JSON on standard input.

`python backend_driver.py BACKEND DIRECTORY`; a line is `[METHOD, ARGUMENT]`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from hpk_kubelet.config import SlurmConfig
from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.backend import Cancel, Label, Submission, SubmitError
from hpk_kubelet.slurm.choice import make_backend
from hpk_kubelet.slurm.script import JobRequest
from hpk_kubelet.spec.resources import JobResources


def submission(directory: Path, number: int, asked: dict[str, Any]) -> Submission:
    script = directory / f"script{number}"
    script.write_text("#!/bin/sh\n" + asked["script"] + "\n")
    request = JobRequest(
        name=asked["name"],
        comment=asked["comment"],
        partition=asked.get("partition", "main"),
        resources=JobResources(asked.get("cpus", 1), asked.get("memory", 300)),
        pod_dir=directory,
        agent_dir=directory,
        user_flags=tuple(asked.get("flags", ())),
        tasks=asked.get("tasks", 0),
    )
    return Submission(request, script)


def plain(value: Any) -> Any:
    if isinstance(value, SubmitError):
        return {"error": "SubmitError", "words": str(value), "transient": value.transient}
    if isinstance(value, HPKError):
        return {"error": type(value).__name__, "words": str(value)}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {k: v for k, v in fields.items() if isinstance(v, str | int | float)}
    return value


async def main() -> None:
    directory = Path(sys.argv[2])
    backend = make_backend(SlurmConfig(backend=sys.argv[1]), directory / "slurmrestd")  # type: ignore[arg-type]
    await backend.start()
    loop = asyncio.get_running_loop()
    number = 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        method, argument = json.loads(line)
        number += 1
        arguments: list[Any] = [] if argument is None else [argument]
        if method == "submit":
            made = [submission(directory, 100 * number + i, a) for i, a in enumerate(argument)]
            arguments = [made]
        elif method == "cancel":
            arguments = [[Cancel(*one) for one in argument]]
        elif method == "label":
            arguments = [[Label(*one) for one in argument]]
        try:
            answer = getattr(backend, method)(*arguments)
            answer = plain(await answer if asyncio.iscoroutine(answer) else answer)
        except HPKError as e:
            answer = plain(e)
        print(json.dumps(answer), flush=True)
    await backend.close()


asyncio.run(main())
