"""What Slurm's commands print, as values. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from hpk_kubelet.slurm.model import ComputeNode, Job, Limits, Partition

SEPARATOR = "\x1f"
"""Between fields: what no name and no reason holds. The comment, which may, comes last."""
# A field without a size is as wide as it must be; what follows its colon follows the field.
SQUEUE_FORMAT = ",".join(
    [
        f"{field}:{SEPARATOR}"
        for field in (
            "JobArrayID", "State", "exit_code", "Reason", "NodeList", "Partition",
            "SubmitTime", "StartTime", "EndTime", "tres-alloc",
        )
    ]
    + ["Comment:"]
)  # fmt: skip
SACCT_FORMAT = "JobID,State,ExitCode,Reason,NodeList,Partition,Submit,Start,End,AllocTRES,Comment"
_FIELDS = 11


def error_words(text: str) -> str:
    """A command's complaint as one line, without the names of commands and levels."""
    prefix = r"^(?:\w+: )?(?:(?:fatal|error): )?(?:Batch job submission failed: )?"
    lines = [
        re.sub(prefix, "", line.strip())
        for line in text.splitlines()
        if line.strip() and not line.startswith("Try ")
    ]
    return "; ".join(dict.fromkeys(line.strip() for line in lines))


def _time(text: str) -> float:
    """Unix seconds of `%s` or ISO times; 0 for Unknown, N/A and the like."""
    if text.isdigit():
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _none(text: str) -> str:
    return "" if text in ("(null)", "N/A", "n/a", "None assigned") else text


def _exit(text: str) -> tuple[int, int]:
    """(exit code, signal) of `3:0`; (0, 0) where there is none."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def jobs(text: str) -> list[Job]:
    """`squeue -h -O SQUEUE_FORMAT` or `sacct -X -n -P --delimiter=SEPARATOR -o SACCT_FORMAT`.

    A comment of several lines leaves lines that are no job; HPK's own comments are one line.
    """
    found = []
    for line in text.split("\n"):
        fields = line.split(SEPARATOR, _FIELDS - 1)
        if len(fields) != _FIELDS:
            continue
        job, word, exit_, reason, nodes, partition, submitted, started, ended, tres, comment = (
            fields
        )
        code, signal = _exit(exit_)
        found.append(
            Job(
                id=job,
                word=word,
                reason=_none(reason),
                exit_code=code,
                signal=signal,
                nodes=_none(nodes),
                partition=partition,
                submitted=_time(submitted),
                started=_time(started),
                ended=_time(ended),
                tres=_none(tres),
                comment=_none(comment),
            )
        )
    return found


def limits(text: str) -> Limits:
    """`scontrol show config`."""
    fields = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.M))
    size = fields.get("MaxArraySize", "")
    return Limits(
        array_size=int(size) if size.isdigit() else 0,
        inactive=re.match(r"0\b", fields.get("InactiveLimit", "")) is None,
        client_filters=_none(fields.get("CliFilterPlugins", "")),
    )


def failed_ids(text: str) -> dict[str, str]:
    """scancel's complaints by job id: `… error on job id 7: Invalid job id specified`."""
    return {
        match[1]: match[2].strip()
        for match in re.finditer(r"on job id (\d+(?:[_.]\d+)?): ([^\n;]+)", text)
    }


