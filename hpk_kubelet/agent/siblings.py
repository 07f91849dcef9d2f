"""The namespaces that the MPI ranks of one step share on a node.

Ranks speak through shared memory and read each other's memory (CMA), for which the kernel wants
them in one user namespace, and MPI wants one numbering of processes. So the first rank on a node
forks a process that makes the namespaces, and hands them to every rank that asks for as long as
any of them lives. There are two user namespaces: in the outer one the user is root and may mount,
in the inner one, where the ranks' programs run, the user has the number that PMIx knows.
"""

import errno
import hashlib
import json
import os
import select
import signal
import socket
import time
from typing import Dict, List, NamedTuple, NoReturn

from . import namespaces, syscalls
from .namespaces import Mapping, NamespaceError

PATIENCE = 30.0  # seconds for the first rank's process to answer
RETRY = 0.005


class Shared(NamedTuple):
    mapping: Mapping
    users: int  # descriptor of the inner user namespace
    link: socket.socket  # tells that this rank lives


def join(secret: str, hostname: str, job: Dict[str, str]) -> Shared:
    """Moves this process into the ranks' namespaces, with mounts of its own; its next children are
    in their PID namespace. `secret`: what only the pod's own processes know, so that nobody else
    can guess the socket's name before it is taken. NamespaceError."""
    step = "%s %s.%s" % (secret, job.get("SLURM_JOB_ID"), job.get("SLURM_STEP_ID"))
    name = "\0hpk-ranks-" + hashlib.sha256(step.encode()).hexdigest()[:40]
    uid = os.getuid()
    give_up = time.monotonic() + PATIENCE
    while True:
        _offer(name, hostname)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(name)
            peer = syscalls.peer_uid(link)
            if peer != uid:
                raise NamespaceError("user %d has taken the socket of this pod's MPI ranks" % peer)
            data, fds, _, _ = socket.recv_fds(link, 4096, 4)
            if data:
                break
        except (ConnectionError, BrokenPipeError):
            pass  # it is not listening yet, or its last rank just ended
        link.close()
        if time.monotonic() > give_up:
            raise NamespaceError("the first MPI rank on this node has not made its namespaces")
        time.sleep(RETRY)
    if not fds:
        raise NamespaceError(data.decode())
    outer, processes, names, inner = fds
    syscalls.setns(outer, syscalls.CLONE_NEWUSER)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SLAVE)
    if hostname:
        syscalls.setns(names, syscalls.CLONE_NEWUTS)
    syscalls.setns(processes, syscalls.CLONE_NEWPID)
    for fd in (outer, processes, names):
        os.close(fd)
    return Shared(Mapping(*json.loads(data)), inner, link)


def _offer(name: str, hostname: str) -> None:
    """Forks the process that serves under this name, unless there is one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        try:
            listener.bind(name)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            return
        listener.listen(1024)
        if os.fork() == 0:
            _hold(listener, hostname)


def _hold(listener: socket.socket, hostname: str) -> NoReturn:
    """Serves until the last rank has ended."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            mapping = namespaces.enter(hostname, rank=True).mapping
            fds = [
                os.open("/proc/self/ns/" + kind, os.O_RDONLY | os.O_CLOEXEC)
                for kind in ("user", "pid_for_children", "uts")
            ]
            fds.append(_inner())
            data = json.dumps(mapping).encode()
        except (OSError, NamespaceError) as e:
            data, fds = str(e).encode()[:4096], []
        _serve(listener, data, fds)
    finally:
        os._exit(0)


def _inner() -> int:
    """A user namespace inside this process's, in which the user has its own number again."""
    uid, gid = _node_ids()
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            for name, text in (("setgroups", "deny"), ("uid_map", "%d 0 1" % uid),
                               ("gid_map", "%d 0 1" % gid)):  # fmt: skip
                with open("/proc/self/" + name, "w") as f:
                    f.write(text)
            os.write(done, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(done)
    try:
        if not os.read(ready, 1):
            raise NamespaceError("the inner user namespace of MPI ranks can't be made")
        return os.open("/proc/%d/ns/user" % child, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _node_ids() -> List[int]:
    """What root is outside of this process's user namespace."""
    ids = []
    for name in ("uid_map", "gid_map"):
        with open("/proc/self/" + name) as f:
            ids.append(int(f.read().split()[1]))
    return ids


def _serve(listener: socket.socket, data: bytes, fds: List[int]) -> None:
    links: Dict[int, socket.socket] = {}
    served = False
    while links or not served:
        ready, _, _ = select.select([listener, *links.values()], [], [], PATIENCE if not links
                                    else None)  # fmt: skip
        if not ready:
            return
        for one in ready:
            if one is not listener:
                # ranks say nothing: this is one's end
                del links[one.fileno()]
                one.close()
                continue
            link, _ = listener.accept()
            if syscalls.peer_uid(link) != os.getuid():
                link.close()
                continue
            socket.send_fds(link, [data], fds)
            links[link.fileno()] = link
            served = True
