"""`hpk status`, `hpk down` and `hpk jobs`: the control job and the pods' jobs, from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpk_kubelet import homes
from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane import job as jobs
from hpk_kubelet.controlplane.api import ApiClient
from hpk_kubelet.controlplane.kubeconfig import Control, read_control
from hpk_kubelet.controlplane.serve import runs_here
from hpk_kubelet.errors import HPKError

NOT_RUNNING = "no control plane runs; start one with: sbatch hpk.sbatch"
_SLURM_EVERY = 5.0  # seconds between two questions to slurmctld while waiting


@dataclass(frozen=True)
class State:
    """What there is of a control plane: its process or job, and what its API says."""

    control: Control | None
    job: jobs.Job | None
    process: bool  # it runs outside Slurm
    api: bool
    nodes: Mapping[str, bool]  # name → Ready
    pods: Mapping[str, int]  # phase → how many
    slurm: str = ""  # whether it answers and how it is spoken to, as the kubelet sees it

    @property
    def complete(self) -> bool:
        return self.api and bool(self.nodes) and all(self.nodes.values())

    def missing(self) -> str:
        """One sentence on what is not there."""
        if self.job and not self.job.runs:
            return f"control job {self.job.id} is {self.job.state} ({self.job.reason})"
        if not self.job and not self.process:
            return NOT_RUNNING
        if not self.api:
            return "the control plane runs, but its API does not answer yet"
        if not self.nodes:
            return "the API is ready, but no node has registered yet"
        unready = sorted(n for n, ready in self.nodes.items() if not ready)
        return f"not Ready: node {', '.join(unready)}"


def node_ready(node: Mapping[str, Any], since: str) -> bool:
    """Whether a Node's Ready condition is True and was said so since then (RFC 3339, in UTC).

    What an earlier control job's kubelet said names a port where nobody may listen any more.
    """
    conditions: Iterable[Mapping[str, str]] = node.get("status", {}).get("conditions", ())
    return any(
        c["type"] == "Ready" and c["status"] == "True" and c["lastHeartbeatTime"][:19] >= since[:19]
        for c in conditions
    )


def slurm_words(nodes: Iterable[Mapping[str, Any]]) -> str:
    """What the nodes say about Slurm; all say the same."""
    conditions = (c for n in nodes for c in n.get("status", {}).get("conditions", ()))
    return next((c["message"] for c in conditions if c["type"] == "SlurmReachable"), "")


def count_phases(pods: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many pods are in each phase."""
    counts: dict[str, int] = {}
    for pod in pods:
        phase = pod.get("status", {}).get("phase", "Unknown")
        counts[phase] = counts.get(phase, 0) + 1
    return counts


def find_control(paths: Paths) -> tuple[Control | None, jobs.Job | None, bool]:
    """The last control plane started here, its job if one runs or waits, and whether it is a
    process outside Slurm that runs."""
    control = read_control(paths)
    if control is not None and control.job is None and runs_here(control):
        return control, None, True
    try:
        last = control.job if control else None
        _, *others = homes.known(paths.home)
        found = jobs.control_jobs(jobs.my_jobs(), paths.home, last, others)
    except jobs.SlurmUnreachable:
        raise
    except HPKError:
        if control is None or control.job is None:  # no Slurm here, and none was used
            return control, None, False
        raise
    return control, found[0] if found else None, False


def find_control_or_last(paths: Paths) -> tuple[Control | None, jobs.Job | None, bool]:
    """As find_control; the job of the last known control plane, as UNKNOWN and with Slurm's
    words for a reason, while slurmctld does not answer."""
    try:
        return find_control(paths)
    except jobs.SlurmUnreachable as e:
        control = read_control(paths)
        if control is None or control.job is None:
            raise
        return control, jobs.Job(control.job, "UNKNOWN", "", str(e), jobs.JOB_NAME, ""), False


