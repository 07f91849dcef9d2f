"""A pod and what it refers to → the plan its agent carries out. Pure."""

from __future__ import annotations

import re

from hpk_kubelet.spec.container import container_plan
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.inputs import Object, PlanInputs
from hpk_kubelet.spec.plan import PLAN_VERSION, AgentPlan, HostsPlan, PodPlan
from hpk_kubelet.spec.resources import storage_limit
from hpk_kubelet.spec.restart import pod_policy

DEFAULT_GRACE = 30
_HOSTNAME_MAX = 63
_LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def build_plan(pod: Object, inputs: PlanInputs) -> PodPlan:
    """Everything the agent needs. ConfigError for the first container that can't be configured."""
    metadata, spec = pod["metadata"], pod["spec"]
    host_network = bool(spec.get("hostNetwork"))
    name, domain = hostname_and_domain(pod, inputs.cluster_domain)
    hostname = "" if host_network else name
    if domain and spec.get("setHostnameAsFQDN") and not host_network:
        hostname = f"{name}.{domain}"
        if len(hostname) > 64:
            raise ConfigError(
                f"Failed to construct FQDN from pod hostname and cluster domain, FQDN {hostname} "
                f"is too long (64 characters is the max, {len(hostname)} characters requested)",
                reason="ContainerCreating",
                event=("FailedCreatePodSandBox", f"Failed to create pod sandbox: {hostname}"),
            )
    plan = PodPlan(
        version=PLAN_VERSION,
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        created=inputs.created,
        hostname=hostname,
        network="host",
        shareProcessNamespace=bool(spec.get("shareProcessNamespace")),
        restartPolicy=pod_policy(pod),
        terminationGracePeriodSeconds=spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE),
        startTime=inputs.start_time,
        initContainers=[
            container_plan(pod, container, inputs, hostname, init=True)
            for container in spec.get("initContainers") or []
        ],
        containers=[
            container_plan(pod, container, inputs, hostname, init=False)
            for container in spec["containers"]
        ],
        volumes=dict(inputs.volumes),
        etc={
            "/etc/resolv.conf": str(inputs.pod_dir / "etc" / "resolv.conf")
            if "resolv.conf" in etc_files(pod)
            else "/etc/resolv.conf"
        },
        hosts=_hosts(pod, name, domain),
        agent=AgentPlan(
            token=inputs.agent_token,
            kubelet=str(inputs.kubelet_address),
            ca=str(inputs.ca),
            localDir=inputs.local_dir,
        ),
    )
    if spec.get("activeDeadlineSeconds") is not None:
        plan["activeDeadlineSeconds"] = spec["activeDeadlineSeconds"]
    if limit := storage_limit(spec):
        plan["storageLimit"] = limit
    fs_group = (spec.get("securityContext") or {}).get("fsGroup")
    if fs_group is not None:
        plan["fsGroup"] = fs_group
    if inputs.gpus:
        plan["gpus"] = inputs.gpus
    if inputs.mpi is not None:
        main = main_container(pod)
        for container in plan["containers"]:
            if container["name"] == main:
                container["mpi"] = list(inputs.mpi)
    return plan


def main_container(pod: Object) -> str:
    """The container whose program becomes MPI ranks: the one called `main`, else the first."""
    names: list[str] = [container["name"] for container in pod["spec"]["containers"]]
    return "main" if "main" in names else names[0]


def etc_files(pod: Object) -> dict[str, str]:
    """What the kubelet writes into the pod's `etc/`: resolv.conf where the pod brings its own
    (dnsPolicy None); every other pod has the node's."""
    spec = pod["spec"]
    if spec.get("dnsPolicy") != "None":
        return {}
    config = spec.get("dnsConfig") or {}
    lines = []
    if config.get("searches"):
        lines.append("search " + " ".join(dict.fromkeys(config["searches"])))
    lines += [f"nameserver {server}" for server in dict.fromkeys(config.get("nameservers") or [])]
    options = {o["name"]: o.get("value") or "" for o in config.get("options") or []}
    if options:
        words = [f"{name}:{value}" if value else name for name, value in options.items()]
        lines.append("options " + " ".join(words))
    return {"resolv.conf": "".join(line + "\n" for line in lines)}


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


def _hosts(pod: Object, hostname: str, domain: str) -> HostsPlan:
    """The parts of kubelet's managed hosts file; on the host's network the node's own entries are
    part of it, since ranks on other nodes are found by them."""
    spec = pod["spec"]
    names = [] if spec.get("hostNetwork") else [hostname]
    if domain and names:
        names = [f"{hostname}.{domain}", hostname]
    entries = [
        f"{alias['ip']}\t" + "\t".join(alias.get("hostnames") or []) + "\n"
        for alias in spec.get("hostAliases") or []
    ]
    aliases = "\n# Entries added by HostAliases.\n" + "".join(entries) if entries else ""
    header = "# Kubernetes-managed hosts file (host network).\n"
    return HostsPlan(header=header, names=names, aliases=aliases)
