"""Any pod becomes a plan and a script that are whole, or is refused with words; nothing else."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from pod_strategies import POD
from spec_samples import Image, inputs, resolve_user, seccomp_profile

from hpk_kubelet.config import Config
from hpk_kubelet.controllers.claims import Storage, Unschedulable, claims_of
from hpk_kubelet.controllers.fit import choose
from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.nodes import missing_partition
from hpk_kubelet.node.request import job_request
from hpk_kubelet.slurm.script import render_script, sbatch_arguments
from hpk_kubelet.spec.annotations import mpi_words
from hpk_kubelet.spec.build import build_plan
from hpk_kubelet.spec.observed import Observed
from hpk_kubelet.spec.status import build_status
from hpk_kubelet.spec.sysctls import forbidden_sysctl
from hpk_kubelet.spec.unsupported import unsupported
from hpk_kubelet.volumes import VolumeInputs, resolve_volumes, token_requests, write_volumes

EXAMPLES = int(os.environ.get("HPK_EXAMPLES", "30"))
RELAXED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
NODE = {
    "metadata": {"name": "main"},
    "status": {"conditions": [{"type": "Ready", "status": "True"}], "capacity": {"cpu": "8"}},
}
OBJECTS: dict[tuple[str, str], Any] = {
    ("ConfigMap", "a"): {"data": {"main": "x", "": "y", "../..": "z"}},
    ("Secret", "b"): {"data": {"a": "eA==", "$(id)": "not base64"}},
}


def volumes_of(pod: Any, home: Path) -> Any:
    return resolve_volumes(
        pod,
        VolumeInputs(objects=OBJECTS, allocatable={}, pod_dir=home / "pods/u-1", hpk_home=home),
    )


@RELAXED
@given(POD)
def test_the_plan_is_whole_or_refused(pod: Any) -> None:
    try:
        volumes = {name: v.plan for name, v in volumes_of(pod, Path("/h")).items()}
        names = [
            c["name"]
            for kind in ("initContainers", "containers")
            for c in pod["spec"].get(kind, [])
        ]
        given_inputs = inputs(
            {"spec": {"containers": []}},
            images={name: Image() for name in names},
            resolve_user=resolve_user,
            seccomp_profile=seccomp_profile,
            objects=OBJECTS,
            volumes=volumes,
            mpi=mpi_words(pod),
        )
        plan = build_plan(pod, given_inputs)
    except HPKError as e:
        assert str(e)
        return
    assert json.loads(json.dumps(plan)) == plan
    for container in (*plan["initContainers"], *plan["containers"]):
        assert container["argv"] and not any("\0" in word for word in container["argv"])
        assert not any("\0" in k + v or "=" in k for k, v in container["env"].items())
        for mount in container["mounts"]:
            assert ".." not in mount["subPath"].split("/")


@RELAXED
@given(POD)
def test_the_job_is_the_pods_or_refused(pod: Any) -> None:
    """Nothing of a pod is in the script, and of what is given to sbatch nothing is two words."""
    try:
        request = job_request(
            pod,
            Config(),
            cluster="c",
            partition=missing_partition("main"),
            pod_dir=Path("/h/pods/u-1"),
            agent_dir=Path("/h/agent/1"),
        )
        arguments = sbatch_arguments(request)
    except HPKError as e:
        assert str(e)
        return
    assert all(argument.startswith("--") and "\0" not in argument for argument in arguments)
    script = render_script(request)
    assert script == render_script(request.__class__(**{**request.__dict__, "name": "other"}))
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    *_, exec_line = (line for line in script.splitlines() if "exec " in line)
    assert shlex.split(exec_line)[-3:] == ["/h/agent/1", "$@", "/h/pods/u-1"]


@RELAXED
@given(POD)
def test_everything_that_looks_at_a_pod_survives(pod: Any) -> None:
    for look in (
        lambda: unsupported(pod, own_network=False),
        lambda: unsupported(pod, own_network=True),
        lambda: forbidden_sysctl(pod, ("kernel.msg*",)),
        lambda: list(token_requests(pod)),
        lambda: choose(pod, [NODE]),
        lambda: claims_of(pod, Storage({}, {}, {})),
        lambda: json.dumps(build_status(pod, Observed(now=100.0))),
    ):
        try:
            look()
        except (HPKError, Unschedulable) as e:
            assert str(e)


@RELAXED
@given(POD)
def test_volumes_stay_in_their_place(tmp_path: Path, pod: Any) -> None:
    home = tmp_path / "home"
    try:
        volumes = volumes_of(pod, home)
        write_volumes(volumes)
    except HPKError as e:
        assert str(e)
    outside = [p for p in tmp_path.iterdir() if p != home]
    assert outside == []
    if home.exists():
        assert [p.name for p in home.iterdir()] == ["pods"]
