"""The user's own seccomp profiles, by the names that pods give them."""

from __future__ import annotations

from pathlib import Path

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.plan import SeccompProfile
from hpk_kubelet.spec.seccomp import parse_profile


def load_profile(directory: Path, name: str) -> SeccompProfile:
    """`name`: a path below `directory`. HPKError, in containerd's words, when it can't be had."""
    path = directory / name
    try:
        if not path.resolve().is_relative_to(directory.resolve()):
            raise HPKError("it lies outside of the directory of profiles")
        return parse_profile(path.read_bytes())
    except (OSError, ValueError, HPKError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise HPKError(f'cannot load seccomp profile "{path}": {why}') from None
