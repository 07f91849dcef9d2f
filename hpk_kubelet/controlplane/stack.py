"""The control plane's components as data: who they are and what they are started with."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane.api import ApiClient, client_context
from hpk_kubelet.controlplane.kubeconfig import USERS, component_kubeconfig
from hpk_kubelet.controlplane.pki import KeyPair, Leaf, Pki
from hpk_kubelet.controlplane.process import Component

SERVICE_CIDR = "10.96.0.0/16"
SERVICE_API = "10.96.0.1"  # the `kubernetes` Service: the first address of SERVICE_CIDR
DNS_ADDRESS = "10.96.0.10"  # the `kube-dns` Service, where every distribution has it
CLUSTER_DOMAIN = "cluster.local"
ISSUER = f"https://kubernetes.default.svc.{CLUSTER_DOMAIN}"
PORTS = ("apiserver", "etcd", "etcd-peer", "etcd-http")
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager")


@dataclass(frozen=True)
class Site:
    """Everything the components' command lines depend on."""

    paths: Paths
    address: str
    ports: Mapping[str, int]
    binaries: Mapping[str, Path]

    @property
    def api(self) -> str:
        return f"https://{self.address}:{self.ports['apiserver']}"

    @property
    def etcd(self) -> str:
        return f"https://{self.address}:{self.ports['etcd']}"


@dataclass(frozen=True)
class Certificates:
    """The key pairs that the components' command lines name."""

    etcd_server: KeyPair
    etcd_client: KeyPair  # the API server's, to etcd
    apiserver: KeyPair
    kubelet_client: KeyPair  # the API server's, to kubelets
    front_proxy: KeyPair  # the API server's, to aggregated API servers
    admin: KeyPair  # the user's


def certificates(pki: Pki, address: str) -> Certificates:
    """Makes what is missing, near its end, or made for another node."""
    host = socket.gethostname()
    here = (host, socket.getfqdn(), "localhost", address, "127.0.0.1")
    inside = tuple(
        "kubernetes.default.svc.cluster.local".rsplit(".", n)[0] for n in (0, 1, 2, 3, 4)
    )
    etcd = pki.etcd_ca
    return Certificates(
        # The server's is also a client's: etcd's gateway and our health check show it.
        pki.leaf("etcd-server", Leaf("hpk-etcd", names=here, server=True), etcd),
        pki.leaf("apiserver-etcd-client", Leaf("kube-apiserver-etcd-client"), etcd),
        pki.leaf(
            "apiserver",
            Leaf("kube-apiserver", names=(*here, *inside, SERVICE_API), server=True, client=False),
        ),
        pki.leaf("apiserver-kubelet-client", Leaf("kube-apiserver-kubelet-client")),
        pki.leaf("front-proxy-client", Leaf("front-proxy-client"), pki.front_proxy_ca),
        pki.leaf("admin", USERS["admin"]),
    )


def etcd(site: Site, pki: Pki, certs: Certificates) -> Component:
    """etcd, one member. It listens on the node's address too (flanneld of other nodes is to
    read it there), to clients with a certificate of etcd's own authority only."""
    server, ca = certs.etcd_server, pki.etcd_ca.cert
    local = f"https://127.0.0.1:{site.ports['etcd']}"
    peer = f"https://127.0.0.1:{site.ports['etcd-peer']}"
    http = f"https://127.0.0.1:{site.ports['etcd-http']}"
    client = ApiClient(http, client_context(ca, server.cert, server.key))

    async def ready() -> bool:
        return await client.ok("/health")

    return Component(
        "etcd",
        (
            str(site.binaries["etcd"]),
            "--name=hpk",
            f"--data-dir={site.paths.etcd}",
            f"--listen-client-urls={local},{site.etcd}",
            # HTTP (/health) apart from gRPC: on one port, gRPC goes through a slower server.
            f"--listen-client-http-urls={http}",
            f"--advertise-client-urls={site.etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=hpk={peer}",
            "--client-cert-auth=true",
            f"--trusted-ca-file={ca}",
            f"--cert-file={server.cert}",
            f"--key-file={server.key}",
            "--peer-client-cert-auth=true",
            f"--peer-trusted-ca-file={ca}",
            f"--peer-cert-file={server.cert}",
            f"--peer-key-file={server.key}",
            # Its file gives back what it does not use, where that is worth the time.
            "--bootstrap-defrag-threshold-megabytes=64",
            # A lone member still waits out an election, of which these are the length.
            "--heartbeat-interval=10",
            "--election-timeout=100",
            "--log-level=warn",
        ),
        {"GOMEMLIMIT": "200MiB"},
        ready,
        # It waits 5 s for other nodes' flanneld otherwise. What it has acknowledged is on disk.
        stop_timeout=1.0,
    )


