"""The options of `kubectl logs`, and whether a container has a log at all."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpk_kubelet.agent.logs import timestamp
from hpk_kubelet.errors import HPKError


@dataclass(frozen=True)
class LogOptions:
    """PodLogOptions; `since` is in Unix seconds, None where the option was not given."""

    previous: bool = False
    follow: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: float | None = None
    limit: int | None = None
    stream: str = "All"  # All, Stdout or Stderr
    part: int | None = None  # inode of the part of a rotated log to begin with; None: the newest

    def to_stream(self, container: str) -> dict[str, Any]:
        """The arguments of the agent's `logs` stream (agent/wire.py)."""
        return {
            "container": container,
            "previous": self.previous,
            "follow": self.follow,
            "timestamps": self.timestamps,
            "tailLines": self.tail,
            "sinceTime": None if self.since is None else timestamp(int(self.since * 1e9)),
            "limitBytes": self.limit,
        }


def parse_options(query: Mapping[str, str], now: dt.datetime) -> LogOptions:
    """HPKError for a value that is no value of its option."""
    since: float | None = None
    if (seconds := _number(query, "sinceSeconds")) is not None:
        since = now.timestamp() - seconds
    if text := query.get("sinceTime"):
        try:
            since = dt.datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise HPKError(f"sinceTime={text!r} is no RFC 3339 time") from None
    return LogOptions(
        previous=_flag(query, "previous"),
        follow=_flag(query, "follow"),
        timestamps=_flag(query, "timestamps"),
        tail=_number(query, "tailLines"),
        since=since,
        limit=_number(query, "limitBytes"),
        stream=query.get("stream") or "All",
    )


def _flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() in ("1", "true", "t")


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit()):
        raise HPKError(f"{name}={text!r} is no number of zero or more")
    return int(text)


def log_state(status: Mapping[str, Any], pod: str, container: str, previous: bool) -> None:
    """HPKError, in the kubelet's words, for a container that has no log (kubelet_pods.go,
    validateContainerLogStatus)."""
    where = f'container "{container}" in pod "{pod}"'
    entry = next(
        (
            entry
            for key in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses")
            for entry in status.get(key) or ()
            if entry["name"] == container
        ),
        None,
    )
    if entry is None:
        raise HPKError(f"{where} is not available")
    state, last = entry.get("state") or {}, (entry.get("lastState") or {}).get("terminated")
    if previous:
        if not last:
            raise HPKError(f"previous terminated {where} not found")
    elif "running" in state or "terminated" in state or last:
        return
    elif "waiting" in state:
        reason = state["waiting"].get("reason", "")
        text = {
            "ErrImagePull": "image can't be pulled",
            "ImagePullBackOff": "trying and failing to pull image",
        }.get(reason, reason)
        raise HPKError(f"{where} is waiting to start: {text}")
    else:
        raise HPKError(f"{where} is waiting to start - no logs yet")
