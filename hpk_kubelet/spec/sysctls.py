"""Kernel parameters of a pod's own namespaces (pkg/kubelet/sysctl, component-helpers'
node/util/sysctl)."""

from __future__ import annotations

from collections.abc import Iterable

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Object

SAFE = (
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
)
"""What every pod may set."""
_OF_IPC = ("kernel.sem", "kernel.shm", "kernel.msg", "fs.mqueue.")


def sysctls(pod: Object) -> dict[str, str]:
    """Path below /proc/sys → value."""
    found = {}
    for entry in (pod["spec"].get("securityContext") or {}).get("sysctls") or []:
        # dots and slashes change places: a device's name may hold a dot
        found[_dotted(entry["name"]).translate(_SWAPPED)] = str(entry["value"])
    return found


def forbidden_sysctl(pod: Object, allowed: Iterable[str]) -> str:
    """Why the kubelet does not admit the pod, in its words; "" when it does. `allowed`: what may
    be set besides SAFE, as kubelet's --allowed-unsafe-sysctls (`kernel.msg*`)."""
    spec = pod["spec"]
    for entry in (spec.get("securityContext") or {}).get("sysctls") or []:
        name = _dotted(entry["name"])
        if name not in SAFE and not any(_matches(name, pattern) for pattern in allowed):
            return f'forbidden sysctl: "{name}" not allowlisted'
        if name.startswith("net.") and spec.get("hostNetwork"):
            return f'forbidden sysctl: "{name}" not allowed with host Net enabled'
        if name.startswith(_OF_IPC) and spec.get("hostIPC"):
            return f'forbidden sysctl: "{name}" not allowed with host IPC enabled'
    return ""


def check_allowed(patterns: Iterable[str]) -> None:
    """HPKError for a pattern of the configuration that names more than a pod's namespaces have."""
    for pattern in patterns:
        if not _dotted(pattern).startswith(("net.", *_OF_IPC)):
            raise HPKError(
                f"security.allowedUnsafeSysctls: {pattern} belongs to no namespace of a pod; "
                "kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.* and net.* do"
            )


_SWAPPED = str.maketrans("./", "/.")


def _dotted(name: str) -> str:
    """`net/ipv4/conf/eth0.1/x` is `net.ipv4.conf.eth0/1.x`: the first separator decides."""
    for c in name:
        if c == ".":
            return name
        if c == "/":
            return name.translate(_SWAPPED)
    return name


def _matches(name: str, pattern: str) -> bool:
    pattern = _dotted(pattern)
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return name == pattern
