"""The pod on this node before and between its containers' runs: directories, volumes, spawning.

All of it is synchronous and imports little: the first container starts before the event loop is
even imported.
"""

import contextlib
import os
import socket
import stat
import time
from typing import Any, Dict, List, NamedTuple, Optional

from . import namespaces, syscalls
from .container import Mount, NodeRuntime, Process, StartError, find_apptainer, spawn
from .devices import make_devices
from .journal import note
from .logs import path_of
from .volumes import container_mounts, hosts_file, prepare_volume

TERMINATION_MESSAGE_LIMIT = 4096  # bytes


class Run(NamedTuple):
    """One run of a container."""

    process: Process
    number: int  # the restart count
    folder: str  # its files on this node: writable layer, termination message
    log: str
    spawned: float  # Unix seconds


class PodSetup:
    def __init__(self, plan: Dict[str, Any], pod_dir: str, job: Dict[str, str]) -> None:
        """`job`: the job's environment. Moves this process into the pod's namespaces."""
        self.plan = plan
        self.pod_dir = pod_dir
        self.logs = os.path.join(pod_dir, "logs")
        self.home = os.path.dirname(os.path.dirname(os.path.realpath(pod_dir)))
        self.job_id = job.get("SLURM_JOB_ID", "0")
        self.node_name = job.get("SLURMD_NODENAME") or socket.gethostname()
        own_hostname = socket.gethostname()
        self.uid = os.getuid()  # as the node knows it
        self.host_ip = own_address(plan["agent"]["kubelet"])
        mapping = namespaces.enter(plan["hostname"])
        self.scratch = self._make_scratch(job)
        self.mounts = os.path.join(self.scratch, "mounts")
        os.mkdir(self.mounts, 0o700)
        # everything mounted for the pod is on this tmpfs, so that clearing up never walks into it
        syscalls.mount("tmpfs", self.mounts, "tmpfs", syscalls.MS_NOSUID, "mode=0755")
        for name in ("dev", "memory", "staging"):
            os.mkdir(os.path.join(self.mounts, name))
            os.chmod(os.path.join(self.mounts, name), 0o755)
        self.dev = os.path.join(self.mounts, "dev")
        make_devices(self.dev, mapping.gids, plan.get("gpus"), job)
        self.paths: Dict[str, str] = {}
        self.runtime = NodeRuntime(
            apptainer=find_apptainer(),
            mapping=mapping,
            scratch=self.scratch,
            gpus=plan.get("gpus"),
            fields={
                "podIP": self.host_ip,
                "podIPs": self.host_ip,
                "hostIP": self.host_ip,
                "hostIPs": self.host_ip,
                "hostname": own_hostname,
                "podHostname": plan["hostname"] or own_hostname,
            },
            job=job,
        )
        self._hosts = os.path.join(self.scratch, "hosts")
        with open(self._hosts, "w", encoding="utf-8", errors="surrogateescape") as f:
            f.write(hosts_file(plan, self.host_ip))
        os.chmod(self._hosts, 0o644)

    def _make_scratch(self, job: Dict[str, str]) -> str:
        base = self.plan["agent"]["localDir"] or job.get("SLURM_TMPDIR") or "/tmp"
        path = os.path.join(base, "hpk-%d-%s" % (self.uid, self.job_id))
        os.makedirs(base, exist_ok=True)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            # of a job with this number that never cleared up, or somebody else's trap
            found = os.lstat(path)
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                raise
            remove_tree(path)
            os.mkdir(path, 0o700)
        return path

    def prepare_volumes(self) -> None:
        """Makes what is not there yet; VolumeError leaves the rest for the next try."""
        for name, volume in self.plan["volumes"].items():
            if name not in self.paths:
                folder = "volumes" if volume.get("medium") != "Memory" else "mounts/memory"
                self.paths[name] = prepare_volume(
                    name, volume, os.path.join(self.scratch, folder), self.home,
                    self.plan.get("fsGroup"),
                )  # fmt: skip

    def start(self, container: Dict[str, Any], number: int) -> Run:
        """Starts the container's run with this restart count; StartError if it can't be made."""
        name = container["name"]
        folder = os.path.join(self.scratch, "runs", "%s-%d" % (name, number))
        layer: Optional[str] = None
        try:
            os.makedirs(folder, exist_ok=True)
            if not container["security"]["readOnlyRootFilesystem"]:
                layer = os.path.join(folder, "layer")
                os.mkdir(layer)
            log = path_of(self.logs, name, number)
            os.makedirs(os.path.dirname(log), mode=0o700, exist_ok=True)
            os.close(os.open(log, os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            mounts = self._mounts(container, folder, number)
        except OSError as e:
            raise StartError("CreateContainerError", str(e)) from None
        process = spawn(
            self.runtime, container, mounts, layer,
            keep_groups=any(
                self.plan["volumes"][mount["volume"]]["kind"] == "hostPath"
                for mount in container["mounts"]
            ),
        )  # fmt: skip
        return Run(process, number, folder, log, time.time())

    def _mounts(self, container: Dict[str, Any], folder: str, number: int) -> List[Mount]:
        own = {mount["target"].rstrip("/") for mount in container["mounts"]}
        mounts = [Mount(self.dev, "/dev", False)]
        etc = {**self.plan["etc"], "/etc/hosts": self._hosts}
        mounts += [Mount(source, target, False) for target, source in etc.items()]
        target = container["terminationMessagePath"]
        if target:
            message = os.path.join(folder, "message")
            with open(message, "w"):
                os.chmod(message, 0o666)
            mounts.append(Mount(message, target, False))
            if target.startswith("/dev/") and target.count("/") == 2:
                # apptainer makes missing mount points everywhere but in another mount
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(self.dev + target[4:], os.O_CREAT | os.O_EXCL, 0o666))
        staging = os.path.join(self.mounts, "staging", "%s-%d" % (container["name"], number))
        return [mount for mount in mounts if mount.target not in own] + container_mounts(
            container, self.paths, self.runtime.fields, staging
        )

    def termination_message(self, run: Run) -> str:
        """The last 4096 bytes a container wrote to its termination message path."""
        try:
            with open(os.path.join(run.folder, "message"), "rb") as f:
                size = os.fstat(f.fileno()).st_size
                f.seek(max(0, size - TERMINATION_MESSAGE_LIMIT))
                return f.read().decode(errors="replace")
        except OSError:
            return ""

    def forget(self, name: str, run: Run) -> None:
        """Removes what one run left on the node."""
        staging = os.path.join(self.mounts, "staging", "%s-%d" % (name, run.number))
        try:
            for entry in os.listdir(staging):
                syscalls.umount(os.path.join(staging, entry), syscalls.MNT_DETACH)
        except FileNotFoundError:
            pass
        except OSError as e:
            note("a mount of container %s stays until the job ends: %s" % (name, e))
        try:
            remove_tree(run.folder)
        except OSError as e:
            note("the writable layer of container %s stays: %s" % (name, e))

    def clear(self) -> None:
        """Removes everything of the pod on this node."""
        try:
            syscalls.umount(self.mounts, syscalls.MNT_DETACH)
            os.rmdir(self.mounts)
            remove_tree(self.scratch)
        except OSError as e:
            note("%s could not be removed: %s" % (self.scratch, e))


def remove_tree(path: str) -> None:
    """Removes a directory and what is in it, without following links or leaving its mount."""
    with os.scandir(path) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                if os.path.ismount(entry.path):
                    raise OSError("%s is a mount point" % entry.path)
                remove_tree(entry.path)
            else:
                os.unlink(entry.path)
    os.rmdir(path)


def own_address(kubelet_file: str) -> str:
    """The address this node uses towards the kubelet; no packet is sent."""
    import json

    target = "192.0.2.1"  # TEST-NET: any address, to learn the one of the default route
    try:
        with open(kubelet_file, encoding="utf-8") as f:
            target = json.load(f)["host"]
    except (OSError, ValueError, KeyError):
        pass
    try:
        family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect(address)
            return str(s.getsockname()[0])
    except OSError:
        pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
