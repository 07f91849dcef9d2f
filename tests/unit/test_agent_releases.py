"""Keepers of different releases on one node: this one's against the first one's very messages."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hpk_kubelet.agent import owner as owner_module
from hpk_kubelet.agent.keeper import Keeper, receive, send
from hpk_kubelet.agent.nodenet import Namespaces
from hpk_kubelet.agent.owner import Owner
from hpk_kubelet.spec.plan import EtcdFacts, NetworkFacts

# As they were; never to be changed.
FACTS: dict[str, Any] = json.loads(
    """{"revision": 5, "file": "/nowhere", "podCIDR": "10.244.0.0/16",
    "serviceCIDR": "10.96.0.0/16", "vxlanPort": 30121, "interface": "", "mtu": 65520,
    "flanneld": "/bin/flanneld",
    "etcd": {"endpoints": ["https://10.0.0.1:2379"], "prefix": "/hpk/network", "ca": "/ca",
             "cert": "/cert", "key": "/key", "started": 1},
    "api": {"address": "10.96.0.1", "port": 443, "target": "10.0.0.1", "targetPort": 6443},
    "dns": {"address": "10.96.0.10", "target": "10.244.1.2"}}"""
)
READY: dict[str, Any] = json.loads(
    """{"ready": {"subnet": "10.244.36.1/24", "network": "10.244.0.0/16", "mtu": 65470,
    "hostIP": "10.0.0.2", "subnetFile": "FLANNEL_SUBNET=10.244.36.1/24", "base": 7}}"""
)
LATER = {"of a later release": [1]}


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.fixture
def spaces() -> Iterator[Namespaces]:
    """Those of this process: good enough to be handed on."""
    found = Namespaces(*(os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("user", "net")))
    yield found
    for fd in found:
        os.close(fd)


@pytest.mark.parametrize("extra", [{}, LATER])
def test_a_member_joins_what_another_release_owns(
    spaces: Namespaces, extra: dict[str, Any]
) -> None:
    agent, keepers = pair()
    owner, connection = pair()
    member = Keeper({"cluster": "c", "facts": {**FACTS, "vni": 7}}, keepers)
    following = threading.Thread(target=member._follow, args=(connection,))
    following.start()
    asked, _ = receive(owner)
    assert asked["facts"]["revision"] == FACTS["revision"]
    send(owner, {"namespaces": True, **extra}, list(spaces))
    send(owner, extra)
    send(owner, {**READY, **extra})
    message, fds = receive(agent)
    assert message["namespaces"] and len(fds) == 2
    assert receive(agent)[0] == extra
    assert receive(agent)[0]["ready"] == READY["ready"]
    owner.close()
    following.join(timeout=10)
    assert not following.is_alive(), "the next owner is looked for"
    assert member.ready == READY["ready"] and member.spaces is not None
    for fd in (*fds, *member.spaces):
        os.close(fd)


class Recorder:
    """In the place of the daemons."""

    def __init__(self, *_: object) -> None:
        self.facts: list[dict[str, Any]] = []

    def change(self, facts: dict[str, Any]) -> None:
        self.facts.append(facts)


def test_an_owner_serves_members_of_another_release(
    spaces: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "Daemons", Recorder)
    keeper = Keeper({"cluster": "c", "facts": {**FACTS, "vni": 7}}, pair()[1])
    keeper.spaces, keeper.ready = spaces, READY["ready"]
    owner = Owner(keeper, socket.socket(), [])
    member, connection = pair()
    owner._admit(connection)
    message, fds = receive(member)
    assert message == {"namespaces": True} and len(fds) == 2
    assert READY.items() <= receive(member)[0].items()
    newest = {**FACTS, "revision": 6}
    for said in ({"facts": FACTS}, LATER, {"facts": newest, **LATER}):
        send(member, said)
        owner._hear(connection)
    daemons: Any = owner._daemons
    assert daemons.facts == [newest]
    owner._selector.close()
    for fd in fds:
        os.close(fd)


def test_the_first_release_understands_what_this_one_is_told() -> None:
    """Facts are for all keepers of a cluster: what the first release reads must be in them."""
    assert set(FACTS) <= set(NetworkFacts.__annotations__)
    assert set(FACTS["etcd"]) <= set(EtcdFacts.__annotations__)
