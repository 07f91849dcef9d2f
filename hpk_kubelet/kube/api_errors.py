"""What the API server answers when it does not do what it was asked."""

from __future__ import annotations

from typing import Any

import msgspec

from hpk_kubelet.errors import HPKError

Object = dict[str, Any]


class ApiError(HPKError):
    """An answer of the API server that is not a success.

    `status` is the HTTP code, `reason` the machine-readable word (`NotFound`, `Conflict`, …),
    `message` the server's sentence, `body` the whole `Status` object when there was one.
    """

    def __init__(self, status: int, reason: str, message: str, body: Object | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.body: Object = body or {}

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def conflict(self) -> bool:
        return self.status == 409

    @property
    def already_exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def forbidden(self) -> bool:
        """Also what an API server says for a moment after its start, of anything: it answers
        before it has read its roles."""
        return self.status == 403

    @property
    def namespace_terminating(self) -> bool:
        causes = self.body.get("details", {}).get("causes") or ()
        return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)

    @property
    def expired(self) -> bool:
        return self.status == 410

    @property
    def invalid(self) -> bool:
        return self.status == 422


class Unreachable(ApiError):
    """No useful answer within the patience given: refused, reset, overloaded, starting.

    `status` is 0 when nothing answered, else the last 429 or 5xx.
    """


def error_of(status: int, body: bytes, url: str) -> ApiError:
    """The error for a refused request, from the `Status` object the API server sends with it."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        decoded = None
    if isinstance(decoded, dict) and decoded.get("kind") == "Status":
        message = decoded.get("message") or f"{url}: HTTP {status}"
        return ApiError(status, decoded.get("reason") or "", message, decoded)
    text = body[:300].decode(errors="replace").strip()
    return ApiError(status, "", f"{url}: HTTP {status} {text}".strip())


def retry_after(header: str | None) -> float:
    """Seconds of a Retry-After header, bounded; 0 without one (the API server sends seconds)."""
    try:
        return min(max(float(header or 0), 0.0), 30.0)
    except ValueError:
        return 0.0