def apiserver(site: Site, pki: Pki, certs: Certificates, egress: tuple[str, ...] = ()) -> Component:
    """kube-apiserver. Ready when /readyz says so, asked as the administrator: nothing is
    anonymous here, health included. `egress`: flags that say how it reaches pods."""
    ca = pki.ca.cert
    sa = pki.service_account_key()
    local = f"https://127.0.0.1:{site.ports['apiserver']}"
    client = ApiClient(local, client_context(ca, certs.admin.cert, certs.admin.key))

    async def ready() -> bool:
        return await client.ok("/readyz")

    return Component(
        "kube-apiserver",
        (
            str(site.binaries["kube-apiserver"]),
            f"--advertise-address={site.address}",
            "--bind-address=0.0.0.0",
            f"--secure-port={site.ports['apiserver']}",
            f"--tls-cert-file={certs.apiserver.cert}",
            f"--tls-private-key-file={certs.apiserver.key}",
            f"--client-ca-file={ca}",
            "--anonymous-auth=false",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            # Pods ask for it in many charts; what they then get is still only the user's rights.
            "--allow-privileged=true",
            f"--etcd-servers=https://127.0.0.1:{site.ports['etcd']}",
            f"--etcd-cafile={pki.etcd_ca.cert}",
            f"--etcd-certfile={certs.etcd_client.cert}",
            f"--etcd-keyfile={certs.etcd_client.key}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={sa.cert}",
            f"--service-account-signing-key-file={sa.key}",
            f"--kubelet-client-certificate={certs.kubelet_client.cert}",
            f"--kubelet-client-key={certs.kubelet_client.key}",
            f"--kubelet-certificate-authority={ca}",
            "--kubelet-preferred-address-types=InternalIP,Hostname",
            f"--requestheader-client-ca-file={pki.front_proxy_ca.cert}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={certs.front_proxy.cert}",
            f"--proxy-client-key-file={certs.front_proxy.key}",
            # Aggregated APIs are dialled at their endpoints: their Services are headless here.
            "--enable-aggregator-routing=true",
            # Ends watches (operators', `kubectl get -w`) at a stop, which waits for them otherwise.
            "--shutdown-watch-termination-grace-period=1s",
            *egress,
            "--profiling=false",
        ),
        {"GOMEMLIMIT": "450MiB"},
        ready,
        start_timeout=120.0,
    )


def controller_manager(site: Site, pki: Pki) -> Component:
    """kube-controller-manager. It serves nothing, so it is ready when it runs."""
    kubeconfig = component_kubeconfig(site.paths, "controller-manager")
    return Component(
        "kube-controller-manager",
        (
            str(site.binaries["kube-controller-manager"]),
            f"--kubeconfig={kubeconfig}",
            "--secure-port=0",
            "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={pki.service_accounts.key}",
            f"--root-ca-file={pki.ca.cert}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            # The default of 20 requests a second makes a Job of 100 pods take 5 s to create.
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
            "--concurrent-job-syncs=10",
            "--profiling=false",
        ),
        {"GOMEMLIMIT": "200MiB"},
    )


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """One of our modules, run by this Python."""
    return (sys.executable, "-m", module, *arguments)


def own(name: str, argument: str) -> Component:
    """One of HPK's own processes: `hpk ARGUMENT` with this Python."""
    return Component(name, python("hpk_kubelet.cli", argument), stop_timeout=30.0)
