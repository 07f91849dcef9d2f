"""The node's ports that lead to a pod's: bound before its first container starts (hostports.py
serves them)."""

import socket
from typing import Any, Dict, List


class PortTaken(Exception):
    """A port of the node can't be had; the sentence is the kubelet's."""


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
                   str(e.strerror).lower())
            ) from None  # fmt: skip
    return bound
