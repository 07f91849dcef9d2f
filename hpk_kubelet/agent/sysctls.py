"""Kernel parameters of the pod's own namespaces."""

import os
import socket
from typing import Dict

from . import syscalls
from .namespaces import NamespaceError


def set_sysctls(settings: Dict[str, str], netns: int) -> None:
    """`settings`: path below /proc/sys → value; `netns`: the pod's network namespace, in which
    this process is not itself, or -1. NamespaceError if the kernel lets no user set one."""
    own = {path: value for path, value in settings.items() if not path.startswith("net/")}
    words = _write(own)
    network = {path: settings[path] for path in settings.keys() - own.keys()}
    if network and not words:
        words = _write_inside(network, netns) if netns >= 0 else "the network is the node's own"
    if words:
        raise NamespaceError(
            "node %s does not let the pod set its sysctls: %s" % (socket.gethostname(), words)
        )


def _write(settings: Dict[str, str]) -> str:
    """ "" or what went wrong."""
    for path, value in settings.items():
        if ".." in path.split("/"):
            return "%s is none" % path
        try:
            with open("/proc/sys/" + path, "w") as f:
                f.write(value)
        except OSError as e:
            return "%s to %r: %s" % (path.replace("/", "."), value, os.strerror(e.errno or 0))
    return ""


def _write_inside(settings: Dict[str, str], netns: int) -> str:
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            syscalls.setns(netns, syscalls.CLONE_NEWNET)
            words = _write(settings)
        except BaseException as e:
            words = "%s: %s" % (type(e).__name__, e)
        finally:
            os.write(tell, words.encode())
            os._exit(0)
    os.close(tell)
    with open(hear, encoding="utf-8") as f:
        words = f.read()
    os.waitpid(child, 0)
    return words
