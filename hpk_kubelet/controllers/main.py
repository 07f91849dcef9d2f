"""`hpk controllers`: HPK's own controllers in one process, each with its own credentials."""

from __future__ import annotations

import asyncio
import logging
import signal

from hpk_kubelet.agent.install import install
from hpk_kubelet.config import Config, Paths, load_config
from hpk_kubelet.controllers.network_policies import NetworkPolicyController
from hpk_kubelet.controllers.provisioner import Provisioner
from hpk_kubelet.controllers.scheduler import Scheduler
from hpk_kubelet.controllers.services import ServiceController
from hpk_kubelet.controlplane.kubeconfig import component_kubeconfig
from hpk_kubelet.kube.client import Client

PROVISIONER = "hpk-provisioner"


def run() -> None:
    """Runs the controllers until SIGTERM or SIGINT. Raises HPKError without a control plane."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    paths = Paths()
    asyncio.run(controllers(paths, load_config(paths)))


async def controllers(paths: Paths, config: Config) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    scheduler_config = component_kubeconfig(paths, "scheduler")
    provisioner_config = component_kubeconfig(paths, "provisioner")
    services_config = component_kubeconfig(paths, "services")
    async with (
        await Client.from_kubeconfig(scheduler_config, user_agent="hpk-scheduler") as scheduler,
        await Client.from_kubeconfig(services_config, user_agent="hpk-services") as services,
        await Client.from_kubeconfig(provisioner_config, user_agent=PROVISIONER) as provisioner,
        asyncio.TaskGroup() as group,
    ):
        running = [
            group.create_task(Scheduler(scheduler).run()),
            group.create_task(ServiceController(services, config.service_mode).run()),
            group.create_task(NetworkPolicyController(services).run()),
            group.create_task(
                Provisioner(provisioner, config.volumes, paths.home, install(paths.agent)).run()
            ),
        ]
        await stop.wait()
        for task in running:
            task.cancel()
