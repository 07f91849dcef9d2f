"""`hpk kubelet`: makes everything the kubelet needs, and runs it until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import sys
from urllib.parse import urlsplit

from hpk_kubelet.agent.install import install
from hpk_kubelet.config import Config, Paths, load_config
from hpk_kubelet.controlplane.addresses import kubelet_ports, node_address
from hpk_kubelet.controlplane.kubeconfig import read_control, write_node_kubeconfig
from hpk_kubelet.controlplane.metrics import SERVER_NAME as METRICS_SERVER_NAME
from hpk_kubelet.controlplane.pki import Pki, kubelet_server
from hpk_kubelet.errors import HPKError
from hpk_kubelet.images.store import ImageStore, default_root
from hpk_kubelet.kube.client import Client
from hpk_kubelet.node.kubelet import Kubelet
from hpk_kubelet.node.network import NetworkNews
from hpk_kubelet.node.nodes import Host
from hpk_kubelet.node.prepare import Site
from hpk_kubelet.node.virtual_node import VirtualNode
from hpk_kubelet.server.agents import AgentServer
from hpk_kubelet.server.api import KubeletServer, server_context
from hpk_kubelet.server.log_files import read_files
from hpk_kubelet.server.metrics import Metrics
from hpk_kubelet.slurm.backend import Backend, Partition
from hpk_kubelet.slurm.choice import make_backend
from hpk_kubelet.slurm.steps import ControlJobBackend
from hpk_kubelet.spec.sysctls import check_allowed

log = logging.getLogger(__name__)

AGENT_SERVER_NAME = "hpk-kubelet"  # what agents check the certificate for


def run() -> None:
    """The entry point; HPKError for what the user can mend."""
    os.umask(0o077)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    paths = Paths()
    asyncio.run(_until_told(load_config(paths), paths))


async def _until_told(config: Config, paths: Paths) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(serve(config, paths))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    try:
        await serving
    except asyncio.CancelledError:
        log.info("stopped")
    except BaseExceptionGroup as group:
        known = group.subgroup(HPKError)
        while isinstance(known, BaseExceptionGroup):
            known = known.exceptions[0]  # type: ignore[assignment]
        if known is not None:
            raise known from None
        raise
    finally:
        stopping.cancel()


async def serve(config: Config, paths: Paths) -> None:
    """Runs until cancelled."""
    check_allowed(config.security.allowed_unsafe_sysctls)
    control = read_control(paths)
    if control is None:
        raise HPKError("no control plane was started yet: sbatch hpk.sbatch")
    address = node_address(config.address)
    ports = kubelet_ports(config, paths)
    pki = Pki(paths.pki)
    names = (
        AGENT_SERVER_NAME,
        METRICS_SERVER_NAME,
        socket.gethostname(),
        address,
        "127.0.0.1",
        "localhost",
    )
    pair = kubelet_server(pki, names)
    host = Host(address, socket.gethostname(), ports["kubelet"], await apptainer_version())
    images = ImageStore(default_root(config), insecure=config.images.insecure_registries)
    api = urlsplit(control.api)
    site = Site(
        config,
        paths,
        images,
        api.hostname or "",
        api.port or 443,
        NetworkNews(paths, pki.cluster_id(), config.site_network),
    )
    paths.pods.mkdir(mode=0o700, parents=True, exist_ok=True)

    jobs = make_backend(config.slurm, paths.run / "slurmrestd")

    async def make_node(kubelet: Kubelet, name: str, partition: Partition) -> VirtualNode:
        client = await Client.from_kubeconfig(
            await asyncio.to_thread(write_node_kubeconfig, paths, name)
        )
        return VirtualNode(
            name,
            partition,
            client,
            host,
            config.max_pods,
            offered=kubelet.offered,
            full=kubelet.disk.pressure,
            slow=kubelet.disk.slow,
            way=jobs.way,
            calm=kubelet.rush.over,
            on_pod=kubelet.pod_changed,
            on_written=kubelet.status_written,
            on_refused=kubelet.status_refused,
        )

    backend: Backend = jobs
    if control.job is not None:
        backend = ControlJobBackend(jobs, control.job)
    kubelet = Kubelet(site, backend, pki.cluster_id(), install(paths.agent), make_node)
    kubelet.agents = AgentServer(kubelet, server_context(pair.cert, pair.key))
    context = server_context(pair.cert, pair.key, pki.ca.cert, pki.front_proxy_ca.cert)
    metrics = Metrics(kubelet.served, kubelet.allocatable)
    server = KubeletServer(kubelet, context, read_files, metrics, {"maxPods": config.max_pods})
    try:
        agents_port = await kubelet.agents.start("0.0.0.0", ports["agents"])
        await server.start("0.0.0.0", ports["kubelet"])
        await jobs.start()
        # Nothing of what was imported and made so far will ever be garbage.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        await kubelet.run({"host": address, "port": agents_port})
    finally:
        await kubelet.close()
        await server.close()
        await kubelet.agents.close()
        await jobs.close()
        await images.close()


async def apptainer_version() -> str:
    """What the nodes say they run; "unknown" where apptainer is on the compute nodes alone."""
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None:
        return "unknown"
    process = await asyncio.create_subprocess_exec(
        program, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    return out.decode(errors="replace").split()[-1] if out.strip() else "unknown"
