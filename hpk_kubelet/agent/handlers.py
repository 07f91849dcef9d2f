"""Lifecycle hooks and the actions that hooks and probes share."""

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any, Dict, List, Tuple

from .connection import resolved
from .sockets import connect

if TYPE_CHECKING:
    from .runner import Runner

MAX_OUTPUT = 10 * 1024  # bytes of a probe's output that are kept


class HookError(Exception):
    """The hook's action failed; the text says how."""


def reason(error: OSError) -> str:
    """Go's words for a failed connection."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


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
        status, _ = await http_get(hook["httpGet"], runner)
        if not 200 <= status < 400:
            raise HookError("HTTP probe failed with statuscode: %d" % status)
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


async def http_get(action: Dict[str, Any], runner: "Runner") -> Tuple[int, str]:
    """Status and beginning of the body; HookError with Go's kind of words if there is none.

    Like the kubelet: certificates are not verified, redirects to other hosts are not followed
    (a redirect is a success, being under 400)."""
    host = action.get("host") or runner.pod.setup.runtime.fields["podIP"]
    port, path = int(action["port"]), action.get("path") or "/"
    secure = action.get("scheme", "HTTP").upper() == "HTTPS"
    url = "%s://%s:%d%s" % ("https" if secure else "http", host, port, path)
    context = None
    if secure:
        import ssl

        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    headers = {"Host": "%s:%d" % (host, port), "User-Agent": "kube-probe/1.36", "Accept": "*/*",
               "Connection": "close"}  # fmt: skip
    for header in action.get("httpHeaders") or []:
        headers = {k: v for k, v in headers.items() if k.lower() != header["name"].lower()}
        headers[header["name"]] = header["value"]
    request = "GET %s HTTP/1.1\r\n" % (path if path.startswith("/") else "/" + path)
    request += "".join("%s: %s\r\n" % item for item in headers.items()) + "\r\n"
    try:
        reader, writer = await connect(
            runner.pod.setup.runtime.netns, resolved(host), port, context
        )
    except OSError as e:
        raise HookError('Get "%s": dial tcp %s:%d: connect: %s'
                        % (url, host, port, reason(e))) from None  # fmt: skip
    try:
        writer.write(request.encode("latin-1", errors="replace"))
        status_line = (await reader.readline()).split(None, 2)
        if len(status_line) < 2 or not status_line[1].isdigit():
            raise HookError('Get "%s": EOF' % url)
        rest = await reader.read(MAX_OUTPUT)
        return int(status_line[1]), rest.partition(b"\r\n\r\n")[2].decode(errors="replace")
    except OSError as e:
        raise HookError('Get "%s": %s' % (url, e)) from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def grpc_check(action: Dict[str, Any], runner: "Runner") -> Tuple[bool, str]:
    """Whether the container says that it serves (pkg/probe/grpc)."""
    from .grpc import GrpcError, check

    host, port = runner.pod.setup.runtime.fields["podIP"], int(action["port"])
    service = action.get("service") or ""
    try:
        state = await check(host, port, service)
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
