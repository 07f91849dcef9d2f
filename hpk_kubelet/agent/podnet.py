"""A pod's own network namespace and its place in the node network."""

import contextlib
import errno
import os
import signal
import socket
import struct
from typing import Any, Dict, List, NamedTuple, Optional

from . import syscalls
from .journal import note
from .keeper import Gone, receive, send, start_keeper
from .namespaces import Mapping, NamespaceError, map_identity
from .netlink import Netlink
from .nodenet import RESOLVER, Namespaces

GATEWAY = "169.254.1.1"  # link-local: what pods send everything to
_GATEWAY_MAC = bytes.fromhex("eeeeeeeeeeee")
DEVICE = "eth0"
_SYSFS = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC


class Place(NamedTuple):
    """What a pod got."""

    ip: str
    host_ip: str


class NetworkNotReady(Exception):
    """Pods can't join yet; the sentence says why."""


class PodNetwork:
    """The agent's side, in the order of its methods."""

    resolver = RESOLVER  # stands for one on the node's loopback

    def __init__(self, network: Dict[str, Any]) -> None:
        """In the node's namespaces: starts the keeper, and learns the node network's namespaces
        from it. NamespaceError if there can be none."""
        self._keeper, self._talk = start_keeper(network)
        self._ready: Optional[Dict[str, Any]] = None
        try:
            message, fds = receive(self._talk)
        except Gone:
            raise NamespaceError("the node network's keeper did not start") from None
        if "error" in message:
            raise NamespaceError(message["error"])
        self._spaces = Namespaces(*fds)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent = os.getpid()
        self._builder = os.fork()
        if self._builder == 0:
            try:
                ours.close()
                syscalls.die_with_parent(signal.SIGKILL)
                _build(self._spaces, agent, theirs)
            except Gone:
                pass
            finally:
                os._exit(0)
        theirs.close()
        self._order = ours

    def enter_users(self) -> None:
        """Becomes root of the node network's user namespace, in which the pod's is to be made."""
        syscalls.setns(self._spaces.user, syscalls.CLONE_NEWUSER)

    def map_users(self) -> Mapping:
        """Maps the ids of the user namespace that this process has made."""
        return Mapping(*self._ask({"map": True})["mapping"])

    def join(self, netns: int) -> None:
        """The pod's network namespace is there; what is missing is done meanwhile."""
        send(self._order, {}, [netns])
        for fd in self._spaces:
            os.close(fd)

    def place(self, patience: Optional[float]) -> Place:
        """The pod's address. NetworkNotReady if there is none within `patience` seconds (None: as
        long as it takes); it can be asked again."""
        import select

        while self._ready is None:
            if not select.select([self._talk], [], [], patience)[0]:
                raise NetworkNotReady("the node network is still being started")
            try:
                message, _ = receive(self._talk)
            except Gone:
                raise NamespaceError("the node network's keeper ended") from None
            self._ready = message.get("ready")
            if "error" in message:
                raise NetworkNotReady(message["error"])
        answer = self._ask({"join": self._ready})
        self._order.close()
        os.waitpid(self._builder, 0)
        return Place(answer["ip"], self._ready["hostIP"])

    def _ask(self, order: Dict[str, Any]) -> Dict[str, Any]:
        try:
            send(self._order, order)
            answer, _ = receive(self._order)
        except Gone:
            raise NamespaceError("the helper that makes the pod's network ended") from None
        if "error" in answer:
            raise NamespaceError(answer["error"])
        return answer

    def tell(self, facts: Dict[str, Any]) -> None:
        """News of the cluster's, for whoever runs the node network."""
        with contextlib.suppress(Gone):
            send(self._talk, {"facts": facts})

    def fileno(self) -> int:
        """Readable when the keeper says something, which `hear` takes."""
        return self._talk.fileno()

    def hear(self) -> bool:
        """Takes a message nobody waits for any more (the keeper itself tells its job's output what
        went wrong); False if there will be none: the keeper ended."""
        try:
            receive(self._talk)
        except Gone:
            note("the node network's keeper ended: this pod can't help to keep it any more")
            return False
        return True

    def close(self) -> None:
        """The pod is over."""
        self._talk.close()
        if self._order.fileno() >= 0:  # it never had an address; the helper has _talk open, too
            self._order.close()
            os.waitpid(self._builder, 0)
        os.waitpid(self._keeper, 0)


