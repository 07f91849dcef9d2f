"""The life of a pod, as kubectl shows it."""

from __future__ import annotations

import re

import pytest
from conftest import Namespace, eventually, pod


def status_of(whole: dict, name: str) -> dict:
    status = whole["status"]
    entries = status.get("containerStatuses", []) + status.get("initContainerStatuses", [])
    return next(entry for entry in entries if entry["name"] == name)


def conditions(whole: dict) -> dict[str, str]:
    return {entry["type"]: entry["status"] for entry in whole["status"]["conditions"]}


def test_a_pod_runs_as_one_slurm_job(ns: Namespace, busybox: str) -> None:
    ns.create(pod("hello", "sh", "-c", "echo hello from $HOSTNAME; id -u", image=busybox))
    whole = ns.wait_phase("hello", "Succeeded", "Failed")
    state = status_of(whole, "main")
    assert state["state"]["terminated"]["exitCode"] == 0
    assert state["state"]["terminated"]["reason"] == "Completed"
    assert state["imageID"].startswith(busybox.rpartition(":")[0] + "@sha256:")
    assert whole["status"]["qosClass"] == "BestEffort"
    assert whole["status"]["hostIP"] and whole["status"]["podIP"]
    assert conditions(whole)["PodScheduled"] == "True"
    assert ns.logs("hello") == "hello from hello\n0\n"
    job = ns.job("hello")
    eventually("the job is over", lambda: ns.job_state(job) == "COMPLETED")
    shown = ns.user.run("scontrol", "show", "job", job).out
    assert f"JobName={ns.name}/hello" in shown
    # Slurm requeues batch jobs alone (scontrol(1)), and not this one
    assert "Requeue=0" in shown or "BatchFlag=0" in shown
    assert {"Scheduled", "Pulled", "Created", "Started"} <= ns.reasons("hello")
    assert any(job in event["message"] for event in ns.events("hello"))


