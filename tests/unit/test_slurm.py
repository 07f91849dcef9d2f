import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given as generated
from hypothesis import strategies as st

from hpk_kubelet.errors import HPKError
from hpk_kubelet.node.nodes import resources
from hpk_kubelet.slurm import parse
from hpk_kubelet.slurm.backend import Job, Partition
from hpk_kubelet.slurm.model import ComputeNode
from hpk_kubelet.slurm.script import (
    JobRequest,
    comment,
    parse_comment,
    parse_time_limit,
    render_script,
    sbatch_arguments,
)
from hpk_kubelet.slurm.sharing import Amounts
from hpk_kubelet.slurm.states import STATES, Phase, State, state_of, waiting_reason
from hpk_kubelet.spec.resources import JobResources

MAIN = Partition("main", True, True, 2, 2, 64, 64, 128000, 128000, 32, 64000)


def request(**changes):
    base = {
        "name": "ns/p", "comment": "hpk:c:u:ns/p", "partition": "main",
        "resources": JobResources(2, 600), "pod_dir": Path("/h/50% x/u"), "agent_dir": Path("/a"),
    }  # fmt: skip
    return JobRequest(**(base | changes))


def test_arguments():
    assert sbatch_arguments(request()) == [
        "--parsable", "--job-name=ns/p", "--comment=hpk:c:u:ns/p", "--chdir=/h/50% x/u",
        "--output=/h/50%% x/u/slurm.out", "--no-requeue", "--export=NIL", "--open-mode=append",
        "--signal=B:TERM@45", "--partition=main", "--nodes=1", "--ntasks=1", "--cpus-per-task=2",
        "--mem=600M",
    ]  # fmt: skip


def test_arguments_of_all_there_is():
    resources = JobResources(2, 600, 70, 1, "nvidia", 3601, "a&b")
    assert sbatch_arguments(request(resources=resources, extra_flags=("-A", "acct")))[10:] == [
        "--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--mem=600M", "--tmp=70M", "--gres=gpu:1",
        "--time=61", "--constraint=a&b", "--account=acct",
    ]  # fmt: skip


def derived(**changes):
    """The derived arguments that say how much of what, without the user's flags."""
    whole = request(**changes)
    arguments = sbatch_arguments(whole)
    flags = len(whole.extra_flags) + len(whole.user_flags)
    return arguments[9 : len(arguments) - flags]


def test_the_users_flags_come_last_and_replace_what_excludes_them():
    flags = ("--mem-per-cpu=1G", "--partition=x", "--gpus=1", "--cpus-per-gpu=2", "--time=5")
    gpu = JobResources(1, 600, 0, 1, "nvidia", 500)
    assert sbatch_arguments(request(user_flags=flags, resources=gpu))[-5:] == list(flags)
    assert derived(user_flags=flags, resources=gpu) == ["--nodes=1", "--ntasks=1"]


@pytest.mark.parametrize(
    ("flags", "mpi", "want"),
    [
        (("-n4",), False, ["--nodes=1"]),  # without srun, other nodes would stand idle
        (("-n4",), True, []),
        (("-N2",), True, []),  # Slurm's default is then a task per node
        (("-N2", "--ntasks-per-node=2"), True, []),
        (("-wn1",), False, ["--ntasks=1"]),
        (("-wn[1-2]", "-N2"), False, []),
        ((), True, ["--nodes=1", "--ntasks=1"]),
    ],
)
def test_nodes_and_tasks(flags, mpi, want):
    assert derived(user_flags=flags, mpi=mpi)[1:-2] == want


def test_a_bad_flag_of_the_sites_is_told():
    with pytest.raises(HPKError, match=r"^slurm.extraFlags in the configuration: 'echo'"):
        request(extra_flags=("echo",))


def time_of(**changes):
    arguments = sbatch_arguments(request(**changes))
    times = [a.removeprefix("--time=") for a in arguments if a.startswith("--time=")]
    signals = [a.removeprefix("--signal=B:TERM@") for a in arguments if a.startswith("--signal")]
    return times, int(signals[0])


def test_time_limits():
    day = JobResources(1, 600, time_limit_s=86400)
    hour = replace(MAIN, max_time_s=3600, default_time_s=600)
    assert time_of(resources=day) == (["1440"], 45)
    assert time_of(resources=day, limits=MAIN) == (["1440"], 45)
    # a deadline is no request: the partition may have less
    assert time_of(resources=day, limits=hour) == (["60"], 45)
    assert time_of(resources=day, limits=hour, user_flags=("-px",)) == (["1440"], 45)
    # what never ends by itself gets all there is
    assert time_of(lasting=True, limits=hour) == (["60"], 45)
    assert time_of(lasting=True, limits=MAIN) == ([], 45)
    assert time_of(lasting=True, limits=replace(hour, max_time_s=None)) == (["UNLIMITED"], 45)
    assert time_of(lasting=True, limits=hour, user_flags=("--time=2",)) == (["2"], 30)
    assert time_of(limits=hour) == ([], 45)


