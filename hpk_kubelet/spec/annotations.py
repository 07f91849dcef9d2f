"""The annotations with which a pod speaks to Slurm, checked before anything is submitted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.slurm_options import SBATCH, SRUN, Command, read_flags

PREFIXES = ("slurm-job.hpk.io/", "slurm.hpk.io/")
"""The first is the documented one, the second its alias."""


def slurm_flags(pod: Mapping[str, Any]) -> list[str]:
    """The flags for sbatch, each `--long-name[=value]`: its namespace's, which the API server
    copies into `…/namespace-flags` (controlplane/manifests/slurm_flags.json), and then those of
    `…/flags`, which so win. HPKError for what is no flag or can't be allowed."""
    return [*(_flags(pod, "namespace-flags", SBATCH) or ()), *own_flags(pod)]


def own_flags(pod: Mapping[str, Any]) -> list[str]:
    """Without the namespace's."""
    return _flags(pod, "flags", SBATCH) or []


def mpi_words(pod: Mapping[str, Any]) -> list[str] | None:
    """The flags of `…/mpi-flag` for srun; None where the pod has no such annotation."""
    return _flags(pod, "mpi-flag", SRUN)


def sharing(pod: Mapping[str, Any], default: str) -> Any:
    """`…/sharing`: shared or exclusive."""
    return _choice(pod, "sharing", ("shared", "exclusive"), default)


def start(pod: Mapping[str, Any], default: str) -> Any:
    """`…/start`: batch, immediate or auto."""
    return _choice(pod, "start", ("batch", "immediate", "auto"), default)


class Gang(NamedTuple):
    """Pods that start together."""

    name: str
    size: int


def gang(pod: Mapping[str, Any]) -> Gang | None:
    """`…/gang` and `…/gang-size`; None for a pod without. HPKError for one without the other."""
    annotations = pod["metadata"].get("annotations") or {}
    for prefix in PREFIXES:
        name, size = annotations.get(f"{prefix}gang"), annotations.get(f"{prefix}gang-size")
        if name is None and size is None:
            continue
        if name is None or size is None:
            missing = f"{prefix}gang" if name is None else f"{prefix}gang-size"
            raise HPKError(f"a gang needs the annotation {missing}, too")
        if not name or not re.fullmatch(r"[1-9][0-9]{0,4}", size):
            raise HPKError(
                f"annotations {prefix}gang: {name!r} and {prefix}gang-size: {size!r} are not a "
                "name and a number of pods, from 1 on"
            )
        return Gang(name, int(size))
    return None


def _choice(pod: Mapping[str, Any], name: str, choices: Sequence[str], default: str) -> str:
    annotations = pod["metadata"].get("annotations") or {}
    for key in (prefix + name for prefix in PREFIXES):
        if key in annotations:
            value: str = annotations[key]
            if value not in choices:
                known = f"{', '.join(choices[:-1])} nor {choices[-1]}"
                raise HPKError(f"annotation {key}: {value!r} is neither {known}")
            return value
    return default


def _flags(pod: Mapping[str, Any], name: str, command: Command) -> list[str] | None:
    annotations = pod["metadata"].get("annotations") or {}
    for key in (prefix + name for prefix in PREFIXES):
        if key in annotations:
            where = f"annotation {key}"
            try:
                words = shlex.split(annotations[key])
            except ValueError as e:
                raise HPKError(f"{where}: {str(e).lower()} in {annotations[key]!r}") from None
            return read_flags(words, command, where)
    return None
