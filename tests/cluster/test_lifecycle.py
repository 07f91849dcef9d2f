"""Probes of every kind, hooks, restart rules, readiness gates and sidecars' ends."""

from __future__ import annotations

import json
from typing import Any

from conftest import Namespace, eventually, pod

TRAP = (
    "trap 'echo {0} $(cut -d\" \" -f1 /proc/uptime); exit 0' TERM; echo up; "
    "while :; do sleep 0.1; done"
)


def container(ns: Namespace, name: str, of: str = "main") -> dict[str, Any]:
    status = ns.pod(name)["status"]
    every = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
    return next((one for one in every if one["name"] == of), {})


def condition(ns: Namespace, name: str, type_: str) -> str:
    found = {c["type"]: c["status"] for c in ns.pod(name)["status"].get("conditions", [])}
    return found.get(type_, "")


def test_probes_over_the_network(ns: Namespace, registry: str, busybox: str) -> None:
    image = f"{registry}/agnhost:2.63.0"

    def server(name: str, port: int, *argv: str, **probes: Any) -> dict[str, Any]:
        every = {"periodSeconds": 1, "failureThreshold": 2}
        return {
            "name": name, "image": image, "args": list(argv), "ports": [{"containerPort": port}],
            **{kind: {**every, **probe} for kind, probe in probes.items()},
        }  # fmt: skip

    grpc, web = ("grpc-health-checking", "--port=5000", "--http-port=8081"), "netexec"
    whole = pod("served", image=image, restartPolicy="Always", terminationGracePeriodSeconds=1)
    whole["spec"]["containers"] = [
        server(
            "grpc", 5000, *grpc,
            startupProbe={"grpc": {"port": 5000}, "failureThreshold": 30},
            livenessProbe={"grpc": {"port": 5000}}, readinessProbe={"tcpSocket": {"port": 5000}},
        ),
        server(
            "web", 8080, web,
            # follows on the same host, and not to another one
            startupProbe={"httpGet": {"port": 8080, "path": "/redirect?location=%2Fhostname"},
                          "failureThreshold": 30},
            livenessProbe={"httpGet": {"port": 8080,
                                       "path": "/redirect?location=http%3A%2F%2F0.0.0.0%2F"}},
        ),
        {
            "name": "wrong", "image": busybox, "command": ["sleep", "1000"],
            "livenessProbe": {"grpc": {"port": 5000, "service": "unknown"}, "periodSeconds": 1,
                              "failureThreshold": 2, "terminationGracePeriodSeconds": 1},
        },
    ]  # fmt: skip
    ns.create(whole)
    eventually(
        "the wrong service restarts", lambda: container(ns, "served", "wrong").get("restartCount")
    )
    assert container(ns, "served", "grpc")["ready"] and container(ns, "served", "web")["ready"]
    assert container(ns, "served", "grpc")["restartCount"] == 0
    assert container(ns, "served", "web")["restartCount"] == 0
    wanted = {"Unhealthy", "ProbeWarning", "Killing"}
    eventually("the events", lambda: wanted <= ns.reasons("served"))


def test_hooks_and_a_readiness_gate(ns: Namespace, registry: str, busybox: str) -> None:
    gate = {"conditionType": "example.com/ready"}
    hooks = {
        "postStart": {"exec": {"command": ["sh", "-c", "echo started > /proc/1/fd/1"]}},
        "preStop": {"exec": {"command": ["sh", "-c", "echo stopping > /proc/1/fd/1"]}},
    }
    whole = pod(
        "hooked", "sh", "-c", TRAP.format("ended"), image=busybox, readinessGates=[gate],
        container={"lifecycle": hooks},
    )  # fmt: skip
    ns.create(whole)
    eventually(
        "its containers are ready", lambda: condition(ns, "hooked", "ContainersReady") == "True"
    )
    assert condition(ns, "hooked", "Ready") == "False"
    patch = {"status": {"conditions": [{"type": gate["conditionType"], "status": "True"}]}}
    ns.kubectl("patch", "pod", "hooked", "--subresource=status", "-p", json.dumps(patch))
    eventually("the gate opens", lambda: condition(ns, "hooked", "Ready") == "True")
    said = ns.user.popen("kubectl", "-n", ns.name, "logs", "-f", "hooked")
    assert said.stdout is not None
    first = [said.stdout.readline().strip() for _ in range(2)]
    ns.kubectl("delete", "pod", "hooked", "--wait=false")
    out, _ = said.communicate(timeout=60)
    words = [line.split()[0] for line in out.splitlines()]
    assert sorted(first) == ["started", "up"] and words == ["stopping", "ended"]


