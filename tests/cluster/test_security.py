"""Security contexts: who a container is, what it may do, and what it can't see of the node."""

from __future__ import annotations

import json
from typing import Any

from conftest import Namespace, eventually, pod

from hpk_kubelet.agent.syscall_numbers import NUMBERS

STATUS = "grep -E '^(Cap|NoNew|Groups|Seccomp:)' /proc/self/status | tr -s '\\t ' ' '"
DEFAULT_CAPABILITIES = "00000000a80425fb"  # containerd's


def shown(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def test_users_groups_and_rights(ns: Namespace, busybox: str) -> None:
    """One pod, a container for each way to run."""
    contexts: dict[str, dict[str, Any]] = {
        "default": {},
        "user": {"runAsUser": 1234, "runAsGroup": 55, "capabilities": {"add": ["NET_ADMIN"]}},
        "nothing": {"capabilities": {"drop": ["ALL"]}, "allowPrivilegeEscalation": False},
        "some": {"capabilities": {"drop": ["ALL"], "add": ["CHOWN", "SYS_TIME"]}},
        "high": {"runAsUser": 2_000_000_000, "runAsGroup": 0},
        "readonly": {"readOnlyRootFilesystem": True},
        "privileged": {"privileged": True},
        "confined": {"seccompProfile": {"type": "RuntimeDefault"}},
        "confined-user": {"seccompProfile": {"type": "RuntimeDefault"}, "runAsUser": 1234},
    }
    script = (
        f"{STATUS}; echo id: $(id); touch /tmp/x && echo root: written; "
        "touch /proc/sys/kernel/shmmni 2>/dev/null && echo x >/sys/kernel/x 2>/dev/null; "
        "unshare -U true 2>/dev/null && echo unshare: done; (echo child: done); "
        "mkdir -p /tmp/m && mount -t tmpfs m /tmp/m 2>/dev/null && echo mount: done; "
        "cat /proc/keys | wc -l | sed 's/^/keys: /'; sleep 600"
    )
    whole = pod("many", "x", image=busybox)
    whole["spec"] |= {
        "securityContext": {"supplementalGroups": [4321], "fsGroup": 777},
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {"name": name, "image": busybox, "command": ["sh", "-c", script],
             "securityContext": context}
            for name, context in contexts.items()
        ],
    }  # fmt: skip
    refused = pod("refused", "true", image=busybox, securityContext={"runAsNonRoot": True})
    ns.create(whole, refused)
    ns.wait_phase("many", "Running")
    said: dict[str, dict[str, str]] = {}
    for name in contexts:
        eventually(f"{name} speaks", lambda name=name: "keys: " in ns.logs("many", "-c", name))
        said[name] = shown(ns.logs("many", "-c", name))
    zero = "0" * 16
    assert said["default"]["CapEff"] == DEFAULT_CAPABILITIES
    assert said["default"]["NoNewPrivs"] == "0"
    assert said["default"]["Groups"].split() == ["0", "777", "4321"]
    assert said["default"]["root"] == "written"
    assert said["user"]["id"].startswith("uid=1234 gid=55 groups=55")
    assert said["user"]["CapEff"] == zero  # no ambient capabilities, as with containerd
    assert said["user"]["CapBnd"] == "00000000a80435fb"
    assert (said["nothing"]["CapEff"], said["nothing"]["CapBnd"]) == (zero, zero)
    assert said["nothing"]["NoNewPrivs"] == "1"
    assert int(said["some"]["CapEff"], 16) == 1 << 0 | 1 << 25
    assert said["high"]["id"].startswith("uid=2000000000 gid=0")
    assert "root" not in said["readonly"]
    assert int(said["privileged"]["CapEff"], 16) & 1 << 21
    assert said["privileged"]["mount"] == "done"
    assert [name for name, words in said.items() if "mount" in words] == ["privileged"]
    assert {name for name, words in said.items() if words["keys"] == "0"} >= {*contexts} - {
        "privileged"
    }
    filtered = {name for name, words in said.items() if words["Seccomp"] == "2"}
    assert filtered == {"confined", "confined-user"}
    assert {name for name, words in said.items() if "unshare" not in words} == filtered
    assert all(words["child"] == "done" for words in said.values())
    messages = " ".join(e["message"] for e in ns.events("many"))
    assert "capability SYS_TIME is given in the pod's user namespace only" in messages
    assert "privileged gives it what the user may do" in messages
    waiting = ns.pod("refused")["status"]["containerStatuses"][0]["state"]["waiting"]
    assert waiting["reason"] == "CreateContainerConfigError"
    assert "container has runAsNonRoot and image will run as root" in waiting["message"]
    ns.kubectl("delete", "pod", "many")


