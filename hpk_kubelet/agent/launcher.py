"""A program made on the spot: it does a list of system calls, and the last one is the execve.

apptainer hands a container's environment and arguments through shells, and which names, empty
values and newlines survive differs between its versions. So it is given this program to run, as
a sealed file in memory (/proc/self/fd/PROGRAM_FD), and no environment at all. Inside the finished
container the program becomes the user the pod asks for and executes the real one, with every byte
of argv and env as the plan says. No secret is in any command line or file.

REPORT_FD is a Unix socket. The first message on it (`Launcher.hello`) carries the program's process
id as the agent sees it, as the socket's credentials, and the reading end of a pipe. Each failed
call that is to be reported is a RECORD in that pipe; its end of file means that the execve
succeeded if no FATAL record came before (the writing end is closed on exec). runc tells its caller
so, too. The pipe is the program's own, while apptainer keeps the socket open as long as it lives.
"""

import os
import socket
import struct
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

PROGRAM_FD = 251
REPORT_FD = 250

IGNORE, FATAL, REPORT = 0, 1, 2  # what an error means: nothing; report and exit; report and go on

RECORD = struct.Struct("<qq")  # tag of the call, result (-errno)
HELLO = -1  # tag of the first message

_BASE = 0x400000
_CODE = _BASE + 0x1000
_DATA = _BASE + 0x2000
_ENTRY = struct.Struct("<qqqQQQQQQq")  # tag, result, number, six arguments, what an error means

# The code of each machine does this:
# for (e = table;; e++) {
#     r = syscall(e->number, e->arguments…);
#     if (-4095 <= r < 0 && e->action) {
#         e->result = r; write(REPORT_FD, e, 16); if (e->action == FATAL) exit_group(127);
#     }
# }
_X86_64 = bytes.fromhex(
    "49bc {table}"  # _start: movabs $table, %r12
    "498b442410 498b7c2418 498b742420 498b542428"  # 1: number and arguments of the entry:
    "4d8b542430 4d8b442438 4d8b4c2440"  # mov 16(%r12),%rax … mov 64(%r12),%r9
    "0f05 483d01f0ffff 7235"  # syscall; cmp $-4095,%rax; jb 2f
    "498b5c2448 4885db 742b"  # mov 72(%r12),%rbx; test %rbx,%rbx; jz 2f
    "4989442408 bf{fd} 4c89e6 ba10000000 b801000000 0f05"  # mov %rax,8(%r12); write(fd, %r12, 16)
    "4883fb01 750c bf7f000000 b8e7000000 0f05"  # cmp $1,%rbx; jne 2f; exit_group(127)
    "4983c450 eb98".format(  # 2: add $80,%r12; jmp 1b
        table=struct.pack("<Q", _DATA).hex(), fd=struct.pack("<I", REPORT_FD).hex()
    )
)
_AARCH64 = bytes.fromhex(
    "13030058"  # _start: ldr x19, table
    "680a40f9 608641a9 628e42a9 649643a9"  # 1: ldr x8,[x19,#16]; ldp x0,x1 … x4,x5
    "010000d4 1ffc3fb1 c3010054"  # svc #0; cmn x0,#4095; b.lo 2f
    "742640f9 940100b4 600600f9"  # ldr x20,[x19,#72]; cbz x20,2f; str x0,[x19,#8]
    "{fd} e10313aa 020280d2 080880d2 010000d4"  # write(fd, x19, 16)
    "9f0600f1 81000054 e00f8052 c80b80d2 010000d4"  # cmp x20,#1; b.ne 2f; exit_group(127)
    "73420191 ebffff17 1f2003d5 {table}".format(  # 2: add x19,x19,#80; b 1b; table: .quad
        table=struct.pack("<Q", _DATA).hex(),
        fd=struct.pack("<I", 0x52800000 | REPORT_FD << 5).hex(),  # mov w0, #fd
    )
)

