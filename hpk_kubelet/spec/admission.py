"""Pods that a kubelet turns away for good before it does anything for them."""

from __future__ import annotations

from collections.abc import Iterable

from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.sysctls import forbidden_sysctl


def rejection(pod: Object, allowed_sysctls: Iterable[str]) -> tuple[str, str] | None:
    """(reason, message) in kubelet's words (pkg/kubelet/lifecycle, pkg/kubelet/sysctl), None for a
    pod that is admitted."""
    name = (pod["spec"].get("os") or {}).get("name") or "linux"
    if name != "linux":
        return "PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS"
    if why := forbidden_sysctl(pod, allowed_sysctls):
        return "SysctlForbidden", why
    return None
