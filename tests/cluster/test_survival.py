"""Any part may die, and the cluster outlives its control job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from conftest import Namespace, User, eventually, pod
from slurmadmin import ROOT
from test_control import control_job

pytestmark = pytest.mark.disruptive

COMPONENTS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "coredns", "flanneld", "pasta",
    "python.*cli controllers", "python.*cli egress",
)  # fmt: skip


def node_of(user: User) -> str:
    return user.run("squeue", "--me", "-h", "-n", "hpk", "-t", "R", "-o", "%N").out.strip()


def started(user: User, *options: str) -> None:
    user.run("sbatch", *options, "/opt/hpk/src/hpk.sbatch")
    user.run("hpk", "status", "--wait", "120", timeout=150)


@pytest.fixture
def survivor(ns: Namespace, busybox: str) -> Iterator[str]:
    """A pod that runs from before to after, in one job, once."""
    script = "while sleep 1; do echo up; done"
    ns.create(pod("lives", "sh", "-c", script, image=busybox))
    ns.wait_ready("lives")
    job = ns.job("lives")
    yield "lives"
    assert ns.job("lives") == job
    whole = ns.pod("lives")
    assert whole["status"]["phase"] == "Running"
    assert whole["status"]["containerStatuses"][0]["restartCount"] == 0


def test_every_component_killed(ns: Namespace, busybox: str, survivor: str) -> None:
    """All that belong to the control job on its node, one after another: each comes back."""
    node = node_of(ns.user)
    for component in COMPONENTS:
        pattern = f"^([^ ]*/)?{component}"
        before = ns.user.run("pgrep", "-f", pattern, node=node, check=False).out.split()
        if component == "etcd" or component.startswith("kube-"):
            assert before, f"no {component} on {node}"
        ns.user.run("pkill", "-KILL", "-f", pattern, node=node, check=False)
    # A name from inside, so that DNS and the network are back; then a pod of a controller's.
    lookup = ("exec", survivor, "--", "nslookup", "kubernetes.default.svc.cluster.local")
    eventually("names", lambda: ns.kubectl(*lookup, check=False).code == 0, timeout=90)
    ns.kubectl("create", "job", "after", f"--image={busybox}", "--", "true")
    ns.kubectl("wait", "job/after", "--for=condition=Complete", "--timeout=90s", timeout=100)


def test_a_time_limit(ns: Namespace, survivor: str) -> None:
    """The control job has three minutes, and has handed over before they are up."""
    ns.user.run("hpk", "down", timeout=90)
    try:
        started(ns.user, "--time=3")
        first = control_job(ns.user)
        second = eventually(
            "another control job alone",
            lambda: (job := control_job(ns.user)) != first and job.isdigit() and job,
            timeout=200,
        )
        ns.user.run("hpk", "status", "--wait", "60", timeout=90)
        assert ns.job_state(first) == "COMPLETED", "it stopped in order, not at its limit"
        limit = ns.user.run("squeue", "-h", "-j", second, "-o", "%l").out.strip()
        assert limit == "3:00", "the successor has what the first one was given"
    finally:
        ns.user.run("hpk", "down", check=False, timeout=90)
        started(ns.user)
    eventually(
        "exec through the new control plane",
        lambda: ns.kubectl("exec", survivor, "--", "echo", "here", check=False).out == "here\n",
    )


def test_a_daily_copy_of_etcd_and_the_way_back(ns: Namespace, survivor: str) -> None:
    ns.kubectl("create", "configmap", "kept", "--from-literal=a=1")
    copies = set(ns.user.sh("ls ~/.hpk/backup").out.split())
    ns.user.sh("touch -d '2 days ago' ~/.hpk/backup/*")
    made = eventually(
        "a new copy",
        lambda: set(ns.user.sh("ls ~/.hpk/backup").out.split()) - copies,
        timeout=100,
    ).pop()
    eventually("the API", lambda: ns.kubectl("get", "configmap", "kept", check=False).code == 0)
    ns.kubectl("create", "configmap", "lost", "--from-literal=a=1")
    ns.user.run("hpk", "down", timeout=90)
    ns.user.sh(f"cd ~/.hpk && rm -rf etcd.old && mv etcd etcd.old && cp -r backup/{made} etcd")
    started(ns.user)
    eventually("what was in the copy", lambda: not ns.gone("configmap", "kept"))
    assert ns.gone("configmap", "lost")
    ns.user.sh("rm -rf ~/.hpk/etcd.old")


@contextlib.contextmanager
def small_home(node: str, megabytes: int) -> Iterator[str]:
    """A file system of alice's on that node alone, of so many megabytes."""
    path = User("alice").sh("mkdir -p ~/small && echo ~/small").out.strip()
    options = f"size={megabytes}m,mode=0700,uid=$(id -u alice),gid=$(id -g alice)"
    ROOT.run("bash", "-c", f"mount -t tmpfs -o {options} none {path}", node=node)
    try:
        yield path
    finally:
        ROOT.run("umount", "-l", path, node=node)