def test_a_seccomp_profile_of_ones_own(ns: Namespace, busybox: str) -> None:
    """One that refuses a call, one that allows all others, and one that is not there."""
    refuse = {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95}
    allow = {"names": sorted({*NUMBERS} - {*refuse["names"]}), "action": "SCMP_ACT_ALLOW"}
    for name, profile in (
        ("refusing", {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [refuse]}),
        ("allowing", {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [allow]}),
    ):
        path = f"$HOME/.hpk/seccomp/{ns.name}"
        ns.user.sh(f"umask 077; mkdir -p {path}; echo '{json.dumps(profile)}' > {path}/{name}.json")

    def profiled(name: str, **more: Any) -> dict[str, Any]:
        profile = {"type": "Localhost", "localhostProfile": f"{ns.name}/{name}.json"}
        script = "grep Seccomp: /proc/self/status; mkdir /tmp/x; echo done"
        return {
            "name": name, "image": busybox, "command": ["sh", "-c", script + "; sleep 600"],
            "securityContext": {"seccompProfile": profile, "runAsUser": 1234, **more},
        }  # fmt: skip

    whole = pod("profiled", "x", image=busybox)
    whole["spec"] |= {
        "terminationGracePeriodSeconds": 0,
        "containers": [
            profiled("refusing"),
            profiled("allowing", allowPrivilegeEscalation=False),
            profiled("missing"),
        ],
    }
    ns.create(whole)

    def states() -> dict[str, Any]:
        found = ns.pod("profiled")["status"].get("containerStatuses") or ()
        return {container["name"]: container["state"] for container in found}

    eventually("the others run", lambda: sum("running" in s for s in states().values()) == 2)
    for name, error in (
        ("refusing", "Operation not supported"),
        ("allowing", "Operation not permitted"),
    ):
        eventually(f"{name} speaks", lambda name=name: "done" in ns.logs("profiled", "-c", name))
        text = ns.logs("profiled", "-c", name)
        assert "Seccomp:\t2" in text and f"mkdir: can't create directory '/tmp/x': {error}" in text
    waiting = states()["missing"]["waiting"]
    assert waiting["reason"] == "CreateContainerError"
    assert "cannot load seccomp profile" in waiting["message"]
    ns.kubectl("delete", "pod", "profiled")


def test_nothing_of_the_host_leaks_in(ns: Namespace, busybox: str) -> None:
    """Of the job's environment and the node's files a container has only what its pod names."""
    ns.user.sh(f"touch ~/secret-{ns.name}")
    script = (
        "env -0 | tr '\\0' '\\n' | cut -d= -f1 | grep -v ^KUBERNETES_ | sort | tr '\\n' ' '; echo; "
        f"find / -xdev -name 'secret-{ns.name}' 2>/dev/null; ls -A /home /tmp /root; "
        "ls /dev | tr '\\n' ' '; echo; ps | wc -l; cat /proc/1/cmdline | tr '\\0' ' ' | cut -c1-7; "
        "echo; cat /proc/sysrq-trigger >/dev/null; echo 1 > /proc/sys/kernel/shm_rmid_forced"
    )
    ns.create(pod("bare", "sh", "-c", script, image=busybox))
    ns.wait_phase("bare", "Succeeded", "Failed")
    lines = ns.logs("bare").splitlines()
    assert lines[0].split() == ["HOME", "HOSTNAME", "PATH", "PWD", "SHLVL"]
    assert lines[1:4] == ["/home:", "", "/root:"] or f"secret-{ns.name}" not in "".join(lines)
    devices = next(line.split() for line in lines if "null" in line)
    assert set(devices) == {
        "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout",
        "termination-log", "tty", "urandom", "zero",
    }  # fmt: skip
    assert "Read-only file system" in lines[-1]