def test_a_hook_that_fails_kills_the_container(ns: Namespace, busybox: str) -> None:
    failing = {"postStart": {"exec": {"command": ["sh", "-c", "exit 3"]}}}
    ns.create(
        pod(
            "unlucky", "sleep", "1000", image=busybox, restartPolicy="Never",
            terminationGracePeriodSeconds=1, container={"lifecycle": failing},
        )
    )  # fmt: skip
    ns.wait_phase("unlucky", "Failed")
    assert "FailedPostStartHook" in ns.reasons("unlucky")


def test_restart_rules_of_a_container(ns: Namespace, busybox: str) -> None:
    script = "echo x >> /w/n; [ $(wc -l < /w/n) = 2 ] && exit 7; exit 42"
    rule = {"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}
    ns.create(
        pod(
            "ruled", "sh", "-c", script, image=busybox, restartPolicy="Never",
            volumes=[{"name": "w", "emptyDir": {}}],
            container={"restartPolicy": "Never", "restartPolicyRules": [rule],
                       "volumeMounts": [{"name": "w", "mountPath": "/w"}]},
        )
    )  # fmt: skip
    ns.wait_phase("ruled", "Failed")
    last = container(ns, "ruled")
    assert (last["restartCount"], last["state"]["terminated"]["exitCode"]) == (1, 7)
    assert last["lastState"]["terminated"]["exitCode"] == 42


def test_sidecars_end_last_and_in_reverse(ns: Namespace, busybox: str) -> None:
    def sidecar(name: str, script: str) -> dict[str, Any]:
        command = ["sh", "-c", script]
        return {"name": name, "image": busybox, "restartPolicy": "Always", "command": command}

    once = "[ -f /w/was ] || { touch /w/was; exit 1; }; " + TRAP.format("second")
    second = sidecar("second", once) | {"volumeMounts": [{"name": "w", "mountPath": "/w"}]}
    ns.create(
        pod(
            "crew", "sh", "-c", TRAP.format("main"), image=busybox,
            initContainers=[sidecar("first", TRAP.format("first")), second],
            volumes=[{"name": "w", "emptyDir": {}}],
        )
    )  # fmt: skip
    ns.wait_ready("crew")
    eventually("it was restarted", lambda: container(ns, "crew", "second")["restartCount"] == 1)
    followers = {
        name: ns.user.popen("kubectl", "-n", ns.name, "logs", "-f", "crew", "-c", name)
        for name in ("main", "second", "first")
    }
    for follower in followers.values():
        assert follower.stdout is not None and follower.stdout.readline() == "up\n"
    ns.kubectl("delete", "pod", "crew")
    last = {name: f.communicate(timeout=60)[0].split() for name, f in followers.items()}
    assert [words[-2] for words in last.values()] == ["main", "second", "first"]
    times = [float(words[-1]) for words in last.values()]
    assert times == sorted(times)


def test_another_image_restarts_the_container(ns: Namespace, registry: str, busybox: str) -> None:
    again = busybox.replace("/busybox:1", "/agnhost:2.63.0")
    ns.create(
        pod(
            "renewed", "sh", "-c", "ls /agnhost; exec sleep 1000", image=busybox,
            restartPolicy="Never", terminationGracePeriodSeconds=1,
        )
    )  # fmt: skip
    ns.wait_ready("renewed")
    job = ns.job("renewed")
    ns.kubectl("set", "image", "pod/renewed", f"main={again}")
    eventually(
        "it runs the other image",
        lambda: (
            container(ns, "renewed").get("restartCount") == 1
            and "running" in container(ns, "renewed")["state"]
        ),
    )
    assert ns.logs("renewed").strip() == "/agnhost"
    assert container(ns, "renewed")["imageID"].startswith(again.partition(":2")[0] + "@sha256:")
    assert ns.job("renewed") == job
    assert any("definition changed" in event["message"] for event in ns.events("renewed"))


def test_a_misconfigured_container_does_not_hold_up_the_others(ns: Namespace, busybox: str) -> None:
    whole = pod("half", "sh", "-c", "echo up", image=busybox, restartPolicy="Never")
    missing = {"configMapKeyRef": {"name": "late", "key": "word"}}
    whole["spec"]["containers"].append(
        {
            "name": "late", "image": busybox, "command": ["sh", "-c", "echo $WORD"],
            "env": [{"name": "WORD", "valueFrom": missing}],
        }
    )  # fmt: skip
    ns.create(whole)
    eventually("the other one ran", lambda: "terminated" in container(ns, "half").get("state", {}))
    waiting = container(ns, "half", "late")["state"]["waiting"]
    assert waiting["reason"] == "CreateContainerConfigError"
    assert waiting["message"] == 'configmap "late" not found'
    assert ns.phase("half") == "Pending"
    ns.kubectl("create", "configmap", "late", "--from-literal=word=arrived")
    ns.wait_phase("half", "Succeeded")
    assert ns.logs("half", "-c", "late").strip() == "arrived"
