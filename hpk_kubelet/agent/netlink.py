"""Links, addresses, routes and neighbours by rtnetlink (rtnetlink(7)): a process of `ip` for each
would cost more than all the rest of a pod's network. IPv4 only."""

import errno
import os
import socket
import struct
from typing import Optional, Union

_ROUTE = 0  # NETLINK_ROUTE
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _EXCL, _CREATE, _REPLACE = 0x1, 0x4, 0x200, 0x400, 0x100
_NEWLINK, _DELLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 17, 20, 24, 28
_UP = 1  # IFF_UP
_LINK_ADDRESS, _LINK_NAME, _LINK_MTU, _LINK_INFO, _LINK_NETNS_FD = 1, 3, 4, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_VXLAN_ID, _VXLAN_LOCAL, _VXLAN_LEARNING, _VXLAN_PORT_RANGE, _VXLAN_PORT = 1, 4, 7, 10, 15
_ADDR_ADDRESS, _ADDR_LOCAL = 1, 2
_ROUTE_DST, _ROUTE_OIF, _ROUTE_GATEWAY = 1, 4, 5
_NEIGH_DST, _NEIGH_LLADDR = 1, 2
_NUD_PERMANENT = 0x80
_TABLE_MAIN, _PROTO_STATIC = 254, 4
_SCOPE_UNIVERSE, _SCOPE_LINK = 0, 253
UNICAST, UNREACHABLE = 1, 7  # types of routes

_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDR = struct.Struct("=BBBBI")
_ROUTE_MESSAGE = struct.Struct("=BBBBBBBBI")
_NEIGH = struct.Struct("=BxxxiHBB")


def attribute(kind: int, value: Union[int, str, bytes]) -> bytes:
    """One rtattr, padded to four bytes. A number is 32 bits wide, a text ends in a zero byte."""
    if isinstance(value, int):
        value = struct.pack("=I", value)
    elif isinstance(value, str):
        value = value.encode() + b"\0"
    return struct.pack("=HH", len(value) + 4, kind) + value + bytes(-len(value) % 4)


