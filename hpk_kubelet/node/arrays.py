"""Job arrays and gangs on disk: which pod each task is, written and synced before sbatch.

`$HPK_HOME/arrays/NAME/` holds `map` (an Intent and its pod's directory per line, line n for task
n: the agent reads its own), `script.sbatch`, and `slurm.out` with what a task printed before its
agent knew its pod. The array's comment names it, until each task has its own pod's comment.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.slurm.script import comment
from hpk_kubelet.spec.plan import Intent

_GANG = "gang-"


class Arrays:
    def __init__(self, directory: Path, pods: Path) -> None:
        self.directory = directory
        self._pods = pods
        self._tasks: dict[str, list[Intent]] = {}  # by array

    def read(self) -> None:
        """What an earlier kubelet wrote; an array without a whole map was never submitted."""
        try:
            names = [entry.name for entry in self.directory.iterdir()]
        except FileNotFoundError:
            return
        for name in names:
            try:
                lines = (self.directory / name / "map").read_text().splitlines()
                self._tasks[name] = [_intent(json.loads(line)) for line in lines]
            except (OSError, ValueError, TypeError, KeyError):
                self.remove(name)

    def create(self, intents: Sequence[Intent], kind: Literal["array", "gang"] = "array") -> str:
        """The new one's name. Blocks for the disk."""
        name = f"{kind}-{secrets.token_hex(6)}"
        directory = self.path(name)
        directory.mkdir(mode=0o700, parents=True)
        lines = [
            json.dumps({**intent, "podDir": str(self._pods / intent["uid"])}) for intent in intents
        ]
        write_private(directory / "map", "\n".join(lines) + "\n")
        self._tasks[name] = list(intents)
        return name

    def path(self, name: str) -> Path:
        return self.directory / name

    def uids(self, name: str, job_id: str) -> list[str]:
        """The pods of a job: of an array's task (`ARRAY_TASK`) one, of a gang's job all."""
        tasks = self._tasks.get(name, [])
        if name.startswith(_GANG):
            return [task["uid"] for task in tasks]
        _, _, index = job_id.partition("_")
        known = index.isdigit() and int(index) < len(tasks)
        return [tasks[int(index)]["uid"]] if known else []

    def intents(self) -> dict[str, Intent]:
        """By uid."""
        return {intent["uid"]: intent for tasks in self._tasks.values() for intent in tasks}

    def remove(self, name: str) -> None:
        self._tasks.pop(name, None)
        shutil.rmtree(self.path(name), ignore_errors=True)

    def sweep(self, alive: Collection[str]) -> None:
        """Removes the arrays of which no pod is left."""
        for name, tasks in list(self._tasks.items()):
            if not any(task["uid"] in alive for task in tasks):
                self.remove(name)


def array_comment(cluster: str, name: str) -> str:
    return comment(cluster, name, "hpk", "array")


def _intent(line: dict[str, Any]) -> Intent:
    intent = Intent(
        uid=line["uid"],
        namespace=line["namespace"],
        name=line["name"],
        node=line["node"],
        partition=line["partition"],
        comment=line["comment"],
    )
    return {**intent, "gang": True} if line.get("gang") else intent
