"""What each container uses, from /proc: works on every site, with or without cgroups."""

import os
import time
from typing import TYPE_CHECKING, Any, Dict

from .usage import mount_namespace, processes

if TYPE_CHECKING:
    from .pod import Pod


def pod_stats(pod: "Pod") -> Dict[str, Any]:
    """{"time", "containers": {name: {"cpuSeconds", "memoryBytes", "processes"}}} of the running
    ones. CPU time counts from the container's start, its ended processes included; apptainer's
    own processes, which are not in the container, count for nothing."""
    containers: Dict[str, Dict[str, Any]] = {}
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for name, pids in processes(pod.runners).items():
        used = containers[name] = {"cpuSeconds": 0.0, "memoryBytes": 0, "processes": 0}
        space = mount_namespace(pod.runners[name].pid)
        for pid in pids:
            if mount_namespace(pid) != space:
                continue
            try:
                with open("/proc/%d/stat" % pid) as f:
                    fields = f.read().rpartition(")")[2].split()
            except OSError:
                continue
            # utime, stime, and of children waited for: cutime, cstime (proc(5), from field 3)
            used["cpuSeconds"] += sum(int(x) for x in fields[11:15]) / ticks
            used["memoryBytes"] += int(fields[21]) * page
            used["processes"] += 1
    return {"time": time.time(), "containers": containers}
