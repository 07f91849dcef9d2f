"""Limits that the agent itself keeps, because a user has no cgroup to put a container in.

Memory: a container over its limit is killed, all of it, and OOMKilled. Where Slurm gives the job
a cgroup, that one bounds the pod as a whole, and the kernel is faster than any watch; this keeps
each container to its own limit. Disk: a pod over a limit is evicted, in the words of the kubelet's
eviction manager (pkg/kubelet/eviction/eviction_manager.go).
"""

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Dict

from . import usage

if TYPE_CHECKING:
    from .pod import Pod

FASTEST, SLOWEST = 0.1, 2.0  # seconds between two looks at memory
GROWTH = 1 << 30  # bytes a second: what a container is expected to take at most
STEADY = 0.01  # a change of use by less than this part of the limit is none
DISK = 10.0  # seconds between two looks at the disk, as the kubelet's housekeeping interval
DISK_SHARE = 20  # a look that took long is followed by a pause this many times as long
EVICTION_GRACE = 1.0


async def watch(pod: "Pod") -> None:
    """Until cancelled."""
    work = []
    more = bool(pod.plan.get("misconfigured"))  # containers with limits of their own may come
    if memory_limits(pod) or more:
        work.append(_watch_memory(pod))
    if has_disk_limits(pod) or more:
        work.append(_watch_disk(pod))
    await asyncio.gather(*work)


def memory_limits(pod: "Pod") -> Dict[str, int]:
    """Bytes, by container."""
    return {
        name: int(runner.container["memoryLimit"])
        for name, runner in pod.runners.items()
        if runner.container.get("memoryLimit") and not runner.container.get("mpi")
    }


async def _watch_memory(pod: "Pod") -> None:
    used: Dict[str, int] = {}
    pause = FASTEST
    while True:
        await asyncio.sleep(pause)
        before, used = used, {}
        longest, limits = SLOWEST, memory_limits(pod)
        for name, pids in usage.processes(pod.runners).items():
            if name not in limits:
                continue
            limit = limits[name]
            used[name] = usage.resident(pids)
            if used[name] > limit and usage.proportional(pids) > limit:
                pod.note("container %s is over its memory limit of %d bytes" % (name, limit))
                pod.runners[name].oom_killed()
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                continue
            room = max(FASTEST, (limit - used[name]) / GROWTH)
            if abs(used[name] - before.get(name, 0)) < STEADY * limit:
                room = max(room, pause * 2)
            longest = min(longest, room)
        pause = longest


def has_disk_limits(pod: "Pod") -> bool:
    return (
        "storageLimit" in pod.plan
        or any("storageLimit" in r.container for r in pod.runners.values())
        or any("sizeLimit" in volume for volume in pod.plan["volumes"].values())
    )


async def _watch_disk(pod: "Pod") -> None:
    while not pod.stopping.is_set():
        began = time.monotonic()
        message = disk_excess(pod)
        if message:
            pod.event("Warning", "Evicted", message)
            pod.stop(EVICTION_GRACE, "Evicted", message)
            return
        await asyncio.sleep(max(DISK, DISK_SHARE * (time.monotonic() - began)))


def disk_excess(pod: "Pod") -> str:
    """Which limit on the disk the pod is over; "" for none."""
    total = 0
    for name, volume in pod.plan["volumes"].items():
        if volume["kind"] != "emptyDir" or name not in pod.setup.paths:
            continue
        used = usage.disk(pod.setup.paths[name])
        if "sizeLimit" in volume and used > volume["sizeLimit"]:
            return 'Usage of EmptyDir volume "%s" exceeds the limit "%s". ' % (
                name, quantity(volume["sizeLimit"]),
            )  # fmt: skip
        if volume.get("medium") != "Memory":
            total += used
    containers: Dict[str, int] = {}
    for name, runner in pod.runners.items():
        used = usage.disk(os.path.join(pod.setup.logs, name))
        if runner.run is not None:
            used += usage.disk(runner.run.folder)
        containers[name] = used
    limit = pod.plan.get("storageLimit")
    if limit is not None and total + sum(containers.values()) > limit:
        return (
            "Pod ephemeral local storage usage exceeds the total limit of containers %s. "
            % quantity(limit)
        )
    for name, used in containers.items():
        limit = pod.runners[name].container.get("storageLimit")
        if limit is not None and used > limit:
            return 'Container %s exceeded its local ephemeral storage limit "%s". ' % (
                name, quantity(limit),
            )  # fmt: skip
    return ""


def quantity(amount: int) -> str:
    """As Kubernetes writes bytes: 64Mi, 1500."""
    suffixes = ["", "Ki", "Mi", "Gi", "Ti", "Pi"]
    while amount and amount % 1024 == 0 and len(suffixes) > 1:
        amount //= 1024
        del suffixes[0]
    return "%d%s" % (amount, suffixes[0])
