"""What a pod asks for and does not get here: told in Events, never passed over in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hpk_kubelet.spec.annotations import mpi_words
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.ranks import main_container

_NAMES = """
AUDIT_CONTROL AUDIT_READ AUDIT_WRITE BLOCK_SUSPEND BPF IPC_LOCK LINUX_IMMUTABLE MAC_ADMIN
MAC_OVERRIDE MKNOD PERFMON SYS_BOOT SYS_MODULE SYS_NICE SYS_PACCT SYS_RAWIO SYS_RESOURCE
SYSLOG SYS_TIME SYS_TTY_CONFIG WAKE_ALARM
"""
_OF_THE_MACHINE = frozenset(_NAMES.split())
"""Capabilities that the kernel asks for in its first user namespace alone (capabilities(7))."""


class Unsupported(NamedTuple):
    """A Warning Event on the pod."""

    reason: str
    message: str


def unsupported(pod: Object, *, own_network: bool) -> list[Unsupported]:
    """One entry per feature, in the order of the spec; the pod runs without them. `own_network`:
    pods that don't ask for their node's network have one of their own."""
    spec = pod["spec"]
    own_network = own_network and not spec.get("hostNetwork")
    return [
        *_scheduling(spec),
        *_of_pod(spec),
        *_of_network(spec, own_network),
        *_of_containers(spec),
        *_of_ranks(pod),
    ]


def _of_network(spec: Object, own_network: bool) -> Iterator[Unsupported]:
    if not own_network and spec.get("dnsPolicy") == "ClusterFirstWithHostNet":
        yield Unsupported(
            "UnsupportedField",
            "dnsPolicy ClusterFirstWithHostNet counts as Default: the cluster's DNS is not reached "
            "from a node's own network",
        )
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        for port in container.get("ports") or []:
            if not port.get("hostPort"):
                continue
            where = f"container {container['name']}: hostPort {port['hostPort']}"
            if own_network and port.get("protocol") == "SCTP":
                yield Unsupported(
                    "UnsupportedField", f"{where} is ignored: of SCTP there is none here"
                )
            elif not own_network and not spec.get("hostNetwork"):
                yield Unsupported(
                    "UnsupportedField",
                    f"{where} is ignored: pods are on the host's network, and reached at their "
                    f"own port {port.get('containerPort')}",
                )


def _scheduling(spec: Object) -> Iterator[Unsupported]:
    reason = "UnsupportedScheduling"
    affinity = spec.get("affinity") or {}
    for key in ("podAffinity", "podAntiAffinity"):
        if affinity.get(key):
            yield Unsupported(
                reason,
                f"{key} is ignored: Slurm places the job, and can't be told about other pods; "
                "nodeSelector and slurm-job.hpk.io/flags (--constraint, --exclude) can",
            )
    if spec.get("topologySpreadConstraints"):
        yield Unsupported(
            reason, "topologySpreadConstraints are ignored: Slurm places the jobs by its own rules"
        )
    if spec.get("resourceClaims"):
        yield Unsupported(
            reason,
            "resourceClaims are ignored: ask for devices by resource limits or "
            "slurm-job.hpk.io/flags (--gres)",
        )


def _of_pod(spec: Object) -> Iterator[Unsupported]:
    security = spec.get("securityContext") or {}
    for key in ("hostPID", "hostIPC"):
        if spec.get(key):
            yield Unsupported(
                "UnsupportedField", f"{key} is ignored: each pod has its own namespaces"
            )
    if spec.get("hostUsers") is True:
        yield Unsupported(
            "UnsupportedField", "hostUsers is ignored: pods always have a user namespace"
        )
    if spec.get("runtimeClassName"):
        yield Unsupported(
            "UnsupportedField", "runtimeClassName is ignored: containers run through apptainer"
        )
    for volume in spec.get("volumes") or []:
        medium = (volume.get("emptyDir") or {}).get("medium") or ""
        if medium.startswith("HugePages"):
            yield Unsupported(
                "UnsupportedField",
                f"volume {volume['name']}: medium {medium} is not to be had; it is on disk",
            )
    levels = (security, *_security_contexts(spec))
    if any((level.get("appArmorProfile") or {}).get("type") == "Localhost" for level in levels):
        yield Unsupported(
            "UnsupportedField",
            "appArmorProfile of type Localhost is ignored: only an administrator can load one",
        )
    if any(level.get("seLinuxOptions") for level in levels):
        yield Unsupported(
            "UnsupportedField",
            "seLinuxOptions are ignored: containers run with the label of the user's jobs",
        )


def _of_containers(spec: Object) -> Iterator[Unsupported]:
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    for container in containers:
        name = container["name"]
        for mount in container.get("volumeMounts") or []:
            if mount.get("mountPropagation") in ("Bidirectional", "HostToContainer"):
                yield Unsupported(
                    "UnsupportedField",
                    f"container {name}: mountPropagation {mount['mountPropagation']} of volume "
                    f"{mount['name']} is ignored: mounts don't pass between a user's namespaces",
                )
            if mount.get("recursiveReadOnly") == "Enabled":
                yield Unsupported(
                    "UnsupportedField",
                    f"container {name}: recursiveReadOnly of volume {mount['name']} is ignored: "
                    "mounts below it stay writable",
                )
        context = container.get("securityContext") or {}
        added = {
            name.removeprefix("CAP_")
            for name in (context.get("capabilities") or {}).get("add") or []
        }
        if without := sorted(added & _OF_THE_MACHINE):
            yield Unsupported(
                "UnsupportedField",
                f"container {name}: capability {', '.join(without)} is given in the pod's user "
                "namespace only, where it allows nothing: it is over the whole machine",
            )
        if context.get("privileged"):
            yield Unsupported(
                "UnsupportedField",
                f"container {name}: privileged gives it what the user may do on the compute "
                "node, and nothing more",
            )
        for rule in container.get("restartPolicyRules") or []:
            if rule.get("action") == "RestartAllContainers":
                yield Unsupported(
                    "UnsupportedField",
                    f"container {name}: RestartAllContainers restarts this container alone",
                )


def _of_ranks(pod: Object) -> Iterator[Unsupported]:
    if mpi_words(pod) is None:
        return
    main = main_container(pod)
    container = next(c for c in pod["spec"]["containers"] if c["name"] == main)
    asked = (pod["spec"].get("securityContext") or {}) | (container.get("securityContext") or {})
    ids = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")
    if named := [key for key in ids if asked.get(key) is not None]:
        yield Unsupported(
            "UnsupportedField",
            f"container {main}: {', '.join(named)} are ignored: MPI ranks run as the user of the "
            "Slurm job, whom PMIx and Slurm must know them for",
        )


def _security_contexts(spec: Object) -> Iterator[Object]:
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        yield container.get("securityContext") or {}
