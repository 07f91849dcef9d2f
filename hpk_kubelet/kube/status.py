"""Writes pod statuses: the newest one per pod, one request in flight per pod."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from hpk_kubelet.kube.client import STRATEGIC, ApiError, Client, Object, Unreachable, pods

log = logging.getLogger(__name__)

RETRY_PAUSE, CONFLICT_PAUSE = 2.0, 0.05


@dataclass(slots=True)
class Entry:
    """One pod: what was written last, what was refused last, and what waits to be written."""

    namespace: str
    name: str
    written: Object | None = None
    refused: Object | None = None
    wanted: Object | None = None
    queued: bool = False


def status_patch(uid: str, status: Object, written: Object | None = None) -> Object:
    """The strategic merge patch that makes a pod's status `status` (kubelet's status_manager).

    `metadata.uid` makes the API server refuse it (422) for another pod of the same name.
    Conditions merge by type, so those of other writers stay; container statuses are replaced.
    What a merge would leave behind is nulled: top-level fields that were in `written`, `reason`
    and `message`, and `reason` and `message` of each condition.
    """
    patch: Object = dict.fromkeys(written or ())
    patch.update({"reason": None, "message": None})
    patch.update(status)
    if "conditions" in status:
        patch["conditions"] = [
            {"reason": None, "message": None, **condition} for condition in status["conditions"]
        ]
    for addresses in ("podIPs", "hostIPs"):
        if status.get(addresses):  # would merge by ip
            patch[addresses] = [{"$patch": "replace"}, *status[addresses]]
    return {"metadata": {"uid": uid}, "status": patch}


def another_uid(error: ApiError) -> bool:
    """Whether a write was refused because the object of that name has another uid by now."""
    causes = error.body.get("details", {}).get("causes") or ()
    return (error.invalid and any(cause.get("field") == "metadata.uid" for cause in causes)) or (
        error.conflict and "UID in precondition" in error.message
    )


class StatusWriter:
    """`set()` never blocks; `run()` writes until cancelled. Keyed by pod uid.

    A status equal to the last one written is skipped. A pod that is gone or was made again
    (404, 422 or 409 for its uid) is forgotten; `on_error` hears of a status the API server
    refuses for another reason, which is not tried again until `set()` brings a different one.
    """

    def __init__(
        self,
        client: Client,
        *,
        parallel: int = 16,
        on_error: Callable[[str, ApiError], None] | None = None,
        on_written: Callable[[str, Object], None] | None = None,
    ) -> None:
        self._client = client
        self._parallel = parallel
        self._on_error = on_error
        self._on_written = on_written
        self._entries: dict[str, Entry] = {}
        self._queue: asyncio.Queue[tuple[str, Entry]] = asyncio.Queue()
        self._pending = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def set(self, namespace: str, name: str, uid: str, status: Object) -> None:
        entry = self._entries.setdefault(uid, Entry(namespace, name))
        entry.wanted = status
        self._enqueue(uid, entry)

    def forget(self, uid: str) -> None:
        """The pod is gone: drops its memory and what waits to be written."""
        self._entries.pop(uid, None)

    def _enqueue(self, uid: str, entry: Entry) -> None:
        if not entry.queued:
            entry.queued = True
            self._pending += 1
            self._idle.clear()
            self._queue.put_nowait((uid, entry))

    async def flush(self) -> None:
        """Waits until all is sent; put `asyncio.timeout` around it where `run` may be gone."""
        await self._idle.wait()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._parallel):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            uid, entry = await self._queue.get()
            # `queued` stays set while a request is out, so no other worker takes this pod.
            while entry.wanted is not None and self._entries.get(uid) is entry:
                status, entry.wanted = entry.wanted, None
                if status in (entry.written, entry.refused):
                    continue
                pause = await self._write(uid, entry, status)
                if pause is not None:
                    if entry.wanted is None:
                        entry.wanted = status
                    loop = asyncio.get_running_loop()
                    loop.call_later(pause, self._queue.put_nowait, (uid, entry))
                    break
            else:
                entry.queued = False
                self._pending -= 1
                if self._pending == 0:
                    self._idle.set()

    async def _write(self, uid: str, entry: Entry, status: Object) -> float | None:
        """None when this status is dealt with, else in how many seconds to try again."""
        about = f"status of pod {entry.namespace}/{entry.name}"
        path = pods(entry.namespace, entry.name, "status")
        try:
            pod = await self._client.patch(
                path, status_patch(uid, status, entry.written), STRATEGIC
            )
        except ApiError as e:
            if e.not_found or another_uid(e):
                self._entries.pop(uid, None)
            elif isinstance(e, Unreachable) or e.forbidden:
                log.warning("%s: %s", about, e)
                return RETRY_PAUSE
            elif e.conflict:  # other writers were faster several times in a row
                return CONFLICT_PAUSE
            else:
                log.error("%s refused: %s", about, e)
                entry.refused = status
                if self._on_error:
                    self._on_error(uid, e)
        else:
            entry.written, entry.refused = status, None
            if self._on_written:
                self._on_written(uid, pod)
        return None
