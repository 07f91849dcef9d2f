"""The agent's fast path: from the job script to the first container, then the event loop."""

import json
import os
import signal
import sys
import time
from typing import Any, Dict, List, Optional

from .allocation import END_SIGNALS, go_on_attended, library
from .container import StartError
from .journal import AlreadyStarted, Journal, note, own_job
from .later import postpone
from .namespaces import NamespaceError
from .setup import PodSetup, Run
from .volumes import VolumeError

PLAN_VERSION = 2
REFRESH_AFTER = 60.0
INDEX = {"--task": "SLURM_ARRAY_TASK_ID", "--gang": "SLURM_PROCID"}  # which line of the map
FIRST_PATIENCE, PATIENCE = 5.0, 1.0  # seconds for the pod's network, before it is said
PORT_PATIENCE = 60.0  # seconds for a port of the node to become free, before the pod is rejected


class Rejected(Exception):
    """The pod can't run on this node: the kubelet's reason, and why."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__("Pod was rejected: " + why)
        self.reason = reason


class Starting:
    """What the fast path hands to the event loop."""

    def __init__(
        self, plan: Dict[str, Any], pod_dir: str, journal: Journal, job: Dict[str, str]
    ) -> None:
        self.plan = plan
        self.job = job  # the environment it was started in
        self.pod_dir = pod_dir
        self.journal = journal
        self.started_at = time.time()
        self.setup: Optional[PodSetup] = None
        self.runs: Dict[str, Run] = {}
        self.refused: Dict[str, StartError] = {}
        self.volume_error: Optional[VolumeError] = None
        self.terminated = False  # SIGTERM came


def main(argv: List[str]) -> int:
    """`POD_DIR`; `--allocation SCANCEL POD_DIR`: the job is an allocation; `--task FILE`: a task of
    a job array; `--gang FILE`: a task of a gang; `--rank POD_DIR CONTAINER`: one rank of an MPI
    container; `--can-end SCANCEL`: see allocation.py; `--remove DIRECTORY`, `--give DIRECTORY
    GROUP`: see ownership.py; `member SPEC.json`: see member.py."""
    os.umask(0o077)
    if argv[:1] in (["--remove"], ["--give"]):
        from .ownership import run_as_root

        return run_as_root(argv)
    if argv[:1] == ["--can-end"]:
        return int(not library(argv[1]))
    if argv[:1] == ["member"]:
        from .member import hold

        return hold(argv[1])
    job = dict(os.environ)
    if argv[:1] in (["--task"], ["--gang"]):
        try:
            index = int(job[INDEX[argv[0]]])
            if argv[0] == "--gang":  # there may be several on a node, each with its own files
                job["SLURM_JOB_ID"] += ".%d" % index
            argv = [task_dir(argv[1], index)]
        except (OSError, ValueError, KeyError, IndexError) as e:
            note("this task's pod can't be read from %s: %s" % (argv[1], e))
            return 1
    allocation = ""
    if argv[:1] == ["--allocation"]:
        _, allocation, *argv = argv
    is_rank = argv[:1] == ["--rank"]
    pod_dir = os.path.abspath(argv[1] if is_rank else argv[0])
    plan = read_plan(pod_dir)
    if isinstance(plan, str):
        note(plan)
        return 1
    if is_rank:
        from .rank import run_rank

        return run_rank(plan, pod_dir, argv[2])
    try:
        journal = Journal(os.path.join(pod_dir, "journal.jsonl"))
    except AlreadyStarted as e:
        note("pod %s/%s was already started by another agent (%s exists): nothing is run"
             % (plan["namespace"], plan["name"], e))  # fmt: skip
        return 1
    if allocation:
        go_on_attended(allocation)
    starting = Starting(plan, pod_dir, journal, job)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def terminated(*_: Any) -> None:
        starting.terminated = True

    for number in END_SIGNALS:
        signal.signal(number, terminated)
    postpone("inspect")  # asyncio imports it, and a dozen others with it, for what is not done here
    try:
        if time.time() - plan["created"] > REFRESH_AFTER or incomplete(plan):
            from .refresh import refreshed

            starting.plan = refreshed(starting)
            for number in END_SIGNALS:  # the event loop took them away
                signal.signal(number, terminated)
        start(starting)
        from .supervise import supervise

        return supervise(starting)
    except Exception as e:
        if not isinstance(e, (NamespaceError, StartError, Rejected)):
            import traceback

            traceback.print_exc()
        return give_up(starting, e)


def task_dir(path: str, index: int) -> str:
    """The pod's directory of this task: line n of the file is task n. What is written from
    here on goes to the pod's own slurm.out."""
    with open(path, encoding="utf-8") as f:
        line = f.readlines()[index]
    pod_dir: str = json.loads(line)["podDir"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    out = os.open(os.path.join(pod_dir, "slurm.out"), flags, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    return pod_dir


def read_plan(pod_dir: str) -> Any:
    """The plan, or a sentence that says why there is none."""
    path = os.path.join(pod_dir, "plan.json")
    try:
        with open(path, encoding="utf-8") as f:
            plan = json.load(f)
    except (OSError, ValueError) as e:
        return "the pod's plan %s can't be read: %s" % (path, e)
    if not isinstance(plan, dict) or plan.get("version") != PLAN_VERSION:
        return "the plan %s has version %s, this agent knows only %d: is HPK being updated?" % (
            path, plan.get("version") if isinstance(plan, dict) else "?", PLAN_VERSION,
        )  # fmt: skip
    return plan


def incomplete(plan: Dict[str, Any]) -> bool:
    """Whether the pod's tokens are not there yet."""
    return not all(os.path.islink(os.path.join(path, "..data")) for path in plan.get("awaits", ()))


def start(starting: Starting) -> None:
    """Enters the pod's namespaces and starts what may start at once."""
    plan = starting.plan
    starting.setup = PodSetup(plan, starting.pod_dir, starting.job)
    if not connect(starting):
        return
    try:
        starting.setup.prepare_volumes()
    except VolumeError as e:
        starting.volume_error = e
        return
    if starting.terminated:
        return
    for container in plan["initContainers"][:1] or plan["containers"]:
        try:
            starting.runs[container["name"]] = starting.setup.start(container, 0)
        except StartError as e:
            starting.refused[container["name"]] = e


def connect(starting: Starting) -> bool:
    """Waits for the pod's network, with a reason in the journal when it takes long; False when
    the pod was told to end meanwhile."""
    assert starting.setup is not None
    if starting.setup.network is None:
        starting.setup.connect()
        return True
    from .podnet import NetworkNotReady
    from .ports import PortTaken

    said, began = "", time.monotonic()
    patience = FIRST_PATIENCE
    while not starting.terminated:
        try:
            starting.setup.connect(patience)
            return True
        except (NetworkNotReady, PortTaken) as e:
            if isinstance(e, PortTaken) and (e.own or time.monotonic() - began > PORT_PATIENCE):
                # Slurm chose the node without knowing; a controller's next pod may fare better. A
                # kubelet, too, takes no second pod with a port of its node.
                raise Rejected("NodePorts", "Predicate NodePorts failed: %s" % e) from None
            words = str(e) if isinstance(e, PortTaken) else "the pod network: %s" % e
            if words != said:
                from .refresh import waiting_state

                said = words
                event = {
                    "time": time.time(), "type": "Warning", "reason": "FailedCreatePodSandBox",
                    "message": "Failed to create pod sandbox: " + said,
                }  # fmt: skip
                starting.journal.write(waiting_state(starting.plan, said), [event])
            if isinstance(e, PortTaken):
                time.sleep(PATIENCE)
        patience = PATIENCE
    return False


def give_up(starting: Starting, error: Exception) -> int:
    """The last words of an agent that can't go on: on paper, where the kubelet reads them."""
    setup = starting.setup
    starting.journal.write(
        {
            "jobId": own_job(os.environ),
            "node": os.environ.get("SLURMD_NODENAME", ""),
            "hostIP": setup.host_ip if setup else "",
            "podIP": setup.runtime.fields["podIP"] if setup else "",
            "startedAt": starting.started_at,
            "containers": {},
            "finished": True,
            "reason": error.reason if isinstance(error, Rejected) else "AgentError",
            "message": "%s: %s" % (type(error).__name__, error)
            if not isinstance(error, (NamespaceError, StartError, Rejected))
            else str(error),
        },
        [],
    )
    if setup:
        setup.clear()
    return 1


def run() -> None:
    sys.exit(main(sys.argv[1:]))
