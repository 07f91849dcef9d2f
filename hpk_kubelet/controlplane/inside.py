"""What the control job has in the pod network: CoreDNS, and the API server's way in.

Both depend on the place (controlplane/member.py), which may come late and move: CoreDNS is then
started anew in the new one, and the Service kube-dns and the nodes are told its address.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpk_kubelet.agent.nodenet import RESOLVER
from hpk_kubelet.controlplane import kube_proxy
from hpk_kubelet.controlplane.api import ApiClient, Manifest, apply_manifests
from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.controlplane.kubeconfig import component_kubeconfig
from hpk_kubelet.controlplane.member import Place
from hpk_kubelet.controlplane.process import Component, Process
from hpk_kubelet.controlplane.stack import CLUSTER_DOMAIN, DNS_ADDRESS, SERVICE_CIDR, Site, python
from hpk_kubelet.errors import HPKError

if TYPE_CHECKING:
    from hpk_kubelet.controlplane.pod_network import PodNetwork

_BACKLOG = 512  # connections that wait while the proxy is started again


def corefile(kubeconfig: Path) -> str:
    """CoreDNS's configuration, near kubeadm's. Answers about the cluster live for 5 s: clients of
    headless Services see by them which pods there are."""
    return f"""\
.:53 {{
    errors
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 5
    }}
    forward . {RESOLVER} {{
        max_concurrent 1000
    }}
    cache 30 {{
        disable success {CLUSTER_DOMAIN}
        disable denial {CLUSTER_DOMAIN}
    }}
    loadbalance
}}
"""


def dns_manifests(target: str) -> list[Manifest]:
    """The Service that other programs look for, leading to CoreDNS at `target`."""
    labels = {"k8s-app": "kube-dns", "kubernetes.io/name": "CoreDNS"}
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
            "spec": {"clusterIP": DNS_ADDRESS, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-hpk",
                "namespace": "kube-system",
                "labels": {
                    "kubernetes.io/service-name": "kube-dns",
                    "endpointslice.kubernetes.io/managed-by": "hpk.io",
                },
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [target], "conditions": {"ready": True}}],
            "ports": ports,
        },
    ]


async def _make_room(client: ApiClient) -> None:
    """Removes a Service of that name without the address: an address can't be changed."""
    path = "/api/v1/namespaces/kube-system/services/kube-dns"
    status, body = await client.request("GET", path)
    if status == 200 and json.loads(body)["spec"].get("clusterIP") != DNS_ADDRESS:
        await client.request("DELETE", path)


class Egress:
    """The listening socket of the proxy: abstract, so that nothing is left on any disk; the proxy
    looks at its clients' uid. It outlives the proxy's restarts."""

    def __init__(self, site: Site, pod_cidr: str) -> None:
        self.name = f"@hpk-egress-{os.getuid()}-{secrets.token_hex(8)}"
        self._place = site.paths.run / "place.json"
        self._place.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name[1:])
        self._socket.listen(_BACKLOG)
        self._networks = (pod_cidr, SERVICE_CIDR)
        self._file = site.paths.run / "egress.json"
        write_private(self._file, json.dumps(self._selector()))

    @property
    def flag(self) -> str:
        """What the API server is started with."""
        return f"--egress-selector-config-file={self._file}"

    def _selector(self) -> Manifest:
        transport = {"uds": {"udsName": self.name}}
        return {
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [
                {
                    "name": "cluster",
                    "connection": {"proxyProtocol": "HTTPConnect", "transport": transport},
                }
            ],
        }

    def component(self) -> Component:
        fd = self._socket.fileno()
        argv = python("hpk_kubelet.network.egress", str(fd), str(self._place), *self._networks)
        return Component("hpk-egress", argv, fds=(fd,))

    async def moved(self, place: Place) -> None:
        write_private(self._place, json.dumps({"ip": place.ip, "pid": place.pid}))


class Inside:
    """CoreDNS where the place is. `moved` follows it; the API server runs by then or will."""

    def __init__(self, site: Site, network: PodNetwork, say: Callable[[str], None]) -> None:
        self.processes: list[Process] = []
        self._site = site
        self._network = network
        self._say = say
        self._config = site.paths.run / "Corefile"
        self._client: ApiClient | None = None
        self._moving = asyncio.Lock()
        self._proxying: asyncio.Task[None] | None = None

    async def serving(self, client: ApiClient) -> None:
        """The API answers from now on, and the kubelet runs."""
        self._client = client
        if self._network.cluster_ips:
            self._proxying = asyncio.create_task(self._proxy(client), name="kube-proxy's node")
        if self._network.place is not None:
            await self.moved(self._network.place)

    async def moved(self, place: Place) -> None:
        async with self._moving:
            if self._client is not None:
                await self._start(self._client, place)

    async def _start(self, client: ApiClient, place: Place) -> None:
        await self._stop_dns()
        write_private(self._config, corefile(component_kubeconfig(self._site.paths, "coredns")))
        argv = (*place.enter(), str(self._site.binaries["coredns"]), f"-conf={self._config}")
        process = Process(
            Component("coredns", argv, {"GOMEMLIMIT": "100MiB"}), self._site.paths.log, self._say
        )
        self.processes.append(process)
        try:
            await process.start()
            await _make_room(client)
            await apply_manifests(client, dns_manifests(place.ip))
        except (HPKError, OSError) as e:
            self._say(f"the cluster's DNS: {e}")
        await self._network.tell(dns={"address": DNS_ADDRESS, "target": place.ip})

    async def _proxy(self, client: ApiClient) -> None:
        node = await kube_proxy.choose_node(client)
        await self._network.proxy(node)

    async def stop(self) -> None:
        if self._proxying is not None:
            self._proxying.cancel()
        await self._stop_dns()

    async def _stop_dns(self) -> None:
        while self.processes:
            await self.processes.pop().stop()
