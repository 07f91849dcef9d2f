"""The pod's own namespaces, made by the agent for itself: user, mount, IPC and UTS, and a PID
namespace for its children.

The agent stays in the node's network; its children join the pod's (podnet.py), unless that is the
node's, too. Inside the user namespace the user is root,
which is nothing outside of it, and may mount and become any mapped user. Everything of the pod
lives in the PID namespace, and a process that only waits is its init: when the agent dies, so does
the init, and the kernel kills the rest. In it every container has a PID namespace of its own
(apptainer makes it) unless the pod shares one, so that none sees or signals another. The agent
itself stays outside, where nothing of the pod can signal it; it can start no threads from then on.
"""

import os
import signal
import socket
from typing import TYPE_CHECKING, List, NamedTuple, Optional, Tuple, Union

from . import syscalls
from .launcher import IGNORE, MACHINES, Launcher, sealed

if TYPE_CHECKING:
    from .podnet import PodNetwork
    from .sitenet import SiteNetwork

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NamespaceError(Exception):
    """The node lets the user make no namespaces; the text says what an administrator can do."""


def refused(words: str) -> NamespaceError:
    return NamespaceError(
        "node %s does not let users make user namespaces (%s); an administrator can allow"
        " them with the sysctls user.max_user_namespaces and kernel.unprivileged_userns_clone"
        % (socket.gethostname(), words)
    )


class Mapping(NamedTuple):
    """How many user and group ids exist inside; 1: only root, which is the user."""

    uids: int
    gids: int


def subordinate_range(text: str, user: str, uid: int) -> Optional[Tuple[int, int]]:
    """The user's first range (start, count) in the text of /etc/subuid or /etc/subgid."""
    for line in text.splitlines():
        fields = line.strip().split(":")
        if len(fields) == 3 and fields[0] in (user, str(uid)):
            try:
                return int(fields[1]), int(fields[2])
            except ValueError:
                continue
    return None


