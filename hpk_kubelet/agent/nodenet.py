"""The node network: one user and one network namespace of a user's cluster on a node, outside of
any pod, in which the pods' network namespaces hang (docs/networking.md has the drawing)."""

import fcntl
import os
import signal
import socket
import struct
from typing import Any, Callable, Dict, NamedTuple

from . import syscalls
from .namespaces import (
    NamespaceError,
    find_program,
    id_commands,
    map_alone,
    refused,
    run_all,
)  # fmt: skip
from .netlink import UNREACHABLE, Netlink, watch_links

INTERFACE = "eth0"  # of the namespace, towards the node: pasta's
NODE = "192.0.2.1"  # TEST-NET-1 (RFC 5737): inside, the node itself
RESOLVER = "192.0.2.53"  # inside, the node's own resolver
_VXLAN_BYTES = 50  # around each packet: outer IP, UDP, VXLAN, inner Ethernet
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # netdevice(7)
# What kube-proxy leaves behind; `table` makes what there is not, so that it can be deleted.
_NO_PROXY = "".join("table %s kube-proxy\ndelete table %s kube-proxy\n" % (f, f)
                    for f in ("ip", "ip6"))  # fmt: skip
_SYSCTLS = (
    ("net/ipv4/ip_forward", "1"),
    ("net/ipv4/conf/all/accept_redirects", "0"),
    ("net/ipv4/conf/all/send_redirects", "0"),
    ("net/ipv4/conf/default/send_redirects", "0"),
)


class Namespaces(NamedTuple):
    """Descriptors of /proc/PID/ns files; they keep the namespaces alive."""

    user: int
    net: int

    def enter(self) -> None:
        """This process becomes root in both."""
        syscalls.setns(self.user, syscalls.CLONE_NEWUSER)
        syscalls.setns(self.net, syscalls.CLONE_NEWNET)


def make_namespaces() -> Namespaces:
    """New ones, with the ids that the user has; NamespaceError if the node allows none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    uid, gid = os.getuid(), os.getgid()
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.die_with_parent(signal.SIGKILL)
            ours.close()
            try:
                syscalls.unshare(syscalls.CLONE_NEWUSER)
            except OSError as e:
                theirs.send(b"no" + str(e.strerror).encode())
                os._exit(1)
            theirs.send(b"ok")
            if theirs.recv(8) == b"alone":
                map_alone(uid, gid)
            syscalls.unshare(syscalls.CLONE_NEWNET)
            for name, value in _SYSCTLS:
                with open("/proc/sys/" + name, "w") as f:
                    f.write(value)
            Netlink().set_up("lo")
            theirs.send(b"ok")
            theirs.recv(1)  # the namespaces were opened
        except BaseException as e:
            theirs.send(("%s: %s" % (type(e).__name__, e)).encode(errors="replace"))
        finally:
            os._exit(0)
    theirs.close()
    try:
        answer = ours.recv(4096)
        if answer != b"ok":
            raise refused(answer[2:].decode(errors="replace"))
        commands, _ = id_commands(pid, uid, gid)
        ours.send(b"mapped" if commands and run_all(commands) else b"alone")
        answer = ours.recv(4096)
        if answer != b"ok":
            raise NamespaceError("the node network can't be made: %s" % answer.decode())
        base = "/proc/%d/ns/" % pid
        return Namespaces(*(os.open(base + name, os.O_RDONLY | os.O_CLOEXEC)
                            for name in ("user", "net")))  # fmt: skip
    finally:
        ours.close()
        os.waitpid(pid, 0)


class Interface(NamedTuple):
    """One of the node's."""

    name: str
    address: str
    netmask: str