@pytest.mark.parametrize("code", [1, 7, 143])
def test_exit_codes_are_true(ns: Namespace, busybox: str, code: int) -> None:
    ns.create(pod("ends", "sh", "-c", f"exit {code}", image=busybox))
    whole = ns.wait_phase("ends", "Failed")
    terminated = status_of(whole, "main")["state"]["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (code, "Error")
    eventually("Slurm agrees", lambda: ns.job_state(ns.job("ends")) == "FAILED")


def test_running_means_running(ns: Namespace, busybox: str) -> None:
    ns.create(pod("sleeper", "sleep", "1000", image=busybox))
    ns.wait_ready("sleeper")
    whole = ns.pod("sleeper")
    assert whole["status"]["phase"] == "Running"
    assert "startedAt" in status_of(whole, "main")["state"]["running"]
    for name in ("Ready", "ContainersReady", "Initialized"):
        assert conditions(whole)[name] == "True"
    assert ns.job_state(ns.job("sleeper")) == "RUNNING"


def test_init_containers_run_first_and_in_order(ns: Namespace, busybox: str) -> None:
    work = {"name": "work", "mountPath": "/work"}

    def step(name: str) -> dict:
        return {
            "name": name,
            "image": busybox,
            "command": ["sh", "-c", f"echo {name} >> /work/order"],
            "volumeMounts": [work],
        }

    ns.create(
        pod(
            "ordered", "cat", "/work/order", image=busybox,
            container={"volumeMounts": [work]},
            initContainers=[step("one"), step("two")],
            volumes=[{"name": "work", "emptyDir": {}}],
        )
    )  # fmt: skip
    whole = ns.wait_phase("ordered", "Succeeded", "Failed")
    assert ns.logs("ordered") == "one\ntwo\n"
    assert conditions(whole)["Initialized"] == "True"


def test_a_failed_init_container_fails_the_pod(ns: Namespace, busybox: str) -> None:
    ns.create(
        pod(
            "stuck", "true", image=busybox,
            initContainers=[{"name": "bad", "image": busybox, "command": ["sh", "-c", "exit 3"]}],
        )
    )  # fmt: skip
    whole = ns.wait_phase("stuck", "Failed")
    assert status_of(whole, "bad")["state"]["terminated"]["exitCode"] == 3
    assert status_of(whole, "main")["state"]["waiting"]["reason"] == "PodInitializing"


def test_a_sidecar_serves_and_does_not_hold_the_pod_open(ns: Namespace, busybox: str) -> None:
    work = {"name": "work", "mountPath": "/work"}
    sidecar = {
        "name": "sidecar", "image": busybox, "restartPolicy": "Always",
        "command": ["sh", "-c", "echo up > /work/up; trap 'echo bye; exit 0' TERM; "
                    "while true; do sleep 0.1; done"],
        "startupProbe": {"exec": {"command": ["test", "-f", "/work/up"]}, "periodSeconds": 1},
        "volumeMounts": [work],
    }  # fmt: skip
    ns.create(
        pod(
            "assisted", "cat", "/work/up", image=busybox,
            container={"volumeMounts": [work]},
            initContainers=[sidecar], volumes=[{"name": "work", "emptyDir": {}}],
        )
    )  # fmt: skip
    ns.wait_phase("assisted", "Succeeded")
    assert ns.logs("assisted", "-c", "main") == "up\n"
    assert ns.logs("assisted", "-c", "sidecar") == "bye\n"


def test_several_containers_share_the_pod(ns: Namespace, busybox: str) -> None:
    work = {"name": "work", "mountPath": "/work"}
    second = {
        "name": "second", "image": busybox, "volumeMounts": [work],
        "command": ["sh", "-c", "until [ -f /work/note ]; do sleep 0.1; done; cat /work/note"],
    }  # fmt: skip
    whole = pod(
        "pair", "sh", "-c", "echo note > /work/note", image=busybox,
        container={"volumeMounts": [work]}, volumes=[{"name": "work", "emptyDir": {}}],
    )  # fmt: skip
    whole["spec"]["containers"].append(second)
    ns.create(whole)
    ns.wait_phase("pair", "Succeeded")
    assert ns.logs("pair", "-c", "second") == "note\n"


def test_restart_on_failure_with_back_off(ns: Namespace, busybox: str) -> None:
    script = (
        "n=$(cat /work/n 2>/dev/null || echo 0); echo $((n+1)) > /work/n; echo try $n; [ $n = 1 ]"
    )
    ns.create(
        pod(
            "retried", "sh", "-c", script, image=busybox, restartPolicy="OnFailure",
            container={"volumeMounts": [{"name": "work", "mountPath": "/work"}]},
            volumes=[{"name": "work", "emptyDir": {}}],
        )
    )  # fmt: skip
    whole = ns.wait_phase("retried", "Succeeded")
    state = status_of(whole, "main")
    assert state["restartCount"] == 1
    assert state["lastState"]["terminated"]["exitCode"] == 1
    assert ns.logs("retried") == "try 1\n"
    assert ns.logs("retried", "--previous") == "try 0\n"


def test_crash_loop_back_off_is_shown(ns: Namespace, busybox: str) -> None:
    ns.create(pod("loops", "false", image=busybox, restartPolicy="Always"))
    message = eventually(
        "CrashLoopBackOff",
        lambda: next(
            (
                entry["state"]["waiting"]["message"]
                for entry in ns.pod("loops")["status"].get("containerStatuses", [])
                if entry["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
            ),
            "",
        ),
    )
    assert re.match(r"back-off \d+s restarting failed container=main pod=loops_", message)
    assert ns.phase("loops") == "Running"


@pytest.mark.parametrize("policy", ["File", "FallbackToLogsOnError"])
def test_termination_messages(ns: Namespace, busybox: str, policy: str) -> None:
    script = {
        "File": "echo -n why > /dev/termination-log; exit 2",
        "FallbackToLogsOnError": "echo why; exit 2",
    }[policy]
    ns.create(
        pod(
            "says", "sh", "-c", script, image=busybox,
            container={"terminationMessagePolicy": policy},
        )
    )  # fmt: skip
    whole = ns.wait_phase("says", "Failed")
    assert status_of(whole, "main")["state"]["terminated"]["message"].strip() == "why"


def test_a_command_the_image_lacks(ns: Namespace, busybox: str) -> None:
    ns.create(pod("lacks", "no-such-program", image=busybox))
    whole = ns.wait_phase("lacks", "Failed")
    terminated = status_of(whole, "main")["state"]["terminated"]
    assert terminated["exitCode"] in (127, 128)
    assert "no-such-program" in terminated["message"]


def test_the_container_sees_its_own_processes_only(ns: Namespace, busybox: str) -> None:
    ns.create(pod("alone", "sh", "-c", "ls -d /proc/[0-9]* | wc -l; kill -0 -1", image=busybox))
    ns.wait_phase("alone", "Succeeded", "Failed")
    assert int(ns.logs("alone").splitlines()[0]) <= 5


def test_the_host_environment_stays_outside(ns: Namespace, busybox: str) -> None:
    ns.create(pod("clean", "env", image=busybox))
    ns.wait_phase("clean", "Succeeded")
    names = {line.partition("=")[0] for line in ns.logs("clean").splitlines()}
    leaked = [name for name in names if name.startswith(("SLURM", "APPTAINER", "SINGULARITY"))]
    assert not leaked
    assert "KUBERNETES_SERVICE_HOST" in names


def test_active_deadline(ns: Namespace, busybox: str) -> None:
    ns.create(pod("late", "sleep", "1000", image=busybox, activeDeadlineSeconds=3))
    ns.create(pod("later", "sleep", "1000", image=busybox))
    ns.wait_ready("later")
    ns.kubectl("patch", "pod", "later", "-p", '{"spec": {"activeDeadlineSeconds": 1}}')
    for name in ("late", "later"):
        whole = ns.wait_phase(name, "Failed")
        assert whole["status"]["reason"] == "DeadlineExceeded"


def test_the_writable_layer_is_the_containers_own(ns: Namespace, busybox: str) -> None:
    for name in ("first", "second"):
        ns.create(pod(name, "sh", "-c", "ls /mark; echo x > /mark && cat /mark", image=busybox))
        ns.wait_phase(name, "Succeeded")
        assert "x" in ns.logs(name).splitlines()
        assert "No such file" in ns.logs(name)


def test_a_user_of_the_pods_choice(ns: Namespace, busybox: str) -> None:
    ns.create(
        pod(
            "user", "sh", "-c", "id; touch /work/f; ls -ln /work/f", image=busybox,
            securityContext={"runAsUser": 1234, "runAsGroup": 2345, "fsGroup": 3456},
            container={"volumeMounts": [{"name": "work", "mountPath": "/work"}]},
            volumes=[{"name": "work", "emptyDir": {}}],
        )
    )  # fmt: skip
    ns.wait_phase("user", "Succeeded", "Failed")
    said = ns.logs("user")
    assert "uid=1234 gid=2345" in said and "3456" in said


def test_a_failing_liveness_probe_restarts(ns: Namespace, busybox: str) -> None:
    ns.create(
        pod(
            "probed", "sh", "-c", "touch /tmp/live; sleep 2; rm -f /tmp/live; sleep 1000",
            image=busybox, restartPolicy="Always", terminationGracePeriodSeconds=1,
            container={"livenessProbe": {"exec": {"command": ["cat", "/tmp/live"]},
                                         "periodSeconds": 1, "failureThreshold": 2}},
        )
    )  # fmt: skip
    eventually(
        "a restart",
        lambda: (
            status_of(ns.pod("probed"), "main")["restartCount"] >= 1
            if ns.pod("probed")["status"].get("containerStatuses")
            else False
        ),
    )
    assert {"Unhealthy", "Killing"} <= ns.reasons("probed")


def test_readiness_gates_the_ready_condition(ns: Namespace, busybox: str) -> None:
    ns.create(
        pod(
            "gated", "sh", "-c", "sleep 2; touch /tmp/ready; sleep 1000", image=busybox,
            container={"readinessProbe": {"exec": {"command": ["cat", "/tmp/ready"]},
                                          "periodSeconds": 1}},
        )
    )  # fmt: skip
    whole = ns.wait_phase("gated", "Running")
    assert conditions(whole)["Ready"] == "False"
    ns.wait_ready("gated")


def test_a_job_of_twenty_pods_completes(ns: Namespace, busybox: str) -> None:
    template = pod("x", "sh", "-c", "echo done", image=busybox)["spec"]
    ns.create(
        {
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "many"},
            "spec": {"completions": 20, "parallelism": 20, "template": {"spec": template}},
        }
    )  # fmt: skip
    ns.kubectl("wait", "job/many", "--for=condition=Complete", "--timeout=110s")
    assert ns.get("job", "many")["status"]["succeeded"] == 20
    names = ns.user.run("squeue", "--me", "-h", "-t", "all", "-o", "%j").out.split()
    assert sum(name.startswith(f"{ns.name}/many-") for name in names) == 20
