"""Everything a pod needs before sbatch: images, objects, tokens, the plan, the script."""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from hpk_kubelet.agent.install import install
from hpk_kubelet.config import Config, Paths
from hpk_kubelet.images.store import Image, ImageStore
from hpk_kubelet.images.users import resolve_user
from hpk_kubelet.kube.client import Client
from hpk_kubelet.node.crash import crash_point
from hpk_kubelet.node.network import NetworkNews
from hpk_kubelet.node.objects import Key, Object, ObjectCache, Token, request_tokens
from hpk_kubelet.node.pulls import Say, pull_images, with_volumes
from hpk_kubelet.node.seccomp import load_profile
from hpk_kubelet.node.store import PodDir
from hpk_kubelet.spec.build import build_plan
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.inputs import PlanInputs
from hpk_kubelet.spec.plan import ContainerPlan, PodPlan
from hpk_kubelet.spec.references import references
from hpk_kubelet.spec.resources import granted
from hpk_kubelet.volumes import (
    TokenRequest,
    Volume,
    VolumeInputs,
    resolve_files,
    resolve_volumes,
    token_requests,
    write_volumes,
)
from hpk_kubelet.volumes.image import PREFIX

log = logging.getLogger(__name__)


class Node(Protocol):
    """The virtual node that a pod runs on."""

    @property
    def client(self) -> Client: ...
    @property
    def objects(self) -> ObjectCache: ...
    @property
    def allocatable(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Site:
    """What is the same for all pods."""

    config: Config
    paths: Paths
    images: ImageStore
    api_host: str
    api_port: int
    network: NetworkNews


@dataclass(frozen=True)
class Prepared:
    plan: PodPlan
    tokens: Mapping[TokenRequest, Token]


async def fetch_inputs(
    pod: Object,
    node: Node,
    site: Site,
    pod_dir: Path,
    have: Mapping[TokenRequest, Token],
    later: bool = False,
) -> tuple[VolumeInputs, dict[TokenRequest, Token]]:
    """What the pod's volumes are made of as it is now, and its tokens; `later`: empty ones."""
    namespace = pod["metadata"]["namespace"]
    requests = token_requests(pod)
    objects, tokens = await asyncio.gather(
        node.objects.get(namespace, [(r.kind, r.name) for r in references(pod)]),
        request_tokens(node.client, pod, () if later else requests, have),
    )
    if bound := bound_volumes(objects):
        objects |= await node.objects.get(namespace, bound)
    inputs = VolumeInputs(
        objects=objects,
        tokens={r: tokens[r].value if r in tokens else "" for r in requests},
        allocatable=allocatable(pod, node, site),
        pod_dir=pod_dir,
        hpk_home=site.paths.home,
    )
    return inputs, tokens


def allocatable(pod: Object, node: Node, site: Site) -> Mapping[str, str]:
    """What a container of the pod without a limit may use."""
    return {**node.allocatable, **granted(pod, site.config.slurm)}


def bound_volumes(objects: Mapping[Key, Object | None]) -> list[Key]:
    """What the claims among the objects are bound to."""
    return [
        ("PersistentVolume", claim["spec"]["volumeName"])
        for (kind, _), claim in objects.items()
        if kind == "PersistentVolumeClaim" and claim and claim["spec"].get("volumeName")
    ]


async def prepare(
    pod: Object,
    node: Node,
    site: Site,
    directory: PodDir,
    *,
    start_time: float,
    say: Say,
    mpi: Sequence[str] | None,
    gpus: Literal["nvidia", "rocm"] | None,
    script: str | None,
    services: Sequence[Object],
    agent_token: str = "",
    tokens_later: bool = False,
) -> Prepared:
    """Writes the pod's directory, the script last; None leaves the script of before (a plan
    that is refreshed: give it the same `agent_token`). `tokens_later` leaves the volumes with
    tokens to `refresh_volumes`, which is due once the job is there.

    Raises PullFailed, ConfigError, or ApiError when the API server is away; all may pass.
    """
    directory.create()
    crash_point(site.paths.run, "created")
    pulled, fetched = await asyncio.gather(
        pull_images(pod, node.objects, site.images, say, with_volumes(pod)),
        fetch_inputs(pod, node, site, directory.path, {}, tokens_later),
        return_exceptions=True,
    )
    # Both have ended, so that a missing object does not break off a long pull; the volumes' word
    # comes first, as in the kubelet.
    if isinstance(fetched, BaseException):
        raise fetched
    inputs, tokens = fetched
    volumes = resolve_volumes(pod, inputs)
    if isinstance(pulled, BaseException):
        raise pulled
    images = pulled
    for name, volume in volumes.items():
        if volume.plan["kind"] == "image":
            image = images[PREFIX + name]
            volume.plan["path"], volume.plan["digest"] = str(image.rootfs), image.digest
    crash_point(site.paths.run, "pulled")
    plan = build_plan(
        pod,
        replace(
            plan_inputs(site, directory, inputs, images, volumes, services),
            agent_token=agent_token or secrets.token_urlsafe(32),
            start_time=start_time,
            mpi=mpi,
            gpus=gpus,
            network=site.network.plan(),
        ),
    )
    if tokens_later:
        awaited = {request.volume for request in token_requests(pod)}
        plan["awaits"] = [volumes[name].plan["path"] for name in sorted(awaited)]
        volumes = {name: v for name, v in volumes.items() if name not in awaited}
    await asyncio.to_thread(write, pod, volumes, site)
    directory.write_plan(plan, script)
    crash_point(site.paths.run, "planned")
    return Prepared(plan, tokens)


def plan_inputs(
    site: Site,
    directory: PodDir,
    found: VolumeInputs,
    images: Mapping[str, Image],
    volumes: Mapping[str, Volume],
    services: Sequence[Object],
) -> PlanInputs:
    """What every plan needs, of a whole pod or of one container in it."""
    now = time.time()
    return PlanInputs(
        objects=found.objects,
        images=images,
        resolve_user=resolve_user,
        seccomp_profile=partial(load_profile, site.paths.seccomp),
        volumes={name: volume.plan for name, volume in volumes.items()},
        services=services,
        api_host=site.api_host,
        api_port=site.api_port,
        allocatable=found.allocatable,
        pod_dir=directory.path,
        agent_token="",
        kubelet_address=site.paths.kubelet,
        ca=site.paths.pki / "ca.crt",
        local_dir=site.config.local_dir,
        created=now,
        start_time=now,
    )


async def prepare_container(
    pod: Object,
    container: Object,
    path: str,
    node: Node,
    site: Site,
    directory: PodDir,
    *,
    say: Say,
    services: Sequence[Object],
) -> ContainerPlan:
    """What the agent of a running pod needs to start one more container, or one anew with another
    image: it is planned as the only one of its pod. `path`: its field path; an ephemeral one is
    never restarted. Raises as `prepare` does."""
    spec = {**pod["spec"], "initContainers": [], "containers": [container]}
    if path.startswith("spec.ephemeralContainers"):
        spec["restartPolicy"] = "Never"
    alone = {**pod, "spec": spec}
    images = await pull_images(pod, node.objects, site.images, say, [(container, path)])
    found, _ = await fetch_inputs(alone, node, site, directory.path, {})
    found = replace(found, allocatable=allocatable(pod, node, site))
    volumes = resolve_volumes(alone, found)
    inputs = plan_inputs(site, directory, found, images, volumes, services)
    plan = build_plan(alone, inputs)["containers"][0]
    if container.get("targetContainerName"):
        plan["targetContainer"] = container["targetContainerName"]
    directory.write_ephemeral(plan)
    return plan


def write(pod: Object, volumes: Mapping[str, Volume], site: Site) -> None:
    """The volumes' files; an OSError becomes a ConfigError that names the volume's directory.
    Blocks."""
    group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
    give = None
    if group is not None:
        give = partial(give_to_group, install(site.paths.agent), group)
    try:
        write_volumes(volumes, give)
    except OSError as e:
        raise ConfigError(
            f"{e.filename}: {e.strerror}",
            reason="ContainerCreating",
            event=("FailedMount", f"volumes can't be written: {e.filename}: {e.strerror}"),
        ) from None


def give_to_group(agent: Path, group: int, directory: Path) -> bool:
    """Has the agent's namespaces give files to a group of the pods'; False if this user or this
    file system knows no such group."""
    command = (sys.executable, "-I", "-S", agent, "--give", directory, str(group))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        log.info("%s: %s", directory, done.stderr.decode(errors="replace").strip())
    return done.returncode == 0


async def refresh_volumes(
    pod: Object, node: Node, site: Site, directory: Path, have: Mapping[TokenRequest, Token]
) -> tuple[dict[TokenRequest, Token], list[ConfigError]]:
    """Brings the volumes of a running pod up to date; answers its tokens, and what could not be."""
    inputs, tokens = await fetch_inputs(pod, node, site, directory, have)
    volumes, errors = resolve_files(pod, inputs)
    await asyncio.to_thread(write, pod, volumes, site)
    return tokens, errors
