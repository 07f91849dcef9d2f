"""What a pod asks reaches Slurm, and what Slurm does to a job comes out in Kubernetes."""

from __future__ import annotations

import pytest
from conftest import Namespace, eventually, pod

FLAGS = "slurm-job.hpk.io/flags"


def shown(ns: Namespace, job: str) -> dict[str, str]:
    text = ns.user.run("scontrol", "-o", "show", "job", job).out
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def test_resources_become_the_jobs(ns: Namespace, busybox: str) -> None:
    ns.create(
        pod("sized", "true", image=busybox, annotations={FLAGS: "--hold"},
            container={"resources": {"requests": {"cpu": "1500m", "memory": "100Mi"},
                                     "limits": {"memory": "256Mi"}}})
    )  # fmt: skip
    job = eventually("its job", lambda: ns.job("sized"))
    fields = shown(ns, job)
    assert fields["CPUs/Task"] == "2"
    assert fields["MinMemoryNode"] == f"{256 + 192}M"


def test_the_users_flags_win(ns: Namespace, busybox: str) -> None:
    ns.create(
        pod("own", "true", image=busybox,
            annotations={FLAGS: "--hold --cpus-per-task=3 --time=7 --nice=5"})
    )  # fmt: skip
    fields = shown(ns, eventually("its job", lambda: ns.job("own")))
    assert (fields["CPUs/Task"], fields["TimeLimit"], fields["Nice"]) == ("3", "00:07:00", "5")


def test_a_namespaces_flags_hold_unless_the_pod_says_otherwise(ns: Namespace, busybox: str) -> None:
    flags = f"{FLAGS}=--hold --time=9 --nice=4"
    ns.user.run("kubectl", "annotate", "namespace", ns.name, flags)

    def told() -> bool:  # the API server sees the change of a namespace a moment later
        ns.kubectl("delete", "pod", "plain", "--ignore-not-found", "--wait=false", "--force")
        eventually("the old one is gone", lambda: ns.gone("pod", "plain"))
        ns.create(pod("plain", "true", image=busybox))
        return "slurm-job.hpk.io/namespace-flags" in ns.pod("plain")["metadata"]["annotations"]

    eventually("the namespace's flags", told)
    ns.create(pod("own", "true", image=busybox, annotations={FLAGS: "--time=7"}))
    for name, limit in (("plain", "00:09:00"), ("own", "00:07:00")):
        fields = shown(ns, eventually("its job", lambda name=name: ns.job(name)))
        assert (fields["TimeLimit"], fields["Nice"]) == (limit, "4")


@pytest.mark.parametrize(
    ("flags", "words"),
    [("--partition=nope", "partition"), ("--mem=999T", "emory"), ("--nodes", ""), ("'", "quot")],
)
def test_flags_slurm_refuses(ns: Namespace, busybox: str, flags: str, words: str) -> None:
    ns.create(pod("refused", "true", image=busybox, annotations={FLAGS: flags}))
    whole = ns.wait_phase("refused", "Failed")
    assert words in whole["status"]["message"]
    assert "Traceback" not in ns.kubectl("describe", "pod", "refused").out
    assert any(event["type"] == "Warning" for event in ns.events("refused"))


@pytest.mark.parametrize("flags", ["--wrap=id", "--array=1-3", "echo", "--requeue", "--export=ALL"])
def test_flags_that_would_break_the_pod(ns: Namespace, busybox: str, flags: str) -> None:
    ns.create(pod("breaks", "true", image=busybox, annotations={FLAGS: flags}))
    whole = ns.wait_phase("breaks", "Failed")
    assert flags.split("=")[0] in whole["status"]["message"]
    assert ns.job("breaks") == ""


