"""The launcher is run for real: on this machine, as the kernel takes it."""

import os
import platform
import socket

import pytest

from hpk_kubelet.agent.launcher import (
    FATAL,
    IGNORE,
    MACHINES,
    PROGRAM_FD,
    REPORT,
    REPORT_FD,
    Launcher,
    sealed,
)
from hpk_kubelet.agent.program import (
    _EXEC,
    Outcome,
    allowed_capabilities,
    candidates,
    exec_failure,
    read_outcome,
)
from hpk_kubelet.agent.runs import Report, exit_code

pytestmark = pytest.mark.skipif(
    platform.machine() not in MACHINES, reason="no launcher for this machine"
)


def launch(todo: Launcher) -> tuple[list[bytes], int, int, bytes]:
    """Runs it; (records, its pid as reported, wait status, stdout)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    reading, writing = os.pipe()
    memory = sealed(todo.program(platform.machine()))
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(memory, PROGRAM_FD)
            os.dup2(theirs.fileno(), REPORT_FD)
            os.dup2(writing, 1)
            os.closerange(3, REPORT_FD)
            os.execve(f"/proc/self/fd/{PROGRAM_FD}", ["start"], {"LEAK": "1"})
        finally:
            os._exit(99)
    theirs.close()
    os.close(writing)
    os.close(memory)
    report = Report(ours)
    while report.read():
        pass
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as f:
        return report.records, report.pid - pid, status, f.read()


def execute(path: str, argv: list[bytes], env: list[bytes], *before: str) -> Launcher:
    todo = Launcher()
    todo.hello()
    todo.call("close", PROGRAM_FD, on_error=IGNORE)
    for candidate in [*before, path]:
        todo.call("execve", candidate, argv, env, on_error=REPORT, tag=_EXEC)
    return todo


def test_every_byte_of_the_environment_and_the_arguments_arrives() -> None:
    env = [b"PEM=-----BEGIN\n\"'$`\\x\n-----END\n", b"EMPTY=", b"a.b-c=\xff\xfe", b"PATH=/nowhere"]
    records, pid, status, output = launch(execute("/usr/bin/env", [b"env", b"-0"], env))
    assert output == b"\0".join([*env, b""])
    assert (pid, exit_code(status)) == (0, 0)
    assert read_outcome(records, 7, "env", "/") == Outcome(7, "")
    argv = [b"printf", b"[%s]", b"", b"a b", b"--flag", b"$HOME\n"]
    assert launch(execute("/usr/bin/printf", argv, []))[3] == b"[][a b][--flag][$HOME\n]"


def test_nothing_is_left_open_for_the_program() -> None:
    listing = launch(execute("/bin/ls", [b"ls", b"/proc/self/fd"], []))[3]
    assert listing.split() == [b"0", b"1", b"2", b"3"]  # 3 is ls's own


def test_a_failed_candidate_is_reported_but_harmless() -> None:
    records, _, status, output = launch(
        execute("/bin/echo", [b"echo", b"hi"], [], "/nonexistent/echo", "/etc/passwd/echo")
    )
    assert output == b"hi\n" and exit_code(status) == 0
    assert len(records) == 3  # hello and two failures
    assert read_outcome(records, 7, "echo", "/").failed == ""


def test_a_fatal_error_ends_it_with_its_record() -> None:
    todo = Launcher()
    todo.hello()
    todo.call("chdir", "/nonexistent/dir", tag=1, on_error=FATAL)
    todo.call("execve", "/bin/true", [b"true"], [], on_error=REPORT, tag=_EXEC)
    records, _, status, _ = launch(todo)
    assert exit_code(status) == 127
    outcome = read_outcome(records, 7, "true", "/nonexistent/dir")
    assert outcome.failed == 'chdir to cwd ("/nonexistent/dir") failed: no such file or directory'


@pytest.mark.parametrize("machine", MACHINES)
def test_the_file_is_a_static_executable_for_each_machine(machine: str) -> None:
    program = execute("/bin/true", [b"true"], []).program(machine)
    assert program[:5] == b"\x7fELF\x02"
    assert int.from_bytes(program[18:20], "little") == {"x86_64": 62, "aarch64": 183}[machine]


def test_no_report_means_that_it_never_ran() -> None:
    assert read_outcome([], 0, "x", "/") == Outcome(0, "")


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("foo", 2, 'exec: "foo": executable file not found in $PATH'),
        ("/foo", 2, 'exec: "/foo": stat /foo: no such file or directory'),
        ("/foo", 13, 'exec: "/foo": permission denied'),
        ("foo", 8, 'exec: "foo": exec format error'),
    ],
)
def test_exec_failures_read_as_runc_puts_them(program: str, code: int, words: str) -> None:
    assert exec_failure(program, code) == words


def test_candidates_are_those_of_look_path() -> None:
    assert candidates("a", "/x:/y:") == ["/x/a", "/y/a", "./a"]
    assert candidates("./a", "/x") == ["./a"]


def test_capabilities() -> None:
    def allowed(**security: object) -> set[str]:
        return set(allowed_capabilities({"privileged": False, **security}))

    default = allowed()
    assert "CHOWN" in default and "SYS_ADMIN" not in default and len(default) == 14
    assert allowed(dropCapabilities=["ALL"]) == set()
    assert allowed(dropCapabilities=["ALL"], capabilities=["NET_BIND_SERVICE"]) == {
        "NET_BIND_SERVICE"
    }
    assert allowed(dropCapabilities=["CHOWN"]) == default - {"CHOWN"}
    assert allowed(capabilities=["SYS_PTRACE"]) == default | {"SYS_PTRACE"}
    assert len(allowed(privileged=True)) == 41
