"""The pod on this node before and between its containers' runs: directories, volumes, spawning.

All of it is synchronous and imports little: the first container starts before the event loop is
even imported.
"""

import contextlib
import fcntl
import os
import socket
import stat
import sys
import time
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Union

from . import namespaces, syscalls
from .container import Mount, NodeRuntime, Process, StartError, find_apptainer, open_streams, spawn
from .devices import make_devices
from .etc import hosts_file, node_text, resolver_file
from .journal import note
from .logs import path_of
from .outside import Outside
from .volumes import container_mounts, inside, prepare_volume

if TYPE_CHECKING:
    from . import podnet
    from .siblings import Shared
    from .sitenet import SiteNetwork

TERMINATION_MESSAGE_LIMIT = 4096  # bytes
STALE = 60.0  # seconds: younger directories may just be about to be locked


class Run(NamedTuple):
    """One run of a container."""

    process: Process
    number: int  # the restart count
    folder: str  # its files on this node: writable layer, termination message
    log: str
    spawned: float  # Unix seconds


class PodSetup:
    def __init__(
        self, plan: Dict[str, Any], pod_dir: str, job: Dict[str, str], rank: str = ""
    ) -> None:
        """`job`: the job's environment; `rank`: STEP.RANK if this is not the agent but one of its
        MPI ranks. Moves this process into the pod's namespaces."""
        self.plan = plan
        self.pod_dir = pod_dir
        self.logs = os.path.join(pod_dir, "logs")
        self.home = os.path.dirname(os.path.dirname(os.path.realpath(pod_dir)))
        self.job_id = job.get("SLURM_JOB_ID", "0")
        self.node_name = job.get("SLURMD_NODENAME") or socket.gethostname()
        own_hostname = socket.gethostname()
        self.uid = os.getuid()  # as the node knows it
        self.host_ip = own_address(plan["agent"]["kubelet"])
        self.outside: Optional[Outside] = None
        self._mpi = any(container.get("mpi") for container in plan["containers"])
        if self._mpi and not rank:
            self.outside = Outside()
        self.network: "Union[podnet.PodNetwork, SiteNetwork, None]" = None
        if plan["network"]["mode"] == "rootless":
            from .podnet import PodNetwork

            self.network = PodNetwork(plan["network"])
        elif plan["network"]["mode"] == "site":
            from .sitenet import SiteNetwork

            uid = os.path.basename(os.path.realpath(pod_dir))
            self.network = SiteNetwork(plan["network"]["program"], uid, self.host_ip)
        self._siblings: "Optional[Shared]" = None
        if rank:
            from .siblings import join

            self._siblings = join(plan["agent"]["token"], plan["hostname"], job)
            entered = namespaces.Entered(self._siblings.mapping, -1)
        else:
            entered = namespaces.enter(plan["hostname"], network=self.network)
        mapping = entered.mapping
        if plan.get("sysctls"):
            from .sysctls import set_sysctls

            set_sysctls(plan["sysctls"], entered.netns)
        base = plan["agent"]["localDir"] or job.get("SLURM_TMPDIR") or "/tmp"
        agents = os.path.join(base, "hpk-%d-%s" % (self.uid, self.job_id))
        self.scratch = agents + "." + rank if rank else agents
        self._lock = make_scratch(self.scratch)
        # ranks on other nodes see only what is on the shared file system
        self._volumes = os.path.join(agents, "volumes")
        self._shared_volumes = self._mpi and int(job.get("SLURM_JOB_NUM_NODES") or 1) > 1
        if self._shared_volumes:
            self._volumes = os.path.join(pod_dir, "emptydir")
        self.mounts = os.path.join(self.scratch, "mounts")
        os.mkdir(self.mounts, 0o700)
        # everything mounted for the pod is on this tmpfs, so that clearing up never walks into it
        syscalls.mount("tmpfs", self.mounts, "tmpfs", syscalls.MS_NOSUID, "mode=0755")
        for name in ("dev", "memory", "staging", "masked"):
            os.mkdir(os.path.join(self.mounts, name))
            os.chmod(os.path.join(self.mounts, name), 0o755)
        self.dev = os.path.join(self.mounts, "dev")
        containers = plan["initContainers"] + plan["containers"]
        privileged = any(c["security"]["privileged"] for c in containers)
        make_devices(self.dev, mapping.gids, plan.get("gpus"), job, self._mpi, privileged)
        self.paths: Dict[str, str] = {}
        self.runtime = NodeRuntime(
            apptainer=find_apptainer(),
            mapping=mapping,
            scratch=self.scratch,
            ptmx=os.path.join(self.dev, "pts", "ptmx"),
            gpus=plan.get("gpus"),
            netns=entered.netns,
            fields={
                "podIP": "",  # until there is one
                "hostname": own_hostname,
                "podHostname": plan["hostname"] or own_hostname,
            },
            job=job,
        )
        self._place: Optional[podnet.Place] = None
        self.bound: List[socket.socket] = []  # to the pod's host ports
        self._etc: Dict[str, str] = {}  # path in the containers → path on the node

    def connect(self, patience: Optional[float] = None) -> None:
        """Gives the pod its address and ports, and what tells its containers of it. It can be
        called again after NetworkNotReady (there was no network within `patience` seconds) and
        PortTaken."""
        address = self.host_ip
        loopback = ""
        if self.network is not None:
            if self._place is None:
                self._place = self.network.place(patience)
            address, self.host_ip = self._place
            loopback = self.network.resolver
        if self.plan["hostPorts"]:
            from .ports import listen

            self.bound = listen(self.plan["hostPorts"], self.node_name)
        for name, value in (("podIP", address), ("hostIP", self.host_ip)):
            self.runtime.fields[name] = self.runtime.fields[name + "s"] = value
        self._write_etc("hosts", hosts_file(self.plan["hosts"], node_text("/etc/hosts"), address))
        resolver = resolver_file(self.plan["resolver"], node_text("/etc/resolv.conf"), loopback)
        self._write_etc("resolv.conf", resolver)

    def _write_etc(self, name: str, text: str) -> None:
        path = self._etc["/etc/" + name] = os.path.join(self.scratch, name)
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as f:
            f.write(text)
        os.chmod(path, 0o644)

    def prepare_volumes(self) -> None:
        """Makes what is not there yet; VolumeError leaves the rest for the next try."""
        for name, volume in self.plan["volumes"].items():
            if name not in self.paths:
                folder = self._volumes
                if volume.get("medium") == "Memory":
                    if self._mpi:  # ranks could not see the agent's mount
                        volume = {**volume, "medium": ""}
                    else:
                        folder = os.path.join(self.mounts, "memory")
                self.paths[name] = prepare_volume(
                    name, volume, folder, self.home, self.plan.get("fsGroup"),
                    os.path.join(self.mounts, "masked", name),
                )  # fmt: skip

    def start(self, container: Dict[str, Any], number: int, beside: int = 0) -> Run:
        """Starts the container's run with this restart count; StartError if it can't be made.
        `beside`: see spawn."""
        name = container["name"]
        folder = os.path.join(self.scratch, "runs", "%s-%d" % (name, number))
        layer: Optional[str] = None
        if os.path.isdir(folder):
            self._discard(name, number, folder)  # of a try that failed
        try:
            os.makedirs(folder)
            if not container["security"]["readOnlyRootFilesystem"]:
                layer = os.path.join(folder, "layer")
                os.mkdir(layer)
            log = path_of(self.logs, name, number)
            os.makedirs(os.path.dirname(log), mode=0o700, exist_ok=True)
            os.close(os.open(log, os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            if container.get("mpi"):
                return Run(self._srun(container), number, folder, log, time.time())
            mounts = self._mounts(container, folder, number)
        except OSError as e:
            raise StartError("CreateContainerError", str(e)) from None
        process = spawn(
            self.runtime, container, mounts, layer,
            keep_groups=any(
                self.plan["volumes"][mount["volume"]]["kind"] in ("hostPath", "claim")
                for mount in container["mounts"]
            ),
            own_pid_namespace=not self.plan["shareProcessNamespace"], beside=beside,
        )  # fmt: skip
        return Run(process, number, folder, log, time.time())

    def _srun(self, container: Dict[str, Any]) -> Process:
        """Starts an MPI container: srun, and under it one agent for each rank."""
        srun = namespaces.find_program("srun")
        if srun is None or self.outside is None:
            raise StartError("CreateContainerError", "srun is not on the PATH of this node")
        from .rank import forget_failure

        forget_failure(self.pod_dir, container["name"])
        job = self.runtime.job
        argv = srun_argv(srun, container["mpi"], job)
        python, agent = os.readlink("/proc/self/exe"), os.path.abspath(sys.argv[0])
        argv += [python, "-I", "-S", agent, "--rank", self.pod_dir, container["name"]]
        # what srun passes on to the ranks is the job's own environment
        env = {name: value for name, value in job.items() if name != "SLURM_EXPORT_ENV"}
        return self.outside.spawn(argv, env, open_streams("", False))

    def start_rank(self, container: Dict[str, Any]) -> Process:
        """Starts this rank's container; it has this process's standard streams."""
        folder = os.path.join(self.scratch, "run")
        try:
            layer: Optional[str] = None
            if not container["security"]["readOnlyRootFilesystem"]:
                layer = os.path.join(folder, "layer")
                os.makedirs(layer)
            mounts = self._mounts({**container, "terminationMessagePath": ""}, folder, 0)
        except OSError as e:
            raise StartError("CreateContainerError", str(e)) from None
        own = {mount.target for mount in mounts}
        mounts += [
            Mount(path, path, False)
            for path in node_directories(self.runtime.job)
            if path not in own
        ]
        return spawn(
            self.runtime, container, mounts, layer, keep_groups=True, own_pid_namespace=False,
            users=self._siblings.users if self._siblings else -1,
        )  # fmt: skip

    def _mounts(self, container: Dict[str, Any], folder: str, number: int) -> List[Mount]:
        own = {mount["target"].rstrip("/") for mount in container["mounts"]}
        mounts = [Mount(self.dev, "/dev", False)]
        mounts += [Mount(source, target, False) for target, source in self._etc.items()]
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
        self._discard(name, run.number, run.folder)

    def _discard(self, name: str, number: int, folder: str) -> None:
        staging = os.path.join(self.mounts, "staging", "%s-%d" % (name, number))
        try:
            for entry in os.listdir(staging):
                syscalls.umount(os.path.join(staging, entry), syscalls.MNT_DETACH)
            remove_tree(staging)
        except FileNotFoundError:
            pass
        except OSError as e:
            note("a mount of container %s stays until the job ends: %s" % (name, e))
        try:
            remove_tree(folder)
        except OSError as e:
            note("the writable layer of container %s stays: %s" % (name, e))

    def clear(self) -> None:
        """Removes everything of the pod on this node."""
        if self.outside:
            self.outside.close()
        if self.network is not None:
            self.network.close()
        try:
            syscalls.umount(self.mounts, syscalls.MNT_DETACH)
            os.rmdir(self.mounts)
            remove_tree(self.scratch)
            sweep(self.scratch)
            if self._shared_volumes and self.outside and os.path.isdir(self._volumes):
                remove_tree(self._volumes)
        except OSError as e:
            note("%s could not be removed: %s" % (self.scratch, e))


def srun_argv(srun: str, words: List[str], job: Dict[str, str]) -> List[str]:
    """srun with the pod's words, and with what sbatch was told but srun does not take over."""
    argv = [srun, "--input=none", *words]
    given = {word.partition("=")[0] for word in words}
    if "SLURM_NTASKS" in job and not given & {"--ntasks", "-n", "--ntasks-per-node"}:
        argv.append("--ntasks=" + job["SLURM_NTASKS"])
    if "SLURM_CPUS_PER_TASK" in job and not given & {"--cpus-per-task", "-c"}:
        argv.append("--cpus-per-task=" + job["SLURM_CPUS_PER_TASK"])
    return argv


def node_directories(job: Dict[str, str]) -> List[str]:
    """Where MPI and PMIx keep what the ranks of a node share."""
    paths = ["/tmp"]
    for name in ("PMIX_SERVER_TMPDIR", "PMIX_SYSTEM_TMPDIR", "SLURM_TMPDIR"):
        path = os.path.normpath(job.get(name) or "/tmp")
        if os.path.isdir(path) and not any(inside(path, known) for known in paths):
            paths.append(path)
    return paths


def make_scratch(path: str) -> int:
    """A fresh private directory on this node; a lock on it, held as long as the descriptor that is
    answered, says that it is in use."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        # of a job with this number that never cleared up, or somebody else's trap
        found = os.lstat(path)
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise
        remove_tree(path)
        os.mkdir(path, 0o700)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def sweep(scratch: str) -> None:
    """Removes what agents that were killed left beside this one's directory."""
    base, own = os.path.split(scratch)
    prefix = own[: own.rindex("-") + 1]
    for name in os.listdir(base):
        path = os.path.join(base, name)
        try:
            found = os.lstat(path)
            if (
                not name.startswith(prefix)
                or found.st_uid != os.getuid()
                or not stat.S_ISDIR(found.st_mode)
                or time.time() - found.st_mtime < STALE
            ):
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(path)
            finally:
                os.close(lock)
        except (BlockingIOError, FileNotFoundError):
            continue  # in use, or its owner or another sweep was quicker
        except OSError as e:
            note("%s, left by another job, could not be removed: %s" % (path, e))


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
