"""From a pod's job to sbatch's arguments and script. Pure.

Options go to sbatch as arguments, which no shell reads, in an order in which the user's come last
and so win. The script holds paths and nothing else of the pod's.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2

from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.model import Partition
from hpk_kubelet.slurm.sharing import POLICIES, Policy
from hpk_kubelet.slurm.states import NO_PYTHON
from hpk_kubelet.spec.annotations import Gang
from hpk_kubelet.spec.resources import JobResources
from hpk_kubelet.spec.slurm_options import SBATCH, read_flags, value_of

TEMPLATES = Path(__file__).parents[1] / "data" / "slurm_templates"
# The last is the kubelet's own, which a site with an old Python was given (singularity/hpk.def).
# A name with its version in it needs no process to ask for it: a few milliseconds of every start.
PYTHONS = (*(f"/usr/bin/python3.{minor}" for minor in range(14, 8, -1)), "python3", sys.executable)
TASKS = ("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket")
AGENT_MARGIN_S = 15
"""What the agent has, beyond the grace period, between the signal and the time limit."""
_LONGEST_WARNING_S = 65535  # sbatch(1), --signal
_SLURM_MARGIN_S = 30
"""Slurm looks at time limits so often (PERIODIC_TIMEOUT in slurmctld): a signal comes up to so much
too early."""


@dataclass(frozen=True)
class JobRequest:
    """Everything about one pod's job. `user_flags` come last: they win over what is derived.

    Flags of both kinds may be written in any way sbatch takes; HPKError for one it can't take.
    """

    name: str
    comment: str
    partition: str
    resources: JobResources
    pod_dir: Path
    agent_dir: Path
    grace_s: int = 30
    pythons: tuple[str, ...] = PYTHONS  # paths or names; the first that is 3.9 or newer runs
    extra_flags: tuple[str, ...] = ()  # the site's, from the configuration
    user_flags: tuple[str, ...] = ()
    mpi: bool = False  # the main container is ranks, which may be on several nodes
    lasting: bool = False  # never ends by itself: gets all the time the partition gives
    limits: Partition | None = None  # of `partition`, where known
    sharing: Policy = "shared"
    control_job: str = ""  # whose step it becomes
    gang: Gang | None = None  # whose tasks are its pods, a line of `map` in `pod_dir` each
    start: Literal["batch", "immediate", "auto"] = "batch"  # see node/immediate.py
    tasks: int = 0  # of an array whose `pod_dir` holds `map`, a pod per line; 0: a single pod

    def __post_init__(self) -> None:
        extra = read_flags(self.extra_flags, SBATCH, "slurm.extraFlags in the configuration")
        user = read_flags(self.user_flags, SBATCH, "the pod's Slurm flags")
        object.__setattr__(self, "extra_flags", tuple(extra))
        object.__setattr__(self, "user_flags", tuple(user))
        if self.gang:
            _check_gang(self)

    @property
    def output(self) -> str:
        """The file for what the script says."""
        return str(self.pod_dir / "slurm.out")

    @property
    def script(self) -> str:
        """Where the script of several pods is."""
        return str(self.pod_dir / "script.sbatch")

    @property
    def agent_arguments(self) -> tuple[str, ...]:
        if self.gang:  # `--gang` is what the script adds when it is a task
            return (str(self.pod_dir / "map"),)
        return ("--task", str(self.pod_dir / "map")) if self.tasks else (str(self.pod_dir),)


def _check_gang(request: JobRequest) -> None:
    """HPKError for what can't be a task among others of the same shape."""
    flags = (*request.extra_flags, *request.user_flags)
    clash = next((name for name in TASKS if value_of(flags, name) is not None), "")
    if clash or request.mpi or request.resources.gpus or request.control_job:
        what = f"--{clash}" if clash else "MPI ranks, GPUs or the node control"
        raise HPKError(f"the pods of a gang are the tasks of one job: {what} can't be theirs")


def comment(cluster: str, uid: str, namespace: str, name: str) -> str:
    """How a job tells whose it is: `hpk:CLUSTER:UID:NAMESPACE/NAME`."""
    return f"hpk:{cluster}:{uid}:{namespace}/{name}"


def parse_comment(text: str) -> tuple[str, str, str] | None:
    """(cluster, uid, namespace/name) of a comment made by `comment`, None for any other."""
    parts = text.split(":", 3)
    return (parts[1], parts[2], parts[3]) if len(parts) == 4 and parts[0] == "hpk" else None


def output_path(request: JobRequest) -> str:
    """Where the script's output goes: %-signs and backslashes in it mean something to Slurm."""
    return request.output.replace("\\", "\\\\").replace("%", "%%")


