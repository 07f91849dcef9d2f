"""What Slurm's commands print, as values. Pure."""

from __future__ import annotations

import re
from datetime import datetime

from hpk_kubelet.slurm.backend import Job, Partition

# The comment comes last: it alone may hold the separator. `JobID` is the task's own id in an array.
SQUEUE_FORMAT = (
    "JobID:|,State:|,exit_code:|,Reason:|,NodeList:|,Partition:|,SubmitTime:|,StartTime:|,EndTime:|,"
    "Comment:"
)
SACCT_FORMAT = "JobIDRaw,State,ExitCode,Reason,NodeList,Partition,Submit,Start,End,Comment"


def error_words(text: str) -> str:
    """A command's complaint as one line, without the names of commands and levels."""
    lines = [
        re.sub(r"^(?:\w+: )?(?:fatal|error): (?:Batch job submission failed: )?", "", line.strip())
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


def _job(fields: list[str]) -> Job:
    job_id, word, exit_code, reason, nodes, partition, submitted, started, ended, comment = fields
    code, _, signal = exit_code.partition(":")
    return Job(
        id=job_id,
        word=word,
        reason=_none(reason),
        exit_code=int(code or 0),
        signal=int(signal or 0),
        nodes=_none(nodes),
        partition=partition,
        submitted=_time(submitted),
        started=_time(started),
        ended=_time(ended),
        comment=_none(comment),
    )


def _table(text: str) -> list[Job]:
    rows = (line.split("|", 9) for line in text.splitlines())
    return [_job(row) for row in rows if len(row) == 10]


def squeue(text: str) -> list[Job]:
    """`squeue -h -O SQUEUE_FORMAT`."""
    return _table(text)


def sacct(text: str) -> list[Job]:
    """`sacct -X -n -P -o SACCT_FORMAT`."""
    return _table(text)


def _fields(line: str) -> dict[str, str]:
    """`Name=value Name=value …`, where values may hold spaces (comments, reasons)."""
    found = list(re.finditer(r"(?:^|\s)([A-Z][A-Za-z:/]*)=", line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {
        match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=True)
    }


def scontrol_jobs(text: str) -> list[Job]:
    """`scontrol -o show job`."""
    jobs = []
    for line in text.splitlines():
        fields = _fields(line)
        if "JobId" in fields:
            jobs.append(
                _job(
                    [
                        fields["JobId"],
                        fields.get("JobState", "UNKNOWN"),
                        fields.get("ExitCode", "0:0"),
                        fields.get("Reason", ""),
                        fields.get("NodeList", ""),
                        fields.get("Partition", ""),
                        fields.get("SubmitTime", ""),
                        fields.get("StartTime", ""),
                        fields.get("EndTime", ""),
                        fields.get("Comment", ""),
                    ]
                )
            )
    return jobs


_UNUSABLE = re.compile(r"DOWN|DRAIN|FAIL|UNKNOWN|FUTURE|NOT_RESPONDING|MAINT|REBOOT|\*")


def _gpus(gres: str) -> int:
    """`gpu:2`, `gpu:a100:4(S:0-1),gpu:t4:1` → how many."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)(?=[(,]|$)", gres))


def _duration(text: str) -> int | None:
    """`[D-]HH:MM:SS` in seconds; None for UNLIMITED and its like."""
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
    found = []
    for line in shown.splitlines():
        fields = _fields(line)
        if "PartitionName" not in fields:
            continue
        name = fields["PartitionName"]
        own = members.get(name, [])
        usable = [node for node in own if not _UNUSABLE.search(node.get("State", ""))]

        def numbers(of: list[dict[str, str]], field: str) -> list[int]:
            return [int(node.get(field) or 0) for node in of]

        cpus, memory = numbers(own, "CPUTot"), numbers(own, "RealMemory")
        found.append(
            Partition(
                name=name,
                up=fields.get("State") == "UP",
                default=fields.get("Default") == "YES",
                nodes=len(own),
                nodes_usable=len(usable),
                cpus=sum(cpus),
                cpus_usable=sum(numbers(usable, "CPUTot")),
                memory_mb=sum(memory),
                memory_usable_mb=sum(numbers(usable, "RealMemory")),
                largest_cpus=max(cpus, default=0),
                largest_memory_mb=max(memory, default=0),
                gpus=sum(_gpus(_none(node.get("Gres", ""))) for node in own),
                tmp_mb=sum(numbers(own, "TmpDisk")),
                features=frozenset(
                    feature
                    for node in own
                    for feature in _none(node.get("AvailableFeatures", "")).split(",")
                    if feature
                ),
                max_time_s=_duration(fields.get("MaxTime", "")),
            )
        )
    return found
