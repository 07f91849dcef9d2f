"""A process that stays outside the pod's namespaces, to start srun there.

Inside them the user is root, whom Slurm and munge would not believe. What it starts becomes the
agent's own child: it is orphaned at once, and the agent is the one who inherits orphans.
"""

import json
import os
import signal
import socket
from typing import Dict, List, Tuple

from . import syscalls
from .container import Ends, Process
from .launcher import HELLO, RECORD, sealed


class Outside:
    def __init__(self) -> None:
        """Forks the process; to be called before the namespaces are entered."""
        syscalls.inherit_orphans()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                syscalls.die_with_parent(signal.SIGKILL)
                self._socket.close()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                _serve(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def spawn(self, argv: List[str], env: Dict[str, str], ends: Ends) -> Process:
        """Runs a program outside; it is this process's child. It reports like a launcher."""
        report, their_report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        complaints, their_complaints = os.pipe()
        request = sealed(json.dumps({"argv": argv, "env": env}).encode())
        fds = [request, *ends.theirs, their_report.fileno()]
        socket.send_fds(self._socket, [b"1"], fds)
        their_report.close()
        for fd in {request, their_complaints, *ends.theirs}:
            os.close(fd)
        return Process(int(self._socket.recv(32)), ends.ours, report, complaints)

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)


def _serve(requests: socket.socket) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 1, 8)
        if not data:
            return
        request, stdin, stdout, stderr, report = fds
        order = json.loads(os.pread(request, os.fstat(request).st_size, 0))
        hear, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                os.write(tell, b"%d" % os.getpid())
                _become(order["argv"], order["env"], report, (stdin, stdout, stderr))
            os._exit(0)
        os.waitpid(middle, 0)  # from here on the other one is the agent's child
        requests.send(os.read(hear, 32))
        for fd in {*fds, hear, tell}:
            os.close(fd)


def _become(
    argv: List[str], env: Dict[str, str], report: int, streams: Tuple[int, int, int]
) -> None:
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for wanted, fd in enumerate([os.dup(fd) for fd in streams]):
            os.dup2(fd, wanted, True)
        os.write(report, RECORD.pack(HELLO, 0))
        os.execve(argv[0], argv, env)
    except BaseException as e:
        os.write(2, ("%s: %s\n" % (type(e).__name__, e)).encode(errors="replace"))
    finally:
        os._exit(127)
