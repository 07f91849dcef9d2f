"""The node network's parts that need no privileges."""

import os
import socket
import struct
from pathlib import Path

import pytest

from hpk_kubelet.agent.keeper import Gone, Keeper, newer, peer_uid, receive, send
from hpk_kubelet.agent.netlink import Netlink, attribute
from hpk_kubelet.agent.ports import PortTaken, listen
from hpk_kubelet.errors import HPKError
from hpk_kubelet.network.facts import Chosen, choose, free_udp_port
from hpk_kubelet.network.modes import choose as choose_mode

FACTS = {"revision": 1, "file": "/nowhere"}


def keeper(cluster: str) -> Keeper:
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Keeper({"cluster": cluster, "facts": FACTS}, ours)


def test_one_keeper_is_the_owner_until_it_ends() -> None:
    cluster = os.urandom(6).hex()
    first, second, third = keeper(cluster), keeper(cluster), keeper(cluster)
    found, listener = first._meet()
    assert not found
    found, connection = second._meet()
    assert found and peer_uid(connection) == os.getuid()
    other, elsewhere = keeper(os.urandom(6).hex())._meet()
    assert not other, "another cluster has another owner"
    listener.close()
    with pytest.raises(Gone):
        receive(connection)
    found, successor = third._meet()
    assert not found
    for one in (connection, successor, elsewhere):
        one.close()


def test_a_newcomer_that_becomes_owner_takes_the_network_of_those_who_have_one() -> None:
    cluster = os.urandom(6).hex()
    newcomer, holder = keeper(cluster), keeper(cluster)
    _, listener = newcomer._meet()
    _, connection = holder._meet()
    spaces = Path("/proc/self/ns")
    with (spaces / "user").open() as user, (spaces / "net").open() as net:
        send(connection, {"facts": {**FACTS, "revision": 5}}, [user.fileno(), net.fileno()])
        members = newcomer._waiting(listener)
        assert newcomer.spaces is not None
        assert os.fstat(newcomer.spaces.net).st_ino == os.fstat(net.fileno()).st_ino
    assert newcomer.facts["revision"] == 5
    for one in (*members, listener, connection):
        one.close()
    for fd in newcomer.spaces:
        os.close(fd)


def test_a_keeper_never_waits_for_one_that_does_not_listen() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(Gone):
        for _ in range(100_000):
            send(ours, {"error": "x" * 200})


def test_the_newest_facts_count() -> None:
    assert newer(FACTS, {"revision": 2}) == {"revision": 2}
    assert newer(FACTS, {"revision": 1, "x": 1}) is FACTS
    assert newer(FACTS, None) is FACTS


def test_attributes_are_padded() -> None:
    assert attribute(3, "abc") == struct.pack("=HH", 8, 3) + b"abc\0"
    assert attribute(1, b"\1\2\3\4\5\6") == struct.pack("=HH", 10, 1) + b"\1\2\3\4\5\6\0\0"
    assert attribute(4, 1450) == struct.pack("=HHI", 8, 4, 1450)


@pytest.mark.parametrize(("port", "last"), [(21001, 21002), (65535, 65535)])
def test_a_tunnel_has_one_source_port(
    monkeypatch: pytest.MonkeyPatch, port: int, last: int
) -> None:
    netlink, sent = Netlink(), []
    monkeypatch.setattr(netlink, "_change", lambda *order: sent.append(order))
    netlink.add_vxlan("flannel.7", bytes(6), 7, "10.0.0.1", port, 1450)
    netlink.close()
    assert attribute(10, struct.pack("!HH", port, last)) in sent[0][2]


def test_ports_of_the_node_are_all_bound_or_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(
        ("127.0.0.1", 0)
    ) as unused:  # fmt: skip
        clash, free = taken.getsockname()[1], unused.getsockname()[1]
        unused.close()
        wanted = [
            {"address": "127.0.0.1", "port": port, "target": 80, "protocol": "TCP"}
            for port in (free, clash)
        ]
        with pytest.raises(PortTaken, match=f"hostport {clash} on node n1.*already in use") as e:
            listen(wanted, "n1")
        assert e.value.own
    for bound in listen(wanted, "n1"):
        bound.close()


def test_what_is_chosen_once_is_kept(tmp_path) -> None:
    path = tmp_path / "network.json"
    ports = range(21000, 21100)
    chosen = choose(path, ports)
    assert chosen.vxlan_port in ports
    assert len(f"flannel.{chosen.vni}") <= 15, "a name of an interface"
    path.write_text('{"vni": 7, "vxlanPort": 21001}')
    assert choose(path, ports) == Chosen(vni=7, vxlan_port=21001)
    path.write_text('{"vni": "x"}')
    with pytest.raises(HPKError, match=r"network\.json"):
        choose(path, ports)


def test_a_free_port_is_found_beside_a_taken_one() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind(("0.0.0.0", 0))
        taken = s.getsockname()[1]
        with pytest.raises(HPKError, match="no free UDP port"):
            free_udp_port(range(taken, taken + 1), "x")


def test_the_mode_is_the_best_that_can_be_had() -> None:
    assert choose_mode("auto", []).mode == "rootless"
    assert choose_mode("host", []).mode == "host"
    assert choose_mode("site", []).mode == "site"
    fallen = choose_mode("auto", ["pasta is not installed"])
    assert fallen.mode == "host" and "pasta is not installed" in fallen.why
    with pytest.raises(HPKError, match="network: rootless can't be had"):
        choose_mode("rootless", ["pasta is not installed"])