def _range(path: str) -> Optional[Tuple[int, int]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read()
    except OSError:
        return None
    import pwd

    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = ""
    return subordinate_range(text, user, uid)


def find_program(name: str) -> Optional[str]:
    for folder in os.environ.get("PATH", PATH).split(":") + PATH.split(":"):
        path = os.path.join(folder, name)
        if folder and os.access(path, os.X_OK):
            return path
    return None


def id_commands(pid: int, uid: int, gid: int) -> Tuple[List[List[str]], Mapping]:
    """What maps the user's ids in that process's new user namespace, to be run outside of it; no
    commands when the user has no subordinate ids on this node."""
    uids, gids = _range("/etc/subuid"), _range("/etc/subgid")
    newuidmap, newgidmap = find_program("newuidmap"), find_program("newgidmap")
    if not (uids and gids and newuidmap and newgidmap):
        return [], Mapping(1, 1)
    commands = []
    for program, own, (start, count) in ((newuidmap, uid, uids), (newgidmap, gid, gids)):
        count = min(count, 65535)
        commands.append([program, str(pid), "0", str(own), "1", "1", str(start), str(count)])
    return commands, Mapping(min(uids[1], 65535) + 1, min(gids[1], 65535) + 1)


def run_all(commands: List[List[str]]) -> bool:
    """Runs them at the same time; whether all of them succeeded."""
    children = [os.posix_spawn(argv[0], argv, os.environ) for argv in commands]
    return not [child for child in children if os.waitpid(child, 0)[1]]


def map_alone(uid: int, gid: int) -> Mapping:
    """In a new user namespace: its maker, who had these ids, is root, and there is nobody else."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", "0 %d 1" % uid)
    _write("/proc/self/gid_map", "0 %d 1" % gid)
    return Mapping(1, 1)


def map_identity(pid: int) -> Mapping:
    """Gives a new user namespace, which that process has made inside this process's one, the ids
    that there are here."""
    counts = []
    for name in ("uid_map", "gid_map"):
        with open("/proc/self/" + name) as f:
            ranges = [line.split() for line in f]
        counts.append(sum(int(count) for _, _, count in ranges))
        if name == "gid_map" and counts[-1] == 1:
            _write("/proc/%d/setgroups" % pid, "deny")
        # range by range: the kernel wants each to be of one piece here
        text = "".join("%s %s %s\n" % (first, first, count) for first, _, count in ranges)
        _write("/proc/%d/%s" % (pid, name), text)
    return Mapping(*counts)


class Entered(NamedTuple):
    """Where `enter` has moved this process."""

    mapping: Mapping
    netns: int  # descriptor of the pod's network namespace; -1: the node's own


def enter(
    hostname: str, rank: bool = False, network: "Union[PodNetwork, SiteNetwork, None]" = None
) -> Entered:
    """Moves this single-threaded process into new namespaces; `hostname` "" keeps the node's.
    An MPI rank keeps the node's IPC, too, and needs no other ids than its own. With `network`,
    which this process joins only by its children, there is a network namespace for them."""
    uid, gid = os.getuid(), os.getgid()
    helper = None if rank or network else Mapper.prepare(uid, gid)
    flags = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID
    if not rank:
        flags |= syscalls.CLONE_NEWIPC
    if hostname:
        flags |= syscalls.CLONE_NEWUTS
    if network:
        network.enter_users()
    try:
        syscalls.unshare(flags)
    except OSError as e:
        raise refused(str(e.strerror)) from None
    mapping = network.map_users() if network else helper.run() if helper else None
    if mapping is None:
        mapping = map_alone(uid, gid)
    # mounts of the node still arrive (automounted homes), none of ours leaves
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
    if hostname:
        socket.sethostname(hostname)
    netns = _start_init(network is not None)
    if network:
        network.join(netns)
    return Entered(mapping, netns)


def _start_init(own_network: bool) -> int:
    """The first child after the PID namespace was made: its init. It ends with this process. The
    pod's network namespace is first of all this child's; answers its descriptor, or -1."""
    if os.uname().machine not in MACHINES:
        raise NamespaceError(
            "HPK's agent runs on %s; this node is %s" % (" and ".join(MACHINES), os.uname().machine)
        )
    todo = Launcher()
    todo.call("prctl", syscalls.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for _ in range(8):  # waits for ever: no signal that it handles can end it
        todo.call("ppoll", 0, 0, 0, 0, 0, on_error=IGNORE)
    memory = sealed(todo.program(os.uname().machine))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            syscalls.die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans' ends are nobody's business
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if own_network:
                from .podnet import make_netns, show_devices

                netns = make_netns()
                show_devices()
                socket.send_fds(theirs, [b"1"], [netns])
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.setsid()
            os.execve(memory, ["pause"], {})
        finally:
            os._exit(1)
    os.close(memory)
    theirs.close()
    with ours:
        if not own_network:
            return -1
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        if not fds:
            raise NamespaceError("the pod's network namespace can't be made")
        os.set_inheritable(fds[0], False)
        return int(fds[0])


def _write(path: str, text: str) -> None:
    with open(path, "w") as f:
        f.write(text)


class Mapper:
    """A child outside the namespace, which calls newuidmap and newgidmap for its parent."""

    def __init__(self, pid: int, go: int, mapping: Mapping) -> None:
        self._pid, self._go, self._mapping = pid, go, mapping

    @classmethod
    def prepare(cls, uid: int, gid: int) -> "Optional[Mapper]":
        """None when the user has no subordinate ids on this node."""
        commands, mapping = id_commands(os.getpid(), uid, gid)
        if not commands:
            return None
        wait, go = os.pipe()
        pid = os.fork()
        if pid:
            os.close(wait)
            return cls(pid, go, mapping)
        try:
            os.close(go)
            if os.read(wait, 1):
                os._exit(int(not run_all(commands)))
        finally:
            os._exit(1)

    def run(self) -> Optional[Mapping]:
        """None when the kernel or the helpers refused."""
        os.write(self._go, b"1")
        os.close(self._go)
        return None if os.waitpid(self._pid, 0)[1] else self._mapping
