"""Lifecycle hooks and the actions that hooks and probes share."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Dict, List, Tuple

from .connection import resolved
from .sockets import connect, reason

if TYPE_CHECKING:
    from .httpget import Answer
    from .runner import Runner

MAX_OUTPUT = 10 * 1024  # bytes of a probe's output that are kept


class HookError(Exception):
    """The hook's action failed; the text says how."""


async def run_hook(hook: Dict[str, Any], runner: "Runner") -> None:
    """exec, httpGet, sleep or (deprecated) tcpSocket; HookError when it fails."""
    if "exec" in hook:
        code, output = await exec_action(runner, hook["exec"].get("command", []))
        if code:
            raise HookError(
                "command '%s' exited with %d: %s"
                % (" ".join(hook["exec"].get("command", [])), code, output)
            )
    elif "httpGet" in hook:
        answer = await http_get(hook["httpGet"], runner)
        if not 200 <= answer.status < 400:
            raise HookError("HTTP probe failed with statuscode: %d" % answer.status)
    elif "sleep" in hook:
        await asyncio.sleep(hook["sleep"]["seconds"])
    elif "tcpSocket" in hook:
        raise HookError("tcpSocket is no hook")


async def exec_action(runner: "Runner", command: List[str]) -> Tuple[int, str]:
    """Exit code and output of a command in the container; cancelled, the command is killed."""
    from .enter import ExecError, Execution

    try:
        execution = Execution(runner, command, tty=False, stdin=False)
    except ExecError as e:
        raise HookError(str(e)) from None
    output = bytearray()

    async def take(_: str, data: bytes) -> None:
        output.extend(data[: max(0, MAX_OUTPUT - len(output))])

    try:
        code = await execution.finish(take)
    except ExecError as e:
        raise HookError(str(e)) from None
    finally:
        execution.kill()
    return code, output.decode(errors="replace")


async def http_get(action: Dict[str, Any], runner: "Runner") -> "Answer":
    """HookError with Go's kind of words if there is no answer. Certificates are not verified."""
    from .httpget import HttpError, address, get

    runtime = runner.pod.setup.runtime
    try:
        return await get(runtime.netns, *address(action, runtime.fields["podIP"]))
    except HttpError as e:
        raise HookError(str(e)) from None


async def grpc_check(action: Dict[str, Any], runner: "Runner") -> Tuple[bool, str]:
    """Whether the container says that it serves (pkg/probe/grpc)."""
    from .grpc import GrpcError, check

    host, port = runner.pod.setup.runtime.fields["podIP"], int(action["port"])
    service = action.get("service") or ""
    try:
        state = await check(runner.pod.setup.runtime.netns, host, port, service)
    except OSError as e:
        raise HookError('timeout: failed to connect service "%s:%d": %s'
                        % (host, port, reason(e))) from None  # fmt: skip
    except GrpcError as e:
        raise HookError("error: health rpc probe failed: %s" % e) from None
    return state == "SERVING", 'service unhealthy (responded with "%s")' % state


async def tcp_connect(action: Dict[str, Any], runner: "Runner") -> None:
    host = action.get("host") or runner.pod.setup.runtime.fields["podIP"]
    port = int(action["port"])
    try:
        _, writer = await connect(runner.pod.setup.runtime.netns, resolved(host), port)
    except OSError as e:
        raise HookError("dial tcp %s:%d: connect: %s"
                        % (host, port, reason(e))) from None  # fmt: skip
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
