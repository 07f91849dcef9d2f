"""The control plane's part of the rootless pod network: etcd's users, the facts for the nodes, and
the control job's own place in it."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable

import msgspec

from hpk_kubelet.agent.install import install
from hpk_kubelet.config import Config, Paths
from hpk_kubelet.controlplane import flannel, kube_proxy
from hpk_kubelet.controlplane.addresses import port_range
from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.controlplane.member import Member, Place
from hpk_kubelet.controlplane.pki import Pki
from hpk_kubelet.controlplane.stack import DNS_ADDRESS, SERVICE_API, SERVICE_CIDR, Site
from hpk_kubelet.errors import HPKError
from hpk_kubelet.network import modes
from hpk_kubelet.network.facts import ETCD_PREFIX, choose, facts_file, read_facts, revised
from hpk_kubelet.spec.plan import (
    ApiFacts,
    DaemonFacts,
    DnsFacts,
    EtcdFacts,
    NetworkFacts,
    NetworkPlan,
)


def binaries(config: Config) -> tuple[str, ...]:
    """The components that the rootless network takes."""
    proxy = (kube_proxy.NAME,) if config.service_mode == "clusterIP" else ()
    return ("flanneld", "etcdctl", "coredns", *proxy)


def choose_mode(config: Config) -> modes.Choice:
    """By the configuration and a look at this node; HPKError when what is demanded can't be had."""
    choice = modes.choose(
        config.network, [] if config.network in ("host", "site") else modes.missing()
    )
    if config.service_mode == "clusterIP" and choice.mode != "rootless":
        raise HPKError(
            "config.yaml: serviceMode: clusterIP needs `network: rootless`, because kube-proxy "
            f"translates addresses in the pods' own network, and here the network is "
            f"{choice.mode} ({choice.why})"
        )
    return choice


def forget(paths: Paths) -> None:
    """Pods that are made from now on use their nodes' networks."""
    facts_file(paths).unlink(missing_ok=True)


class PodNetwork:
    """`place` is where the control job is in the pod network, once there is one."""

    def __init__(self, config: Config, site: Site, say: Callable[[str], None]) -> None:
        self.place: Place | None = None
        self.cluster_ips = config.service_mode == "clusterIP"
        self.facts: NetworkFacts
        self._config = config
        self._site = site
        self._say = say
        self._member: Member | None = None
        self._followers: list[Callable[[Place], Awaitable[None]]] = []

    async def prepare(self, pki: Pki) -> None:
        """etcd runs, the API server not yet."""
        site, paths = self._site, self._site.paths
        chosen = choose(paths.network, port_range(self._config.ports))
        write_private(paths.network, msgspec.json.format(msgspec.json.encode(chosen)))
        etcdctl = flannel.Etcdctl(
            site.binaries["etcdctl"], f"https://127.0.0.1:{site.ports['etcd']}", pki
        )
        await flannel.make_users(etcdctl, paths.etcd / "hpk-users", chosen.flannel())
        client = flannel.flannel_client(pki)
        self.facts = NetworkFacts(
            revision=0,
            file=str(facts_file(paths)),
            podCIDR=chosen.pod_cidr,
            serviceCIDR=SERVICE_CIDR,
            vni=chosen.vni,
            vxlanPort=chosen.vxlan_port,
            interface=self._config.network_interface,
            mtu=self._config.network_mtu,
            flanneld=str(site.binaries["flanneld"]),
            etcd=EtcdFacts(
                endpoints=[site.etcd],
                prefix=ETCD_PREFIX,
                ca=str(pki.etcd_ca.cert),
                cert=str(client.cert),
                key=str(client.key),
                started=time.time_ns(),
            ),
            api=ApiFacts(
                address=SERVICE_API,
                port=443,
                target=site.address,
                targetPort=site.ports["apiserver"],
            ),
            dns=DnsFacts(address=DNS_ADDRESS, target=""),
        )
        node = kube_proxy.node_of(read_facts(paths))
        if self.cluster_ips and node:  # as before, so that a new control plane stops nothing
            self.facts["daemons"] = {kube_proxy.NAME: self._kube_proxy(node)}
        self._write()
        plan = NetworkPlan(mode="rootless", cluster=pki.cluster_id(), facts=self.facts)
        self._member = Member(
            install(paths.agent), plan, paths.run, paths.log, self._say, self._moved
        )

    def start(self) -> None:
        """Joins in the background; that it fails is said, and tried again: pods have the same
        trouble and say so themselves."""
        assert self._member is not None
        self._member.start()

    async def stop(self) -> None:
        if self._member is not None:
            await self._member.stop()

    def follow(self, follower: Callable[[Place], Awaitable[None]]) -> None:
        """`follower` is called with every new place."""
        self._followers.append(follower)

    async def _moved(self, place: Place) -> None:
        self.place = place
        self._say(f"the control job is {place.ip} in the pod network")
        for follower in self._followers:
            await follower(place)

    def _kube_proxy(self, node: str) -> DaemonFacts:
        return kube_proxy.daemon(self._site, node, self.facts["podCIDR"])

    async def proxy(self, node: str) -> None:
        """From now on kube-proxy runs in every node network."""
        wanted = {kube_proxy.NAME: self._kube_proxy(node)}
        if self.facts.get("daemons") != wanted:
            await self.tell(daemons=wanted)

    async def tell(self, **changes: object) -> None:
        """Changes facts (`dns`, `daemons`): on this node, and through the kubelet on all others."""
        self.facts = revised({**self.facts, **changes})
        self._write()
        if self._member is not None:
            await self._member.tell(self.facts)

    def _write(self) -> None:
        self.facts = revised(self.facts)
        write_private(facts_file(self._site.paths), json.dumps(self.facts))
