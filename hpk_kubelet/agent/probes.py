"""Startup, readiness and liveness probes (kubelet's prober)."""

import asyncio
import time
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

from .fds import within
from .handlers import HookError, exec_action, grpc_check, http_get, tcp_connect

if TYPE_CHECKING:
    from .runner import Runner

KINDS = ("startupProbe", "readinessProbe", "livenessProbe")
_NAMES = {"startupProbe": "Startup", "readinessProbe": "Readiness", "livenessProbe": "Liveness"}


class Threshold:
    """Counts equal results in a row; answers True or False when their number is enough (pure)."""

    def __init__(self, success: int, failure: int) -> None:
        self._needed = {True: success, False: failure}
        self._last: Optional[bool] = None
        self._count = 0

    def add(self, result: bool) -> Optional[bool]:
        self._count = self._count + 1 if result == self._last else 1
        self._last = result
        return result if self._count >= self._needed[result] else None


async def watch(runner: "Runner", started_at: float) -> None:
    """Probes one run of a container until cancelled: the startup probe alone, then the others."""
    spec = runner.container
    if "startupProbe" in spec and not await _startup(runner, spec["startupProbe"], started_at):
        return
    tasks = []
    for kind, follow in (("readinessProbe", _readiness), ("livenessProbe", _liveness)):
        if kind in spec:
            tasks.append(asyncio.ensure_future(follow(runner, spec[kind], started_at)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _startup(runner: "Runner", probe: Dict[str, Any], started_at: float) -> bool:
    async for passed in _results(runner, "startupProbe", probe, started_at):
        if passed:
            runner.passed_startup()
            return True
        if passed is False:
            _restart(runner, "startupProbe", probe)
            return False
    return False


async def _readiness(runner: "Runner", probe: Dict[str, Any], started_at: float) -> None:
    async for passed in _results(runner, "readinessProbe", probe, started_at):
        if passed is not None:
            runner.set_ready(passed)


async def _liveness(runner: "Runner", probe: Dict[str, Any], started_at: float) -> None:
    async for passed in _results(runner, "livenessProbe", probe, started_at):
        if passed is False:
            _restart(runner, "livenessProbe", probe)
            return


def _restart(runner: "Runner", kind: str, probe: Dict[str, Any]) -> None:
    grace = probe.get("terminationGracePeriodSeconds")
    runner.pod.spawn_task(
        runner.kill(
            "Container %s failed %s probe, will be restarted" % (runner.name, _NAMES[kind].lower()),
            runner.pod.grace if grace is None else grace,
        )
    )


async def _results(  # type: ignore[no-untyped-def]
    runner: "Runner", kind: str, probe: Dict[str, Any], started_at: float
):
    threshold = Threshold(probe.get("successThreshold", 1), probe.get("failureThreshold", 3))
    await asyncio.sleep(max(0.0, started_at + probe.get("initialDelaySeconds", 0) - time.time()))
    while True:
        begun = time.monotonic()
        passed, output = await probe_once(runner, kind, probe)
        if not passed and not runner.alive():
            return  # it failed because the container was ending
        if not passed:
            runner.event("Warning", "Unhealthy", "%s probe failed: %s" % (_NAMES[kind], output))
        yield threshold.add(passed)
        spent = time.monotonic() - begun
        await asyncio.sleep(max(0.0, probe.get("periodSeconds", 10) - spent))


async def probe_once(runner: "Runner", kind: str, probe: Dict[str, Any]) -> Tuple[bool, str]:
    """Whether it passed, and what it said."""
    timeout = probe.get("timeoutSeconds", 1)
    try:
        return await within(timeout, _act(runner, kind, probe))
    except HookError as e:
        return False, str(e)
    except asyncio.TimeoutError:
        if "exec" in probe:
            return False, "command timed out: %r timed out after %ds" % (
                " ".join(probe["exec"].get("command", [])), timeout,
            )  # fmt: skip
        if "tcpSocket" in probe:
            return False, "dial tcp %s:%s: i/o timeout" % (
                probe["tcpSocket"].get("host") or runner.pod.setup.runtime.fields["podIP"],
                probe["tcpSocket"]["port"],
            )
        if "grpc" in probe:
            return False, "timeout: health rpc did not complete within %ds" % timeout
        return False, ("context deadline exceeded (Client.Timeout exceeded while awaiting headers)")


async def _act(runner: "Runner", kind: str, probe: Dict[str, Any]) -> Tuple[bool, str]:
    if "exec" in probe:
        code, output = await exec_action(runner, probe["exec"].get("command", []))
        return code == 0, output
    if "httpGet" in probe:
        answer = await http_get(probe["httpGet"], runner)
        if 300 <= answer.status < 400:
            words = "Probe terminated redirects, Response body: %s" % answer.body
            runner.event("Warning", "ProbeWarning", "%s probe warning: %s" % (_NAMES[kind], words))
        passed = 200 <= answer.status < 400
        return passed, "HTTP probe failed with statuscode: %d" % answer.status
    if "tcpSocket" in probe:
        await tcp_connect(probe["tcpSocket"], runner)
        return True, ""
    if "grpc" in probe:
        return await grpc_check(probe["grpc"], runner)
    raise HookError("the probe names no action")
