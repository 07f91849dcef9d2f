"""`network: site`: pods are in a network that an administrator offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Namespace, User, eventually
from netpods import address, http, server

NODES = ("node1", "node2")
PROGRAM = "/usr/local/bin/site-network"
CONFIG = f"network: site\nsiteNetwork: {PROGRAM}\n"
pytestmark = pytest.mark.disruptive


class Second(User):
    """The user, with a second cluster."""

    def run(self, *argv: str, **options: object):  # type: ignore[no-untyped-def]
        home = "export HPK_HOME=~/site/.hpk KUBECONFIG=~/site/.hpk/kubeconfig"
        return super().run("bash", "-c", f'{home}; "$@"', "bash", *argv, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def site() -> Iterator[None]:
    """The administrator's part, on two nodes."""
    root = User("root")
    text = "#!/usr/bin/python3\n" + Path(__file__).with_name("site_network.py").read_text()
    find = "ip -4 -o address show eth0 | grep -o 'inet [0-9.]*' | cut -c6-"
    addresses = [root.run("bash", "-c", find, node=node).out.strip() for node in NODES]
    daemons = []
    for number, node in enumerate(NODES):
        root.run("bash", "-c", f"cat > {PROGRAM}; chmod 755 {PROGRAM}", stdin=text, node=node)
        other = f"{2 - number}={addresses[1 - number]}"
        daemons.append(root.popen(PROGRAM, str(number + 1), other, node=node))
    for daemon in daemons:
        assert daemon.stdout is not None and daemon.stdout.readline() == "ready\n"
    yield
    for daemon in daemons:
        daemon.kill()
    for node in NODES:
        root.run("pkill", "-f", f"{PROGRAM} [12]", node=node, check=False)


@pytest.fixture(scope="module")
def cluster(site: None) -> Iterator[Namespace]:
    """A second cluster of alice's, on the same nodes as the first."""
    user = Second("alice")
    user.run("bash", "-c", "mkdir -p $HPK_HOME; cat > $HPK_HOME/config.yaml; "
             "cd ~ && sbatch -o /dev/null /opt/hpk/src/hpk.sbatch",
             stdin=CONFIG + user.run("cat", "/home/alice/.hpk/config.yaml").out)  # fmt: skip
    try:
        user.run("hpk", "status", "--wait", "120", timeout=150)
        ns = Namespace(user, "default")
        eventually("its account", lambda: not ns.gone("serviceaccount", "default"))
        yield ns
        ns.kubectl("delete", "pod", "--all", "--now")
    finally:
        user.run("hpk", "down", check=False)
        user.run("bash", "-c", "rm -rf ~/site")


def test_pods_are_in_the_sites_network(cluster: Namespace, agnhost: str) -> None:
    cluster.create(*(server(node, agnhost, node) for node in NODES))
    for node in NODES:
        cluster.wait_ready(node)
    found = [address(cluster, node) for node in NODES]
    assert [ip.rpartition(".")[0] for ip in found] == ["172.30.1", "172.30.2"]
    for one, other in ((0, 1), (1, 0), (0, 0)):
        assert http(cluster, NODES[one], found[other]) == NODES[other]
        assert http(cluster, NODES[one], found[other], "clientip").startswith(found[one])
    through = f"/api/v1/namespaces/default/pods/{NODES[1]}:7000/proxy/hostname"
    assert cluster.kubectl("get", "--raw", through).out == NODES[1]
    devices = "ls /sys/class/net | grep -c site || true"
    assert cluster.user.sh(devices).out.strip() == "0"
    root = User("root")
    assert root.run("bash", "-c", devices, node="node2").out.strip() == "1"
    cluster.kubectl("delete", "pod", "node2", "--now")
    eventually(
        "the program was told",
        lambda: root.run("bash", "-c", devices, node="node2").out.strip() == "0",
    )


def test_the_programs_words_are_told(cluster: Namespace, agnhost: str) -> None:
    root = User("root")
    root.run("bash", "-c", f"mv {PROGRAM} {PROGRAM}-away; printf '#!/bin/sh\\n"
             "echo {\\\\\"msg\\\\\": \\\\\"no address is left\\\\\"}; exit 1' > "
             f"{PROGRAM}; chmod 755 {PROGRAM}", node="node1")  # fmt: skip
    try:
        cluster.create(server("waits", agnhost, "node1"))
        eventually("its words", lambda: any(
            "no address is left" in event["message"] for event in cluster.events("waits")
        ))  # fmt: skip
        assert cluster.phase("waits") == "Pending"
    finally:
        root.run("mv", f"{PROGRAM}-away", PROGRAM, node="node1")
    cluster.wait_ready("waits")
