"""Slurm's job states and reasons, and what each means for a pod: one table each.

States from squeue(1), "JOB STATE CODES", and job_state_string() in slurm_protocol_defs.c; reasons
from job_state_reason.c; Slurm 21.08 to 25.11. A message continues the words "Slurm job N …".
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    PENDING = "pending"
    RUNNING = "running"  # holds its nodes, also while suspended or completing
    ENDED = "ended"


class State(NamedTuple):
    phase: Phase
    reason: str  # of the pod, where the job ended without its agent's word
    message: str


NO_PYTHON = 78  # exit code of the job's script where it finds no Python for the agent (EX_CONFIG)

_PENDING = {
    "PENDING": "waits in the queue",
    "CONFIGURING": "has its nodes, which are starting up",
    "POWER_UP_NODE": "has its nodes, which are being powered up",
    "REQUEUED": "was put back into the queue",
    "REQUEUE_FED": "was put back into the queue by the federation",
    "REQUEUE_HOLD": "was put back into the queue and is held",
    "SPECIAL_EXIT": "was put back into the queue in a special state and is held",
    "RESV_DEL_HOLD": "is held, because its reservation was deleted",
    "EXPEDITING": "was put back into the queue with the highest priority",
}
_RUNNING = {
    "RUNNING": "runs",
    "COMPLETING": "is ending",
    "STOPPED": "was stopped and keeps its CPUs",
    "SUSPENDED": "is suspended",
    "RESIZING": "changes its size",
    "SIGNALING": "is being signalled",
    "STAGE_OUT": "stages files out",
    "UPDATE_DB": "is being recorded",
}
_ENDED = {
    "COMPLETED": ("AgentLost", "ended, but its agent left no word about the containers"),
    "FAILED": ("AgentLost", "failed before its agent could tell how the containers ended"),
    "TIMEOUT": ("SlurmTimeout", "reached its time limit"),
    "DEADLINE": ("SlurmDeadline", "reached its deadline"),
    "OUT_OF_MEMORY": ("SlurmOutOfMemory", "used more memory than it asked for"),
    "NODE_FAIL": ("NodeFail", "lost a node, which failed"),
    "PREEMPTED": ("Preempted", "was preempted by a job of higher priority"),
    "CANCELLED": ("SlurmCancelled", "was cancelled"),
    "BOOT_FAIL": ("SlurmBootFail", "lost a node, which did not boot"),
    "LAUNCH_FAILED": ("SlurmLaunchFailed", "could not be launched on its node"),
    "RECONFIG_FAIL": ("SlurmReconfigFail", "lost a node, which could not be reconfigured"),
    "REVOKED": ("SlurmRevoked", "was taken over by another cluster of the federation"),
}
STATES: dict[str, State] = (
    {word: State(Phase.PENDING, "", message) for word, message in _PENDING.items()}
    | {word: State(Phase.RUNNING, "", message) for word, message in _RUNNING.items()}
    | {word: State(Phase.ENDED, *pair) for word, pair in _ENDED.items()}
)
# What Slurm's reason adds to a state that says little by itself.
_FAILURES = {
    "BadConstraints": ("SlurmBadConstraints", "was refused: no node can ever give what it asks"),
    "Constraints": ("SlurmBadConstraints", "was refused: no node can ever give what it asks"),
    "JobLaunchFailure": ("SlurmLaunchFailed", "could not be launched on its node"),
    "Prolog": ("SlurmLaunchFailed", "could not be launched: the site's prolog failed"),
    "SystemFailure": ("SlurmSystemFailure", "failed by a fault of Slurm's own"),
    "NodeDown": ("NodeFail", "lost a node, which failed"),
    "OutOfMemory": ("SlurmOutOfMemory", "used more memory than it asked for"),
    "InvalidAccount": ("SlurmInvalidAccount", "was refused: its account is not valid"),
    "InvalidQOS": ("SlurmInvalidQOS", "was refused: its QOS is not valid"),
    "InactiveLimit": ("SlurmInactiveLimit", "was inactive for longer than the site allows"),
}


def state_of(word: str, reason: str = "", exit_code: int = 0) -> State:
    """The state for what squeue, scontrol or sacct print (`CANCELLED by 1000`, `COMPLETED+`), with
    the job's reason and exit code where it ended.

    An unknown state counts as running, so that nothing is given up on a guess.
    """
    base = re.split(r"[ +]", word.strip(), maxsplit=1)[0].upper()
    state = STATES.get(base)
    if state is None:
        return State(Phase.RUNNING, "", f"is in state {word}")
    if base == "CANCELLED" and reason == "DependencyNeverSatisfied":
        return state._replace(message="was cancelled: its dependency can never be satisfied")
    if base != "FAILED":
        return state
    if reason in _FAILURES:
        return State(Phase.ENDED, *_FAILURES[reason])
    if exit_code == NO_PYTHON:
        return State(
            Phase.ENDED,
            "NoPython",
            "found no Python 3.9 or newer on its node; slurm.out in the pod's directory says "
            "where it looked",
        )
    return state


_REASONS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs of higher priority wait before it",
    "Resources": "the resources it asks for are not free yet",
    "Dependency": "a job it depends on has not ended yet",
    "DependencyNeverSatisfied": "a job it depends on can never satisfy the dependency; delete the "
    "pod",
    "JobHeldUser": "it is held; `scontrol release` lets it go",
    "JobHeldAdmin": "it is held by an administrator",
    "JobHoldMaxRequeue": "it was requeued too often and is held",
    "BeginTime": "the time it may start at is not reached yet",
    "Cleaning": "what it left from an earlier run is being cleaned up",
    "Prolog": "the site's prolog is still running",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition starts no jobs at the moment",
    "PartitionTimeLimit": "its time limit is above the partition's; lower --time or "
    "activeDeadlineSeconds",
    "PartitionNodeLimit": "the number of nodes it asks for is not within the partition's limits, "
    "or too many of them are down",
    "PartitionConfig": "the partition's configuration does not allow what it asks for",
    "ReqNodeNotAvail": "a node it needs is not available: down, drained or reserved",
    "NodeDown": "a node it needs is down",
    "NodesUnavailable": "the nodes it could run on are down, drained or kept for other jobs",
    "BadConstraints": "no node can ever give what it asks for",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": "its reservation was deleted",
    "ReservationInvalid": "its reservation is not valid",
    "Licenses": "a license it needs is not free",
    "BurstBufferResources": "the burst buffer it asks for is not free",
    "BurstBufferStageIn": "its files are being staged into the burst buffer",
    "JobArrayTaskLimit": "the array's limit of running tasks is reached",
    "MaxMemPerLimit": "it asks for more memory than a job may have here",
    "InvalidAccount": "its account is not valid; --account names another",
    "InvalidQOS": "its QOS is not valid; --qos names another",
    "AccountNotAllowed": "its account may not use the partition; --account names another",
    "QOSNotAllowed": "its QOS may not be used in the partition; --qos names another",
    "AssocMaxJobsLimit": "your account's limit of running jobs is reached",
    "AssocMaxSubmitJobLimit": "your account's limit of queued jobs is reached",
    "QOSMaxJobsPerUserLimit": "the QOS's limit of running jobs per user is reached",
    "QOSMaxSubmitJobPerUserLimit": "the QOS's limit of queued jobs per user is reached",
    "SchedDefer": "Slurm defers starting jobs at the moment",
    "JobLaunchFailure": "it could not be launched on its node and is held",
}
_FAMILIES = (
    (re.compile(r"AssocGrp"), "a limit that your account's users share is reached"),
    (re.compile(r"Assoc(Max)?"), "a limit of your account is reached or below what it asks for"),
    (re.compile(r"QOSGrp"), "a limit that all jobs of the QOS share is reached"),
    (re.compile(r"QOSMin"), "it asks for less than the QOS's minimum"),
    (re.compile(r"QOS"), "a limit of the QOS is reached or below what it asks for"),
    (re.compile(r"Max\w+PerAccount"), "a limit per account of the QOS is reached"),
)
# Sentences that Slurm writes in place of a reason's name.
_SENTENCES = (
    (re.compile(r"Nodes required for job are DOWN", re.I), "NodesUnavailable"),
    (re.compile(r"launch failed|prolog", re.I), "JobLaunchFailure"),
)


def waiting_reason(slurm_reason: str, job_id: str) -> tuple[str, str]:
    """A container's waiting reason and message for a queued job: `SlurmPriority` and a sentence.

    `slurm_reason` is squeue's: a name, a name with details (`ReqNodeNotAvail,
    UnavailableNodes:n1`), or a sentence.
    """
    name = (re.match(r"\w*", slurm_reason) or [""])[0] or "None"
    if " " in re.split(r"[,:]", slurm_reason, maxsplit=1)[0]:
        name = next((n for pattern, n in _SENTENCES if pattern.search(slurm_reason)), "")
    why = _REASONS.get(name) or next((t for p, t in _FAMILIES if p.match(name)), "")
    said = "" if slurm_reason in ("", "None") else slurm_reason
    detail = f"{why} ({said})" if why and said else why or said
    reason = "SlurmPending" if name in ("", "None") else f"Slurm{name}"
    return reason, f"Slurm job {job_id} waits: {detail}"