def test_a_full_home(alice: User, busybox: str) -> None:
    """A second cluster of alice's, whose home is full for a while."""
    with small_home("node2", 700) as path:
        home = f"export HPK_HOME={path}/.hpk KUBECONFIG={path}/.hpk/kubeconfig"

        def sh(script: str, check: bool = True) -> str:
            done = alice.run("bash", "-c", f"{home}; {script}", node="node2", check=check)
            return done.out + ("" if check else done.err)

        def condition(status: str) -> bool:
            words = "{range .items[*].status.conditions[*]}{.type}={.status},{.reason} {end}"
            said = sh(f"kubectl get nodes -o jsonpath='{words}'", check=False)
            return f"DiskPressure={status}" in said and ("HomeFull" in said) == (status == "True")

        def phase(name: str) -> str:
            return sh(f"kubectl get pod {name} -o jsonpath={{.status.phase}}", check=False)

        first = sh("cd ~ && sbatch --parsable -w node2 -o /dev/null /opt/hpk/src/hpk.sbatch")
        try:
            eventually("the cluster", lambda: " Ready" in sh("hpk status", check=False), 120)
            eventually("its account", lambda: "default" in sh("kubectl get sa", check=False))
            run = f"kubectl run NAME --image={busybox} --restart=Never --command -- sleep 1000"
            flags = (
                '--overrides=\'{"metadata":{"annotations":{"slurm-job.hpk.io/flags":"-w node2"}}}\''
            )
            sh(run.replace("NAME", f"before {flags}"))
            eventually("a pod", lambda: phase("before") == "Running")
            # Little room: the node says so, and no new pod is tried.
            sh("cd $HPK_HOME/..; free=$(df --output=avail -B1 . | tail -1); "
               "head -c $((free - 100000000)) /dev/zero > filler")  # fmt: skip
            eventually("the condition", lambda: condition("True"))
            sh(run.replace("NAME", f"while {flags}"))
            # None at all: what was said to be written is there afterwards, whoever stopped.
            sh("head -c 1g /dev/zero > $HPK_HOME/../more", check=False)
            sh("head -c 500k /dev/zero | tr '\\0' x > ~/big")
            create = "kubectl create configmap big-NUMBER --from-file=x=$HOME/big"
            said = {i: sh(create.replace("NUMBER", str(i)), check=False) for i in range(15)}
            written = [i for i, words in said.items() if "created" in words]
            sh("rm $HPK_HOME/../filler $HPK_HOME/../more")
            eventually("no condition any more", lambda: condition("False"), 180)
            there = sh("kubectl get configmaps -o name").split()
            assert {f"configmap/big-{i}" for i in written} <= set(there)
            assert phase("before") == "Running", "it went on"
            eventually("the pod that waited", lambda: phase("while") == "Running", 90)
            sh("kubectl delete pod --all --now")
        finally:
            sh("hpk down", check=False)
            alice.run("scancel", first.strip(), check=False)