def test_the_signal_leaves_the_pod_half_its_time():
    assert time_of(user_flags=("--time=1",)) == (["1"], 1)
    assert time_of(user_flags=("--time=1",), grace_s=0) == (["1"], 1)
    assert time_of(user_flags=("--time=10",), grace_s=3600) == (["10"], 270)
    assert time_of(grace_s=3600, limits=replace(MAIN, default_time_s=600)) == ([], 270)
    assert time_of(grace_s=3600, limits=replace(MAIN, max_time_s=600)) == ([], 270)
    assert time_of(grace_s=10**6) == ([], 65535)
    assert time_of(user_flags=("--time=UNLIMITED",), grace_s=3600) == (["UNLIMITED"], 3615)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1", 60), ("1:02", 62), ("1:02:03", 3723), ("1-2", 93600), ("1-2:3", 93780),
     ("1-2:3:4", 93784), ("UNLIMITED", None), ("", None), ("soon", None)],
)  # fmt: skip
def test_reading_time_limits(text, seconds):
    assert parse_time_limit(text) == seconds


@generated(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1))
def test_no_path_is_read_by_the_shell(text):
    script = render_script(request(pod_dir=Path("/" + text)))
    line = shlex.quote(str(Path("/" + text)))
    assert f' /a "$@" {line}\n' in script


