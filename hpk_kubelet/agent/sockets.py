"""Sockets in the pod's network namespace, for an agent that is not in it.

The agent stays in the node's network, where it reaches the kubelet, and can't come back from the
pod's; a child that goes there and hands out a socket need not.
"""

import asyncio
import os
import socket
import ssl
from typing import Any, Optional, Tuple

from . import syscalls

Channel = Tuple[asyncio.StreamReader, asyncio.StreamWriter]


def pod_socket(netns: int, family: int, kind: int) -> socket.socket:
    """A socket of the pod's; `netns` -1: the pod is in the node's network."""
    if netns < 0:
        return socket.socket(family, kind)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.setns(netns, syscalls.CLONE_NEWNET)
            with socket.socket(family, kind) as made:
                socket.send_fds(theirs, [b"1"], [made.fileno()])
        finally:
            os._exit(0)
    theirs.close()
    try:
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    finally:
        ours.close()
        os.waitpid(pid, 0)
    if not fds:
        raise OSError("no socket could be made in the pod's network")
    return socket.socket(fileno=fds[0])


def reason(error: OSError) -> str:
    """Go's words for a failed connection."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


async def connect(
    netns: int, host: str, port: int, context: Optional[ssl.SSLContext] = None, **options: Any
) -> Channel:
    """A TCP connection from inside the pod; OSError if there is none."""
    if netns < 0:
        return await asyncio.open_connection(host, port, ssl=context, **options)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = pod_socket(netns, family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, (host, port))
        if context is not None:
            options["server_hostname"] = ""
        return await asyncio.open_connection(sock=made, ssl=context, **options)
    except BaseException:
        made.close()
        raise
