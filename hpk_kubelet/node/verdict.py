"""What Slurm's view of a job means for its pod: why it waits, how it ended. Pure."""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping
from typing import Any

from hpk_kubelet.node.decide import Job as JobView
from hpk_kubelet.node.decide import Progress, Want
from hpk_kubelet.node.jobs import Snapshot
from hpk_kubelet.slurm.backend import Job
from hpk_kubelet.slurm.states import Phase, waiting_reason
from hpk_kubelet.spec.observed import Ended, Waiting
from hpk_kubelet.spec.plan import PodState

Object = dict[str, Any]

_PHASES = {
    Phase.PENDING: JobView.PENDING,
    Phase.RUNNING: JobView.RUNNING,
    Phase.ENDED: JobView.ENDED,
}


def want(pod: Object | None, given_up: bool) -> Want:
    if pod is None:
        return Want.GONE
    if pod["metadata"].get("deletionTimestamp"):
        return Want.STOP
    terminal = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return Want.DONE if terminal or given_up else Want.RUN


def grace_period(pod: Object | None) -> int:
    """Seconds the pod has to end from the moment it is asked to."""
    if pod is None:
        return 0
    asked = pod["metadata"].get("deletionGracePeriodSeconds")
    if asked is None:
        asked = pod["spec"].get("terminationGracePeriodSeconds", 30)
    return max(0, int(asked))


def progress(state: PodState | None) -> Progress:
    if state is None:
        return Progress.NONE
    return Progress.FINISHED if state["finished"] else Progress.STARTED


def find_job(snapshot: Snapshot | None, uid: str, job_id: str) -> Job | None:
    """The pod's job: by its id, or where that is not known yet, by the comment. Of several with
    the same comment (sbatch was done, then done again after a crash) the first that is active:
    it is the one whose agent comes first."""
    if snapshot is None:
        return None
    if job_id:
        return snapshot.by_id.get(job_id)
    jobs = sorted(snapshot.by_uid.get(uid, ()), key=lambda job: (len(job.id), job.id))
    return next((job for job in jobs if job.phase is not Phase.ENDED), jobs[0] if jobs else None)


def job_view(
    snapshot: Snapshot | None, uid: str, job_id: str, since: float, told: float = 0.0
) -> JobView:
    """`since`: when (time.monotonic()) the job was submitted, or the last try was; `told`: when
    its agent was last heard of, so that an older answer may not call it queued."""
    job = find_job(snapshot, uid, job_id)
    if job is not None:
        assert snapshot is not None
        if job.phase is Phase.PENDING and snapshot.began <= told:
            return JobView.RUNNING
        return _PHASES[job.phase]
    if snapshot is not None and snapshot.began > since:
        return JobView.ENDED
    if not job_id or since <= 0:
        return JobView.UNKNOWN
    return JobView.RUNNING if told else JobView.PENDING  # submitted a moment ago


def waiting(job: Job | None, job_id: str) -> Waiting | None:
    """Why nothing runs yet; None once the job has started."""
    if job is not None and job.phase is not Phase.PENDING:
        return None
    return Waiting(*waiting_reason(job.reason if job else "None", job_id))


def ended(job: Job | None, job_id: str, output: str) -> Ended:
    """How a pod ended whose agent left no last word; `output` is what the job itself printed."""
    if job is None:
        control_job, is_step, _ = job_id.partition(".")
        if is_step:
            return Ended(
                "ControlJobEnded", f"the control job {control_job}, in which the pod ran, has ended"
            )
        return Ended(
            "JobLost",
            f"Slurm does not know job {job_id} any more, and the pod's agent left no last word",
        )
    where = f" on {job.nodes}" if job.nodes else ""
    message = f"Slurm job {job_id}{where} {job.state.message}"
    if job.exit_code:
        message += f" with exit code {job.exit_code}"
    elif job.signal:
        message += f" by signal {job.signal}"
    if job.reason and job.reason not in ("None", "NonZeroExitCode"):
        message += f" ({job.reason})"
    if said := last_line(output):
        message += f"; its last words: {said}"
    return Ended(job.state.reason or "JobEnded", message, finished_at=job.ended or None)


GUESSED = ("Terminated", "SlurmTimeout")
"""An agent's reasons for having been told to end: a signal does not say why it was sent."""


def judged(state: PodState | None, job: Job | None) -> PodState | None:
    """The agent's last word with Slurm's reason in place of its guess, where Slurm has one."""
    if state is None or state.get("reason") not in GUESSED or job is None:
        return state
    if job.phase is not Phase.ENDED or not job.state.reason or job.state.reason == "AgentLost":
        return state
    where = f" on {job.nodes}" if job.nodes else ""
    message = f"Slurm job {job.id}{where} {job.state.message}"
    return {**state, "reason": job.state.reason, "message": message}


def suspended(job: Job | None) -> str:
    """Why nothing of a running pod moves; "" while it does."""
    if job is None or job.word not in ("SUSPENDED", "STOPPED"):
        return ""
    return f"Slurm job {job.id} {job.state.message}"


def requeued(job_id: str) -> Ended:
    """A job that had started waits in the queue again; it would find its agent's journal there."""
    return Ended(
        "SlurmRequeued",
        f"Slurm job {job_id} was put back into the queue after it had started; its pod is over, "
        "since containers that may have done their work must not run twice",
    )


def last_line(output: str, longest: int = 300) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:longest] if lines else ""


def merged(status: Mapping[str, Any], own: Mapping[str, Any] | None) -> Object:
    """The API's status with what this kubelet computed last over it, which the API may not show
    yet. Conditions of others (the scheduler's, readiness gates) stay."""
    if own is None:
        return dict(status)
    mine = {c["type"] for c in own.get("conditions") or ()}
    others = [c for c in status.get("conditions") or () if c["type"] not in mine]
    return {**status, **own, "conditions": [*(own.get("conditions") or ()), *others]}


def unix(time_text: str) -> float:
    """Of an API time in UTC with whole seconds."""
    return float(calendar.timegm(time.strptime(time_text[:19], "%Y-%m-%dT%H:%M:%S")))
