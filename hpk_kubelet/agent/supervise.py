"""The agent's event loop: the pod's life, its connection to the kubelet, and the end of the job."""

import asyncio
import os
import signal
import time
import traceback
from typing import TYPE_CHECKING

from . import hostports, limits
from .allocation import END_SIGNALS
from .connection import Connection
from .fds import on_signal
from .journal import note
from .memory import keep_small
from .pod import Pod

if TYPE_CHECKING:
    from .main import Starting

DELIVERY = 2.0  # seconds for the last state to reach a kubelet that is there


def supervise(starting: "Starting") -> int:
    """Runs the pod to its end; the job's exit code."""
    return asyncio.run(_supervise(starting))


async def _supervise(starting: "Starting") -> int:
    setup = starting.setup
    assert setup is not None
    pod = Pod(starting.plan, setup, starting.journal, starting.started_at)
    for name, run in starting.runs.items():
        pod.runners[name].run = run
    for name, error in starting.refused.items():
        pod.runners[name].start_error = error
    loop = asyncio.get_running_loop()
    on_signal(signal.SIGCHLD, pod.reaper.collect)

    def terminated() -> None:
        note("the job was told to end: the pod's containers get %d s" % pod.grace)
        # Slurm warns up to 30 s earlier than asked for (sbatch(1), --signal).
        left = float(os.environ.get("SLURM_JOB_END_TIME") or "inf") - time.time()
        if left <= 2 * pod.grace + 60:
            pod.stop(pod.grace, "SlurmTimeout", "the Slurm job is about to reach its time limit")
        else:
            pod.stop(pod.grace, "Terminated", "Slurm told the job to end")

    for number in END_SIGNALS:
        on_signal(number, terminated)
    if starting.terminated:
        terminated()
    connection = Connection(pod)
    pod.publish = connection.publish
    link = loop.create_task(connection.run())
    if setup.network is not None:
        network = setup.network
        loop.add_reader(network, lambda: network.hear() or loop.remove_reader(network))
    ports = hostports.start(setup) if setup.bound else None
    chores = [loop.create_task(limits.watch(pod)), loop.create_task(keep_small())]
    try:
        await pod.run(starting.volume_error)
    except Exception as e:
        traceback.print_exc()
        pod.fail("%s: %s" % (type(e).__name__, e))
    await connection.deliver(DELIVERY)
    link.cancel()
    if ports:
        ports.close()
    if setup.network is not None:
        loop.remove_reader(setup.network)
    for chore in chores:
        chore.cancel()
    await asyncio.gather(link, *chores, return_exceptions=True)
    setup.clear()
    return pod.exit_status()
