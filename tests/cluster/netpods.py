"""Pods that answer each other, and who runs the node networks between them."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from conftest import Namespace, User, eventually, pod


def on(node: str) -> dict[str, str]:
    return {"slurm-job.hpk.io/flags": f"--nodelist={node}"}


def address(ns: Namespace, name: str) -> str:
    return str(ns.pod(name)["status"]["podIP"])


def server(name: str, image: str, node: str, **spec: Any) -> dict[str, Any]:
    """HTTP on port 7000 (/hostname, /clientip), the same by UDP datagrams on 7001."""
    return pod(
        name, "/agnhost", "netexec", "--http-port=7000", "--udp-port=7001",
        image=image, annotations=on(node), terminationGracePeriodSeconds=0, **spec,
    )  # fmt: skip


def http(ns: Namespace, one: str, ip: str, path: str = "hostname") -> str:
    """What another pod's server answers `one`."""
    return ns.kubectl("exec", one, "--", "wget", "-T3", "-qO-", f"http://{ip}:7000/{path}").out


def bob_holds(port: int, node: str = "node2", kind: str = "STREAM") -> subprocess.Popen[str]:
    """A server of bob's; it ends with its standard input."""
    script = (
        f"import socket,sys; s=socket.socket(type=socket.SOCK_{kind}); s.bind(('',{port}));"
        "print('up', flush=True); sys.stdin.read()"
    )
    holder = User("bob").popen("python3", "-c", script, node=node)
    assert holder.stdout is not None and holder.stdout.readline() == "up\n"
    return holder


def node_network(user: User, node: str) -> str:
    """Who listens as owner of the user's node network on a node; "" for nobody."""
    uid = user.run("id", "-u").out.strip()
    return user.run("sh", "-c", f"grep -o 'hpk-net-{uid}-.*' /proc/net/unix || true", node=node).out


def quiet_node(user: User) -> str:
    """A node without any of the user's jobs, once there is one."""

    def look() -> str:
        busy = user.run("squeue", "--me", "-h", "-t", "R,CG", "-o", "%N").out
        return next((node for node in nodes if node not in busy), "")

    nodes = sorted(user.run("sinfo", "-h", "-N", "-o", "%N").out.split(), reverse=True)
    if len(set(nodes)) < 4 and not look():
        pytest.skip("no node without alice's jobs: the sandbox has less than 4")
    return str(eventually("a node without jobs", look))


def owner(user: User, node: str) -> tuple[str, ...]:
    """The job whose agent runs the node network, as squeue writes it, and the process that does;
    () while none does."""
    script = r"""
    p=$(ss -lxpH 2>/dev/null | grep "@hpk-net-$(id -u)-" | grep -o 'pid=[0-9]*' | head -n 1)
    [ -n "$p" ] || exit
    eval $(tr '\0' '\n' < /proc/${p#pid=}/environ | grep -E '^SLURM_(JOB|ARRAY_JOB|ARRAY_TASK)_ID=')
    echo ${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID-$SLURM_JOB_ID} ${p#pid=}
    """
    return tuple(user.run("bash", "-c", script, node=node, check=False).out.split())
