"""The node's ports that lead to a pod's: bound before its first container starts (hostports.py
serves them)."""

import os
import socket
from typing import Any, Dict, List


class PortTaken(Exception):
    """A port of the node can't be had; the sentence is the kubelet's. `own`: another pod of this
    user has it."""

    def __init__(self, message: str, own: bool) -> None:
        super().__init__(message)
        self.own = own


def listen(ports: List[Dict[str, Any]], node: str) -> "List[socket.socket]":
    """Binds every port of HostPortPlan, or none: PortTaken."""
    bound: List[socket.socket] = []
    for port in ports:
        tcp = port["protocol"] == "TCP"
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
        bound.append(made)
        try:
            if tcp:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((port["address"] or "0.0.0.0", port["port"]))
            if tcp:
                made.listen(128)
            made.setblocking(False)
        except OSError as e:
            for one in bound:
                one.close()
            raise PortTaken(
                "cannot open hostport %d on node %s: listen %s4 %s:%d: bind: %s"
                % (port["port"], node, port["protocol"].lower(), port["address"], port["port"],
                   str(e.strerror).lower()),
                own=is_own(port["port"], port["protocol"]),
            ) from None  # fmt: skip
    return bound


def is_own(port: int, protocol: str) -> bool:
    """Whether this user's own processes have the node's port (proc_net(5))."""
    uid = os.getuid()  # numbers are shown as they are in the reader's user namespace
    with open("/proc/self/net/" + protocol.lower()) as f:
        next(f)
        rows = [line.split() for line in f]
    return any(int(row[1].rpartition(":")[2], 16) == port and int(row[7]) == uid for row in rows)
