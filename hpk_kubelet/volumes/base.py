"""What every volume type works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Object, Objects
from hpk_kubelet.spec.plan import VolumePlan

DEFAULT_MODE = 0o644


class File(NamedTuple):
    content: bytes
    mode: int


Files = dict[str, File]
"""Path inside the volume → file."""


@dataclass(frozen=True)
class TokenRequest:
    """A token of the pod's service account that a projected volume wants, bound to the pod."""

    volume: str
    path: str
    audience: str  # "": the API server's own
    expiration_seconds: int


@dataclass(frozen=True, kw_only=True)
class VolumeInputs:
    objects: Objects
    allocatable: Mapping[str, str]  # the node's
    pod_dir: Path
    hpk_home: Path
    tokens: Mapping[TokenRequest, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Volume:
    """`files` is None for a volume that the agent makes (emptyDir) or finds (hostPath)."""

    plan: VolumePlan
    files: Files | None = field(default=None, repr=False)
    mount_points: tuple[str, ...] = ()  # directories inside it where other volumes are mounted


def items(data: Mapping[str, bytes], source: Object, mode: int, missing: str) -> Files:
    """The keys of an object as files: all of them, or those that `items` names.

    HPKError made of `missing` for a key that is not there, unless the source is optional.
    """
    if not source.get("items"):
        return {key: File(content, mode) for key, content in data.items()}
    files: Files = {}
    for item in source["items"]:
        if item["key"] in data:
            own = item.get("mode")
            files[item["path"]] = File(data[item["key"]], mode if own is None else own)
        elif not source.get("optional"):
            raise HPKError(f"{missing}: {item['key']}")
    return files


def default_mode(source: Object) -> int:
    mode = source.get("defaultMode")
    return DEFAULT_MODE if mode is None else int(mode)
