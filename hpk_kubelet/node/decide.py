"""What to do next for one pod: a pure function of what is wanted and what is known.

Nothing here remembers: every call looks at the whole view again, so that a kubelet that was
killed between any two steps goes on where it stopped. Each action may be carried out twice
without harm; whoever carries it out remembers what it has already said, to save traffic.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Want(Enum):
    """What the API says about the pod."""

    RUN = auto()
    DONE = auto()  # its phase is Succeeded or Failed, or is about to be: nothing may run
    STOP = auto()  # it has a deletionTimestamp
    GONE = auto()  # the object does not exist any more (or another pod has its name)


class Stage(Enum):
    """How far the pod has come, as the pod's directory tells."""

    NEW = auto()  # nothing that counts is on disk
    PREPARING = auto()  # this process is at it: pulling, fetching, writing, or asking for the job
    PREPARED = auto()  # plan and script are written, by this process
    INTENDED = auto()  # intent.json without a job id: sbatch may or may not have happened
    SUBMITTED = auto()  # the job id is on disk


class Job(Enum):
    """What Slurm says about the pod's job."""

    UNKNOWN = auto()  # no successful answer that began after the job was submitted
    PENDING = auto()
    RUNNING = auto()  # holds resources in any way, COMPLETING included
    ENDED = auto()  # a successful answer does not list it among the active ones


class Progress(Enum):
    """What the agent said last, over its connection or in its journal."""

    NONE = auto()
    STARTED = auto()
    FINISHED = auto()


class View(NamedTuple):
    want: Want
    stage: Stage
    job: Job
    progress: Progress
    agent: bool  # its connection is up
    overdue: bool  # whoever was to end, asked or by itself, had all the time it was due
    unattended: bool = False  # its job is an allocation, in which no agent was heard for a while


class Action(Enum):
    WAIT = auto()  # for a change of anything
    PREPARE = auto()  # pull, fetch, write
    ABORT = auto()  # give up preparing, or wait for an answer that is on its way
    SUBMIT = auto()  # intent to disk, then sbatch
    ADOPT = auto()  # note the id of the job that was found by its comment or in its journal
    ATTEND = auto()  # see that an agent runs in its allocation
    REPORT = auto()  # it is over: find out how it ended and say so
    STOP = auto()  # tell the agent to end the pod within the grace period
    TERM = auto()  # scancel --batch --signal=TERM
    CANCEL = auto()  # scancel
    FINISH = auto()  # last status, then delete the object from the API
    REMOVE = auto()  # the pod's directory, and with it everything


def decide(v: View) -> Action:
    """The next action; WAIT means that only a change of the view can lead further."""
    if v.stage is Stage.PREPARING:
        return Action.WAIT if v.want is Want.RUN else Action.ABORT
    match v.want:
        case Want.RUN:
            return _run(v)
        case Want.DONE:
            return Action.CANCEL if _lingers(v) else Action.WAIT if _over(v) else _end(v)
        case Want.STOP:
            return Action.FINISH if _over(v) else _end(v)
        case Want.GONE:
            # The directory outlives the job: its agent is still reading and writing there.
            if _nothing_runs(v):
                return Action.REMOVE
            return Action.WAIT if v.progress is Progress.FINISHED and not v.overdue else _end(v)


def _run(v: View) -> Action:
    match v.stage:
        case Stage.NEW:
            return Action.PREPARE
        case Stage.PREPARED:
            return Action.SUBMIT
        case Stage.INTENDED:
            if v.progress is not Progress.NONE or v.job in (Job.PENDING, Job.RUNNING):
                return Action.ADOPT
            return Action.SUBMIT if v.job is Job.ENDED else Action.WAIT
        case _:
            if _over(v) or _requeued(v):
                return Action.REPORT
            forsaken = v.unattended and v.job is Job.RUNNING and not v.agent
            return Action.ATTEND if forsaken else Action.WAIT


def _requeued(v: View) -> bool:
    """Its job waits again, although its agent had begun."""
    return v.job is Job.PENDING and v.progress is Progress.STARTED and not v.agent


def _lingers(v: View) -> bool:
    """The pod is over, and its job should be."""
    queued_again = v.job is Job.PENDING and not v.agent
    lingers = queued_again or (v.job is Job.RUNNING and v.overdue)
    return v.progress is Progress.FINISHED and lingers and not _nothing_runs(v)


def _nothing_runs(v: View) -> bool:
    return v.stage in (Stage.NEW, Stage.PREPARED) or v.job is Job.ENDED


def _over(v: View) -> bool:
    return _nothing_runs(v) or v.progress is Progress.FINISHED


def _end(v: View) -> Action:
    """The way to end a pod that may be running."""
    if v.overdue:
        return Action.CANCEL
    if v.agent:
        return Action.STOP
    match v.job:
        case Job.PENDING:
            return Action.CANCEL
        case Job.RUNNING:
            # Without an owner there is nobody to be polite for.
            return Action.CANCEL if v.want is Want.GONE else Action.TERM
        case _:
            return Action.WAIT
