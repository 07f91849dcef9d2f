"""Limits of accounts and QOS, and a slurmdbd that is away: where the site has accounting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Namespace, eventually, pod
from slurmadmin import ROOT
from test_truth import wait_reason

pytestmark = pytest.mark.disruptive
FLAGS = "slurm-job.hpk.io/flags"


@pytest.fixture(autouse=True)
def _accounting() -> Iterator[None]:
    if ROOT.run("sacctmgr", "-n", "list", "cluster", check=False).code:
        pytest.skip("this Slurm has no accounting")
    yield
    ROOT.run("sacctmgr", "-i", "modify", "user", "alice", "set", "MaxJobs=-1", check=False)
    ROOT.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxTRESPU=cpu=-1", check=False)


def test_an_accounts_limit_of_running_jobs(ns: Namespace, busybox: str) -> None:
    names = ("squeue", "--me", "-h", "-t", "R,CG", "-o", "%j")
    eventually("no pods of other tests", lambda: ns.user.run(*names).out.split() == ["hpk"])
    ROOT.run("sacctmgr", "-i", "modify", "user", "alice", "set", "MaxJobs=1")
    ns.create(pod("waits", "true", image=busybox))
    wait_reason(ns, "waits", "SlurmAssocMaxJobsLimit")
    ROOT.run("sacctmgr", "-i", "modify", "user", "alice", "set", "MaxJobs=-1")
    ns.wait_phase("waits", "Succeeded", timeout=90)


def test_a_qos_limit(ns: Namespace, busybox: str) -> None:
    ROOT.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxTRESPU=cpu=1")
    ns.create(pod("waits", "true", image=busybox))
    found = wait_reason(ns, "waits", "SlurmQOSMaxCpuPerUserLimit")
    assert "QOS" in found["message"]
    ROOT.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxTRESPU=cpu=-1")
    ns.wait_phase("waits", "Succeeded", timeout=90)


@pytest.mark.parametrize("flag", ["--account=nobody", "--qos=nothing"])
def test_an_account_or_qos_that_is_not(ns: Namespace, busybox: str, flag: str) -> None:
    ns.create(pod("refused", "true", image=busybox, annotations={FLAGS: flag}))
    whole = ns.wait_phase("refused", "Failed")
    assert whole["status"]["reason"] == "SlurmRejected"
    assert flag[2:].partition("=")[0] in whole["status"]["message"].lower()


def test_slurmdbd_away(ns: Namespace, busybox: str) -> None:
    """Jobs start and end without it."""
    ROOT.sh("kill $(cat /run/slurmdbd.pid); while sacctmgr -n list cluster; do sleep 0.2; done")
    try:
        ns.create(pod("ends", "sh", "-c", "exit 4", image=busybox))
        whole = ns.wait_phase("ends", "Failed")
        assert whole["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
    finally:
        ROOT.sh("setsid slurmdbd >/dev/null 2>&1 </dev/null")
        eventually(
            "slurmdbd", lambda: not ROOT.run("sacctmgr", "-n", "list", "cluster", check=False).code
        )


def test_the_accounting_tells_the_pod(ns: Namespace, busybox: str) -> None:
    ns.create(pod("told", "sh", "-c", "exit 3", image=busybox))
    ns.wait_phase("told", "Failed")
    job = ns.job("told")

    def row() -> list[str]:
        said = ns.user.run("sacct", "-X", "-n", "-P", "-j", job, "-o", "JobName%80,State").out
        return said.strip().split("|")

    eventually("its end", lambda: row()[-1] == "FAILED")
    assert row()[0] == f"{ns.name}/told"
