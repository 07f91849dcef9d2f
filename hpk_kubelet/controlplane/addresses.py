"""Which address and which ports the servers of this node use."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import random
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from hpk_kubelet.config import Config, Paths
from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.errors import HPKError

# Below the kernel's usual ephemeral range (32768-60999), so that no outgoing connection of
# another program sits on a port between our choosing it and the server's binding it.
_ANY = range(20000, 32768)
_SIOCGIFADDR = 0x8915


def node_address(configured: str = "") -> str:
    """The IPv4 address other nodes reach this one at: configured, else the host name's, else
    the default route's, else the first interface's. Never a loopback one."""
    if configured:
        return configured
    candidates = [_by_name, _by_route, _by_interface]
    for candidate in candidates:
        address = candidate()
        if address and not ipaddress.ip_address(address).is_loopback:
            return address
    raise HPKError("this node has no IPv4 address but loopback; set `address` in config.yaml")


def _by_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _by_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # a datagram socket: nothing is sent
        except OSError:
            return ""
        return str(s.getsockname()[0])


def _by_interface() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            address = socket.inet_ntoa(raw[20:24])
            if not address.startswith("127."):
                return address
    return ""


def port_range(configured: str) -> range:
    """Parses the config's `ports` (`first-last`, or empty for any)."""
    if not configured:
        return _ANY
    match = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", configured)
    if match and 1024 <= int(match[1]) <= int(match[2]) <= 65535:
        return range(int(match[1]), int(match[2]) + 1)
    raise HPKError(
        f"config.yaml: ports: {configured!r} is not FIRST-LAST with 1024 <= FIRST <= LAST <= 65535"
    )


def kubelet_ports(config: Config, paths: Paths) -> dict[str, int]:
    """Those of the kubelet's API (`kubelet`) and of its agents (`agents`)."""
    memory = paths.run / "kubelet-ports.json"
    return choose_ports(("kubelet", "agents"), port_range(config.ports), memory)


def choose_ports(names: Iterable[str], allowed: range, memory: Path) -> dict[str, int]:
    """A free TCP port for each name; the ones remembered in `memory` where they are still free.

    Keeping them lets pods and kubeconfigs that know the old address survive a restart.
    """
    try:
        old: dict[str, int] = json.loads(memory.read_text())
    except (FileNotFoundError, ValueError):
        old = {}
    ports: dict[str, int] = {}
    fresh = iter(random.sample(allowed, len(allowed)))
    for name in names:
        port = old.get(name, 0)
        while port not in allowed or port in ports.values() or not _is_free(port):
            try:
                port = next(fresh)
            except StopIteration:
                raise HPKError(
                    f"no free port for {name} in {allowed.start}-{allowed.stop - 1} on "
                    f"{socket.gethostname()}; widen `ports` in config.yaml"
                ) from None
        ports[name] = port
    if ports != old:
        write_private(memory, json.dumps(ports))
    return ports


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
