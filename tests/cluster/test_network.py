"""The pods' own network: addresses, names, ports, and what keeps it apart."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Namespace, User, eventually, pod
from netpods import address, bob_holds, http, node_network, on, server

PODS = ipaddress.ip_network("10.244.0.0/16")


def test_pods_reach_each_other_and_the_outside(ns: Namespace, agnhost: str, registry: str) -> None:
    for name, node in (("a", "node1"), ("b", "node1"), ("c", "node2")):
        ns.create(server(name, agnhost, node))
    for name in "abc":
        ns.wait_ready(name)
    found = {name: address(ns, name) for name in "abc"}
    hosts = {name: ns.pod(name)["status"]["hostIP"] for name in "abc"}
    assert len(set(found.values())) == 3
    assert all(ipaddress.ip_address(ip) in PODS for ip in found.values())
    assert hosts["a"] == hosts["b"] != hosts["c"]
    for one, other in (("a", "b"), ("a", "c"), ("c", "a"), ("a", "a")):
        assert "0% packet loss" in ns.kubectl("exec", one, "--", "ping", "-c2", found[other]).out
        assert http(ns, one, found[other]) == other
        assert http(ns, one, found[other], "clientip").startswith(found[one] + ":")
        dial = f"dial?host={found[other]}&port=7001&protocol=udp&request=hostname"
        assert json.loads(http(ns, one, "127.0.0.1", dial)) == {"responses": [other]}
    assert ns.kubectl("exec", "a", "--", "ls", "/sys/class/net").out.split() == ["eth0", "lo"]
    # the registry is a server beside the cluster; the API server is on one of the nodes
    assert ns.kubectl("exec", "c", "--", "wget", "-qO-", f"http://{registry}/v2/").out == "{}"
    for name in "abc":
        said = ns.kubectl(
            "exec", name, "--", "sh", "-c",
            "nc -w2 $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT </dev/null && echo open",
        ).out  # fmt: skip
        assert said == "open\n", name


def test_a_large_transfer_arrives_whole(ns: Namespace, busybox: str) -> None:
    ns.create(
        pod("sink", "sh", "-c", "sleep 1000 | nc -l -p 7000 | md5sum", image=busybox,
            annotations=on("node2"))
    )  # fmt: skip
    ns.wait_ready("sink")
    script = (
        "mkfifo /tmp/copy; md5sum < /tmp/copy & head -c 1073741824 /dev/urandom | tee /tmp/copy |"
        f" nc {address(ns, 'sink')} 7000; wait"
    )
    ns.create(pod("source", "sh", "-c", script, image=busybox, annotations=on("node1")))
    ns.wait_phase("source", "Succeeded", timeout=90)
    eventually("the sum is there", lambda: ns.logs("sink"))
    assert ns.logs("sink") == ns.logs("source")


def test_many_connections_between_nodes_are_one_flow(
    ns: Namespace, agnhost: str, alice: User
) -> None:
    """pasta keeps sockets for each flow for minutes, and may open only so many."""
    ns.create(server("near", agnhost, "node1"), server("far", agnhost, "node2"))
    ns.wait_ready("near")
    ns.wait_ready("far")
    url = f"http://{address(ns, 'far')}:7000/hostname"
    script = f"for i in $(seq 100); do wget -T3 -qO- {url}; done"
    assert ns.kubectl("exec", "near", "--", "sh", "-c", script).out == "far" * 100
    port = json.loads(alice.run("sh", "-c", "cat ~/.hpk/network.json").out)["vxlanPort"]
    flows = alice.run("ss", "-Hunap", f"sport = :{port} or dport = :{port}", node="node2").out
    assert 0 < len(flows.splitlines()) < 10


def test_names_and_addresses_in_the_pod(ns: Namespace, busybox: str) -> None:
    whole = pod(
        "named", "sh", "-c",
        "hostname; echo $IP $HOST_IP; cat /etc/hosts /etc/resolv.conf; sleep 1000",
        image=busybox, hostname="web", subdomain="sub",
        hostAliases=[{"ip": "1.2.3.4", "hostnames": ["db", "db.local"]}],
        dnsConfig={"searches": ["extra.org"], "options": [{"name": "ndots", "value": "3"}]},
        container={
            "env": [
                {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
            ]
        },
    )  # fmt: skip
    ns.create(whole)
    ns.wait_ready("named")
    status = ns.pod("named")["status"]
    assert status["podIPs"] == [{"ip": status["podIP"]}]
    said = eventually("the log is there", lambda: ns.logs("named"))
    assert said.startswith(f"web\n{status['podIP']} {status['hostIP']}\n")
    assert f"{status['podIP']}\tweb.sub.{ns.name}.svc.cluster.local\tweb\n" in said
    assert "127.0.0.1\tlocalhost\n" in said and "1.2.3.4\tdb\tdb.local\n" in said
    assert "extra.org" in said and "ndots:3" in said
    assert ns.kubectl("exec", "named", "--", "wget", "-qO-", "http://127.0.0.1:1", check=False).code


def test_containers_of_a_pod_share_network_and_memory(ns: Namespace, busybox: str) -> None:
    whole = pod("two", "sh", "-c", "echo x > /dev/shm/f; nc -l -p 7000 -e cat", image=busybox)
    whole["spec"]["containers"].append(
        {
            "name": "other",
            "image": busybox,
            "command": ["sh", "-c", "until echo hello | nc -w1 127.0.0.1 7000 2>/dev/null;"
                        "do :; done; cat /dev/shm/f"],
        }
    )  # fmt: skip
    ns.create(whole)
    ns.wait_phase("two", "Succeeded")
    assert ns.logs("two", "-c", "other") == "hello\nx\n"


def test_ports_of_the_node_lead_to_the_pod(ns: Namespace, agnhost: str, alice: User) -> None:
    def publishing(name: str, port: int) -> dict[str, Any]:
        ports = [
            {"containerPort": 7000, "hostPort": port},
            {"containerPort": 7001, "hostPort": port, "protocol": "UDP"},
        ]
        return server(name, agnhost, "node2", container={"ports": ports})

    ns.create(publishing("first", 17000))
    ns.wait_ready("first")
    host = ns.pod("first")["status"]["hostIP"]
    script = (
        "import socket,sys; import urllib.request as r; host=sys.argv[1];"
        "print(r.urlopen(f'http://{host}:17000/hostname', timeout=5).read());"
        "u=socket.socket(type=socket.SOCK_DGRAM); u.settimeout(5);"
        "u.sendto(b'hostname',(host,17000)); print(u.recv(9))"
    )
    assert alice.run("python3", "-c", script, host).out == "b'first'\nb'first'\n"
    ns.create(publishing("second", 17000))
    status = ns.wait_phase("second", "Failed")["status"]
    assert status["reason"] == "NodePorts"
    assert status["message"].startswith("Pod was rejected: Predicate NodePorts failed: ")
    assert "hostport 17000 on node node2" in status["message"]
    # a port that something else has: the pod waits for it
    holder = bob_holds(17001)
    ns.create(publishing("third", 17001))
    eventually("the clash is told", lambda: "FailedCreatePodSandBox" in ns.reasons("third"))
    message = next(
        event["message"]
        for event in ns.events("third")
        if event["reason"] == "FailedCreatePodSandBox"
    )
    assert "hostport 17001" in message and "address already in use" in message
    assert ns.phase("third") == "Pending"
    assert holder.stdin is not None
    holder.stdin.close()
    ns.wait_ready("third")


def test_a_pod_may_ask_for_its_nodes_network(ns: Namespace, agnhost: str) -> None:
    ns.create(server("host", agnhost, "node1", hostNetwork=True))
    ns.wait_ready("host")
    status = ns.pod("host")["status"]
    assert status["podIP"] == status["hostIP"]
    assert ipaddress.ip_address(status["podIP"]) not in PODS
    ns.create(server("own", agnhost, "node2"))
    ns.wait_ready("own")
    assert http(ns, "own", status["podIP"]) == "node1"


def test_probes_look_into_the_pods_own_network(ns: Namespace, agnhost: str) -> None:
    whole = server("probed", agnhost, "node1")
    whole["spec"]["containers"][0]["readinessProbe"] = {
        "tcpSocket": {"port": 7000}, "periodSeconds": 1,
    }  # fmt: skip
    whole["spec"]["containers"][0]["livenessProbe"] = {
        "httpGet": {"port": 7000, "path": "/hostname"}
    }
    ns.create(whole)
    ns.wait_ready("probed")


def test_the_mode_is_told(alice: User) -> None:
    assert "network      rootless (" in alice.run("hpk", "status").out


@pytest.fixture
def bob() -> Iterator[User]:
    """bob, with a cluster of his own."""
    user = User("bob")
    started = user.run("hpk", "status", check=False).code != 0
    if started:
        user.run("sbatch", "/opt/hpk/src/hpk.sbatch")
    user.run("hpk", "status", "--wait", "60", timeout=90)
    yield user
    user.run("kubectl", "delete", "pod", "his", "--ignore-not-found", "--wait=false")
    if started:
        user.run("hpk", "down")


@pytest.mark.disruptive
def test_users_are_apart(ns: Namespace, agnhost: str, alice: User, bob: User) -> None:
    """Both have pods on both nodes at the same time, in networks with the same addresses."""
    control = bob.run("squeue", "--me", "-h", "-t", "R", "-n", "hpk", "-o", "%N").out.strip()
    node, other = ("node1", "node2") if control == "node2" else ("node2", "node1")
    ns.create(server("hers", agnhost, node), server("hers1", agnhost, other))
    theirs = Namespace(bob, "default")
    theirs.create(server("his", agnhost, node))
    for whose, name in ((ns, "hers"), (ns, "hers1"), (theirs, "his")):
        whose.wait_ready(name)
    his, hers = address(theirs, "his"), address(ns, "hers")
    assert http(ns, "hers1", hers) == "hers"  # while bob's are there
    # neither from a pod nor from the node: his address means nothing, or one of hers, to alice
    said = ns.kubectl(
        "exec", "hers", "--", "wget", "-T2", "-qO-", f"http://{his}:7000/hostname", check=False
    )
    assert "his" not in said.out
    # nor does anything of his listen on the node, but for the tunnel of his network
    uid = bob.run("id", "-u").out.strip()
    open_tcp = alice.run("ss", "-Htlne", node=node).out
    assert f"uid:{uid}" not in open_tcp
    took = alice.run(
        "python3", "-c",
        "import socket,sys; s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1].replace('@',chr(0))); print(s.recv(999))",
        "@" + node_network(bob, node).strip(), node=node,
    )  # fmt: skip
    assert took.out == "b''\n", "an owner answers its own user alone"
    # and she hears nothing of what his pods say
    spy = "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"
    assert "PermissionError" in alice.run("python3", "-c", spy, node=node, check=False).err
    daemon = bob.run("pgrep", "-u", "bob", "-x", "flanneld", node=node).out.strip()
    enter = alice.run("nsenter", f"--net=/proc/{daemon}/ns/net", "true", node=node, check=False)
    assert enter.code != 0 and "denied" in enter.err
