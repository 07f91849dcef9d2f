"""A pod's job as sbatch is asked for it. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpk_kubelet.config import Config
from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm.backend import Partition
from hpk_kubelet.slurm.script import JobRequest, comment
from hpk_kubelet.spec.annotations import gang, mpi_words, own_flags, sharing, slurm_flags, start
from hpk_kubelet.spec.resources import job_resources


def job_request(
    pod: dict[str, Any],
    config: Config,
    *,
    cluster: str,
    partition: Partition,
    pod_dir: Path,
    agent_dir: Path,
) -> JobRequest:
    """HPKError for what Slurm could never accept."""
    metadata, spec = pod["metadata"], pod["spec"]
    mpi = mpi_words(pod)
    if partition.control_job and (mpi is not None or own_flags(pod)):
        raise HPKError(
            "a pod on the node control is a step of the control job: it takes no Slurm flags and "
            "has no MPI ranks; remove the slurm-job.hpk.io annotations or choose another node"
        )
    namespace, name = metadata["namespace"], metadata["name"]
    return JobRequest(
        name=f"{namespace}/{name}",
        comment=comment(cluster, metadata["uid"], namespace, name),
        partition=partition.name,
        resources=job_resources(pod, config.slurm),
        pod_dir=pod_dir,
        agent_dir=agent_dir,
        grace_s=int(spec.get("terminationGracePeriodSeconds") or 0),
        extra_flags=(*config.slurm.extra_flags, *_priority(spec, config)),
        user_flags=tuple(slurm_flags(pod)),
        mpi=mpi is not None,
        lasting=spec.get("restartPolicy", "Always") == "Always",
        limits=partition if partition.nodes else None,
        control_job=partition.control_job,
        sharing=sharing(pod, config.slurm.sharing),
        start=start(pod, config.slurm.start),
        gang=gang(pod),
    )


def _priority(spec: dict[str, Any], config: Config) -> tuple[str, ...]:
    return config.slurm.priority_classes.get(spec.get("priorityClassName") or "", ())
