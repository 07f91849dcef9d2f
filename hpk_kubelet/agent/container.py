"""Starts one container: `apptainer exec` with the launcher as its program."""

import fcntl
import os
import signal
import socket
import struct
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence

from . import syscalls
from .launcher import PROGRAM_FD, REPORT_FD, sealed
from .namespaces import PATH, Mapping, find_program
from .program import STDERR_FD, STDIN_FD, STDOUT_FD, USERS_FD, start_program

OOM_SCORE = "900"  # when memory runs out a container dies, never the agent (which stays at 0)

RANK_VARIABLES = (
    "SLURM_", "SLURMD_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "UCX_", "OMPI_",
)  # fmt: skip
DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
)  # fmt: skip
"""What Slurm says of the granted devices: the one thing of the job a GPU container is told."""


_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430  # <asm-generic/ioctls.h>


class Mount(NamedTuple):
    source: str
    target: str
    read_only: bool


class StartError(Exception):
    """The container can't be made; the kubelet's reason and message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def csv_field(text: str) -> str:
    """One field of `--mount`, which apptainer reads as a line of CSV."""
    if any(c in text for c in ',"\n'):
        return '"%s"' % text.replace('"', '""')
    return text


def apptainer_argv(
    apptainer: str,
    rootfs: str,
    *,
    writable_layer: Optional[str],
    mounts: Sequence[Mount],
    gpus: Optional[str] = None,
    own_pid_namespace: bool = True,
) -> List[str]:
    """The command line. `writable_layer`: a directory, None for a read-only root. Nothing of
    the node is mounted but what `mounts` names."""
    argv = [
        apptainer, "--quiet", "exec", "--contain", "--no-home", "--no-init", "--pwd", "/",
        "--no-mount", "dev,devpts,home,tmp,hostfs,bind-paths",
    ]  # fmt: skip
    if own_pid_namespace:
        argv.append("--pid")
    if writable_layer:
        argv += ["--overlay", writable_layer]
    if gpus:
        argv.append("--nv" if gpus == "nvidia" else "--rocm")
    # a mount inside another one must come after it
    for mount in sorted(mounts, key=lambda m: m.target.count("/")):
        fields = ["type=bind", "source=" + mount.source, "destination=" + mount.target]
        if mount.read_only:
            fields.append("ro")
        argv += ["--mount", ",".join(csv_field(field) for field in fields)]
    return [*argv, rootfs, "/proc/self/fd/%d" % PROGRAM_FD]


def complete(late: Sequence[str], fields: Dict[str, str]) -> str:
    """A text whose odd parts name what only the compute node knows."""
    return "".join(fields[part] if i % 2 else part for i, part in enumerate(late))


def container_argv(container: Dict[str, Any], fields: Dict[str, str]) -> List[str]:
    argv = list(container["argv"])
    for index, late in container.get("lateArgv", {}).items():
        argv[int(index)] = complete(late, fields)
    return argv


def container_env(
    container: Dict[str, Any],
    fields: Dict[str, str],
    gpus: Optional[str],
    job: Dict[str, str],
) -> Dict[str, str]:
    """The container's whole environment; `job` is the job's, of which only the granted devices
    and, for an MPI rank, what srun set for it, are passed."""
    env = {"PATH": PATH, "HOSTNAME": fields["podHostname"], **container["env"]}
    for name, late in container.get("lateEnv", {}).items():
        env[name] = complete(late, fields)
    if container["tty"]:
        env.setdefault("TERM", "xterm")
    if gpus:
        for name in DEVICE_VARIABLES:
            if name in job:
                env[name] = job[name]
        # where apptainer puts the node's driver libraries
        libraries = env.get("LD_LIBRARY_PATH", "")
        env["LD_LIBRARY_PATH"] = libraries + (":" if libraries else "") + "/.singularity.d/libs"
    if container.get("mpi"):
        for name, value in job.items():
            if name.startswith(RANK_VARIABLES):
                env.setdefault(name, value)
    return env


class Streams(NamedTuple):
    """The agent's ends of a container's standard streams; -1 for none."""

    stdin: int
    stdout: int
    stderr: int


class Process(NamedTuple):
    """What was forked: apptainer, the ends it talks through, and where the launcher reports."""

    pid: int
    streams: Streams
    report: socket.socket
    complaints: int  # apptainer's own stdout and stderr


class Ends(NamedTuple):
    ours: Streams
    theirs: Streams


def open_streams(tty: str, stdin: bool) -> Ends:
    """Pipes or, with `tty` the path of the pod's ptmx, the two ends of a pseudo terminal (stdin
    and stdout are one then)."""
    if tty:
        ours = os.open(tty, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        fcntl.ioctl(ours, _TIOCSPTLCK, struct.pack("i", 0))
        number = struct.unpack("i", fcntl.ioctl(ours, _TIOCGPTN, bytes(4)))[0]
        slave = os.path.join(os.path.dirname(tty), str(number))
        theirs = os.open(slave, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        return Ends(Streams(ours, ours, -1), Streams(theirs, theirs, theirs))
    if stdin:
        their_in, our_in = os.pipe()
    else:
        their_in, our_in = os.open(os.devnull, os.O_RDONLY), -1
    our_out, their_out = os.pipe()
    our_err, their_err = os.pipe()
    return Ends(Streams(our_in, our_out, our_err), Streams(their_in, their_out, their_err))


def fork_program(
    program: bytes,
    ends: Ends,
    before: Callable[[], None],
    execute: Callable[[], NoReturn],
    users: int = -1,
) -> Process:
    """Forks; the child has the launcher, its report socket and the streams at their places, does
    `before` while it can still see everything, and ends in `execute`. `users`: see spawn."""
    report, their_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    report.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    complaints, their_complaints = os.pipe()
    memory = sealed(program)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        their_report.close()
        for fd in {memory, their_complaints, *ends.theirs}:
            os.close(fd)
        return Process(pid, ends.ours, report, complaints)
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        if os.getppid() not in (0, parent):  # 0: it is outside this child's PID namespace
            os._exit(1)  # it died before it could be watched
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write(OOM_SCORE)
        null = os.open(os.devnull, os.O_RDONLY)
        wanted = {
            0: null, 1: their_complaints, 2: their_complaints,
            STDIN_FD: ends.theirs.stdin, STDOUT_FD: ends.theirs.stdout,
            STDERR_FD: ends.theirs.stderr,
            PROGRAM_FD: memory, REPORT_FD: their_report.fileno(),
        }  # fmt: skip
        if users >= 0:
            wanted[USERS_FD] = users
        before()
        place(wanted)
        for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.setsid()
        execute()
    except BaseException as e:
        os.write(2, ("%s: %s\n" % (type(e).__name__, e)).encode(errors="replace"))
    finally:
        os._exit(126)


def place(wanted: Dict[int, int]) -> None:
    """Puts descriptors at the numbers that are the keys, whatever was there."""
    above = {to: fcntl.fcntl(fd, fcntl.F_DUPFD, 256) for to, fd in wanted.items()}
    for to, fd in above.items():
        os.dup2(fd, to, True)
        os.close(fd)


def apptainer_environment(scratch: str) -> Dict[str, str]:
    """apptainer's own: none of the job's, none of the container's."""
    env = {"PATH": os.environ.get("PATH", PATH), "HOME": scratch, "USER": "root"}
    for prefix in ("APPTAINER_", "SINGULARITY_"):
        env[prefix + "CACHEDIR"] = env[prefix + "TMPDIR"] = scratch
    return env


