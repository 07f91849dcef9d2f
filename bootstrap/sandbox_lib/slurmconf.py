"""What a cluster is made of, and Slurm's configuration files for it. Pure."""

from __future__ import annotations

import dataclasses
import re
import zlib

from .base import NAME, SandboxError

HEAD = "head"
"""The node that users log in to; runs slurmctld, the registry and the cluster's DNS."""
NETWORK = "10.213.{}".format(0 if NAME == "hpk" else 1 + zlib.crc32(NAME.encode()) % 254)
"""The first three bytes of every address; the host itself is .1 on it."""
HEAD_ADDRESS = f"{NETWORK}.2"
REGISTRY = "registry.hpk.test:5000"
PRIVATE_REGISTRY = "registry.hpk.test:5001"


@dataclasses.dataclass(frozen=True)
class Options:
    """A cluster, as `up`'s options describe it."""

    nodes: int = 2
    cpus: int = 32  # claimed, per node
    memory: int = 64000  # MB claimed, per node
    gpus: int = 0  # claimed, per node
    partitions: tuple[str, ...] = ("main",)  # NAME or NAME=NODE[+NODE…]; the first is the default
    accounting: bool = False
    cgroup: bool = False  # memory limits by slurmd's cgroup plugin
    sched_delay: int | None = None  # batch_sched_delay in seconds; None: Slurm's own (3)
    extra: tuple[str, ...] = ()  # lines added to slurm.conf

    def names(self) -> list[str]:
        """The compute nodes."""
        return [f"node{i}" for i in range(1, self.nodes + 1)]

    def address(self, name: str) -> str:
        return HEAD_ADDRESS if name == HEAD else f"{NETWORK}.{10 + int(name[4:])}"

    def partition_nodes(self) -> dict[str, list[str]]:
        """Partition → its nodes."""
        parts: dict[str, list[str]] = {}
        for text in self.partitions:
            name, _, nodes = text.partition("=")
            parts[name] = nodes.split("+") if nodes else self.names()
        return parts


def check(options: Options) -> None:
    """Raises SandboxError for a cluster that cannot be."""
    if not 1 <= options.nodes <= 200:
        raise SandboxError(f"--nodes is {options.nodes}: it must be between 1 and 200")
    if options.cpus < 1 or options.memory < 512 or options.gpus < 0:
        raise SandboxError("--cpus must be at least 1, --memory at least 512 (MB), --gpus not < 0")
    for name, nodes in options.partition_nodes().items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise SandboxError(f"--partitions: {name!r} is no partition name")
        unknown = set(nodes) - set(options.names())
        if unknown:
            raise SandboxError(
                f"--partitions: {name} names {', '.join(sorted(unknown))}; this cluster has "
                f"{', '.join(options.names())}"
            )


def slurm_conf(options: Options, first_job_id: int) -> str:
    """slurm.conf. The scheduler's settings are Slurm's own unless --sched-delay says otherwise."""
    lines = [
        "ClusterName=sandbox",
        f"SlurmctldHost={HEAD}({HEAD_ADDRESS})",
        "SlurmUser=slurm",
        "StateSaveLocation=/var/spool/slurmctld",
        "SlurmdSpoolDir=/var/spool/slurmd",
        "SlurmctldPidFile=/run/slurmctld.pid",
        "SlurmdPidFile=/run/slurmd.pid",
        "SlurmctldLogFile=/var/log/slurm/slurmctld.log",
        "SlurmdLogFile=/var/log/slurm/slurmd.log",
        # processes of all nodes are the machine's: no freezer for them
        "ProctrackType=proctrack/linuxproc",
        f"TaskPlugin=task/{'cgroup' if options.cgroup else 'none'}",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # nodes claim more than the machine has
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "SlurmdTimeout=60",
        "DefMemPerCPU=256",
        "MaxArraySize=10001",
        "MaxJobCount=20000",
        # HPK remembers job ids over `down` and `up`; a cluster does not give one out twice
        f"FirstJobId={first_job_id}",
    ]
    if options.sched_delay is not None:
        lines.append(f"SchedulerParameters=batch_sched_delay={options.sched_delay}")
    if options.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={HEAD}",
            "AccountingStorageEnforce=associations,limits,qos",
            "JobAcctGatherType=jobacct_gather/linux",
            "PriorityType=priority/multifactor",
        ]
        if options.gpus:
            lines.append("AccountingStorageTRES=gres/gpu")
    gres = ""
    if options.gpus:
        lines.append("GresTypes=gpu")
        gres = f" Gres=gpu:{options.gpus}"
    lines += [
        f"NodeName={name} NodeAddr={options.address(name)} CPUs={options.cpus} Sockets=1 "
        f"CoresPerSocket={options.cpus} ThreadsPerCore=1 RealMemory={options.memory} "
        f"TmpDisk=0 State=UNKNOWN{gres}"
        for name in options.names()
    ]
    for i, (name, nodes) in enumerate(options.partition_nodes().items()):
        default = " Default=YES" if i == 0 else ""
        lines.append(
            f"PartitionName={name} Nodes={','.join(nodes)}{default} MaxTime=INFINITE State=UP"
        )
    return "\n".join([*lines, *options.extra]) + "\n"


def gres_conf(options: Options) -> str:
    """gres.conf. slurmd ignores a GPU without a device file; the nodes have idle ones."""
    if not options.gpus:
        return ""
    nodes = ",".join(options.names())
    return f"AutoDetect=off\nNodeName={nodes} Name=gpu File=/dev/nvidia[0-{options.gpus - 1}]\n"


SLURMDBD_CONF = f"""\
DbdHost={HEAD}
SlurmUser=slurm
PidFile=/run/slurmdbd.pid
LogFile=/var/log/slurm/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageLoc=slurm_acct_db
StorageUser=slurm
"""


def cgroup_conf(options: Options) -> str:
    """cgroup.conf: without --cgroup nothing of the machine's is touched."""
    if not options.cgroup:
        return "CgroupPlugin=disabled\n"
    return "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nAllowedRAMSpace=100\n"


def hosts(options: Options) -> str:
    """/etc/hosts of every node."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines.append(f"{HEAD_ADDRESS} {HEAD} {REGISTRY.split(':')[0]}")
    lines += [f"{options.address(name)} {name}" for name in options.names()]
    return "\n".join(lines) + "\n"


# `sandbox` / `sandbox`: for pods with imagePullSecrets. docker-registry takes bcrypt alone.
HTPASSWD = "sandbox:$2b$05$abcdefghijklmnopqrstuuKRCM4P211LOQMG/2wRBo2GyNq4J5CyW\n"


def registry_conf(port: int) -> str:
    """docker-registry's configuration; 5001 wants a password and is the same storage."""
    auth = (
        "auth:\n  htpasswd:\n    realm: sandbox\n    path: /etc/slurm/htpasswd\n"
        if port == 5001
        else ""
    )
    return f"""\
version: 0.1
log:
  level: warn
storage:
  filesystem:
    rootdirectory: /var/lib/registry
  delete:
    enabled: true
http:
  addr: :{port}
{auth}"""
