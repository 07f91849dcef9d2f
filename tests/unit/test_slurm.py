import shlex
from pathlib import Path

import pytest
from hypothesis import given as generated
from hypothesis import strategies as st

from hpk_kubelet.config import SlurmConfig
from hpk_kubelet.errors import HPKError
from hpk_kubelet.slurm import parse
from hpk_kubelet.slurm.backend import Job, Partition
from hpk_kubelet.slurm.script import (
    JobRequest,
    comment,
    parse_comment,
    render_script,
    sbatch_arguments,
)
from hpk_kubelet.slurm.states import STATES, Phase, state_of, waiting_reason
from hpk_kubelet.spec.annotations import mpi_words, slurm_flags
from hpk_kubelet.spec.resources import JobResources, job_resources

CONFIG = SlurmConfig(memory_overhead_mb=100, default_memory_mb=500)


def pod(*containers, **spec):
    return {"metadata": {}, "spec": {"containers": list(containers), **spec}}


def needs(restart=None, limits=None, **requests):
    container = {"name": "c", "resources": {"requests": requests, "limits": limits or {}}}
    return container | ({"restartPolicy": restart} if restart else {})


def annotated(text, name="slurm-job.hpk.io/flags"):
    return {"metadata": {"annotations": {name: text}}, "spec": {}}


@pytest.mark.parametrize(
    ("whole", "want"),
    [
        (pod({"name": "c"}), JobResources(1, 600)),
        (pod(needs(cpu="1500m", memory="1Gi")), JobResources(2, 1124)),
        (pod(needs(memory="1Gi", limits={"memory": "2Gi"})), JobResources(1, 2148)),
        (pod(needs(cpu="600m"), needs(cpu="600m")), JobResources(2, 600)),
        (pod(needs(cpu=1), initContainers=[needs(cpu=3)]), JobResources(3, 600)),
        # KEP-753: the sidecar before it counts beside an init container and beside the main ones
        (
            pod(needs(cpu=2), initContainers=[needs("Always", cpu=1), needs(cpu=3)]),
            JobResources(4, 600),
        ),
        (
            pod(needs(cpu=2), initContainers=[needs(cpu=2), needs("Always", cpu=1)]),
            JobResources(3, 600),
        ),
        (
            pod(needs(limits={"nvidia.com/gpu": "2"}), activeDeadlineSeconds=60),
            JobResources(1, 600, gpus=2, gpu_kind="nvidia", time_limit_s=120),
        ),
        (
            pod(needs(**{"ephemeral-storage": "1G"}), nodeSelector={"feature.hpk.io/ssd": "true"}),
            JobResources(1, 600, tmp_mb=954, constraint="ssd"),
        ),
    ],
)
def test_resources(whole, want):
    assert job_resources(whole, CONFIG) == want


def test_a_malformed_quantity_is_named():
    with pytest.raises(HPKError, match=r"container c: resources\.requests\.cpu: 'lots'"):
        job_resources(pod(needs(cpu="lots")), CONFIG)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("--time=10 -p x --exclusive", ["--time=10", "-p", "x", "--exclusive"]),
        ("-n4 --constraint='a&b'", ["-n4", "--constraint=a&b"]),
        ("--ntasks 4", ["--ntasks", "4"]),
    ],
)
def test_flags(text, words):
    assert slurm_flags(annotated(text)) == words
    assert slurm_flags(annotated(text, "slurm.hpk.io/flags")) == words


@pytest.mark.parametrize(
    "text",
    ["'", "echo", "--time=1 echo x", "--wrap=id", "--wra=id", "--arr 1-3", "-a1-3", "-J x", "--",
     "--export ALL", "a\0b", "-o/etc/x", "--comment=hpk:x", "--time=1\x01"],
)  # fmt: skip
def test_flags_that_cannot_be(text):
    with pytest.raises(HPKError, match=r"annotation slurm-job\.hpk\.io/flags: "):
        slurm_flags(annotated(text))


def test_mpi_words():
    assert mpi_words(annotated("--mpi=pmix", "slurm-job.hpk.io/mpi-flag")) == ["--mpi=pmix"]
    assert mpi_words(annotated("", "slurm-job.hpk.io/mpi-flag")) == []
    assert mpi_words(annotated("--mpi=pmix")) is None
    with pytest.raises(HPKError, match="--export"):
        mpi_words(annotated("--export=ALL", "slurm-job.hpk.io/mpi-flag"))


def request(**changes):
    base = {
        "name": "ns/p", "comment": "hpk:c:u:ns/p", "partition": "main",
        "resources": JobResources(2, 600), "pod_dir": Path("/h/50% x/u"), "agent_dir": Path("/a"),
    }  # fmt: skip
    return JobRequest(**(base | changes))