class Netlink:
    """A socket in the network namespace this process is in when it is made; it stays there.
    Each call is one change; OSError with the kernel's errno when it is refused."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _ROUTE)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def _change(self, kind: int, flags: int, body: bytes, what: str) -> None:
        self._sequence += 1
        header = _HEADER.pack(
            _HEADER.size + len(body), kind, flags | _REQUEST | _ACK, self._sequence, 0
        )
        self._socket.send(header + body)
        while True:
            answer = self._socket.recv(1 << 16)
            _, answered, _, sequence, _ = _HEADER.unpack_from(answer)
            if answered != _ERROR or sequence != self._sequence:
                continue
            code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
            if code:
                raise OSError(code, "%s: %s" % (what, os.strerror(code)))
            return

    def add_veth(
        self, name: str, mac: bytes, peer: str, peer_mac: bytes, peer_netns: int, mtu: int
    ) -> None:
        """A pair of virtual Ethernet devices: `name` here and up, `peer` there and down."""
        common = attribute(_LINK_MTU, mtu)
        other = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + attribute(_LINK_NAME, peer)
        other += attribute(_LINK_ADDRESS, peer_mac) + common
        other += attribute(_LINK_NETNS_FD, peer_netns)
        info = attribute(_INFO_KIND, "veth")
        info += attribute(_INFO_DATA, attribute(_VETH_PEER, other))
        body = _LINK.pack(socket.AF_UNSPEC, 0, 0, _UP, _UP) + attribute(_LINK_NAME, name)
        body += attribute(_LINK_ADDRESS, mac) + common + attribute(_LINK_INFO, info)
        self._change(_NEWLINK, _CREATE | _EXCL, body, "veth %s" % name)

    def add_vxlan(self, name: str, mac: bytes, vni: int, local: str, port: int, mtu: int) -> None:
        """An end of a tunnel, at the address `local` of whichever device has it; down. Its packets
        come from UDP port `port` too, all of them."""
        data = attribute(_VXLAN_ID, vni) + attribute(_VXLAN_LOCAL, socket.inet_aton(local))
        data += attribute(_VXLAN_LEARNING, b"\0")
        data += attribute(_VXLAN_PORT_RANGE, struct.pack("!HH", port, min(port + 1, 0xFFFF)))
        data += attribute(_VXLAN_PORT, struct.pack("!H", port))
        info = attribute(_INFO_KIND, "vxlan") + attribute(_INFO_DATA, data)
        body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + attribute(_LINK_NAME, name)
        body += attribute(_LINK_ADDRESS, mac) + attribute(_LINK_MTU, mtu)
        body += attribute(_LINK_INFO, info)
        self._change(_NEWLINK, _CREATE | _EXCL, body, "vxlan %s" % name)

    def delete_link(self, name: str) -> None:
        body = _LINK.pack(socket.AF_UNSPEC, 0, socket.if_nametoindex(name), 0, 0)
        self._change(_DELLINK, 0, body, "removal of %s" % name)

    def set_up(self, name: str, mtu: Optional[int] = None) -> None:
        body = _LINK.pack(socket.AF_UNSPEC, 0, socket.if_nametoindex(name), _UP, _UP)
        if mtu is not None:
            body += attribute(_LINK_MTU, mtu)
        self._change(_NEWLINK, 0, body, "%s up" % name)

    def add_address(self, index: int, address: str) -> None:
        """A /32 on the device with this index."""
        packed = socket.inet_aton(address)
        body = _ADDR.pack(socket.AF_INET, 32, 0, _SCOPE_UNIVERSE, index)
        body += attribute(_ADDR_LOCAL, packed) + attribute(_ADDR_ADDRESS, packed)
        self._change(_NEWADDR, _CREATE | _EXCL, body, "address %s" % address)

    def add_route(
        self,
        target: str,
        *,
        index: Optional[int] = None,
        gateway: str = "",
        kind: int = UNICAST,
        exclusive: bool = True,
    ) -> bool:
        """A route to `target` (ADDRESS/LENGTH). False if there is one already and `exclusive`:
        exactly one of several that try at once gets True. Else it replaces the one there is."""
        network, _, length = target.partition("/")
        scope = _SCOPE_UNIVERSE if gateway or kind != UNICAST else _SCOPE_LINK
        body = _ROUTE_MESSAGE.pack(
            socket.AF_INET, int(length), 0, 0, _TABLE_MAIN, _PROTO_STATIC, scope, kind, 0
        )
        if int(length):
            body += attribute(_ROUTE_DST, socket.inet_aton(network))
        if index is not None:
            body += attribute(_ROUTE_OIF, index)
        if gateway:
            body += attribute(_ROUTE_GATEWAY, socket.inet_aton(gateway))
        flags = _CREATE | (_EXCL if exclusive else _REPLACE)
        try:
            self._change(_NEWROUTE, flags, body, "route to %s" % target)
        except OSError as e:
            if exclusive and e.errno == errno.EEXIST:
                return False
            raise
        return True

    def add_neighbour(self, index: int, address: str, mac: bytes) -> None:
        """Who has `address` on that link, for good: nobody is asked."""
        body = _NEIGH.pack(socket.AF_INET, index, _NUD_PERMANENT, 0, 0)
        body += attribute(_NEIGH_DST, socket.inet_aton(address)) + attribute(_NEIGH_LLADDR, mac)
        self._change(_NEWNEIGH, _CREATE | _REPLACE, body, "neighbour %s" % address)


def watch_links() -> socket.socket:
    """A socket that becomes readable when a link or an IPv4 address in this process's network
    namespace comes or goes."""
    news = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _ROUTE)
    news.bind((0, 0x1 | 0x10))  # RTMGRP_LINK, RTMGRP_IPV4_IFADDR
    return news
