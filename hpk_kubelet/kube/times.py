"""Kubernetes' two time formats: metav1.Time (seconds) and metav1.MicroTime."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    return datetime.now(UTC)


def rfc3339(time: datetime) -> str:
    """metav1.Time, `2026-01-02T03:04:05Z`; fractions of a second are cut off as Go's are."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(time: datetime) -> str:
    """metav1.MicroTime, `2026-01-02T03:04:05.000006Z`."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse(text: str) -> datetime:
    """Either format, with `Z` or an offset. Raises ValueError."""
    return datetime.fromisoformat(text)
