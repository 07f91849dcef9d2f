"""How pods share compute nodes with what else runs there: what sbatch is told, and what a virtual
node then has to offer. A policy is one class and one line in POLICIES. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from hpk_kubelet.slurm.model import Job, Partition
from hpk_kubelet.slurm.states import Phase

Policy = Literal["shared", "exclusive"]


@dataclass(frozen=True)
class Amounts:
    """Memory in MB."""

    cpus: int = 0
    memory_mb: int = 0
    gpus: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.cpus + other.cpus, self.memory_mb + other.memory_mb, self.gpus + other.gpus
        )

    def less(self, other: Amounts) -> Amounts:
        """What remains, nothing below 0."""
        return Amounts(
            max(0, self.cpus - other.cpus),
            max(0, self.memory_mb - other.memory_mb),
            max(0, self.gpus - other.gpus),
        )


class Sharing(Protocol):
    @property
    def flags(self) -> tuple[str, ...]:
        """For sbatch; the pod's own win."""

    def offered(self, node: Amounts, others: Amounts) -> Amounts:
        """What pods may have of a usable node on which `others` is held by other jobs."""


class Shared:
    """Pods run beside anybody's jobs, as Slurm packs them."""

    flags: tuple[str, ...] = ()

    def offered(self, node: Amounts, others: Amounts) -> Amounts:
        return node.less(others)


class Exclusive:
    """Pods share nodes with jobs of the same user alone."""

    flags = ("--exclusive=user",)

    def offered(self, node: Amounts, others: Amounts) -> Amounts:
        return node if others == Amounts() else Amounts()


POLICIES: dict[Policy, Sharing] = {"shared": Shared(), "exclusive": Exclusive()}


def offered(partition: Partition, own: dict[str, Amounts], policy: Sharing) -> Amounts:
    """What the partition has for pods; `own`: what pods hold already, by compute node."""
    total = Amounts()
    for node in partition.members:
        if node.usable:
            held = Amounts(node.cpus_held, node.memory_held_mb, node.gpus_held)
            whole = Amounts(node.cpus, node.memory_mb, node.gpus)
            total += policy.offered(whole, held.less(own.get(node.name, Amounts())))
    return total


def held(jobs: Iterable[Job]) -> dict[str, Amounts]:
    """What the jobs hold, by compute node; of a job on several, each is taken to give the same."""
    result: dict[str, Amounts] = {}
    for job in jobs:
        if job.phase is not Phase.RUNNING:
            continue
        nodes = expand(job.nodes)
        amounts = tres(job.tres)
        for name in nodes:
            share = Amounts(
                -(-amounts.cpus // len(nodes)),
                -(-amounts.memory_mb // len(nodes)),
                -(-amounts.gpus // len(nodes)),
            )
            result[name] = result.get(name, Amounts()) + share
    return result


def tres(text: str) -> Amounts:
    """`cpu=2,mem=704M,node=1,gres/gpu=1`; fractions of units as Slurm writes them (`62.50G`)."""
    fields = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    gpus = fields.get("gres/gpu", "0")
    return Amounts(
        int(fields.get("cpu", "0")), _megabytes(fields.get("mem", "0")), int(gpus or "0")
    )


def _megabytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)([KMGTP]?)", text)
    if match is None:
        return 0
    return int(float(match[1]) * 1024.0 ** ("KMGTP".find(match[2] or "M") - 1))


def expand(hostlist: str) -> list[str]:
    """The names of `n[1-2,07-08],gpu3` (hostlist of scontrol(1))."""
    names: list[str] = []
    for item in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", hostlist):
        found = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            parts = [text] if text else _numbers(ranges)
            found = [left + right for left in found for right in parts]
        names += found
    return names


def _numbers(ranges: str) -> list[str]:
    result = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        result += [
            str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)
        ]
    return result
