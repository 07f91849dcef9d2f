"""`hpk controllers`: HPK's own controllers in one process, each with its own credentials."""

from __future__ import annotations

import asyncio
import logging
import signal

from hpk_kubelet.config import Paths
from hpk_kubelet.controllers.scheduler import Scheduler
from hpk_kubelet.controllers.services import ServiceController
from hpk_kubelet.controlplane.kubeconfig import component_kubeconfig
from hpk_kubelet.kube.client import Client


def run() -> None:
    """Runs the controllers until SIGTERM or SIGINT. Raises HPKError without a control plane."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    asyncio.run(controllers(Paths()))


async def controllers(paths: Paths) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    scheduler_config = component_kubeconfig(paths, "scheduler")
    services_config = component_kubeconfig(paths, "services")
    async with (
        await Client.from_kubeconfig(scheduler_config, user_agent="hpk-scheduler") as scheduler,
        await Client.from_kubeconfig(services_config, user_agent="hpk-services") as services,
        asyncio.TaskGroup() as group,
    ):
        running = [
            group.create_task(Scheduler(scheduler).run()),
            group.create_task(ServiceController(services).run()),
        ]
        await stop.wait()
        for task in running:
            task.cancel()
