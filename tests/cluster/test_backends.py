"""What every backend must do alike, asked of each on the sandbox's Slurm."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Namespace, User, eventually, pod
from slurmadmin import ROOT, slurmctld_away

ALICE = User("alice")
DRIVER = "/opt/hpk/src/tests/cluster/backend_driver.py"
BACKENDS = ("commands", "slurmrestd")


class Driven:
    """A backend inside the sandbox."""

    def __init__(self, name: str) -> None:
        self.tag = uuid.uuid4().hex[:8]
        home = ALICE.sh("echo $HOME").out.strip()
        self.directory = f"{home}/b{self.tag}"
        ALICE.run("mkdir", "-m", "700", self.directory)
        program = ("/opt/hpk/venv/bin/python", DRIVER, name, self.directory)
        self.process = ALICE.popen("env", "PYTHONPATH=/opt/hpk/src", *program)

    def ask(self, method: str, argument: Any = None) -> Any:
        self.send(method, argument)
        return self.answer()

    def send(self, method: str, argument: Any = None) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([method, argument]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr
            pytest.fail(self.process.stderr.read())
        return json.loads(line)

    def one(self, name: str, script: str = "true", **asked: Any) -> dict[str, Any]:
        """A submission, with a comment to find it by."""
        return {"name": f"ns/{name}", "comment": f"{self.tag}:{name}", "script": script, **asked}

    def held(self, name: str, **asked: Any) -> dict[str, Any]:
        return self.one(name, flags=["--hold"], **asked)

    def jobs(self) -> dict[str, dict[str, Any]]:
        """By id: what this backend submitted."""
        return {j["id"]: j for j in self.ask("jobs") if j["comment"].startswith(self.tag)}

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(30) == 0
        ALICE.run("rm", "-r", self.directory)


@pytest.fixture(scope="module")
def both() -> Iterator[dict[str, Driven]]:
    driven = {name: Driven(name) for name in BACKENDS}
    yield driven
    ALICE.sh("squeue --me -h -o '%i %j' | awk '$2 ~ /^ns\\// {print $1}' | xargs -r scancel")
    for one in driven.values():
        one.close()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, both: dict[str, Driven]) -> Driven:
    return both[request.param]


def test_each_says_what_it_is(both: dict[str, Driven]) -> None:
    assert both["commands"].ask("way") == "sbatch and scancel"
    assert re.fullmatch(r"slurmrestd v0\.0\.\d+", both["slurmrestd"].ask("way"))


def shown(job: str) -> dict[str, str]:
    """`scontrol show job`, without what differs between any two jobs, and sbatch's own notes."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", ALICE.run("scontrol", "-o", "show", "job", job).out))
    own = r"JobId|.*Time|Last.*|Priority|StdErr|StdOut|WorkDir|Command|Comment|AllocNode:Sid"
    ours = r"|TresPerTask|OOMKillStep|Accrue.*|Elig.*"
    return {k: v for k, v in fields.items() if not re.fullmatch(own + ours, k)}


def test_jobs_are_what_sbatch_makes_of_them(both: dict[str, Driven]) -> None:
    script = "env | sort; ulimit -a; umask; echo $0 $#"
    asked = {
        "cpus": 2,
        "memory": 400,
        "flags": ["--time=90", "--nice=7", "--exclusive=user", "--mem=1G"],
    }
    ids = {}
    for name, driven in both.items():
        (ids[name],) = driven.ask("submit", [driven.one("same", script, **asked)])
        assert ids[name].isdigit(), ids
    eventually("both ran", lambda: all(ALICE.sh(f"cat {d.directory}/slurm.out", check=False).out
                                       for d in both.values()))  # fmt: skip
    eventually("both are over", lambda: {ALICE.run("squeue", "-h", "-t", "all", "-o", "%T",
               "-j", ids[name]).out.strip() for name in BACKENDS} == {"COMPLETED"})  # fmt: skip
    first, second = (shown(ids[name]) for name in BACKENDS)
    assert first["TimeLimit"] == "01:30:00"
    for volatile in ("NodeList", "BatchHost", "Nodes"):
        first.pop(volatile, None), second.pop(volatile, None)
    assert first == second

    def output(driven: Driven) -> list[str]:
        text = ALICE.run("cat", f"{driven.directory}/slurm.out").out
        # Of this job alone, and what sbatch adds for mpirun and srun: such pods are left to it.
        own = r"SLURM_(JOB_?ID|TASK_PID|TRES_PER_TASK|JOB_(START|END)_TIME|TIME_FORMAT)"
        mpi = r"|.*HYDRA.*|OMPI_.*|PRTE_.*|SLURM_JOB_NODELIST|SLURM_NODELIST|SLURMD_NODENAME"
        where = r"|SLURM_TOPOLOGY_ADDR|HOSTNAME|SLURM_SUBMIT_DIR|PWD|OLDPWD|/var/spool.*"
        kept = (line for line in text.splitlines() if not re.match(f"({own}{mpi}{where})", line))
        return list(kept)

    assert output(both["commands"]) == output(both["slurmrestd"])


