"""A pod's job as sbatch is asked for it. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpk_kubelet.config import Config
from hpk_kubelet.slurm.script import JobRequest, comment
from hpk_kubelet.spec.annotations import slurm_flags
from hpk_kubelet.spec.resources import job_resources


def job_request(
    pod: dict[str, Any],
    config: Config,
    *,
    cluster: str,
    partition: str,
    pod_dir: Path,
    agent_dir: Path,
    longest_s: int | None,
) -> JobRequest:
    """HPKError for what Slurm could never accept; `longest_s` is the partition's time limit."""
    metadata = pod["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    resources = job_resources(pod, config.slurm)
    policy = pod["spec"].get("restartPolicy", "Always")
    if policy == "Always" and resources.time_limit_s is None:
        # Such a pod never ends by itself: it gets all the time there is.
        resources = replace(resources, time_limit_s=longest_s)
    return JobRequest(
        name=f"{namespace}/{name}",
        comment=comment(cluster, metadata["uid"], namespace, name),
        partition=partition,
        resources=resources,
        pod_dir=pod_dir,
        agent_dir=agent_dir,
        grace_s=int(pod["spec"].get("terminationGracePeriodSeconds") or 0),
        extra_flags=tuple(config.slurm.extra_flags),
        user_flags=tuple(slurm_flags(pod)),
    )
