"""What of a pod and of the configuration its job is asked for."""

from pathlib import Path

import pytest

from hpk_kubelet.config import Config, SlurmConfig
from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.nodes import missing_partition
from hpk_kubelet.node.request import job_request
from hpk_kubelet.slurm.script import shape


def asked(annotations=None, config=None, **spec):
    pod = {
        "metadata": {"namespace": "ns", "name": "p", "uid": "u", "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main"}], **spec},
    }
    slurm = config or SlurmConfig()
    request = job_request(
        pod, Config(slurm=slurm), cluster="c", partition=missing_partition("main"),
        pod_dir=Path("/p"), agent_dir=Path("/a"),
    )  # fmt: skip
    return shape(request)


def test_a_priority_class_becomes_flags_that_the_pods_own_override():
    config = SlurmConfig(
        extra_flags=("--account=site",),
        priority_classes={"urgent": ("--qos=high", "--nice=0")},
    )
    flags = asked(config=config, priorityClassName="urgent")
    assert flags[-3:] == ("--account=site", "--qos=high", "--nice=0")
    own = {"slurm-job.hpk.io/flags": "--qos=mine"}
    assert asked(own, config, priorityClassName="urgent")[-1] == "--qos=mine"
    assert asked(config=config, priorityClassName="other")[-1] == "--account=site"


@pytest.mark.parametrize(
    ("policy", "annotation", "exclusive"),
    [
        ("shared", None, False),
        ("exclusive", None, True),
        ("shared", "exclusive", True),
        ("exclusive", "shared", False),
    ],
)
def test_sharing_is_the_pods_word_else_the_configurations(policy, annotation, exclusive):
    own = {"slurm-job.hpk.io/sharing": annotation} if annotation else {}
    flags = asked(own, SlurmConfig(sharing=policy))
    assert ("--exclusive=user" in flags) is exclusive


def test_a_namespaces_flags_come_before_the_pods_own():
    marks = {
        "slurm-job.hpk.io/namespace-flags": "--qos=high --nice=3",
        "slurm-job.hpk.io/flags": "--qos=low",
    }
    assert asked(marks)[-3:] == ("--qos=high", "--nice=3", "--qos=low")


def test_the_users_own_flag_is_not_doubled():
    own = {"slurm-job.hpk.io/flags": "--exclusive", "slurm.hpk.io/sharing": "exclusive"}
    assert "--exclusive=user" not in asked(own)


def test_another_word_for_sharing_is_refused():
    with pytest.raises(HPKError, match="'maybe' is neither shared nor exclusive"):
        asked({"slurm-job.hpk.io/sharing": "maybe"})
