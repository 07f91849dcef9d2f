"""Runs a command inside a running container: exec, probes and hooks."""

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, List, NoReturn

from . import syscalls
from .container import (
    Process,
    container_env,
    fork_program,
    join_network,
    open_streams,
    pass_on,
)  # fmt: skip
from .fds import Output, chunks
from .launcher import PROGRAM_FD
from .program import read_outcome, start_program
from .runs import exit_code, report, resize

if TYPE_CHECKING:
    from .runner import Runner


class ExecError(Exception):
    """The command could not be started; the kubelet's words."""


def enter_container(runner: "Runner", command: List[str], tty: bool, stdin: bool) -> Process:
    """Forks a process that joins the container's namespaces and becomes the command there, as
    the container's user, with its environment and working directory."""
    setup = runner.pod.setup
    if not runner.pid:
        raise ExecError('container not found ("%s")' % runner.name)
    if runner.container.get("mpi"):
        raise ExecError(
            "container %s is MPI ranks, which can't be entered: each is a task of Slurm's"
            % runner.name
        )
    base = "/proc/%d" % runner.pid
    try:
        root = os.open(base + "/root", os.O_PATH | os.O_CLOEXEC)
        spaces = [
            (os.open(base + "/ns/pid", os.O_RDONLY | os.O_CLOEXEC), syscalls.CLONE_NEWPID),
            (os.open(base + "/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), syscalls.CLONE_NEWNS),
        ]
    except OSError as e:
        raise ExecError('container not found ("%s"): %s' % (runner.name, e.strerror)) from None
    container = runner.container
    env = container_env(container, setup.runtime.fields, setup.runtime.gpus, setup.runtime.job)
    if tty:
        env.setdefault("TERM", "xterm")
    program = start_program(
        command, env, container["workingDir"], container["security"], setup.runtime.mapping,
        tty=tty, fresh=False,
    )  # fmt: skip

    def join() -> None:
        join_network(setup.runtime)
        for fd, kind in spaces:
            syscalls.setns(fd, kind)
        os.fchdir(root)
        os.chroot(".")

    def execute() -> NoReturn:
        child = os.fork()
        if child == 0:
            syscalls.die_with_parent(signal.SIGKILL)
            os.setsid()
            os.execve(PROGRAM_FD, ["start"], {})
        pass_on(child)

    try:
        return fork_program(
            program, open_streams(setup.runtime.ptmx if tty else "", stdin), join, execute
        )
    finally:
        for fd in [root] + [fd for fd, _ in spaces]:
            os.close(fd)


class Execution:
    """A command in a container: its streams, and how it ends."""

    def __init__(self, runner: "Runner", command: List[str], *, tty: bool, stdin: bool) -> None:
        if not command:
            raise ExecError("no command was given")
        self._runner = runner
        self._command = command
        self.process = enter_container(runner, command, tty, stdin)
        self._exited = runner.pod.reaper.watch(self.process.pid)
        os.set_blocking(self.process.complaints, False)
        for fd in set(self.process.streams) - {-1}:
            os.set_blocking(fd, False)
        self._open = set(self.process.streams) - {-1}

    async def finish(self, output: Output) -> int:
        """Passes its output on until it ends; answers its exit code. ExecError if the command
        could not be executed."""

        async def pump(fd: int, stream: str) -> None:
            async for data in chunks(fd, self._exited):
                await output(stream, data)

        streams = self.process.streams
        pumps = [
            asyncio.ensure_future(pump(fd, name))
            for fd, name in ((streams.stdout, "stdout"), (streams.stderr, "stderr"))
            if fd >= 0
        ]
        try:
            await self.outcome()
            status = await self._exited
            await asyncio.gather(*pumps)
            return exit_code(status)
        finally:
            for task in pumps:
                task.cancel()

    async def outcome(self) -> None:
        """Returns when the command runs; ExecError if it can't."""
        records, pid = await report(self.process.report)
        outcome = read_outcome(records, pid, self._command[0], self._runner.container["workingDir"])
        if outcome.failed:
            raise ExecError(outcome.failed)
        if not outcome.pid:
            words = b""
            with contextlib.suppress(BlockingIOError):
                words = os.read(self.process.complaints, 4096)
            raise ExecError(
                'container "%s" can\'t be entered: %s'
                % (self._runner.name, words.decode(errors="replace").strip())
            )

    def close_stdin(self) -> None:
        fd = self.process.streams.stdin
        if fd in self._open and fd != self.process.streams.stdout:
            self._open.discard(fd)
            os.close(fd)

    def resize(self, width: int, height: int) -> None:
        resize(self.process.streams.stdout, width, height)

    def kill(self) -> None:
        """Ends the command if it still runs, and closes everything."""
        if not self._exited.done():
            os.kill(self.process.pid, signal.SIGKILL)
        for fd in self._open | {self.process.complaints}:
            os.close(fd)
        self._open = set()