async def look(paths: Paths, where: tuple[Control | None, jobs.Job | None, bool]) -> State:
    """Asks the API, if there can be one, for nodes and pods."""
    control, job, process = where
    nodes: dict[str, bool] = {}
    pods: dict[str, int] = {}
    api, slurm = False, ""
    if control is not None and (process or (job is not None and job.id == control.job)):
        with contextlib.suppress(OSError, ssl.SSLError, HPKError):
            client = ApiClient.from_kubeconfig(paths.kubeconfig)
            if await client.ok("/readyz"):
                listing = await client.get_json("/api/v1/nodes")
                nodes = {
                    n["metadata"]["name"]: node_ready(n, control.started) for n in listing["items"]
                }
                slurm = slurm_words(listing["items"])
                pods = count_phases((await client.get_json("/api/v1/pods"))["items"])
                api = True
    return State(control, job, process, api, nodes, pods, slurm)


async def status(paths: Paths, wait: float, say: Callable[[str], None]) -> None:
    """Prints the state; with `wait`, only once the API is ready and every node is. HPKError
    when it isn't running, or not complete after that many seconds."""
    deadline = time.monotonic() + wait
    where = find_control_or_last(paths)
    asked = time.monotonic()
    seen = where[1]
    while True:
        state = await look(paths, where)
        if state.complete or time.monotonic() >= deadline:
            break
        await asyncio.sleep(0.25)
        if time.monotonic() - asked >= _SLURM_EVERY or read_control(paths) != where[0]:
            where = find_control_or_last(paths)
            asked = time.monotonic()
            if seen is not None and where[1] is None and not where[2]:
                raise HPKError(f"control job {seen.id} ended; its output is hpk-{seen.id}.out")
            seen = where[1]
    for line in describe(paths, state):
        say(line)
    if not state.api or (wait and not state.complete):
        raise HPKError(state.missing())


def describe(paths: Paths, state: State) -> list[str]:
    """The state as lines for a person."""
    lines = []
    if state.job:
        where = f" on {state.job.node}" if state.job.node else f" ({state.job.reason})"
        lines.append(f"control job  {state.job.id} {state.job.state}{where}")
    elif state.process and state.control:
        lines.append(f"control      process {state.control.pid} on {state.control.host}")
    if state.api and state.control:
        lines.append(f"API          {state.control.api} ready since {state.control.started}")
        for name, ready in sorted(state.nodes.items()):
            lines.append(f"node         {name} {'Ready' if ready else 'NotReady'}")
        if state.control.network:
            lines.append(f"network      {state.control.network}")
        if state.slurm:
            lines.append(f"Slurm        {state.slurm}")
        total = ", ".join(f"{n} {phase}" for phase, n in sorted(state.pods.items()))
        lines.append(f"pods         {total or 'none'}")
        lines.append(f"kubectl      export KUBECONFIG={paths.kubeconfig}")
    return lines


def down(paths: Paths, say: Callable[[str], None], patience: float = 75.0) -> None:
    """Stops the control plane and waits until it is gone; pods go on. HPKError if none runs."""
    control, job, process = find_control(paths)
    if process and control is not None:
        if control.host != socket.gethostname():
            raise HPKError(
                f"the control plane is process {control.pid} on {control.host}, and Slurm can't "
                f"stop it: run hpk down there"
            )
        os.kill(control.pid, signal.SIGTERM)
        _until(lambda: not runs_here(control), patience, f"process {control.pid} does not stop")
        say(f"process {control.pid} stopped")
        return
    if job is None:
        _, *others = homes.known(paths.home)
        if others and (waiting := jobs.unmarked(jobs.my_jobs())):
            raise HPKError(
                f"job {waiting[0].id} waits to become a control job, of {paths.home} or of "
                f"{', '.join(map(str, others))}: Slurm does not tell which; if it is this one's, "
                f"scancel {waiting[0].id}"
            )
        raise HPKError(NOT_RUNNING)
    for waits in jobs.control_jobs(jobs.my_jobs(), paths.home, None):
        if waits.id != job.id and not waits.runs and waits.comment == jobs.marker(paths.home):
            jobs.run_slurm(["scancel", str(waits.id)])
            say(f"control job {waits.id}, which was to take over, cancelled")
    if not job.runs:
        jobs.run_slurm(["scancel", str(job.id)])
        say(f"control job {job.id} had not started; cancelled")
        return

    def ended() -> bool:
        now = jobs.find_job(job.id)
        return now is None or not now.alive

    # To the script alone: a plain scancel would hit etcd and the kubelet at the same moment.
    jobs.run_slurm(["scancel", "--batch", "--signal=TERM", str(job.id)])
    try:
        _until(ended, patience, "")
    except HPKError:
        say(f"control job {job.id} does not stop; cancelling it")
        jobs.run_slurm(["scancel", str(job.id)])
        _until(ended, patience, f"Slurm does not end job {job.id}: see squeue -j {job.id}")
    say(f"control job {job.id} stopped; pods that ran go on")
    _, successor, _ = find_control(paths)
    if successor is not None and successor.id != job.id:  # it began to take over meanwhile
        down(paths, say, patience)


