"""The facts of a cluster's pod network: what is chosen once and kept, and what the control plane
tells the nodes of itself (spec.plan.NetworkFacts)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpk_kubelet.config import Paths
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.plan import NetworkFacts

POD_CIDR = "10.244.0.0/16"
SUBNET_LENGTH = 24  # of each node's part
ETCD_PREFIX = "/hpk/network"
_VNI = range(4096, 10_000_000)  # its number must fit an interface's name: flannel.9999999


class Chosen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What all nodes must agree on; chosen when the cluster is made (`$HPK_HOME/network.json`)."""

    vni: int
    """Of VXLAN; random, so that somebody else's packets are not taken for ours by accident."""
    vxlan_port: int
    """UDP, on every node that has pods."""
    pod_cidr: str = POD_CIDR

    def flannel(self) -> str:
        """flannel's own configuration, as it is in etcd."""
        return json.dumps(
            {
                "Network": self.pod_cidr,
                "SubnetLen": SUBNET_LENGTH,
                # No rules are asked of flannel; its other way would need the module br_netfilter.
                "EnableNFTables": True,
                "Backend": {"Type": "vxlan", "VNI": self.vni, "Port": self.vxlan_port},
            },
            sort_keys=True,
        )


def choose(path: Path, ports: range) -> Chosen:
    """What `path` says, or a new choice for it, which the caller keeps there."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Chosen)
    except FileNotFoundError:
        pass
    except msgspec.MsgspecError as e:
        raise HPKError(
            f"{path} can't be understood ({e}); delete it while no pod runs, and it is made anew"
        ) from None
    return Chosen(vni=random.choice(_VNI), vxlan_port=free_udp_port(ports, str(path)))


def free_udp_port(ports: range, seed: str) -> int:
    """A port free on this node. Where the search begins differs by user and cluster: the port must
    be free on all nodes, where other users' clusters have theirs."""
    digest = hashlib.sha256(f"{os.getuid()} {seed}".encode()).digest()
    start = int.from_bytes(digest[:8], "big")
    for i in range(len(ports)):
        port = ports[(start + i) % len(ports)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                s.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise HPKError(
        f"no free UDP port in {ports.start}-{ports.stop - 1} on {socket.gethostname()} for the pod "
        "network; widen `ports` in config.yaml"
    )


def facts_file(paths: Paths) -> Path:
    return paths.run / "network.json"


def read_facts(paths: Paths) -> NetworkFacts | None:
    """The newest facts; None where pods use their nodes' networks."""
    try:
        facts: NetworkFacts = json.loads(facts_file(paths).read_bytes())
    except FileNotFoundError:
        return None
    return facts


def revised(facts: Mapping[str, Any]) -> NetworkFacts:
    """The same facts as the newest there are."""
    return NetworkFacts(**{**facts, "revision": time.time_ns()})  # type: ignore[typeddict-item]
