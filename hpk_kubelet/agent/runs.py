"""What a container's run and a command in it have in common."""

import fcntl
import os
import socket
import struct
import termios
from typing import List, Optional, Tuple

from .fds import readable
from .launcher import RECORD

SCM_CREDENTIALS = 2  # socket.SCM_CREDENTIALS is missing on some builds


def resize(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def exit_code(status: int) -> int:
    """Of a wait status, as Kubernetes counts: 128 + N for a signal."""
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


class Report:
    """Reads what a launcher reports (see launcher.py)."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket: Optional[socket.socket] = sock
        self._pipe = -1
        self.records: List[bytes] = []
        self.pid = 0  # as this process sees it; 0: the launcher never ran

    def fileno(self) -> int:
        """What to wait for."""
        if self._pipe >= 0:
            return self._pipe
        assert self._socket is not None
        return self._socket.fileno()

    def read(self) -> bool:
        """Takes what there is; False at the end, when everything is closed."""
        data = os.read(self._pipe, RECORD.size) if self._pipe >= 0 else self._receive()
        if data:
            self.records.append(data)
            return True
        self.close()
        return False

    def _receive(self) -> bytes:
        assert self._socket is not None
        try:
            data, ancillary, _, _ = self._socket.recvmsg(RECORD.size, 256)
        except ConnectionError:
            return b""
        for _, kind, content in ancillary:
            if kind == SCM_CREDENTIALS:
                self.pid = struct.unpack("iII", content[:12])[0]
            elif kind == socket.SCM_RIGHTS:
                self._pipe = struct.unpack("i", content[:4])[0]
        if self._pipe >= 0:
            self._socket.close()
            self._socket = None
        return data

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        if self._socket is not None:
            self._socket.close()
        self._pipe, self._socket = -1, None


async def report(sock: socket.socket) -> Tuple[List[bytes], int]:
    """What a launcher says until it executes the program or ends, and its process id (0: it never
    ran)."""
    source = Report(sock)
    try:
        while True:
            await readable(source.fileno())
            if not source.read():
                return source.records, source.pid
    finally:
        source.close()
