"""The containers' /dev: one per pod, made of the node's harmless devices and the granted GPUs."""

import os
import stat
from typing import Dict, List, Optional

from . import syscalls

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
}  # fmt: skip
_TTY_GROUP = 5
_NOT_SHARED = ("tty", "pt", "vcs", "console", "nvidia", "kfd", "dri")


def make_devices(
    path: str,
    gids: int,
    gpus: Optional[str],
    job: Dict[str, str],
    of_node: bool = False,
    privileged: bool = False,
) -> None:
    """Fills the empty directory `path`, which is on a tmpfs. `gids`: how many groups exist.
    `of_node`: MPI's ranks share the node's /dev/shm and use its interconnect. `privileged`: every
    device that the user may use, but for GPUs that were not granted."""
    names = _DEVICES + tuple(gpu_devices(gpus, job) if gpus else ())
    if privileged:
        names += tuple(name for name in usable_devices() if name not in names)
    for name in names:
        bind_device(os.path.join("/dev", name), os.path.join(path, name))
    for name, target in _LINKS.items():
        os.symlink(target, os.path.join(path, name))
    shm = os.path.join(path, "shm")
    if of_node:
        for name in ("shm", "infiniband"):
            bind_device(os.path.join("/dev", name), os.path.join(path, name))
    else:
        os.mkdir(shm)
        os.chmod(shm, 0o1777)
    os.mkdir(os.path.join(path, "pts"))
    options = "newinstance,ptmxmode=0666,mode=0620"
    if gids > _TTY_GROUP:
        options += ",gid=%d" % _TTY_GROUP
    syscalls.mount(
        "devpts", os.path.join(path, "pts"), "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC,
        options,
    )  # fmt: skip


def bind_device(source: str, target: str) -> None:
    if not os.path.exists(source):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o600))
    syscalls.mount(source, target, flags=syscalls.MS_BIND | syscalls.MS_REC)


def usable_devices() -> List[str]:
    """Names below /dev of what the user may open on this node; no terminals, no GPUs."""
    found = []
    for folder in ("", "net", "vfio", "infiniband"):
        try:
            names = sorted(os.listdir(os.path.join("/dev", folder)))
        except OSError:
            continue
        for name in (os.path.join(folder, name) for name in names):
            path = os.path.join("/dev", name)
            mode = os.lstat(path).st_mode
            if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) or name.startswith(_NOT_SHARED):
                continue
            if os.access(path, os.R_OK):
                found.append(name)
    return found


def gpu_devices(gpus: str, job: Dict[str, str]) -> List[str]:
    """Names below /dev. Of NVIDIA's numbered ones those Slurm granted, when it says which."""
    try:
        present = os.listdir("/dev")
    except OSError:
        return []
    if gpus == "rocm":
        return [name for name in ("kfd", "dri") if name in present]
    granted = job.get("SLURM_JOB_GPUS") or job.get("SLURM_STEP_GPUS")
    allowed = None if granted is None else set(expand(granted))
    names = []
    for name in sorted(present):
        if not name.startswith("nvidia"):
            continue
        number = name[len("nvidia") :]
        if number.isdigit() and allowed is not None and int(number) not in allowed:
            continue
        mode = os.lstat("/dev/" + name).st_mode
        if not stat.S_ISLNK(mode):
            names.append(name)
    return names


def expand(numbers: str) -> List[int]:
    """`0,2-3` as Slurm writes it; what is no number (a MIG's name) is left out."""
    result: List[int] = []
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            result += range(int(first), int(last or first) + 1)
    return result
