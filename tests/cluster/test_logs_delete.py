"""kubectl logs in its forms, and kubectl delete at every moment."""

from __future__ import annotations

import re
import time

from conftest import Namespace, eventually, pod


def test_logs_in_every_form(ns: Namespace, busybox: str) -> None:
    ns.create(pod("talks", "sh", "-c", "for i in 1 2 3 4 5; do echo line $i; done", image=busybox))
    ns.wait_phase("talks", "Succeeded")
    assert ns.logs("talks") == "".join(f"line {i}\n" for i in range(1, 6))
    assert ns.logs("talks", "--tail=2") == "line 4\nline 5\n"
    assert ns.logs("talks", "--since=1h").count("\n") == 5
    assert ns.logs("talks", "--limit-bytes=6") == "line 1"
    assert ns.logs("talks", "-f") == ns.logs("talks")
    stamped = ns.logs("talks", "--timestamps").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z line \d$", line) for line in stamped)


def test_follow_delivers_while_it_runs_and_ends_with_it(ns: Namespace, busybox: str) -> None:
    ns.create(pod("ticks", "sh", "-c", "echo first; sleep 4; echo last", image=busybox))
    ns.wait_ready("ticks")
    follow = ns.user.popen("kubectl", "-n", ns.name, "logs", "-f", "ticks")
    assert follow.stdout is not None
    assert follow.stdout.readline() == "first\n"
    assert ns.phase("ticks") == "Running"
    rest, _ = follow.communicate(timeout=30)
    assert rest == "last\n"


def test_large_output_arrives_whole(ns: Namespace, busybox: str) -> None:
    ns.create(pod("floods", "seq", "200000", image=busybox))
    ns.wait_phase("floods", "Succeeded")
    assert ns.logs("floods") == "".join(f"{i}\n" for i in range(1, 200001))


def test_delete_gives_the_grace_that_was_asked_for(ns: Namespace, busybox: str) -> None:
    script = "trap 'echo got TERM; exit 0' TERM; echo ready; while true; do sleep 0.1; done"
    ns.create(pod("polite", "sh", "-c", script, image=busybox))
    ns.wait_ready("polite")
    eventually("its trap is set", lambda: "ready" in ns.logs("polite"))
    job = ns.job("polite")
    follow = ns.user.popen("kubectl", "-n", ns.name, "logs", "-f", "polite")
    assert follow.stdout is not None
    assert follow.stdout.readline() == "ready\n"
    started = time.monotonic()
    ns.kubectl("delete", "pod", "polite")
    assert time.monotonic() - started < 20, (
        "the container left on TERM: no need for the whole grace"
    )
    assert "got TERM" in follow.communicate(timeout=30)[0]
    eventually("Slurm's books are right", lambda: ns.job_state(job) not in ("RUNNING", "PENDING"))


def test_delete_kills_what_ignores_term(ns: Namespace, busybox: str) -> None:
    ns.create(
        pod("deaf", "sh", "-c", "trap '' TERM; while true; do sleep 0.1; done", image=busybox)
    )
    ns.wait_ready("deaf")
    job = ns.job("deaf")
    ns.kubectl("delete", "pod", "deaf", "--grace-period=2", timeout=60)
    eventually("the job is gone", lambda: ns.job_state(job) not in ("RUNNING", "COMPLETING"))


def test_force_delete_ends_the_job(ns: Namespace, busybox: str) -> None:
    ns.create(pod("forced", "sleep", "1000", image=busybox))
    ns.wait_ready("forced")
    job = ns.job("forced")
    ns.kubectl("delete", "pod", "forced", "--force", "--grace-period=0")
    eventually("the job is gone", lambda: ns.job_state(job) not in ("RUNNING", "COMPLETING"))


def test_delete_while_queued(ns: Namespace, busybox: str) -> None:
    held = pod("queued", "true", image=busybox, annotations={"slurm-job.hpk.io/flags": "--hold"})
    ns.create(held)
    job = eventually("its job", lambda: ns.job("queued"))
    eventually(
        "Slurm's reason is shown",
        lambda: "SlurmJobHeldUser" in ns.kubectl("get", "pod", "queued", "-o", "yaml").out,
    )
    ns.kubectl("delete", "pod", "queued", timeout=60)
    eventually("the job is cancelled", lambda: ns.job_state(job) == "CANCELLED")


def test_delete_twice_and_again_is_one_delete(ns: Namespace, busybox: str) -> None:
    ns.create(pod("twice", "sleep", "1000", image=busybox))
    ns.wait_ready("twice")
    ns.kubectl("delete", "pod", "twice", "--wait=false")
    ns.kubectl("delete", "pod", "twice", "--wait=false", "--grace-period=1")
    eventually("it is gone", lambda: ns.gone("pod", "twice"))


def test_a_new_pod_of_the_same_name_is_another(ns: Namespace, busybox: str) -> None:
    for round_ in ("one", "two"):
        ns.create(pod("again", "echo", round_, image=busybox))
        ns.wait_phase("again", "Succeeded")
        assert ns.logs("again") == f"{round_}\n"
        ns.kubectl("delete", "pod", "again")


def test_nothing_stays_behind(ns: Namespace, busybox: str) -> None:
    ns.create(pod("tidy", "sh", "-c", "dd if=/dev/zero of=/big bs=1M count=8; mkdir -m 0 /x",
                  image=busybox))  # fmt: skip
    ns.wait_phase("tidy", "Succeeded")
    uid = ns.pod("tidy")["metadata"]["uid"]
    job = ns.job("tidy")
    eventually("the job is over", lambda: ns.job_state(job) == "COMPLETED")
    left = ns.user.run(
        "srun", "-N2", "-t1", "bash", "-c", f"ls -d /tmp/*{job}* 2>/dev/null || true"
    )
    assert left.out == ""
    ns.kubectl("delete", "pod", "tidy")
    eventually(
        "its directory is gone",
        lambda: ns.user.sh(f"test ! -e ~/.hpk/pods/{uid}", check=False).code == 0,
    )