def handover(paths: Paths, say: Callable[[str], None]) -> None:
    """Moves the control plane to a new job; returns when that is asked for."""
    _, job, process = find_control(paths)
    if process or job is None or not job.runs:
        raise HPKError(NOT_RUNNING)
    jobs.run_slurm(["scancel", "--batch", "--signal=USR1", str(job.id)])
    say(f"control job {job.id} will submit its successor, which takes over as soon as it runs")


def _until(condition: Callable[[], bool], patience: float, otherwise: str) -> None:
    deadline = time.monotonic() + patience
    wait = 0.1
    while not condition():
        if time.monotonic() > deadline:
            raise HPKError(otherwise)
        time.sleep(wait)
        wait = min(wait * 1.5, 2.0)


@dataclass(frozen=True)
class PodJob:
    """A pod's job, and the pod if the API still has it."""

    id: str
    state: str
    where: str  # nodes, or why it waits
    partition: str
    cpus: str
    pod: str  # namespace/name
    phase: str


COMMENT = "hpk:"  # hpk:CLUSTER:UID:NAMESPACE/NAME, as the kubelet writes it


def pair(listing: str, pods: Sequence[Mapping[str, Any]]) -> list[PodJob]:
    """Pairs `squeue -h -o '%i|%T|%N|%r|%P|%C|%k'` with pods, by uid. Pods without a job are at
    the end."""
    by_uid = {p["metadata"]["uid"]: p for p in pods}
    rows = []
    for line in listing.splitlines():
        fields = line.split("|", 6)
        if len(fields) < 7 or not fields[6].startswith(COMMENT):
            continue
        id, state, nodes, reason, partition, cpus, comment = fields
        _, _, uid, name = comment.split(":", 3)
        pod = by_uid.pop(uid, None)
        phase = pod.get("status", {}).get("phase", "?") if pod else "(deleted)"
        if uid.startswith("gang-"):  # its pods are below, without a job of their own
            phase = "(gang)"
        rows.append(PodJob(id, state, nodes or f"({reason})", partition, cpus, name, phase))
    for pod in by_uid.values():
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        phase = pod.get("status", {}).get("phase", "?")
        rows.append(PodJob("-", "-", "-", "-", "-", name, phase))
    return rows


async def list_jobs(paths: Paths) -> list[PodJob]:
    """Every pod beside its job, those that ended a short while ago included."""
    client = ApiClient.from_kubeconfig(paths.kubeconfig)
    try:
        pods = (await client.get_json("/api/v1/pods"))["items"]
    except OSError:
        raise HPKError(f"the API does not answer ({NOT_RUNNING})") from None
    user = str(os.getuid())
    listing = jobs.run_slurm(
        ["squeue", "-h", "-r", "-u", user, "-t", "all", "-o", "%i|%T|%N|%r|%P|%C|%k"]
    )
    # Those on the node control are steps of the control job, which carry the comment as their name.
    steps = jobs.run_slurm(
        ["squeue", "-h", "-s", "-u", user, "-o", "%i|RUNNING|%N|None|control|-|%j"]
    )
    return pair(f"{listing}\n{steps}", pods)


def table(rows: Sequence[PodJob]) -> list[str]:
    """The rows as aligned lines, with a header."""
    header = ("JOBID", "STATE", "NODES", "PARTITION", "CPUS", "POD", "PHASE")
    cells = [header] + [(r.id, r.state, r.where, r.partition, r.cpus, r.pod, r.phase) for r in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
