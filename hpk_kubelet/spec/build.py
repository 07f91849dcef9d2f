"""A pod and what it refers to → the plan its agent carries out. Pure."""

from __future__ import annotations

from hpk_kubelet.spec.container import container_plan
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.inputs import Object, PlanInputs
from hpk_kubelet.spec.network import (
    host_ports,
    hostname_and_domain,
    hosts_plan,
    network_plan,
    resolver_plan,
    uses_host,
)
from hpk_kubelet.spec.plan import PLAN_VERSION, AgentPlan, ContainerPlan, PodPlan
from hpk_kubelet.spec.ranks import main_container
from hpk_kubelet.spec.resources import storage_limit
from hpk_kubelet.spec.restart import pod_policy
from hpk_kubelet.spec.sysctls import sysctls

DEFAULT_GRACE = 30


def build_plan(pod: Object, inputs: PlanInputs) -> PodPlan:
    """Everything the agent needs. ConfigError for an init container that can't be configured, or
    when none of the main ones can."""
    metadata, spec = pod["metadata"], pod["spec"]
    host_network = uses_host(pod)
    network = network_plan(pod, inputs)
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
    containers, misconfigured = _main_containers(pod, inputs, hostname)
    plan = PodPlan(
        version=PLAN_VERSION,
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        created=inputs.created,
        hostname=hostname,
        network=network,
        hostPorts=host_ports(pod, network),
        shareProcessNamespace=bool(spec.get("shareProcessNamespace")),
        restartPolicy=pod_policy(pod),
        terminationGracePeriodSeconds=spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE),
        startTime=inputs.start_time,
        initContainers=[
            container_plan(pod, container, inputs, hostname, init=True)
            for container in spec.get("initContainers") or []
        ],
        containers=containers,
        volumes=dict(inputs.volumes),
        resolver=resolver_plan(pod, network, inputs.cluster_domain),
        hosts=hosts_plan(pod, name, domain, network),
        agent=AgentPlan(
            token=inputs.agent_token,
            kubelet=str(inputs.kubelet_address),
            ca=str(inputs.ca),
            localDir=inputs.local_dir,
        ),
    )
    if misconfigured:
        plan["misconfigured"] = misconfigured
    if spec.get("activeDeadlineSeconds") is not None:
        plan["activeDeadlineSeconds"] = spec["activeDeadlineSeconds"]
    if settings := sysctls(pod):
        plan["sysctls"] = settings
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


def _main_containers(
    pod: Object, inputs: PlanInputs, hostname: str
) -> tuple[list[ContainerPlan], dict[str, dict[str, str]]]:
    """Those that can be configured, and why the others can't. Ranks start together or not at all;
    without any container there is nothing to hold a job for."""
    plans: list[ContainerPlan] = []
    errors: dict[str, ConfigError] = {}
    for container in pod["spec"]["containers"]:
        try:
            plans.append(container_plan(pod, container, inputs, hostname, init=False))
        except ConfigError as e:
            errors[container["name"]] = e
    if errors and (not plans or inputs.mpi is not None):
        raise next(iter(errors.values()))
    return plans, {n: {"reason": e.reason, "message": e.message} for n, e in errors.items()}
