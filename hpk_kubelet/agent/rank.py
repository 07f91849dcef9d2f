"""One rank of an MPI container, started by srun on whichever node.

Each rank has mounts of its own, shares the other namespaces with the ranks on its node, sees the
node's /tmp and /dev/shm, where MPI keeps what ranks share, and runs as the user under the user's
own number: PMIx compares it.
"""

import contextlib
import json
import os
import signal
from typing import Any, Dict, Optional

from .container import Process, StartError
from .journal import note
from .namespaces import NamespaceError
from .program import read_outcome
from .runs import Report, exit_code
from .setup import PodSetup
from .volumes import VolumeError

START_FAILED = 127  # a shell's exit code for a command that is not there


def run_rank(plan: Dict[str, Any], pod_dir: str, name: str) -> int:
    """Runs the container's program as this rank; its exit code. The first rank to fail notes it:
    srun's own code is the highest of all, which may be that of one that was killed for it."""
    code = _run(plan, pod_dir, name)
    if code:
        text = json.dumps({"rank": int(os.environ.get("SLURM_PROCID", "0")), "exitCode": code})
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            note_fd = os.open(_failure(pod_dir, name), flags, 0o600)
        except FileExistsError:
            return code
        with open(note_fd, "w") as f:
            f.write(text)
    return code


def first_failure(pod_dir: str, name: str) -> Optional[Dict[str, int]]:
    """`rank` and `exitCode` of the rank of this container that failed first; None if none said."""
    try:
        with open(_failure(pod_dir, name)) as f:
            found: Dict[str, int] = json.load(f)
            return found
    except (OSError, ValueError):
        return None


def forget_failure(pod_dir: str, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_failure(pod_dir, name))


def _failure(pod_dir: str, name: str) -> str:
    return os.path.join(pod_dir, "failed-rank.%s.json" % name)


def _run(plan: Dict[str, Any], pod_dir: str, name: str) -> int:
    container = next(c for c in plan["containers"] if c["name"] == name)
    job = dict(os.environ)
    rank = "%s.%s" % (job.get("SLURM_STEP_ID", "0"), job.get("SLURM_PROCID", "0"))
    own = {"uid": os.getuid(), "gid": os.getgid(), "groups": []}
    container["security"] = {**container["security"], **own}
    setup = None
    try:
        setup = PodSetup(plan, pod_dir, job, rank=rank)
        setup.connect()
        setup.prepare_volumes()
        return _attend(setup.start_rank(container), container)
    except (NamespaceError, StartError, VolumeError) as e:
        note("rank %s of container %s: %s" % (rank, name, e))
        return START_FAILED
    finally:
        if setup:
            setup.clear()


def _attend(process: Process, container: Dict[str, Any]) -> int:
    """Waits for the container's end, passing signals on."""
    report = Report(process.report)
    while report.read():
        pass
    pid = report.pid
    outcome = read_outcome(report.records, pid, container["argv"][0], container["workingDir"])

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or process.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    _, status = os.waitpid(process.pid, 0)
    if outcome.failed:
        raise StartError("StartError", outcome.failed)
    if not outcome.pid:
        words = os.read(process.complaints, 4096).decode(errors="replace")
        raise StartError("ContainerCannotRun", words)
    return exit_code(status)