def test_each_submission_has_its_own_answer(backend: Driven) -> None:
    good, partition, qos, array, odd = backend.ask(
        "submit",
        [
            backend.held("good"),
            backend.held("bad", partition="nowhere"),
            backend.one("impossible", flags=["--constraint=nowhere"]),
            backend.held("tasks", tasks=3),
            backend.one("odd", flags=["--hold", "--begin=now+1hour"]),  # for sbatch alone
        ],
    )
    refused = {"error": "SubmitError", "transient": False}
    assert partition == refused | {
        "words": "invalid partition specified: nowhere; Invalid partition name specified"
    }
    assert qos == refused | {"words": "Invalid feature specification"}
    jobs = backend.jobs()
    assert {k for k in jobs if jobs[k]["comment"].endswith(("good", "tasks", "odd"))} == {
        good, odd, f"{array}_0", f"{array}_1", f"{array}_2",
    }  # fmt: skip
    assert jobs[good]["word"] == "PENDING" and jobs[good]["reason"] == "JobHeldUser"
    assert jobs[good]["partition"] == "main"
    backend.ask("label", [[f"{array}_1", "ns/renamed", f"{backend.tag}:renamed"]])
    assert backend.jobs()[f"{array}_1"]["comment"] == f"{backend.tag}:renamed"
    assert backend.ask("cancel", [[good], [odd], [array]]) == [None, None, None]


def test_cancelling_what_is_there_and_what_is_not(backend: Driven) -> None:
    trap = "trap 'echo told; exit 3' TERM; echo ready; sleep 300 & wait"
    held, array, runs = backend.ask(
        "submit",
        [backend.held("held"), backend.held("array", tasks=4), backend.one("traps", trap)],
    )
    output = f"{backend.directory}/slurm.out"
    eventually("it runs", lambda: "ready" in ALICE.sh(f"cat {output}", check=False).out)
    asked = [[held], [f"{array}_2"], ["999999999"], [f"{array}_77"], [runs, "TERM", True]]
    assert backend.ask("cancel", asked) == [None] * 5
    eventually("the script was told", lambda: backend.jobs()[runs]["word"] == "FAILED")
    jobs = backend.jobs()
    assert jobs[runs]["exit_code"] == 3
    assert jobs[held]["word"] == "CANCELLED"
    assert {job for job in jobs if jobs[job]["word"] == "PENDING"} == {
        f"{array}_{index}" for index in (0, 1, 3)
    }
    assert backend.ask("cancel", [[held], [array]]) == [None, None]  # over already, and the rest
    assert not [job for job in backend.jobs().values() if job["word"] == "PENDING"]


def test_what_the_cluster_is(backend: Driven) -> None:
    assert backend.ask("limits")["array_size"] == 10001
    (main,) = [p for p in backend.ask("partitions") if p["name"] == "main"]
    assert main["up"] and main["cpus"] >= 1


@pytest.mark.disruptive
def test_while_slurmctld_is_away_nothing_is_known(both: dict[str, Driven]) -> None:
    jobs = {name: d.ask("submit", [d.held("before")])[0] for name, d in both.items()}
    with slurmctld_away():  # both at once: each takes nine seconds to give up
        for driven in both.values():
            driven.send("submit", [driven.held("away")])
        for driven in both.values():
            assert driven.answer()[0]["error"] == "UnreachableError"
        for name, driven in both.items():
            driven.send("cancel", [[jobs[name]]])
        for driven in both.values():
            assert driven.answer()[0]["error"] == "UnreachableError"
    for name, driven in both.items():
        assert driven.ask("cancel", [[jobs[name]]]) == [None]
        assert not [j for j in driven.jobs().values() if j["comment"].endswith("away")]


@pytest.mark.disruptive
def test_pods_start_while_slurmrestd_is_dead(ns: Namespace, busybox: str) -> None:
    def way() -> str:
        return next(
            line for line in ns.user.run("hpk", "status").out.splitlines() if "Slurm" in line
        )

    eventually("slurmrestd is used", lambda: "slurmrestd v0" in way(), timeout=40)
    control = ns.user.run("squeue", "--me", "-h", "-n", "hpk", "-t", "R", "-o", "%N").out.strip()
    # Nothing listens any more on the socket that the kubelet thinks is there.
    ROOT.run("pkill", "-KILL", "-u", "alice", "-f", "hpk/run/slurmrestd", node=control)
    ns.create(pod("one", "true", image=busybox))
    ns.wait_phase("one", "Succeeded")
    assert "SlurmSubmitFailed" not in ns.reasons("one")
    assert ns.user.sh("stat -c %a ~/.hpk/run/slurmrestd").out.strip() == "700"
    sockets = "find ~/.hpk/run/slurmrestd -type s"
    eventually("slurmrestd is back", lambda: ns.user.sh(sockets).out)
