"""From a pod's job to the fields of slurmrestd's job submission, as sbatch would set them.

Field names are those of the data parsers in VERSIONS, which agree in everything used here. What has
no entry in the table (GPUs, ranks of MPI, most of what users add) is left to sbatch, which knows
all of it.
"""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpk_kubelet.slurm.script import JobRequest, output_path, parse_time_limit, shape

Fields = dict[str, Any]

VERSIONS = ("v0.0.42", "v0.0.41", "v0.0.40")
"""Data parsers, the best first. A Slurm release offers its own and the two or three before: these
are 24.11, 24.05 and 23.11."""

_MEGABYTES = {"": 1, "M": 1, "G": 1 << 10, "T": 1 << 20}
_RLIMITS = ("cpu", "fsize", "data", "stack", "core", "rss", "nproc", "nofile", "memlock", "as")


def number(value: int | None) -> Fields:
    """Of the fields that may be unset or infinite; None is infinite."""
    return {"set": True, "infinite": value is None, "number": value or 0}


def _size(name: str, wrap: Callable[[int], Any]) -> Callable[[str], Fields | None]:
    def field(value: str) -> Fields | None:
        match = re.fullmatch(r"([1-9]\d*)([MGT]?)", value)
        return {name: wrap(int(match[1]) * _MEGABYTES[match[2]])} if match else None

    return field


def _text(name: str) -> Callable[[str], Fields | None]:
    return lambda value: {name: value}


def _count(name: str, wrap: Callable[[int], Any] = int) -> Callable[[str], Fields | None]:
    return lambda value: {name: wrap(int(value))} if re.fullmatch(r"\d{1,9}", value) else None


def _time(value: str) -> Fields | None:
    if value.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return {"time_limit": number(None)}
    seconds = parse_time_limit(value)
    return {"time_limit": number(-(-seconds // 60))} if seconds else None


def _signal(value: str) -> Fields | None:
    match = re.fullmatch(r"B:(\w+)@(\d+)", value)
    if match is None:
        return None
    return {
        "kill_warning_flags": ["BATCH_JOB"],
        "kill_warning_signal": match[1],
        "kill_warning_delay": number(int(match[2])),
    }


def _only(expected: str, fields: Fields) -> Callable[[str], Fields | None]:
    return lambda value: fields if value == expected else None


# By sbatch's long option: the fields for a value, None for one that only sbatch can read.
_FIELDS: Mapping[str, Callable[[str], Fields | None]] = {
    "no-requeue": _only("", {"requeue": False}),
    "export": _only("NIL", {}),  # the environment is `_environment`
    "open-mode": _only("append", {"open_mode": ["APPEND"]}),
    "signal": _signal,
    "partition": _text("partition"),
    "nodes": lambda value: {"nodes": value} if value.isdigit() else None,
    "ntasks": _count("tasks"),
    "cpus-per-task": _count("cpus_per_task"),
    "mem": _size("memory_per_node", number),
    "tmp": _size("temporary_disk_per_node", int),
    "time": _time,
    "constraint": _text("constraints"),
    "exclusive": _only("user", {"shared": ["user"]}),
    "hold": _only("", {"hold": True}),
    "nice": _count("nice"),
    "account": _text("account"),
    "qos": _text("qos"),
    "reservation": _text("reservation"),
    "licenses": _text("licenses"),
    "array": _text("array"),
}


@dataclass(frozen=True)
class Submitter:
    """What sbatch looks up about itself, and the job inherits."""

    host: str
    umask: int
    nice: int
    rlimits: Mapping[str, int | None]  # soft; None: unlimited. PropagateResourceLimits chooses

    @classmethod
    def this(cls) -> Submitter:
        umask = os.umask(0o077)
        os.umask(umask)
        soft = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
                for name in _RLIMITS}  # fmt: skip
        rlimits = {n: None if limit == resource.RLIM_INFINITY else limit
                   for n, limit in soft.items()}  # fmt: skip
        return cls(socket.gethostname(), umask, os.getpriority(os.PRIO_PROCESS, 0), rlimits)


def job_fields(request: JobRequest, submitter: Submitter) -> Fields | None:
    """All but the script; None where sbatch must be asked."""
    if request.mpi or request.gang:  # mpirun and srun read variables that sbatch makes
        return None
    fields: Fields = {
        "name": request.name,
        "comment": request.comment,
        "current_working_directory": str(request.pod_dir),
        "standard_output": output_path(request),
        "rlimits": {name: number(limit) for name, limit in submitter.rlimits.items()},
    }
    array = [f"--array=0-{request.tasks - 1}"] if request.tasks else []
    for flag in (*array, *shape(request)):
        name, _, value = flag.removeprefix("--").partition("=")
        found = _FIELDS[name](value) if name in _FIELDS else None
        if found is None:
            return None
        fields |= found
    fields["environment"] = _environment(fields, submitter)
    return fields


def _environment(fields: Fields, submitter: Submitter) -> list[str]:
    """What sbatch --export=NIL leaves in a job's environment."""
    found = {
        "SLURM_EXPORT_ENV": "NIL",
        "SLURM_PRIO_PROCESS": str(submitter.nice),
        "SLURM_SUBMIT_DIR": fields["current_working_directory"],
        "SLURM_SUBMIT_HOST": submitter.host,
        "SLURM_UMASK": f"{submitter.umask:04o}",
    }
    if "cpus_per_task" in fields:
        found["SLURM_CPUS_PER_TASK"] = str(fields["cpus_per_task"])
    return [f"{name}={value}" for name, value in found.items()]
