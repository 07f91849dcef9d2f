"""The pods' network when owners, ports, and the control job go away."""

from __future__ import annotations

import json
from functools import partial

import pytest
from conftest import Namespace, User, eventually, pod
from netpods import (
    address,
    bob_holds,
    http,
    node_network,
    on,
    owner,
    quiet_node,
    server,
)

pytestmark = pytest.mark.disruptive


def told(ns: Namespace, name: str) -> bool:
    return "FailedCreatePodSandBox" in ns.reasons(name)


def test_a_taken_tunnel_port_is_told_and_waited_for(
    ns: Namespace, agnhost: str, alice: User
) -> None:
    free = quiet_node(alice)
    port = json.loads(alice.run("sh", "-c", "cat ~/.hpk/network.json").out)["vxlanPort"]
    holder = bob_holds(port, free, "DGRAM")
    ns.create(server("waits", agnhost, free), server("cancelled", agnhost, free))
    for name in ("waits", "cancelled"):
        eventually(f"{name} has a reason", partial(told, ns, name))
    said = " ".join(event["message"] for event in ns.events("waits"))
    assert "pasta" in said and str(port) in said
    assert ns.phase("waits") == "Pending"
    alice.run("scancel", "--me", "-n", f"{ns.name}/cancelled")
    status = ns.wait_phase("cancelled", "Failed")["status"]  # it had no address yet
    assert status["reason"] in ("Terminated", "SlurmCancelled"), status
    assert "podIP" not in status
    gone = ("squeue", "--me", "-h", "-n", f"{ns.name}/cancelled")
    eventually("its job is over at once", lambda: not alice.run(*gone).out, timeout=15)
    assert holder.stdin is not None
    holder.stdin.close()
    ns.wait_ready("waits")


def test_the_network_follows_the_control_job(ns: Namespace, agnhost: str, alice: User) -> None:
    """Pods that run hear where etcd is when the control job starts again on another node."""
    ns.create(server("one", agnhost, "node1"), server("two", agnhost, "node2"))
    for name in ("one", "two"):
        ns.wait_ready(name)
    where = alice.run("squeue", "--me", "-h", "-t", "R", "-n", "hpk", "-o", "%N").out.strip()
    other = "node2" if where == "node1" else "node1"
    alice.run("hpk", "down")
    alice.run("sbatch", f"--nodelist={other}", "/opt/hpk/src/hpk.sbatch")
    alice.run("hpk", "status", "--wait", "60", timeout=90)
    # a subnet that the nodes' flannels hear of only from the etcd that is there now
    ns.create(server("late", agnhost, where))
    ns.wait_ready("late")
    eventually(
        "the agents are back",
        lambda: (
            ns.kubectl("exec", "one", "--", "true", check=False).code == 0
            and ns.kubectl("exec", "two", "--", "true", check=False).code == 0
        ),
    )
    for name in ("one", "two"):
        for target in ("one", "two", "late"):
            assert http(ns, name, address(ns, target)) == target


def test_the_last_pod_leaves_nothing_on_its_node(ns: Namespace, agnhost: str, alice: User) -> None:
    free = quiet_node(alice)
    ns.create(server("last", agnhost, free), server("too", agnhost, free))
    for name in ("last", "too"):
        ns.wait_ready(name)
    assert node_network(alice, free)
    ns.kubectl("delete", "pod", "last", "too")
    eventually("no owner", lambda: not node_network(alice, free))
    left = alice.run("sh", "-c", "ps -u $(id -u) -o args= ; ls -A /tmp", node=free).out
    assert "pasta" not in left and "flanneld" not in left and "hpk-" not in left


def test_five_hundred_short_pods_share_a_small_subnet(alice: User) -> None:
    """By the agent's own functions in a node network of its own: many more pods than a /24 has
    addresses, eight at a time, and none gets the address of one that has just ended."""
    script = """
import os, sys
sys.path.insert(0, "/opt/hpk/src")
from hpk_kubelet.agent import nodenet, podnet, syscalls
nodenet.make_namespaces().enter()
home = os.open("/proc/self/ns/net", os.O_RDONLY)
ready = {"subnet": "10.244.9.0/24", "mtu": 1450, "base": 250}
gates = []
for number in range(500):
    gate, opened = os.pipe()
    told, tell = os.pipe()
    if os.fork() == 0:
        for inherited in (*gates, opened):
            os.close(inherited)
        netns = podnet.make_netns()
        syscalls.setns(home, syscalls.CLONE_NEWNET)
        os.write(tell, podnet.connect(ready, netns).encode())
        os.read(gate, 1)
        os._exit(0)
    os.close(gate)
    os.close(tell)
    print(os.read(told, 99).decode(), flush=True)
    os.close(told)
    gates.append(opened)
    if len(gates) == 8:
        os.close(gates.pop(0))
        os.wait()
"""
    used = alice.run("python3", "-c", script, node="node2").out.split()
    assert len(used) == 500
    for at, one in enumerate(used):
        assert one not in used[max(0, at - 150) : at], "an address was used again at once"