# <asm/unistd_64.h> and <asm-generic/unistd.h>
_CALLS_X86_64 = {
    "write": 1, "close": 3, "ioctl": 16, "sendmsg": 46, "execve": 59, "chdir": 80, "fchown": 93,
    "umask": 95, "setsid": 112, "setgroups": 116, "setresuid": 117, "setresgid": 119, "capset": 126,
    "prctl": 157, "mount": 165, "umount2": 166, "exit_group": 231, "keyctl": 250, "openat": 257,
    "mkdirat": 258, "ppoll": 271, "unshare": 272, "dup3": 292, "pipe2": 293, "setns": 308,
    "seccomp": 317,
}  # fmt: skip
_CALLS_AARCH64 = {
    "dup3": 24, "ioctl": 29, "mkdirat": 34, "umount2": 39, "mount": 40, "chdir": 49, "fchown": 55,
    "openat": 56, "close": 57, "pipe2": 59, "write": 64, "ppoll": 73, "capset": 91,
    "exit_group": 94, "unshare": 97, "setresuid": 147, "setresgid": 149, "setsid": 157,
    "setgroups": 159, "umask": 166, "prctl": 167, "sendmsg": 211, "keyctl": 219, "execve": 221,
    "setns": 268, "seccomp": 277,
}  # fmt: skip

_MACHINES: Dict[str, Tuple[int, bytes, Dict[str, int]]] = {
    "x86_64": (62, _X86_64, _CALLS_X86_64),
    "aarch64": (183, _AARCH64, _CALLS_AARCH64),
}

MACHINES = tuple(_MACHINES)

Argument = Union[int, str, bytes, Sequence[Any]]
"""A number, a text (a pointer to its bytes and a zero) or a list of arguments (a pointer to as many
64-bit words and a zero one)."""


class _Call(NamedTuple):
    name: str
    arguments: Tuple[Argument, ...]
    action: int
    tag: int


class Launcher:
    """Collects calls; `program` makes the executable of them."""

    def __init__(self) -> None:
        self._calls: List[_Call] = []

    def call(self, name: str, *arguments: Argument, on_error: int = FATAL, tag: int = 0) -> None:
        """Adds a system call; its record carries the tag."""
        self._calls.append(_Call(name, arguments, on_error, tag))

    def hello(self) -> None:
        """Says that the container is made, and opens the pipe for what follows. Everything but
        the standard streams and REPORT_FD must be closed before."""
        reading, writing = 3, 4  # the lowest free descriptors
        self.call("pipe2", bytes(8), 0)
        rights = struct.pack("<QiiI4x", 20, socket.SOL_SOCKET, socket.SCM_RIGHTS, reading)
        text = RECORD.pack(HELLO, 0)
        self.call("sendmsg", REPORT_FD, [0, 0, [text, len(text)], 1, rights, len(rights), 0], 0)
        self.call("dup3", writing, REPORT_FD, os.O_CLOEXEC)
        self.call("close", reading)
        self.call("close", writing)

    def program(self, machine: str) -> bytes:
        """The ELF file for one of MACHINES."""
        number, code, calls = _MACHINES[machine]
        entries = [*self._calls, _Call("exit_group", (127,), IGNORE, 0)]
        heap = bytearray()
        heap_at = _DATA + len(entries) * _ENTRY.size

        def place(data: bytes) -> int:
            at = heap_at + len(heap)
            heap.extend(data)
            return at

        def value(argument: Argument) -> int:
            if isinstance(argument, int):
                return argument & 0xFFFFFFFFFFFFFFFF
            if isinstance(argument, str):
                argument = os.fsencode(argument)
            if isinstance(argument, bytes):
                return place(argument + b"\0")
            pointers = [value(item) for item in argument] + [0]
            heap.extend(bytes(-len(heap) % 8))
            return place(struct.pack("<%dQ" % len(pointers), *pointers))

        known: Dict[int, int] = {}  # an environment is shared by all the execve calls
        table = bytearray()
        for call in entries:
            values = []
            for argument in call.arguments:
                if id(argument) not in known:
                    known[id(argument)] = value(argument)
                values.append(known[id(argument)])
            values += [0] * (6 - len(values))
            table += _ENTRY.pack(call.tag, 0, calls[call.name], *values, call.action)
        data = bytes(table + heap)
        header = struct.pack(
            "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, number, 1, _CODE, 64, 0, 0, 64, 56, 3, 0, 0, 0
        )
        segment = struct.Struct("<IIQQQQQQ")
        header += segment.pack(1, 5, 0x1000, _CODE, _CODE, len(code), len(code), 0x1000)
        header += segment.pack(1, 6, 0x2000, _DATA, _DATA, len(data), len(data), 0x1000)
        header += segment.pack(0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # PT_GNU_STACK: not executable
        return header.ljust(0x1000, b"\0") + code.ljust(0x1000, b"\0") + data


def sealed(program: bytes) -> int:
    """The launcher as a file that exists in memory alone."""
    fd = os.memfd_create("start", os.MFD_CLOEXEC)
    view = memoryview(program)
    while view:
        view = view[os.write(fd, view) :]
    return fd
