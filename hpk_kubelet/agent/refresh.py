"""A plan that waited in the queue is asked for again before anything runs."""

import asyncio
import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any, Dict

from . import wire
from .allocation import END_SIGNALS
from .connection import DIAL_ERRORS, dial, hello
from .fds import on_signal, within
from .journal import note, own_job

if TYPE_CHECKING:
    from .main import Starting

RETRY, LONGEST_RETRY = 0.5, 10.0
ANSWER_TIMEOUT = 60.0


class RefreshError(Exception):
    """The kubelet has no newer plan for this pod (yet)."""


def refreshed(starting: "Starting") -> Dict[str, Any]:
    """The plan as it should be now. Waits for the kubelet, with a reason in the journal; SIGTERM
    (the pod was deleted) ends the wait with the old plan, of which nothing will be run."""
    return asyncio.run(_refreshed(starting))


async def _refreshed(starting: "Starting") -> Dict[str, Any]:
    delay = RETRY
    said = ""
    stop = asyncio.Event()

    def terminated() -> None:
        starting.terminated = True
        stop.set()

    for number in END_SIGNALS:
        on_signal(number, terminated)
    if starting.terminated:
        stop.set()
    while not starting.terminated:
        try:
            return await within(ANSWER_TIMEOUT, _ask(starting))
        except (*DIAL_ERRORS, wire.WireError, RefreshError) as e:
            words = str(e) or type(e).__name__
            if words != said:
                said = words
                note("the plan waited in the queue and needs a fresh one: %s" % words)
                why = "waiting for the kubelet to refresh the pod's plan: %s" % words
                starting.journal.write(waiting_state(starting.plan, why), [])
        with contextlib.suppress(asyncio.TimeoutError):
            await within(delay, stop.wait())
        delay = min(delay * 2, LONGEST_RETRY)
    return starting.plan


async def _ask(starting: "Starting") -> Dict[str, Any]:
    plan = starting.plan
    reader, writer = await dial(plan["agent"])
    try:
        writer.write(hello(plan, waiting_state(plan, ""), []))
        writer.write(wire.encode_message({"type": "refresh"}))
        decoder = wire.Decoder()
        while True:
            data = await reader.read(1 << 16)
            if not data:
                raise RefreshError("the kubelet closed the connection")
            for frame in decoder.feed(data):
                if frame.kind != wire.MESSAGE:
                    continue
                message = frame.message()
                if message["type"] == "stop":
                    starting.terminated = True
                    return plan
                if message["type"] == "plan":
                    if "plan" not in message:
                        raise RefreshError(str(message.get("error", "it sent no plan")))
                    fresh: Dict[str, Any] = message["plan"]
                    if fresh.get("version") != plan["version"]:
                        raise RefreshError("the kubelet's plan has another version")
                    keep(fresh, starting.pod_dir)
                    return fresh
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def keep(plan: Dict[str, Any], pod_dir: str) -> None:
    """MPI ranks read the plan from its file."""
    path = os.path.join(pod_dir, "plan.json")
    with open(path + ".new", "w") as f:
        json.dump(plan, f)
        f.flush()
        os.fsync(f.fileno())
    os.rename(path + ".new", path)


def waiting_state(plan: Dict[str, Any], words: str) -> Dict[str, Any]:
    """Every container waits; `words` say for what ("": the kubelet is just being asked)."""
    waiting = {"reason": "ContainerCreating"}
    if words:
        waiting["message"] = words
    first = (plan["initContainers"] or plan["containers"])[0]["name"]
    names = [c["name"] for c in plan["initContainers"] + plan["containers"]]
    return {
        "jobId": own_job(os.environ),
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "hostIP": "",
        "podIP": "",
        "startedAt": time.time(),
        "containers": {
            name: {
                "waiting": waiting if name == first or not plan["initContainers"]
                else {"reason": "PodInitializing"},
                "restartCount": 0, "started": False, "ready": False,
            }
            for name in names
        },
        "finished": False,
    }  # fmt: skip