class NodeRuntime(NamedTuple):
    """What every container of this pod on this node shares."""

    apptainer: str
    mapping: Mapping
    scratch: str  # the job's directory on this node
    ptmx: str  # where the pod's pseudo terminals are made
    gpus: Optional[str]
    netns: int  # descriptor of the pod's network namespace; -1: the node's
    fields: Dict[str, str]  # late fields and podHostname
    job: Dict[str, str]  # the job's environment


def join_network(runtime: NodeRuntime) -> None:
    """This child is in the pod's network."""
    if runtime.netns >= 0:
        syscalls.setns(runtime.netns, syscalls.CLONE_NEWNET)


def see_own_processes() -> None:
    """/proc becomes that of the pod's PID namespace, in which this child lives: apptainer looks
    its own process up there."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount(
        "proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    )


def pass_on(child: int) -> NoReturn:
    """A PID namespace is joined by the next child; this process stays to pass its end on."""
    os.closerange(3, 256)
    for fd in (0, 1, 2):
        os.close(fd)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        os._exit(128 + os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def find_apptainer() -> str:
    """apptainer, or the SingularityCE that takes the same words."""
    for name in ("apptainer", "singularity"):
        path = find_program(name)
        if path:
            return path
    raise StartError(
        "CreateContainerError",
        "neither apptainer nor singularity is on the PATH of node %s" % socket.gethostname(),
    )


def spawn(
    runtime: NodeRuntime,
    container: Dict[str, Any],
    mounts: Sequence[Mount],
    writable_layer: Optional[str],
    *,
    keep_groups: bool = False,
    own_pid_namespace: bool = True,
    beside: int = 0,
    users: int = -1,
) -> Process:
    """Forks apptainer for one run of a container. `keep_groups`: see start_program. `beside`: a
    process in whose PID namespace it shall be. `users`: descriptor of the user namespace of an MPI
    rank's program, which gets the standard streams of this process (srun's)."""
    rootfs = container["image"]["rootfs"]
    if not os.path.exists(rootfs):
        raise StartError(
            "CreateContainerError",
            "the image's files %s are not there on node %s: is that file system mounted, was the"
            " image removed?" % (rootfs, socket.gethostname()),
        )
    try:
        program = start_program(
            container_argv(container, runtime.fields),
            container_env(container, runtime.fields, runtime.gpus, runtime.job),
            container["workingDir"],
            container["security"],
            runtime.mapping,
            tty=container["tty"],
            fresh=True,
            mounted=[mount.target for mount in mounts],
            keep_groups=keep_groups,
            users_given=users >= 0,
        )
    except ValueError as e:  # a seccomp profile that is too long
        raise StartError("CreateContainerError", str(e)) from None
    argv = apptainer_argv(
        runtime.apptainer, rootfs, writable_layer=writable_layer, mounts=mounts,
        gpus=runtime.gpus, own_pid_namespace=own_pid_namespace and not beside,
    )  # fmt: skip
    env = apptainer_environment(runtime.scratch)
    if users >= 0:
        ends = Ends(Streams(-1, -1, -1), Streams(os.dup(0), os.dup(1), os.dup(2)))
    else:
        ends = open_streams(runtime.ptmx if container["tty"] else "", container["stdin"])

    def before() -> None:
        join_network(runtime)
        see_own_processes()

    def execute() -> NoReturn:
        os.execve(argv[0], argv, env)

    def execute_beside() -> NoReturn:
        child = os.fork()
        if child:
            pass_on(child)
        syscalls.die_with_parent(signal.SIGKILL)
        os.setsid()
        before()
        execute()

    def join() -> None:
        space = os.open("/proc/%d/ns/pid" % beside, os.O_RDONLY | os.O_CLOEXEC)
        syscalls.setns(space, syscalls.CLONE_NEWPID)

    if beside:
        return fork_program(program, ends, join, execute_beside)
    return fork_program(program, ends, before, execute, users)
