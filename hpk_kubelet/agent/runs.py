"""What a container's run and a command in it have in common."""

import fcntl
import os
import socket
import struct
import termios
from typing import List, Tuple

from .fds import readable
from .launcher import RECORD


def resize(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def exit_code(status: int) -> int:
    """Of a wait status, as Kubernetes counts: 128 + N for a signal."""
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


async def report(sock: socket.socket) -> Tuple[List[bytes], int]:
    """What a launcher says until it executes the program or ends, and its process id as this
    process sees it (0: it never ran)."""
    sock.setblocking(False)
    records: List[bytes] = []
    pid = 0
    while True:
        await readable(sock.fileno())
        try:
            data, ancillary, _, _ = sock.recvmsg(RECORD.size, 128)
        except BlockingIOError:
            continue
        except OSError:
            break
        if not data:
            break
        records.append(data)
        if not pid and ancillary:
            pid = struct.unpack("iII", ancillary[0][2][:12])[0]
    sock.close()
    return records, pid
