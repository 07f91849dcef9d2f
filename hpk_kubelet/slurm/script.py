"""From a pod's job to sbatch's arguments and script. Pure.

Options go to sbatch as arguments, which no shell reads, in an order in which the user's come last
and so win. The script holds two paths and nothing of the pod's.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from hpk_kubelet.spec.annotations import given
from hpk_kubelet.spec.resources import JobResources

TEMPLATES = Path(__file__).parents[1] / "data" / "slurm_templates"
SIGNAL_BEFORE_LIMIT_S = 15
"""More than the grace that is left to the agent to end the containers when the limit comes."""


@dataclass(frozen=True)
class JobRequest:
    """Everything about one pod's job. `user_flags` come last: they win over what is derived."""

    name: str
    comment: str
    partition: str
    resources: JobResources
    pod_dir: Path
    agent_dir: Path
    grace_s: int = 30
    pythons: tuple[str, ...] = ("/usr/bin/python3", "python3")  # the first that is new enough
    extra_flags: tuple[str, ...] = ()  # the site's, from the configuration
    user_flags: tuple[str, ...] = ()


def comment(cluster: str, uid: str, namespace: str, name: str) -> str:
    """How a job tells whose it is: `hpk:CLUSTER:UID:NAMESPACE/NAME`."""
    return f"hpk:{cluster}:{uid}:{namespace}/{name}"


def parse_comment(text: str) -> tuple[str, str, str] | None:
    """(cluster, uid, namespace/name) of a comment made by `comment`, None for any other."""
    parts = text.split(":", 3)
    return (parts[1], parts[2], parts[3]) if len(parts) == 4 and parts[0] == "hpk" else None


def sbatch_arguments(request: JobRequest) -> list[str]:
    """What stands between `sbatch` and the script's path."""
    resources, flags = request.resources, (*request.extra_flags, *request.user_flags)
    output = str(request.pod_dir / "slurm.out").replace("\\", "\\\\").replace("%", "%%")
    arguments = [
        "--parsable",
        f"--job-name={request.name}",
        f"--comment={request.comment}",
        "--no-requeue",
        "--export=NIL",
        f"--chdir={request.pod_dir}",
        f"--output={output}",
        "--open-mode=append",
        f"--signal=B:TERM@{request.grace_s + SIGNAL_BEFORE_LIMIT_S}",
        f"--partition={request.partition}",
    ]
    if not given(flags, "nodes", "N", "ntasks", "n", "ntasks-per-node"):
        arguments += ["--nodes=1", "--ntasks=1"]
    if not given(flags, "cpus-per-task", "c", "cpus-per-gpu"):
        arguments.append(f"--cpus-per-task={resources.cpus}")
    if not given(flags, "mem", "mem-per-cpu", "mem-per-gpu"):
        arguments.append(f"--mem={resources.memory_mb}M")
    if resources.tmp_mb:
        arguments.append(f"--tmp={resources.tmp_mb}M")
    if resources.gpus and not given(flags, "gres", "gpus", "G", "gpus-per-node", "gpus-per-task"):
        arguments.append(f"--gres=gpu:{resources.gpus}")
    if resources.time_limit_s is not None:
        arguments.append(f"--time={-(-resources.time_limit_s // 60)}")
    if resources.constraint:
        arguments.append(f"--constraint={resources.constraint}")
    return [*arguments, *flags]


@cache
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


def render_script(request: JobRequest) -> str:
    """The job's script."""
    return _template("pod.sbatch.j2").render(request=request)
