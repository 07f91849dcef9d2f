"""The network part of a pod's plan: mode, names, /etc/hosts, /etc/resolv.conf, host ports. Pure."""

from __future__ import annotations

import re

from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.inputs import Object, PlanInputs
from hpk_kubelet.spec.plan import (
    HostPortPlan,
    HostsPlan,
    NetworkPlan,
    ResolverConfig,
    ResolverPlan,
)

_HOSTNAME_MAX = 63
_LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_HOSTS = """127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
fe00::0\tip6-localnet
fe00::0\tip6-mcastprefix
fe00::1\tip6-allnodes
fe00::2\tip6-allrouters
"""  # kubelet_pods.go, managedHostsFileContent


def network_plan(pod: Object, inputs: PlanInputs) -> NetworkPlan:
    """A pod with hostNetwork, and one of MPI ranks, is where its node is."""
    if uses_host(pod) or inputs.mpi is not None or inputs.network is None:
        return NetworkPlan(mode="host")
    return inputs.network


def api_address(pod: Object, inputs: PlanInputs) -> tuple[str, int]:
    """Where the pod reaches the API server: in the pod network by its Service's address, which
    stays while the control plane moves."""
    network = network_plan(pod, inputs)
    api = network["facts"].get("api") if network["mode"] == "rootless" else None
    return (api["address"], api["port"]) if api else (inputs.api_host, inputs.api_port)


def uses_host(pod: Object) -> bool:
    return bool(pod["spec"].get("hostNetwork"))


def hostname_and_domain(pod: Object, cluster_domain: str) -> tuple[str, str]:
    """kubelet's GeneratePodHostNameAndDomain."""
    spec, metadata = pod["spec"], pod["metadata"]
    if spec.get("hostnameOverride"):
        return _truncate(spec["hostnameOverride"]), ""
    for key in ("hostname", "subdomain"):
        if spec.get(key) and not _LABEL.fullmatch(spec[key]):
            raise ConfigError(
                f'pod {key.capitalize()} "{spec[key]}" is not a valid DNS label',
                reason="ContainerCreating",
            )
    domain = ""
    if spec.get("subdomain"):
        domain = f"{spec['subdomain']}.{metadata['namespace']}.svc.{cluster_domain}"
    return _truncate(spec.get("hostname") or metadata["name"]), domain


def _truncate(hostname: str) -> str:
    if len(hostname) <= _HOSTNAME_MAX:
        return hostname
    return hostname[:_HOSTNAME_MAX].rstrip("-.")


def hosts_plan(pod: Object, hostname: str, domain: str, network: NetworkPlan) -> HostsPlan:
    """The parts of kubelet's managed hosts file. On the host's network the node's own entries are
    part of it, since ranks on other nodes are found by them."""
    spec = pod["spec"]
    names = [] if uses_host(pod) else [hostname]
    if domain and names:
        names = [f"{hostname}.{domain}", hostname]
    entries = [
        f"{alias['ip']}\t" + "\t".join(alias.get("hostnames") or []) + "\n"
        for alias in spec.get("hostAliases") or []
    ]
    aliases = "\n# Entries added by HostAliases.\n" + "".join(entries) if entries else ""
    if uses_host(pod):
        header = "# Kubernetes-managed hosts file (host network).\n"
    else:
        header = "# Kubernetes-managed hosts file.\n"
    on_host = network["mode"] == "host"
    return HostsPlan(
        header=header if on_host else header + _HOSTS, node=on_host, names=names, aliases=aliases
    )


def resolver_plan(pod: Object, network: NetworkPlan, cluster_domain: str) -> ResolverPlan:
    """kubelet's GetPodDNS (dns.go). On the host's network nobody reaches the cluster's DNS."""
    spec = pod["spec"]
    policy = spec.get("dnsPolicy") or "ClusterFirst"
    config = spec.get("dnsConfig") or {}
    plan = ResolverPlan(
        nameservers=[],
        searches=[],
        options=[],
        node="nothing",
        config=ResolverConfig(
            nameservers=list(config.get("nameservers") or []),
            searches=list(config.get("searches") or []),
            options=[
                f"{o['name']}:{o['value']}" if o.get("value") else str(o["name"])
                for o in config.get("options") or []
            ],
        ),
    )
    if policy == "None":
        return plan
    dns = network["facts"].get("dns") if network["mode"] == "rootless" else None
    if policy == "Default" or dns is None:
        plan["node"] = "everything"
        return plan
    namespace = pod["metadata"]["namespace"]
    plan["nameservers"] = [dns["address"]]
    plan["searches"] = [
        f"{namespace}.svc.{cluster_domain}",
        f"svc.{cluster_domain}",
        cluster_domain,
    ]
    plan["options"] = ["ndots:5"]
    plan["node"] = "searches"
    return plan


def host_ports(pod: Object, network: NetworkPlan) -> list[HostPortPlan]:
    """The ports of the node that lead to the pod; on the node's network they are its own."""
    if network["mode"] == "host":
        return []
    spec = pod["spec"]
    return [
        HostPortPlan(
            address=port.get("hostIP") or "",
            port=port["hostPort"],
            target=port["containerPort"],
            protocol="UDP" if port.get("protocol") == "UDP" else "TCP",
        )
        for container in [*(spec.get("initContainers") or []), *spec["containers"]]
        for port in container.get("ports") or []
        if port.get("hostPort") and port.get("protocol", "TCP") in ("TCP", "UDP")
    ]