def test_a_group_reads_a_secret_and_the_world_does_not(ns: Namespace, busybox: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    script = "stat -L -c '%a %g' /s/k; cat /s/k"
    ns.create(
        {**secret, "stringData": {"k": "v"}},
        pod(
            "reads", "sh", "-c", script, image=busybox,
            securityContext={"runAsUser": 1000, "fsGroup": 1001},
            container={"volumeMounts": [{"name": "s", "mountPath": "/s"}]},
            volumes=[{"name": "s", "secret": {"secretName": "s", "defaultMode": 0o440}}],
        ),
    )  # fmt: skip
    ns.wait_phase("reads", "Succeeded", "Failed")
    assert ns.logs("reads") == "440 1001\nv"


def test_privileges_are_gained_only_where_allowed(ns: Namespace, registry: str) -> None:
    """A program that belongs to root and is setuid, run by somebody else."""
    script = (
        "cp /bin/cat /tmp/cat; chmod 4755 /tmp/cat; "
        "setpriv --reuid 1000 --clear-groups /tmp/cat /proc/self/status | grep ^Uid: | cut -f 3"
    )
    whole = pod("gains", "x", image="x")
    whole["spec"]["containers"] = [
        {"name": name, "image": f"{registry}/mpi:1", "command": ["sh", "-c", script],
         "securityContext": context}
        for name, context in (("allowed", {}), ("not", {"allowPrivilegeEscalation": False}))
    ]  # fmt: skip
    ns.create(whole)
    ns.wait_phase("gains", "Succeeded", "Failed")
    assert (ns.logs("gains", "-c", "allowed"), ns.logs("gains", "-c", "not")) == ("0\n", "1000\n")


def test_sysctls_of_the_pods_own_namespaces(ns: Namespace, busybox: str) -> None:
    def asks(name: str, sysctl: str, value: str, **spec: Any) -> dict[str, Any]:
        settings = {"sysctls": [{"name": sysctl, "value": value}]}
        path = sysctl.replace(".", "/")
        return pod(
            name, "cat", f"/proc/sys/{path}", image=busybox, securityContext=settings, **spec
        )

    before = ns.user.run("cat", "/proc/sys/kernel/shm_rmid_forced").out
    ns.create(
        asks("safe", "kernel.shm_rmid_forced", "1"),
        asks("network", "net.ipv4.tcp_fin_timeout", "21"),
        asks("unsafe", "kernel.msgmax", "10000"),
    )
    ns.wait_phase("safe", "Succeeded", "Failed")
    assert ns.logs("safe") == "1\n"
    network = ns.wait_phase("network", "Succeeded", "Failed")
    if network["status"]["podIP"] == network["status"]["hostIP"]:
        assert "the network is the node's own" in network["status"]["message"]
    else:
        assert ns.logs("network") == "21\n"
    assert ns.user.run("cat", "/proc/sys/kernel/shm_rmid_forced").out == before
    status = ns.wait_phase("unsafe", "Failed")["status"]
    assert status["reason"] == "SysctlForbidden"
    assert status["message"] == (
        'Pod was rejected: forbidden sysctl: "kernel.msgmax" not allowlisted'
    )
    assert "SysctlForbidden" in ns.reasons("unsafe")
    assert ns.job("unsafe") == ""