def host_interface(facts: Dict[str, Any]) -> Interface:
    """The one towards the control plane, or the one that the facts name. OSError with a sentence
    where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        name, wanted = facts.get("interface") or "", ""
        if not name:
            host = facts["etcd"]["endpoints"][0].rpartition("//")[2].rpartition(":")[0]
            try:
                s.connect((host, 9))  # a datagram socket: nothing is sent
            except OSError as e:
                raise OSError(
                    "node %s has no route to the control plane's node %s (%s)"
                    % (socket.gethostname(), host, e.strerror)
                ) from None
            wanted = s.getsockname()[0]
        for _, one in socket.if_nameindex():
            request = struct.pack("256s", one.encode()[:15])
            try:
                address = socket.inet_ntoa(fcntl.ioctl(s, _SIOCGIFADDR, request)[20:24])
            except OSError:
                continue  # it has no IPv4 address
            if one == name or address == wanted:
                mask = socket.inet_ntoa(fcntl.ioctl(s, _SIOCGIFNETMASK, request)[20:24])
                return Interface(one, address, mask)
    raise OSError(
        "node %s has no interface %s" % (socket.gethostname(), name or "with address " + wanted)
    )


def prepare_network(
    facts: Dict[str, Any], host_ip: str, fresh: bool, clear: Callable[[], object]
) -> None:
    """Inside: waits for pasta's interface and makes routes and rules. `fresh`: pasta is still to
    be started, which `clear` is told once the interface of the one before is gone."""
    news = watch_links()
    if fresh:
        while INTERFACE in (name for _, name in socket.if_nameindex()):
            news.recv(1 << 16)
        clear()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        while not _has_address(s):
            news.recv(1 << 16)
    news.close()
    netlink = Netlink()
    # what no pod has must not go to the outside
    for network in (facts["podCIDR"], facts["serviceCIDR"]):
        netlink.add_route(network, kind=UNREACHABLE)
    if not _has_default_route():
        netlink.add_route("0.0.0.0/0", index=socket.if_nametoindex(INTERFACE))
    make_tunnel(netlink, facts, host_ip)
    run_nft(rules(facts, host_ip))


def make_tunnel(netlink: Netlink, facts: Dict[str, Any], host_ip: str) -> None:
    """flannel's device, which flanneld takes as it finds it.

    Made so that all packets between two nodes are one flow: by itself VXLAN gives each connection
    between pods a source port of its own, and pasta keeps two sockets for each for three minutes,
    until it may open no more. And so that it outlives pasta's interface: with it stay the ways to
    the other nodes, which the next owner needs before etcd can be asked for them."""
    if "vni" not in facts:
        return
    name, mtu = "flannel.%d" % facts["vni"], facts["mtu"] - _VXLAN_BYTES
    if name not in (link for _, link in socket.if_nameindex()):
        mac = b"\x02\x00" + socket.inet_aton(host_ip)
        netlink.add_vxlan(name, mac, facts["vni"], host_ip, facts["vxlanPort"], mtu)
    netlink.set_up(name, mtu)


def _has_address(s: socket.socket) -> bool:
    try:
        fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", INTERFACE.encode()))
    except OSError:
        return False
    return True


def _has_default_route() -> bool:
    with open("/proc/self/net/route") as f:
        return any(line.split()[1] == "00000000" for line in f)


def rules(facts: Dict[str, Any], host_ip: str) -> str:
    """The translation of addresses, for nft(8); it replaces what was there."""
    pods = facts["podCIDR"]
    dns, api = facts.get("dns") or {}, facts.get("api")
    lines = []
    if api:
        # a connection is translated once: what leads to the node itself must say so here
        target = NODE if api["target"] == host_ip else api["target"]
        lines.append("ip daddr %s tcp dport %d dnat to %s:%d"
                     % (api["address"], api["port"], target, api["targetPort"]))  # fmt: skip
    if dns.get("target"):
        for protocol in ("udp", "tcp"):
            lines.append("ip daddr %s %s dport 53 dnat to %s"
                         % (dns["address"], protocol, dns["target"]))  # fmt: skip
    gone = "" if "kube-proxy" in (facts.get("daemons") or {}) else _NO_PROXY
    return (
        gone
        + """table ip hpk
delete table ip hpk
table ip hpk {
 chain prerouting {
  type nat hook prerouting priority dstnat - 5
  ip saddr %s jump from-pods
 }
 chain from-pods {
  %s
 }
 chain node {
  # after kube-proxy, whose node ports are at the node's address
  type nat hook prerouting priority dstnat + 5
  ip saddr %s ip daddr %s dnat to %s
 }
 chain output {
  type nat hook output priority dstnat + 5
  ip daddr %s dnat to %s
 }
 chain postrouting {
  type nat hook postrouting priority srcnat
  oifname "%s" ip saddr %s masquerade
 }
 chain forward {
  type filter hook forward priority filter
  iifname "flannel.*" ip saddr != %s drop
 }
}
"""
        % (pods, "\n  ".join(lines), pods, host_ip, NODE, host_ip, NODE, INTERFACE, pods, pods)
    )


def run_nft(text: str) -> None:
    """Applies rules in this process's network namespace; nft says on stderr what it dislikes."""
    nft = find_program("nft")
    if nft is None:
        raise OSError("nft is not on the PATH of node %s" % socket.gethostname())
    rules_file = os.memfd_create("rules")
    os.write(rules_file, text.encode())
    os.lseek(rules_file, 0, os.SEEK_SET)
    pid = os.posix_spawn(
        nft, [nft, "-f", "-"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, rules_file, 0)]
    )
    os.close(rules_file)
    if os.waitpid(pid, 0)[1]:
        raise OSError("nft refused the rules of the pod network")