def sbatch_arguments(request: JobRequest) -> list[str]:
    """What stands between `sbatch` and the script's path."""
    return [
        "--parsable",
        f"--job-name={request.name}",
        f"--comment={request.comment}",
        f"--chdir={request.pod_dir}",
        f"--output={output_path(request)}",
        *([f"--array=0-{request.tasks - 1}"] if request.tasks else []),
        *shape(request),
    ]


def shape(request: JobRequest) -> tuple[str, ...]:
    """The arguments that are not its identity's: jobs with the same may be tasks of one array."""
    resources, flags = request.resources, (*request.extra_flags, *request.user_flags)

    def given(*names: str) -> bool:
        return value_of(flags, *names) is not None

    limits = None if given("partition") else request.limits
    time_limit = value_of(flags, "time") or _time_limit(request, limits)
    arguments = [
        "--no-requeue",
        "--export=NIL",
        "--open-mode=append",
        # To the script, which is the agent; a gang's agents are tasks, and alone listen to URG.
        f"--signal={'URG' if request.gang else 'B:TERM'}@"
        f"{_warning(request.grace_s, time_limit, limits)}",
    ]
    if not given("partition"):
        arguments.append(f"--partition={request.partition}")
    tasks = given(*TASKS)
    placed = given("nodes", "nodelist", "nodefile")
    if not (placed or request.gang or (tasks and request.mpi)):
        arguments.append("--nodes=1")
    if request.gang:
        arguments.append(f"--ntasks={request.gang.size}")
    elif not tasks and not given("nodes"):  # else Slurm's default: a task per node
        arguments.append("--ntasks=1")
    if not given("cpus-per-task", "cpus-per-gpu"):
        arguments.append(f"--cpus-per-task={resources.cpus}")
    if not given("mem", "mem-per-cpu", "mem-per-gpu"):
        if request.gang:  # --mem is a node's, on which there may be several
            arguments.append(f"--mem-per-cpu={-(-resources.memory_mb // resources.cpus)}M")
        else:
            arguments.append(f"--mem={resources.memory_mb}M")
    # Where Slurm is told of no node's disk, it would refuse every job that asks for some.
    if resources.tmp_mb and not (limits and not limits.tmp_mb):
        arguments.append(f"--tmp={resources.tmp_mb}M")
    gpus = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
    if resources.gpus and not given(*gpus):
        arguments.append(f"--gres=gpu:{resources.gpus}")
    if time_limit and not given("time"):
        arguments.append(f"--time={time_limit}")
    if resources.constraint:
        arguments.append(f"--constraint={resources.constraint}")
    if not given("exclusive", "oversubscribe"):
        arguments += POLICIES[request.sharing].flags
    return (*arguments, *flags)


def _time_limit(request: JobRequest, limits: Partition | None) -> str:
    """The derived --time: "" for the partition's default. A deadline is the longest the pod may
    take, not what it needs, so it never asks for more than the partition gives."""
    longest = limits.max_time_s if limits else None
    asked = request.resources.time_limit_s
    if asked is not None:
        return _minutes(asked if longest is None else min(asked, longest))
    if request.lasting and limits and limits.default_time_s is not None:
        return "UNLIMITED" if longest is None else _minutes(longest)
    return ""


def _minutes(seconds: int) -> str:
    """Slurm's unit of time limits; a partition's own is a whole number of them."""
    return str(-(-seconds // 60))


def _warning(grace_s: int, time_limit: str, limits: Partition | None) -> int:
    """Seconds before the time limit at which the agent is told: the grace period and a margin, but
    never so much that less than half of the time is left for the pod itself."""
    limit = parse_time_limit(time_limit)
    if limit is None and not time_limit and limits:
        limit = limits.default_time_s or limits.max_time_s
    wanted = min(grace_s + AGENT_MARGIN_S, _LONGEST_WARNING_S)
    return wanted if limit is None else max(1, min(wanted, limit // 2 - _SLURM_MARGIN_S))


def parse_time_limit(text: str) -> int | None:
    """Seconds of sbatch's --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes, days-hours:minutes:seconds; None for UNLIMITED and what is none of these."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None or third is not None:
        return (((days or 0) * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    return (first or 0) * 60 + (second or 0)


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    environment.filters["quote"] = _quote
    return environment.get_template(name)


def _quote(values: object) -> str:
    """As words of a shell: a string as one, a sequence as one each."""
    words: Sequence[object] = values if isinstance(values, tuple | list) else (values,)
    return " ".join(shlex.quote(str(word)) for word in words)


# Read now: the files may be replaced by another version's while this one runs.
_POD = _template("pod.sbatch.j2")


def render_script(request: JobRequest) -> str:
    """The job's script."""
    return _POD.render(request=request, no_python=NO_PYTHON)
