"""The pods' own network: addresses, names, ports, and what keeps it apart."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Namespace, User, eventually, pod

PODS = ipaddress.ip_network("10.244.0.0/16")


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
    ip = address(ns, "sink")
    ns.create(
        pod("source", "sh", "-c",
            f"head -c 60000000 /dev/urandom > /tmp/x; md5sum < /tmp/x; nc {ip} 7000 < /tmp/x",
            image=busybox, annotations=on("node1"))
    )  # fmt: skip
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


def bob_holds(port: int, node: str = "node2", kind: str = "STREAM") -> subprocess.Popen[str]:
    """A server of bob's; it ends with its standard input."""
    script = (
        f"import socket,sys; s=socket.socket(type=socket.SOCK_{kind}); s.bind(('',{port}));"
        "print('up', flush=True); sys.stdin.read()"
    )
    holder = User("bob").popen("python3", "-c", script, node=node)
    assert holder.stdout is not None and holder.stdout.readline() == "up\n"
    return holder


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


@pytest.mark.disruptive
def test_a_taken_tunnel_port_is_told_and_waited_for(
    ns: Namespace, agnhost: str, alice: User
) -> None:
    free = quiet_node(alice)
    port = json.loads(alice.run("sh", "-c", "cat ~/.hpk/network.json").out)["vxlanPort"]
    holder = bob_holds(port, free, "DGRAM")
    ns.create(server("waits", agnhost, free))
    eventually("the reason is told", lambda: "FailedCreatePodSandBox" in ns.reasons("waits"))
    said = " ".join(event["message"] for event in ns.events("waits"))
    assert "pasta" in said and str(port) in said
    assert ns.phase("waits") == "Pending"
    assert holder.stdin is not None
    holder.stdin.close()
    ns.wait_ready("waits")


@pytest.mark.disruptive
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


@pytest.mark.disruptive
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


@pytest.mark.disruptive
def test_many_short_pods_share_a_small_subnet(ns: Namespace, busybox: str, agnhost: str) -> None:
    """More pods than there were addresses left to a node that forgot to give them back."""
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "many"},
        "spec": {
            "completions": 40,
            "parallelism": 8,
            "template": {
                "metadata": {"annotations": on("node2")},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [
                        {"name": "main", "image": busybox,
                         "command": ["sh", "-c", "ip -4 -o addr show eth0"]}
                    ],
                },
            },
        },
    }  # fmt: skip
    ns.create(server("holder", agnhost, "node2"))  # one node network for all
    ns.wait_ready("holder")
    ns.create(job)
    ns.kubectl("wait", "job/many", "--for=condition=Complete", "--timeout=110s", timeout=120)
    items = ns.kubectl("get", "pods", "-l", "job-name=many", "-o", "json").json()["items"]
    used = [item["status"]["podIP"] for item in items]
    assert len(used) == 40
    assert len(set(used)) == 40, "an address was used again at once"


def flannel_lines(user: User, node: str) -> list[str]:
    return user.run("sh", "-c", "pgrep -x flanneld || true", node=node).out.split()


@pytest.mark.disruptive
def test_another_pod_takes_the_node_network_over(
    ns: Namespace, busybox: str, agnhost: str, alice: User
) -> None:
    """The owner's job is killed again and again while pods of the node talk to another node's."""
    free = quiet_node(alice)
    other = next(n for n in ("node2", "node1") if n != free)
    ns.create(*(server(f"victim{i}", agnhost, free) for i in range(4)))
    for i in range(4):
        ns.wait_ready(f"victim{i}")
    ns.create(
        pod("sink", "sh", "-c", "sleep 1000 | nc -l -p 7000 | md5sum", image=busybox,
            annotations=on(free))
    )  # fmt: skip
    ns.wait_ready("sink")
    listing = alice.run("squeue", "--me", "-h", "-t", "R", "-o", "%A %j").out.split()
    victims = {
        number: name.rpartition("/")[2]
        for number, name in zip(listing[::2], listing[1::2], strict=True)
        if name.startswith(f"{ns.name}/victim")
    }
    assert len(victims) == 4
    script = (
        "i=0; while [ $i -lt 300 ]; do head -c 100000 /dev/zero; i=$((i+1)); sleep 0.05; done |"
        f" nc {address(ns, 'sink')} 7000"
    )
    ns.create(server("observer", agnhost, other))
    ns.create(pod("source", "sh", "-c", script, image=busybox, annotations=on(other)))
    ns.wait_ready("source")
    killed = 0
    while victims:
        owner = eventually("an owner", lambda: owner_job(alice, free))
        if owner not in victims:
            break  # the transfer's own end has it now
        name = victims.pop(owner)
        alice.run("scancel", "--signal=KILL", "--full", owner)
        eventually(f"another owner than {name}",
                   lambda owner=owner: owner_job(alice, free) not in ("", owner))  # fmt: skip
        eventually("its flanneld runs", lambda: flannel_lines(alice, free))
        killed += 1
    assert killed, f"the owner {owner} is none of {victims}"
    for name in victims.values():  # those that live can be reached
        assert http(ns, "observer", address(ns, name)) == name
    ns.wait_phase("source", "Succeeded", timeout=90)
    eventually("the sum is there", lambda: ns.logs("sink"))
    assert ns.logs("sink").split()[0] == "9e6261867ca2438eb9804c93c542a722"


def owner_job(user: User, node: str) -> str:
    """The number of the job whose agent runs the node network; "" while there is none."""
    script = """
    p=$(ss -lxpH 2>/dev/null | grep "@hpk-net-$(id -u)-" | grep -o 'pid=[0-9]*' | head -n 1)
    [ -z "$p" ] || tr '\\0' '\\n' < /proc/${p#pid=}/environ | sed -n 's/^SLURM_JOB_ID=//p'
    """
    return user.run("bash", "-c", script, node=node, check=False).out.strip()


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
    ns.create(server("hers", agnhost, "node2"), server("hers1", agnhost, "node1"))
    theirs = Namespace(bob, "default")
    theirs.create(server("his", agnhost, "node2"))
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
    open_tcp = alice.run("ss", "-Htlne", node="node2").out
    assert f"uid:{uid}" not in open_tcp
    took = alice.run(
        "python3", "-c",
        "import socket,sys; s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1].replace('@',chr(0))); print(s.recv(999))",
        "@" + node_network(bob, "node2").strip(), node="node2",
    )  # fmt: skip
    assert took.out == "b''\n", "an owner answers its own user alone"