def test_arguments():
    assert sbatch_arguments(request()) == [
        "--parsable", "--job-name=ns/p", "--comment=hpk:c:u:ns/p", "--no-requeue", "--export=NIL",
        "--chdir=/h/50% x/u", "--output=/h/50%% x/u/slurm.out", "--open-mode=append",
        "--signal=B:TERM@45", "--partition=main", "--nodes=1", "--ntasks=1", "--cpus-per-task=2",
        "--mem=600M",
    ]  # fmt: skip


def test_the_users_flags_come_last_and_replace_what_excludes_them():
    flags = ("-n4", "--mem-per-cpu=1G", "--partition=x", "--gpus=1")
    arguments = sbatch_arguments(
        request(user_flags=flags, resources=JobResources(1, 600, gpus=1, gpu_kind="nvidia"))
    )
    assert arguments[-4:] == list(flags)
    assert not [a for a in arguments if a.startswith(("--nodes", "--mem=", "--gres"))]


@generated(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1))
def test_no_path_is_read_by_the_shell(text):
    script = render_script(request(pod_dir=Path("/" + text)))
    line = shlex.quote(str(Path("/" + text)))
    assert f" /a {line}\n" in script


@generated(st.text(), st.text(st.characters(exclude_characters=":")))
def test_comments_are_found_again(name, uid):
    assert parse_comment(comment("c", uid, "ns", name)) == ("c", uid, f"ns/{name}")


def test_the_comments_of_others_are_not_ours():
    assert parse_comment("my:job") is None


SQUEUE = """\
8|FAILED|3:0|NonZeroExitCode|node1|main|1795236424|1795236425|1795236426|we|ird "x" %i
9|PENDING|0:0|JobHeldUser||main|1795236424|N/A|N/A|(null)
"""


def test_squeue():
    assert parse.squeue(SQUEUE) == [
        Job("8", "FAILED", "NonZeroExitCode", 3, 0, "node1", "main", 1795236424, 1795236425,
            1795236426, 'we|ird "x" %i'),
        Job("9", "PENDING", "JobHeldUser", partition="main", submitted=1795236424),
    ]  # fmt: skip


def test_scontrol_job():
    (job,) = parse.scontrol_jobs(
        "JobId=10 JobName=x UserId=alice(1000) JobState=CANCELLED Reason=a b c Dependency=(null) "
        "ExitCode=0:15 SubmitTime=1795236424 StartTime=Unknown EndTime=1795236425 Partition=p "
        "NodeList=n[1-2] Comment=hpk:c:u:ns/p TRES=cpu=1\n"
    )
    assert job == Job("10", "CANCELLED", "a b c", 0, 15, "n[1-2]", "p", 1795236424, 0, 1795236425,
                      "hpk:c:u:ns/p")  # fmt: skip


def test_partitions():
    shown = "PartitionName=main Default=YES MaxTime=1-02:03:04 State=UP\nPartitionName=x State=DOWN"
    nodes = (
        "NodeName=a CPUTot=4 RealMemory=100 State=IDLE Partitions=main,x Gres=gpu:a100:2(S:0-1) "
        "AvailableFeatures=ssd,big TmpDisk=7\n"
        "NodeName=b CPUTot=8 RealMemory=200 State=IDLE+DRAIN Partitions=main Gres=(null)\n"
    )
    assert parse.partitions(shown, nodes) == [
        Partition("main", True, True, 2, 1, 12, 4, 300, 100, 8, 200, 2, 7,
                  frozenset({"ssd", "big"}), 93784),
        Partition("x", False, False, 1, 1, 4, 4, 100, 100, 4, 100, 2, 7,
                  frozenset({"ssd", "big"})),
    ]  # fmt: skip


def test_states():
    assert state_of("CANCELLED by 1000") is STATES["CANCELLED"]
    assert state_of("COMPLETED+x") is STATES["COMPLETED"]
    assert state_of("NOT_INVENTED_YET").phase is Phase.RUNNING
    assert all(state.reason for state in STATES.values() if state.phase is Phase.ENDED)


def test_waiting_reasons():
    assert waiting_reason("Priority", "7") == (
        "SlurmPriority",
        "Slurm job 7 waits: jobs of higher priority wait before it (Priority)",
    )
    assert waiting_reason("ReqNodeNotAvail, UnavailableNodes:n1", "7")[0] == "SlurmReqNodeNotAvail"
    assert waiting_reason("None", "7")[0] == "SlurmPending"
    assert waiting_reason("QOSGrpNodeLimit", "7") == (
        "SlurmQOSGrpNodeLimit", "Slurm job 7 waits: QOSGrpNodeLimit")  # fmt: skip


def test_words():
    text = (
        "sbatch: error: invalid partition specified: nope\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
    )
    assert parse.error_words(text) == (
        "invalid partition specified: nope; Invalid partition name specified"
    )
