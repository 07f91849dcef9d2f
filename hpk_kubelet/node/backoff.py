"""Delays between tries of the same thing, doubling (client-go's flowcontrol.Backoff)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """`initial` seconds after the first failure, doubling up to `longest`."""

    initial: float
    longest: float
    failures: int = 0
    until: float = 0.0  # the clock's time before which nothing is tried

    def failed(self, now: float) -> float:
        """Notes a failure; answers the delay."""
        delay = min(self.longest, self.initial * 2.0**self.failures)
        self.failures += 1
        self.until = now + delay
        return delay

    def succeeded(self) -> None:
        self.failures = 0
        self.until = 0.0