def _build(spaces: Namespaces, agent: int, orders: socket.socket) -> None:
    """A child of the agent's, root of the node network while the agent is root of the pod only."""
    syscalls.setns(spaces.user, syscalls.CLONE_NEWUSER)
    netns = -1
    while True:
        order, fds = receive(orders)
        try:
            if "map" in order:
                send(orders, {"mapping": map_identity(agent)})
            elif fds:
                netns = fds[0]
                syscalls.setns(spaces.net, syscalls.CLONE_NEWNET)
            else:
                send(orders, {"ip": connect(order["join"], netns)})
        except OSError as e:
            send(orders, {"error": "the pod's network can't be made: %s" % e})


def connect(ready: Dict[str, Any], netns: int) -> str:
    """From inside the node network: a pair of devices, and the first free address of the node's
    subnet. Ends inside the pod's namespace. A route to the address is what says that it is taken:
    the kernel removes it with the pod's namespace, so that none is ever lost."""
    name = "hpk" + os.urandom(5).hex()
    mac = b"\x02" + os.urandom(5)
    node = Netlink()
    node.add_veth(name, _GATEWAY_MAC, DEVICE, mac, netns, ready["mtu"])
    index = socket.if_nametoindex(name)
    try:
        address = take_address(node, ready["subnet"], index, ready["base"])
    except OSError:
        node.delete_link(name)
        raise
    node.add_neighbour(index, address, mac)
    node.close()
    syscalls.setns(netns, syscalls.CLONE_NEWNET)
    pod = Netlink()
    own = socket.if_nametoindex(DEVICE)
    pod.set_up(DEVICE)
    pod.add_address(own, address)
    pod.add_neighbour(own, GATEWAY, _GATEWAY_MAC)
    pod.add_route(GATEWAY + "/32", index=own)
    pod.add_route("0.0.0.0/0", index=own, gateway=GATEWAY)
    return address


def candidates(subnet: str, start: int) -> List[str]:
    """The addresses pods may have, beginning at `start`: all but the subnet's first two (flannel's
    own and, by convention, a gateway's) and its last (broadcast)."""
    text, _, length = subnet.partition("/")
    size = 1 << (32 - int(length))
    base = struct.unpack("!I", socket.inet_aton(text))[0] & ~(size - 1)
    count = size - 3
    return [
        socket.inet_ntoa(struct.pack("!I", base + 2 + (start + i) % count)) for i in range(count)
    ]


def take_address(node: Netlink, subnet: str, index: int, base: int) -> str:
    """Devices' indexes only ever grow: beginning there, an address is used again as late as can
    be, whoever asks. Each node network has another `base`, for it may live as long as one pod."""
    for address in candidates(subnet, base + index):
        if node.add_route(address + "/32", index=index):
            return address
    raise OSError(errno.EADDRNOTAVAIL, "all addresses of this node's subnet %s are taken" % subnet)


def make_netns() -> int:
    """This process gets a network namespace with nothing but its loopback device; answers a
    descriptor of it."""
    syscalls.unshare(syscalls.CLONE_NEWNET)
    netlink = Netlink()
    netlink.set_up("lo")
    netlink.close()
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def show_devices() -> None:
    """This process's mount namespace shows the devices of its network namespace in /sys, as far
    as the kernel lets a user mount one: else the node's are seen, which harms nobody."""
    devices = "/sys/devices/virtual/net"
    with contextlib.suppress(OSError):
        syscalls.mount("sysfs", devices, "sysfs", _SYSFS)
        # what /sys/class/net has are links to where the devices themselves are
        for source, target in (("/class/net", "/sys/class/net"), (devices[4:], devices)):
            syscalls.mount(devices + source, target, flags=syscalls.MS_BIND)
