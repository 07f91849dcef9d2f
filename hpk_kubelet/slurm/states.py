"""Slurm's job states and pending reasons, and what each means for a pod: one table each.

States from squeue(1), "JOB STATE CODES", Slurm 21.08 to 25.11.
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


def _pending(message: str) -> State:
    return State(Phase.PENDING, "", message)


def _running(message: str) -> State:
    return State(Phase.RUNNING, "", message)


def _ended(reason: str, message: str) -> State:
    return State(Phase.ENDED, reason, message)


STATES: dict[str, State] = {
    "PENDING": _pending("waits in the queue"),
    "CONFIGURING": _pending("has its nodes, which are starting up"),
    "REQUEUED": _pending("was put back into the queue"),
    "REQUEUE_HOLD": _pending("was put back into the queue and is held"),
    "REQUEUE_FED": _pending("was put back into the queue by the federation"),
    "RESV_DEL_HOLD": _pending("is held, its reservation was deleted"),
    "SPECIAL_EXIT": _pending("was put back into the queue in a special state and is held"),
    "EXPEDITING": _pending("was put back into the queue with priority"),
    "RUNNING": _running("runs"),
    "COMPLETING": _running("is ending"),
    "STOPPED": _running("was stopped and keeps its CPUs"),
    "SUSPENDED": _running("is suspended"),
    "RESIZING": _running("changes its size"),
    "SIGNALING": _running("is being signalled"),
    "STAGE_OUT": _running("stages files out"),
    "POWER_UP_NODE": _pending("has its nodes, which are being powered up"),
    "UPDATE_DB": _running("is being recorded"),
    "COMPLETED": _ended("AgentLost", "ended with exit code 0, but the pod's agent left no word"),
    "FAILED": _ended("AgentLost", "failed"),
    "TIMEOUT": _ended("SlurmTimeout", "reached its time limit"),
    "DEADLINE": _ended("SlurmDeadline", "reached its deadline"),
    "OUT_OF_MEMORY": _ended("SlurmOutOfMemory", "used more memory than it asked for"),
    "NODE_FAIL": _ended("NodeFail", "lost a node that failed"),
    "PREEMPTED": _ended("Preempted", "was preempted by a job of higher priority"),
    "CANCELLED": _ended("SlurmCancelled", "was cancelled"),
    "BOOT_FAIL": _ended("SlurmBootFail", "lost a node that did not boot"),
    "LAUNCH_FAILED": _ended("SlurmLaunchFailed", "could not be launched on its node"),
    "RECONFIG_FAIL": _ended("SlurmReconfigFail", "lost a node that could not be reconfigured"),
    "REVOKED": _ended("SlurmRevoked", "was taken over by another cluster of the federation"),
}


def state_of(word: str) -> State:
    """The table's row for what squeue, scontrol or sacct print (`CANCELLED by 1000`,
    `COMPLETED+…`); an unknown state counts as running, so that nothing is given up on a guess."""
    base = re.split(r"[ +]", word.strip(), maxsplit=1)[0].upper()
    return STATES.get(base) or _running(f"is in state {word}")


_REASONS = {
    "Priority": "jobs of higher priority wait before it",
    "Resources": "the resources it asks for are not free yet",
    "Dependency": "another job it depends on has not ended yet",
    "DependencyNeverSatisfied": "a job it depends on can never satisfy the dependency",
    "JobHeldUser": "it is held by the user; `scontrol release` lets it go",
    "JobHeldAdmin": "it is held by an administrator",
    "BeginTime": "its start time is not reached yet",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs at the moment",
    "PartitionTimeLimit": "its time limit is above the partition's",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "ReqNodeNotAvail": "a node it needs is not available",
    "Reservation": "its reservation has not begun",
    "Licenses": "it waits for a license",
    "AssocGrpCpuLimit": "the account's CPU limit is reached",
    "AssocMaxJobsLimit": "the account's limit of running jobs is reached",
    "QOSMaxJobsPerUserLimit": "the QOS's limit of running jobs per user is reached",
    "QOSMaxCpuPerUserLimit": "the QOS's CPU limit per user is reached",
    "JobArrayTaskLimit": "the array's limit of running tasks is reached",
    "NodeDown": "a node it needs is down",
    "BadConstraints": "no node can ever satisfy what it asks for",
    "Cleaning": "what it left from an earlier run is being cleaned up",
    "None": "Slurm has not looked at it yet",
}


def waiting_reason(slurm_reason: str, job_id: str) -> tuple[str, str]:
    """A container's waiting reason and message for a queued job: `SlurmPriority` and a sentence.

    `slurm_reason` is squeue's %r; it may carry a list (`ReqNodeNotAvail, UnavailableNodes:n1`).
    """
    word = re.match(r"[A-Za-z0-9_]*", slurm_reason)
    name = (word[0] if word else "") or "None"
    if name == "None":
        return "SlurmPending", f"Slurm job {job_id} waits: {_REASONS['None']}"
    why = _REASONS.get(name)
    detail = slurm_reason if not why else f"{why} ({slurm_reason})"
    return f"Slurm{name}", f"Slurm job {job_id} waits: {detail}"