def run_script(tmp_path, *pythons):
    """The script with these candidates, in the environment that --export=NIL leaves."""
    pod_dir = tmp_path / "a 'pod' $x"
    agent = tmp_path / "agent"
    agent.mkdir()
    (agent / "__main__.py").write_text("import sys; print(sys.argv[1:], sys.flags.isolated)")
    script = render_script(request(pod_dir=pod_dir, agent_dir=agent, pythons=pythons))
    result = subprocess.run(
        ["/bin/sh", "-c", script],
        env={"SLURMD_NODENAME": "n1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr, f"[{str(pod_dir)!r}] 1\n"


def python(tmp_path, name, body):
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_script_takes_the_first_python_that_is_new_enough(tmp_path):
    import sys

    old = python(tmp_path, "python3", "exit 1")
    own = python(tmp_path, "mypython", f'exec {shlex.quote(sys.executable)} "$@"')
    code, out, err, want = run_script(tmp_path, "/nowhere/python3.12", old, own)
    assert (code, out, err) == (0, want, "")


def test_the_script_asks_no_python_with_its_version_in_its_name(tmp_path):
    named = python(tmp_path, "python3.12", 'echo "$@"')
    code, out, _, _ = run_script(tmp_path, named)
    assert (code, out) == (0, f"-I -S {tmp_path}/agent {tmp_path}/a 'pod' $x\n")


def test_the_script_says_that_there_is_no_python(tmp_path):
    code, out, err, _ = run_script(tmp_path, "/nowhere/python3.9", "nopython")
    assert (code, out) == (78, "")
    assert err == ("hpk: no Python 3.9 or newer on node n1 among: /nowhere/python3.9 nopython\n")


@generated(st.text(), st.text(st.characters(exclude_characters=":")))
def test_comments_are_found_again(name, uid):
    assert parse_comment(comment("c", uid, "ns", name)) == ("c", uid, f"ns/{name}")


def test_the_comments_of_others_are_not_ours():
    assert parse_comment("my:job") is None
    assert parse_comment("hpk:x") is None


# As squeue 24.11.5 printed them.
SQUEUE = """\
8|FAILED|3:0|NonZeroExitCode|node1|main|1795236424|1795236425|1795236426|cpu=1,mem=1G|we|ird "x" %i
9_4|PENDING|0:0|JobHeldUser||main|1795236424|N/A|N/A||(null)
10|RUNNING|0:0|None|node[1-2]|main|2026-11-21T04:54:04|1795236425|NONE|cpu=2|two
lines|of it
11|CANCELLED|0:15|a | in a reason||main|1|2|3||x
""".replace("|", parse.SEPARATOR).replace(f"we{parse.SEPARATOR}ird", "we|ird")


def test_squeue(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    import time

    time.tzset()
    found = parse.jobs(SQUEUE.replace(f"a {parse.SEPARATOR} in", "a | in"))
    assert found == [
        Job("8", "FAILED", "NonZeroExitCode", 3, 0, "node1", "main", 1795236424, 1795236425,
            1795236426, 'we|ird "x" %i', "cpu=1,mem=1G"),
        Job("9_4", "PENDING", "JobHeldUser", partition="main", submitted=1795236424),
        Job("10", "RUNNING", "None", 0, 0, "node[1-2]", "main", 1795236844, 1795236425, 0, "two",
            "cpu=2"),
        Job("11", "CANCELLED", "a | in a reason", 0, 15, "", "main", 1, 2, 3, "x"),
    ]  # fmt: skip


def test_partitions():
    shown = (
        "PartitionName=main Default=YES DefaultTime=00:10:00 MaxTime=1-02:03:04 State=UP\n"
        "PartitionName=x DefaultTime=NONE MaxTime=UNLIMITED State=DOWN\n"
    )
    nodes = (
        "NodeName=a CPUEfctv=3 CPUTot=4 CPUAlloc=2 AllocMem=50 RealMemory=100 MemSpecLimit=10 "
        "AllocTRES=cpu=2,mem=50M,gres/gpu=1 "
        "State=IDLE+CLOUD+POWERED_DOWN Partitions=main,x Gres=gpu:a100:2(S:0-1),gpu:t4:1 "
        "AvailableFeatures=ssd,big TmpDisk=7 OS=Linux 6.1 #1 SMP Reason=State=DOWN CPUTot=9\n"
        "NodeName=b CPUTot=8 RealMemory=200 State=IDLE+DRAIN Partitions=main Gres=(null)\n"
        "NodeName=c CPUTot=8 RealMemory=300 State=MIXED* Partitions=main AvailableFeatures=(null)\n"
    )
    features = frozenset({"ssd", "big"})
    found = parse.partitions(shown, nodes)
    assert found[0].members[0] == ComputeNode("a", True, 3, 90, 3, 2, 50, 1)
    assert [node.usable for node in found[0].members] == [True, False, False]
    assert [replace(partition, members=()) for partition in found] == [
        Partition("main", True, True, 3, 1, 19, 3, 590, 90, 8, 300, 3, 7, features, 93784, 600),
        Partition("x", False, False, 1, 1, 3, 3, 90, 90, 3, 90, 3, 7, features),
    ]


def test_states():
    assert state_of("CANCELLED by 1000") is STATES["CANCELLED"]
    assert state_of("COMPLETED+") is STATES["COMPLETED"]
    assert state_of("NOT_INVENTED_YET") == State(Phase.RUNNING, "", "is in state NOT_INVENTED_YET")
    assert all(state.reason for state in STATES.values() if state.phase is Phase.ENDED)
    assert not any(state.reason for state in STATES.values() if state.phase is not Phase.ENDED)


def test_what_a_reason_adds_to_a_failure():
    refused = "was refused: no node can ever give what it asks"
    assert Job("1", "FAILED", "BadConstraints", 0, 1).state == State(
        Phase.ENDED, "SlurmBadConstraints", refused
    )
    assert Job("1", "FAILED", "NonZeroExitCode", 78).state.reason == "NoPython"
    assert Job("1", "FAILED", "NonZeroExitCode", 1).state is STATES["FAILED"]
    assert Job("1", "RUNNING", "BadConstraints").state is STATES["RUNNING"]


@pytest.mark.parametrize(
    ("reason", "want"),
    [
        ("Priority", ("SlurmPriority", "jobs of higher priority wait before it (Priority)")),
        ("None", ("SlurmPending", "Slurm has not looked at it yet")),
        ("", ("SlurmPending", "Slurm has not looked at it yet")),
        (
            "ReqNodeNotAvail, UnavailableNodes:n1",
            (
                "SlurmReqNodeNotAvail",
                "a node it needs is not available: down, drained or reserved "
                "(ReqNodeNotAvail, UnavailableNodes:n1)",
            ),
        ),
        (
            "QOSGrpNodeLimit",
            (
                "SlurmQOSGrpNodeLimit",
                "a limit that all jobs of the QOS share is reached (QOSGrpNodeLimit)",
            ),
        ),
        (
            "Nodes required for job are DOWN, DRAINED or reserved",
            (
                "SlurmNodesUnavailable",
                "the nodes it could run on are down, drained or kept for other jobs "
                "(Nodes required for job are DOWN, DRAINED or reserved)",
            ),
        ),
        ("something new", ("SlurmPending", "something new")),
        ("SomethingNew", ("SlurmSomethingNew", "SomethingNew")),
    ],
)
def test_waiting_reasons(reason, want):
    assert waiting_reason(reason, "7") == (want[0], f"Slurm job 7 waits: {want[1]}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "invalid partition specified: nope; Invalid partition name specified",
        ),
        (
            "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information\n",
            "unrecognized option '--bogus'",
        ),
        ("Slurm accounting storage is disabled\n", "Slurm accounting storage is disabled"),
    ],
)
def test_words(text, words):
    assert parse.error_words(text) == words


def test_which_jobs_were_not_cancelled():
    text = (
        "scancel: error: Kill job error on job id 99999: Invalid job id specified\n"
        "scancel: error: Kill job error on job id 49_3: Job can not be altered now, try again later"
    )
    assert parse.failed_ids(parse.error_words(text)) == {
        "99999": "Invalid job id specified",
        "49_3": "Job can not be altered now, try again later",
    }


@pytest.mark.parametrize(
    ("gres", "resource"),
    [
        ("gpu:mi250x:4", "amd.com/gpu"),
        ("gpu:a100:2", "nvidia.com/gpu"),
        ("gpu:2", "nvidia.com/gpu"),
    ],
)
def test_whose_gpus_they_are(gres: str, resource: str) -> None:
    node = f"NodeName=n CPUTot=2 RealMemory=100 State=IDLE Partitions=p Gres={gres}"
    (partition,) = parse.partitions("PartitionName=p State=UP", node)
    assert partition.gpu_resource == resource
    assert resource in resources(partition, 10, Amounts(2, 100, 1))[1]
