"""What each container uses, from /proc: works on every site, with or without cgroups."""

import os
import time
from typing import TYPE_CHECKING, Any, Dict

if TYPE_CHECKING:
    from .pod import Pod


def pod_stats(pod: "Pod") -> Dict[str, Any]:
    """{"time", "containers": {name: {"cpuSeconds", "memoryBytes", "processes"}}} of the running
    ones. CPU time counts from the container's start, its ended processes included."""
    spaces = {}
    containers: Dict[str, Dict[str, Any]] = {}
    for name, runner in pod.runners.items():
        if runner.pid:
            try:
                spaces[os.readlink("/proc/%d/ns/mnt" % runner.pid)] = name
            except OSError:
                continue
            containers[name] = {"cpuSeconds": 0.0, "memoryBytes": 0, "processes": 0}
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            name = spaces[os.readlink("/proc/%s/ns/mnt" % pid)]
            with open("/proc/%s/stat" % pid) as f:
                fields = f.read().rpartition(")")[2].split()
        except (OSError, KeyError):
            continue
        # utime, stime, and of children waited for: cutime, cstime (proc(5), counted from field 3)
        containers[name]["cpuSeconds"] += sum(int(x) for x in fields[11:15]) / ticks
        containers[name]["memoryBytes"] += int(fields[21]) * page
        containers[name]["processes"] += 1
    return {"time": time.time(), "containers": containers}