def test_a_cancelled_job_fails_its_pod(ns: Namespace, busybox: str) -> None:
    ns.create(pod("cancelled", "sleep", "1000", image=busybox))
    ns.wait_ready("cancelled")
    ns.user.run("scancel", "--signal=KILL", "--full", ns.job("cancelled"))
    whole = ns.wait_phase("cancelled", "Failed")
    assert whole["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] != 0


def test_a_queued_job_cancelled_fails_its_pod(ns: Namespace, busybox: str) -> None:
    ns.create(pod("queued", "true", image=busybox, annotations={FLAGS: "--hold"}))
    ns.user.run("scancel", eventually("its job", lambda: ns.job("queued")))
    whole = ns.wait_phase("queued", "Failed")
    assert "ancel" in whole["status"]["reason"] + whole["status"]["message"]


def test_the_time_limit(ns: Namespace, busybox: str) -> None:
    ns.create(pod("limited", "sleep", "1000", image=busybox, terminationGracePeriodSeconds=1,
                  annotations={FLAGS: "--time=1"}))  # fmt: skip
    ns.wait_ready("limited")
    whole = ns.wait_phase("limited", "Failed", timeout=150)
    assert "ime" in whole["status"].get("reason", "") + whole["status"].get("message", "")


@pytest.mark.parametrize("flags", ["--ntasks=4", "--ntasks=4 --nodes=2"])
def test_mpi_ranks(ns: Namespace, registry: str, flags: str) -> None:
    ns.create(
        pod("ranks", "sh", "-c", "echo rank $PMIX_RANK on $SLURMD_NODENAME of $SLURM_NTASKS",
            image=f"{registry}/mpi:1",
            annotations={FLAGS: flags, "slurm-job.hpk.io/mpi-flag": "--mpi=pmix"})
    )  # fmt: skip
    ns.wait_phase("ranks", "Succeeded", "Failed", timeout=120)
    lines = sorted(line.split() for line in ns.logs("ranks").splitlines())
    assert [line[1] for line in lines] == ["0", "1", "2", "3"]
    assert len({line[3] for line in lines}) == (2 if "--nodes=2" in flags else 1)
    assert shown(ns, ns.job("ranks"))["NumTasks"] == "4"


def test_the_first_rank_that_fails_is_the_containers_end(ns: Namespace, registry: str) -> None:
    script = "echo up; case $PMIX_RANK in 2) exit 5;; 1) sleep 2; exit 99;; esac; sleep 3"
    ns.create(
        pod("ranks", "sh", "-c", script, image=f"{registry}/mpi:1",
            annotations={FLAGS: "--ntasks=4", "slurm-job.hpk.io/mpi-flag": "--mpi=pmix --label"})
    )  # fmt: skip
    whole = ns.wait_phase("ranks", "Failed", timeout=120)
    ended = whole["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 5
    assert ended["message"] == "rank 2 was the first to fail, with exit code 5"
    labelled = [line for line in ns.logs("ranks").splitlines() if line.endswith(": up")]
    assert sorted(labelled) == [f"{rank}: up" for rank in range(4)]


def test_ranks_speak_through_shared_memory(ns: Namespace, registry: str) -> None:
    """With no other transport allowed; two programs beside each other on one node."""
    script = (
        "sed 's/^run.*/run 5/' /usr/share/lammps/bench/in.lj > /tmp/in.$PMIX_RANK; "
        "lmp -in /tmp/in.$PMIX_RANK -log none | grep '^Loop time'; readlink /proc/self/ns/user"
    )
    env = [{"name": "OMPI_MCA_btl", "value": "self,sm"}]
    node = "--ntasks=2 --nodelist=" + ns.user.run("sinfo", "-hN", "-o", "%N").out.split()[0]
    for name in ("one", "two"):
        ns.create(
            pod(name, "sh", "-c", script, image=f"{registry}/mpi:1", container={"env": env},
                annotations={FLAGS: node, "slurm-job.hpk.io/mpi-flag": "--mpi=pmix"})
        )  # fmt: skip
    spaces = set()
    for name in ("one", "two"):
        ns.wait_phase(name, "Succeeded", "Failed", timeout=120)
        lines = ns.logs(name).splitlines()
        assert any("on 2 procs for 5 steps" in line for line in lines), lines
        own = {line for line in lines if line.startswith("user:")}
        assert len(own) == 1  # both ranks' one
        spaces |= own
    assert len(spaces) == 2


def test_the_first_failing_rank_fails_the_pod(ns: Namespace, registry: str) -> None:
    ns.create(
        pod("broken", "sh", "-c", "exit $((PMIX_RANK == 1 ? 9 : 0))", image=f"{registry}/mpi:1",
            annotations={FLAGS: "--ntasks=2", "slurm-job.hpk.io/mpi-flag": "--mpi=pmix"})
    )  # fmt: skip
    whole = ns.wait_phase("broken", "Failed", timeout=120)
    assert whole["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 9


def test_a_pod_that_wants_no_others_on_its_node(ns: Namespace, busybox: str) -> None:
    annotations = {FLAGS: "--hold", "slurm-job.hpk.io/sharing": "exclusive"}
    ns.create(pod("alone", "true", image=busybox, annotations=annotations))
    fields = shown(ns, eventually("its job", lambda: ns.job("alone")))
    assert fields["OverSubscribe"] == "USER"
