"""Makes a TCP socket for each message on the Unix socket FD, and sends it there.

Run by egress.py inside a network namespace; ends when the other end is closed. Standard library
alone, no package: it starts in 10 ms.
"""

import array
import socket
import sys


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as talk:
        while talk.recv(16):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
                rights = array.array("i", [made.fileno()])
                talk.sendmsg([b"ok"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


main()
