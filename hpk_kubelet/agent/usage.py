"""How much memory and disk the pod's containers use, found cheaply: this runs several times a
second in every pod that has a limit, so it looks at the agent's own descendants and nothing else.
"""

import os
from typing import TYPE_CHECKING, Dict, List, Set

if TYPE_CHECKING:
    from .runner import Runner

PAGE = os.sysconf("SC_PAGE_SIZE")


def processes(runners: "Dict[str, Runner]") -> Dict[str, List[int]]:
    """The processes of each running container by its name, those of exec included.

    A container's are the descendants of what was forked for it, and whoever shares its mount
    namespace: orphans of a pod with one PID namespace, and commands that entered it."""
    roots: Dict[int, str] = {}
    spaces: Dict[str, str] = {}
    found: Dict[str, List[int]] = {}
    for name, runner in runners.items():
        if runner.pid and runner.run is not None:
            roots[runner.run.process.pid] = name
            spaces[mount_namespace(runner.pid)] = name
            found[name] = []
    spaces.pop("", None)
    todo = [(child, "") for child in children(os.getpid())]
    seen: Set[int] = set()
    while todo:
        pid, name = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        name = name or roots.get(pid) or spaces.get(mount_namespace(pid), "")
        if name:
            found[name].append(pid)
        todo += [(child, name) for child in children(pid)]
    return found


def children(pid: int) -> List[int]:
    """Of all its threads; none for a process that is gone."""
    result: List[int] = []
    folder = "/proc/%d/task" % pid
    try:
        threads = os.listdir(folder)
    except OSError:
        return []
    for thread in threads:
        try:
            with open("%s/%s/children" % (folder, thread), "rb") as f:
                result += [int(word) for word in f.read().split()]
        except OSError:
            continue
    return result


def mount_namespace(pid: int) -> str:
    try:
        return os.readlink("/proc/%d/ns/mnt" % pid)
    except OSError:
        return ""


def resident(pids: List[int]) -> int:
    """Bytes, counting what several share as often as they do: never too few."""
    total = 0
    for pid in pids:
        try:
            with open("/proc/%d/statm" % pid, "rb") as f:
                total += int(f.read().split()[1]) * PAGE
        except (OSError, IndexError):
            continue
    return total


def proportional(pids: List[int]) -> int:
    """Bytes, counting what is shared once: what a cgroup would. Dearer than `resident`, which
    stands in for a process that can't be asked."""
    total = 0
    for pid in pids:
        try:
            with open("/proc/%d/smaps_rollup" % pid, "rb") as f:
                for line in f:
                    if line.startswith(b"Pss:"):
                        total += int(line.split()[1]) * 1024
                        break
        except OSError:
            total += resident([pid])
    return total


def disk(path: str) -> int:
    """Bytes that a directory takes on its own file system, each hard-linked file once."""
    total = 0
    seen: Set[int] = set()
    todo = [path]
    try:
        device = os.lstat(path).st_dev
    except OSError:
        return 0
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    if found.st_dev != device:
                        continue
                    if found.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                        if found.st_ino in seen:
                            continue
                        seen.add(found.st_ino)
                    total += found.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
        except OSError:
            continue
    return total