KILLS = 10
PORT = 7000


def end_owner(user: User, node: str, spared: str) -> bool:
    """Kills the job whose agent runs the node network, or of the spared one only the part that does
    (False). Returns once another has taken it over."""
    job, pid = eventually("an owner", lambda: owner(user, node))
    if job == spared:
        user.run("kill", "-KILL", pid, node=node)
    else:
        user.run("scancel", "--signal=KILL", "--full", job)
    eventually(f"another owner than {job}", lambda: owner(user, node)[:1] not in ((), (job,)))
    eventually(
        "its flanneld",
        lambda: user.run("pgrep", "-x", "flanneld", node=node, check=False).out,
    )
    return job != spared


def test_pods_take_the_node_network_over_while_data_flows(
    ns: Namespace, busybox: str, agnhost: str, alice: User
) -> None:
    """Owners are killed one after the other while their node's pod receives from another node."""
    node = quiet_node(alice)
    other = next(n for n in ("node2", "node1") if n != node)
    check = '$1 != NR - 1 {bad = 1} END {print NR, bad ? "broken" : "whole"}'
    count = f"nc -l -p {PORT} | awk '{check}'"
    sink = pod("sink", "sh", "-c", f"sleep 1000 | {count}", image=busybox, annotations=on(node))
    victims = [f"victim{i}" for i in range(KILLS + 1)]
    ns.create(*(server(name, agnhost, node) for name in victims), sink)
    ns.create(server("observer", agnhost, other))
    ns.wait_ready("sink")
    lines = (
        "i=0; while [ ! -f /tmp/stop ]; do seq $i $((i + 9999)); i=$((i + 10000)); sleep 0.05; "
        f"done | nc {address(ns, 'sink')} {PORT}"
    )
    ns.create(pod("source", "sh", "-c", lines, image=busybox, annotations=on(other)))
    for name in ("source", "observer", *victims):
        ns.wait_ready(name)
    spared = ns.job("sink")
    killed = 0
    while killed < KILLS:
        killed += end_owner(alice, node, spared)
    jobs = alice.run("squeue", "--me", "-h", "-o", "%j").out.split()
    (survivor,) = (name for name in victims if f"{ns.name}/{name}" in jobs)
    assert http(ns, "observer", address(ns, survivor)) == survivor
    ns.kubectl("exec", "source", "--", "touch", "/tmp/stop")
    ns.wait_phase("source", "Succeeded")
    said = eventually("all lines came", lambda: ns.logs("sink")).split()
    assert int(said[0]) >= 10000 and said[1] == "whole"


def test_a_takeover_needs_no_control_job(
    ns: Namespace, busybox: str, agnhost: str, alice: User
) -> None:
    """Without etcd, the next owner still has the ways to the other nodes."""
    node = quiet_node(alice)
    other = next(n for n in ("node2", "node1") if n != node)
    ns.create(server("far", agnhost, other))
    ns.wait_ready("far")
    url = f"http://{address(ns, 'far')}:7000/hostname"
    ask = f"while :; do wget -T1 -qO- {url} && echo; sleep 0.2; done"
    ns.create(
        server("victim", agnhost, node),
        server("other", agnhost, node),
        pod("asking", "sh", "-c", ask, image=busybox, annotations=on(node)),
    )
    for name in ("victim", "other", "asking"):
        ns.wait_ready(name)
    log = f"~/.hpk/pods/{ns.pod('asking')['metadata']['uid']}/logs/main/0.log"

    def answers() -> int:
        return int(alice.sh(f"grep -c far {log} || true").out)

    eventually("an answer", answers)
    spared = ns.job("asking")
    alice.run("hpk", "down")
    try:
        end_owner(alice, node, spared)
        before = answers()
        eventually("more answers than before", lambda: answers() > before + 2)
    finally:
        alice.run("sbatch", "/opt/hpk/src/hpk.sbatch")
        alice.run("hpk", "status", "--wait", "60", timeout=90)