def _fields(line: str) -> dict[str, str]:
    """`Name=value Name=value …`, where values may hold spaces. The first of a name counts: free
    text (a node's Reason, Comment and Extra) comes last and may look like a field."""
    found = list(re.finditer(r"(?:^|\s)([A-Z][A-Za-z:/]*)=", line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    fields: dict[str, str] = {}
    for match, end in zip(found, ends, strict=True):
        fields.setdefault(match[1], line[match.end() : end].strip())
    return fields


# Base states and flags of scontrol's node State (`IDLE+DRAIN+NOT_RESPONDING`) under which no job
# starts. A node that is powered down is not among them: Slurm powers it up for a job.
_UNUSABLE = frozenset(
    {
        "DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "INVAL",
        "INVALID_REG", "MAINT", "NOT_RESPONDING", "POWERING_DOWN", "REBOOT", "REBOOT_ISSUED",
        "REBOOT_REQUESTED", "UNKNOWN",
    }
)  # fmt: skip


def _usable(node: dict[str, str]) -> bool:
    state = node.get("State", "")
    return not state.endswith("*") and _UNUSABLE.isdisjoint(re.split(r"[+*]", state))


def _number(node: dict[str, str], *names: str) -> int:
    """The first of the fields that the node has; 0 where it has none."""
    return next((int(node[name]) for name in names if node.get(name, "").isdigit()), 0)


def _cpus(node: dict[str, str]) -> int:
    return _number(node, "CPUEfctv", "CPUTot")  # CPUEfctv: less those kept for the system (22.05)


def _memory(node: dict[str, str]) -> int:
    return max(0, _number(node, "RealMemory") - _number(node, "MemSpecLimit"))


def _gpus(gres: str) -> int:
    """`gpu:2`, `gpu:a100:4(S:0-1),gpu:t4:1` → how many."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)(?=[(,]|$)", gres))


_AMD = re.compile(r"(?:^|,)gpu:(?:mi\d|amd|instinct|radeon|gfx|vega)", re.IGNORECASE)


def _gpu_resource(gres: Iterable[str]) -> str:
    """Slurm says no vendor: the type, where a site names one, tells AMD's from the others."""
    return "amd.com/gpu" if any(_AMD.search(text) for text in gres) else "nvidia.com/gpu"


def _duration(text: str) -> int | None:
    """`[D-]HH:MM:SS` in seconds; None for UNLIMITED, NONE and their like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def partitions(shown: str, nodes: str) -> list[Partition]:
    """`scontrol -o show partition` with `scontrol -o show node`."""
    members: dict[str, list[dict[str, str]]] = {}
    for line in nodes.splitlines():
        node = _fields(line)
        for name in _none(node.get("Partitions", "")).split(","):
            members.setdefault(name, []).append(node)
    rows = (_fields(line) for line in shown.splitlines())
    return [
        _partition(fields, members.get(fields["PartitionName"], []))
        for fields in rows
        if "PartitionName" in fields
    ]


def _partition(fields: dict[str, str], nodes: list[dict[str, str]]) -> Partition:
    usable = [node for node in nodes if _usable(node)]
    cpus, memory = [_cpus(node) for node in nodes], [_memory(node) for node in nodes]
    return Partition(
        name=fields["PartitionName"],
        up=fields.get("State") == "UP",
        default=fields.get("Default") == "YES",
        nodes=len(nodes),
        nodes_usable=len(usable),
        cpus=sum(cpus),
        cpus_usable=sum(map(_cpus, usable)),
        memory_mb=sum(memory),
        memory_usable_mb=sum(map(_memory, usable)),
        largest_cpus=max(cpus, default=0),
        largest_memory_mb=max(memory, default=0),
        gpus=sum(_gpus(node.get("Gres", "")) for node in nodes),
        gpu_resource=_gpu_resource(node.get("Gres", "") for node in nodes),
        tmp_mb=sum(_number(node, "TmpDisk") for node in nodes),
        features=_features(nodes),
        max_time_s=_duration(fields.get("MaxTime", "")),
        default_time_s=_duration(fields.get("DefaultTime", "")),
        members=tuple(map(_node, nodes)),
    )


def _node(fields: dict[str, str]) -> ComputeNode:
    match = re.search(r"gres/gpu=(\d+)", fields.get("AllocTRES", ""))
    return ComputeNode(
        name=fields.get("NodeName", ""),
        usable=_usable(fields),
        cpus=_cpus(fields),
        memory_mb=_memory(fields),
        gpus=_gpus(fields.get("Gres", "")),
        cpus_held=_number(fields, "CPUAlloc"),
        memory_held_mb=_number(fields, "AllocMem"),
        gpus_held=int(match[1]) if match else 0,
    )


def _features(nodes: Iterable[dict[str, str]]) -> frozenset[str]:
    lists = (_none(node.get("AvailableFeatures", "")).split(",") for node in nodes)
    return frozenset(feature for features in lists for feature in features if feature)
