"""hostPath: a path of the compute node, or of the file systems it shares."""

from __future__ import annotations

import os
from pathlib import Path

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.plan import VolumePlan
from hpk_kubelet.volumes.base import VolumeInputs

TYPES = (
    "",
    "Directory",
    "DirectoryOrCreate",
    "File",
    "FileOrCreate",
    "Socket",
    "CharDevice",
    "BlockDevice",
)


def plan(pod: Object, volume: Object, inputs: VolumeInputs) -> VolumePlan:
    return plan_of(volume["hostPath"], inputs)


def plan_of(source: Object, inputs: VolumeInputs) -> VolumePlan:
    """The path as it is written, without `..`; its type is checked where it is mounted."""
    path, kind = absolute(source.get("path", "")), source.get("type") or ""
    if kind not in TYPES:
        raise HPKError(f"hostPath type {kind} is not supported; use one of {', '.join(TYPES[1:])}")
    if _inside(Path(path), inputs.hpk_home):
        raise HPKError(
            f"hostPath {path} is refused: it is inside HPK's own directory, {inputs.hpk_home}"
        )
    return VolumePlan(kind="hostPath", path=path, type=kind)


def absolute(path: str) -> str:
    """Normalised; HPKError unless it is absolute."""
    if not path.startswith("/") or "\0" in path:
        raise HPKError(f"hostPath {path!r} is not an absolute path")
    return os.path.normpath("/" + path.lstrip("/"))


def is_provisioned(path: str, home: Path) -> bool:
    """Whether it is (or is in) a volume in the part of `$HPK_HOME` that holds nothing else."""
    real = Path(os.path.realpath(path))
    base = Path(os.path.realpath(home)) / "volumes"
    return real != base and real.is_relative_to(base)


def _inside(path: Path, home: Path) -> bool:
    """By name, and by where links lead as far as they can be followed from here."""
    real = os.path.realpath
    return path.is_relative_to(home) or Path(real(path)).is_relative_to(real(home))
