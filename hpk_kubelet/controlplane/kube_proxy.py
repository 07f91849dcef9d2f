"""kube-proxy in every node network, for `serviceMode: clusterIP`: what the nodes start."""

from __future__ import annotations

import asyncio
from typing import Any

from hpk_kubelet.controlplane.api import ApiClient
from hpk_kubelet.controlplane.kubeconfig import component_kubeconfig
from hpk_kubelet.controlplane.stack import Site
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.plan import DaemonFacts, NetworkFacts

NAME = "kube-proxy"
_NODE = "--hostname-override="
_LOOK = 0.2


def daemon(site: Site, node: str, pod_cidr: str) -> DaemonFacts:
    """Started by the node network's owner, as root of that network alone. `node`: the virtual node
    whose pods are local to Services; on a compute node there may be pods of several."""
    return DaemonFacts(
        argv=[
            str(site.binaries[NAME]),
            f"--kubeconfig={component_kubeconfig(site.paths, 'proxy')}",
            _NODE + node,
            "--proxy-mode=nftables",
            "--detect-local-mode=ClusterCIDR",
            f"--cluster-cidr={pod_cidr}",
            # Sysctls that are the node's, or whose default will do.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--oom-score-adj=0",
            # Pods reach the node network's own addresses: nothing but its loopback is listened on.
            "--healthz-bind-address=127.0.0.1:10256",
            "--metrics-bind-address=127.0.0.1:10249",
            "--nodeport-addresses={hostIP}/32",
        ],
        # A changed address is a changed kubeconfig, which is read at the start alone.
        env={"GOMEMLIMIT": "64MiB", "HPK_API": site.api},
    )


def node_of(facts: NetworkFacts | None) -> str:
    """The node that facts already name; "" if they name none."""
    daemons = facts.get("daemons", {}) if facts is not None else {}
    argv = daemons[NAME]["argv"] if NAME in daemons else []
    return next((word[len(_NODE) :] for word in argv if word.startswith(_NODE)), "")


async def choose_node(client: ApiClient) -> str:
    """The default partition's node, else the first; waits until there is one."""
    while True:
        try:
            nodes: list[dict[str, Any]] = (await client.get_json("/api/v1/nodes"))["items"]
        except (HPKError, OSError):
            nodes = []
        names = sorted(
            (n["metadata"].get("labels", {}).get("hpk.io/default-partition") != "true", name)
            for n in nodes
            if (name := str(n["metadata"]["name"]))
        )
        if names:
            return names[0][1]
        await asyncio.sleep(_LOOK)
