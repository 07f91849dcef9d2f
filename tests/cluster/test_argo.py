"""The demo's Argo workflow: a fan-out of MPI jobs and what collects their results."""

from __future__ import annotations

import subprocess
from pathlib import Path

from conftest import ROOT, Namespace, User


def test_the_workflow_succeeds_as_slurm_jobs(alice: User, registry: str) -> None:
    out = Path(
        subprocess.run(
            [ROOT / "bootstrap" / "demo" / "manifests", registry],
            check=True, capture_output=True, text=True,
        ).stdout.strip()
    )  # fmt: skip
    argo = Namespace(alice, "argo")
    apply = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    alice.run("kubectl", *apply, stdin=(out / "argo.yaml").read_text())
    argo.kubectl("rollout", "status", "deployment/workflow-controller", "--timeout=110s")
    argo.kubectl("delete", "workflow", "scaling", "--ignore-not-found")
    argo.kubectl("create", "-f", "-", stdin=(out / "workflow.yaml").read_text())
    argo.kubectl(
        "wait", "workflow/scaling", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=240s",
        timeout=250,
    )  # fmt: skip
    pods = argo.kubectl(
        "get", "pods", "-l", "workflows.argoproj.io/workflow=scaling", "-o", "json"
    ).json()["items"]
    tasks = {}
    for pod in pods:
        flags = pod["metadata"]["annotations"].get("slurm-job.hpk.io/flags")
        if flags:
            shown = alice.run(
                "scontrol", "-o", "show", "job", argo.job(pod["metadata"]["name"])
            ).out
            tasks[flags] = "".join(word for word in shown.split() if word.startswith("NumTasks="))
    assert tasks == {f"--ntasks={n}": f"NumTasks={n}" for n in (2, 4, 8)}
    collected = argo.kubectl(
        "logs", "-l", "workflows.argoproj.io/workflow=scaling", "-c", "main", "--tail=-1"
    ).out
    for n in (2, 4, 8):
        assert f"on {n} procs" in collected
