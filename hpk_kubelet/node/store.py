"""The kubelet's files about a pod, below `$HPK_HOME/pods/UID` (spec/plan.py lists them).

Only intent.json is fsynced: it must be there before the job is. A plan or script that a power cut
took is found out (`plan()` answers None) and made again.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.spec.plan import (
    AgentEvent,
    ContainerPlan,
    Intent,
    JournalLine,
    PodPlan,
    PodState,
)


@dataclass
class Journal:
    """What the agent wrote so far; `read` goes on from where it stopped."""

    path: Path
    state: PodState | None = None
    exists: bool = False
    _offset: int = field(default=0, repr=False)

    def read(self) -> list[AgentEvent]:
        """Takes in whole lines that are new; returns their events.

        The file is opened anew each time, which makes an NFS client look at the server. A line
        that is no JSON (a disk that was full) is passed over: every state is complete in itself.
        """
        try:
            with self.path.open("rb") as f:
                f.seek(self._offset)
                data = f.read()
        except FileNotFoundError:
            return []
        self.exists = True
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for text in whole.splitlines():
            try:
                line: JournalLine = json.loads(text)
            except ValueError:
                continue
            if not isinstance(line, dict):
                continue
            if "state" in line:
                self.state = line["state"]
            if "event" in line:
                events.append(line["event"])
        return events


class PodDir:
    """One pod's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script = path / "script.sbatch"
        self.output = path / "slurm.out"
        self.journal = Journal(path / "journal.jsonl")

    def create(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def intent(self) -> Intent | None:
        intent = _read_json(self.path / "intent.json")
        return Intent(**intent) if intent is not None and "uid" in intent else None  # type: ignore[typeddict-item]

    def write_intent(self, intent: Intent, *, sync: bool = True) -> None:
        write_private(self.path / "intent.json", json.dumps(intent), sync=sync)

    def plan(self) -> PodPlan | None:
        """None when there is none, or none that was written whole."""
        plan = _read_json(self.path / "plan.json")
        whole = plan is not None and "agent" in plan and self.script.exists()
        return plan if whole else None  # type: ignore[return-value]

    def write_ephemeral(self, plan: ContainerPlan) -> None:
        """For who must know what runs from which image; the agent has it by its connection."""
        path = self.path / f"ephemeral.{plan['name']}.json"
        write_private(path, json.dumps({"containers": [plan]}), sync=False)

    def write_plan(self, plan: PodPlan, script: str | None) -> None:
        """The script goes last: with it the preparation is complete. None leaves the script."""
        # ASCII: env may hold lone surrogates (spec/plan.py), which UTF-8 has no bytes for.
        plan_json = json.dumps(plan, separators=(",", ":"))
        write_private(self.path / "plan.json", plan_json, sync=False)
        if script is not None:
            write_private(self.script, script.encode(errors="surrogateescape"), sync=False)

    def remove(self) -> None:
        """Everything; a file that can't be removed is an OSError, and the rest is gone."""
        failed: list[OSError] = []

        def note(function: object, path: str, error: Any) -> None:
            if not isinstance(error[1], FileNotFoundError):
                failed.append(error[1])

        shutil.rmtree(self.path, onerror=note)
        if failed:
            raise failed[0]


def pod_dirs(pods: Path) -> dict[str, PodDir]:
    """uid → directory, of every pod that has one."""
    try:
        entries = [entry for entry in pods.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return {}
    return {entry.name: PodDir(entry) for entry in entries}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
