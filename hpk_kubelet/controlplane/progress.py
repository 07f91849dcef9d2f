"""Progress of something long: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

FIRST = 1.5  # seconds of silence before anything is worth a line
EVERY = 15.0  # seconds between two plain lines


class Progress:
    """`with Progress("etcd v3.6 (1/8)") as p: p.update("compiled 3 of 90 packages")`.

    Writes to stderr. The time goes on by itself, whether or not anything is reported.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._state = ""
        self._live = sys.stderr.isatty()
        self._began = time.monotonic()
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._shown = False

    def update(self, state: str) -> None:
        self._state = state

    def _line(self) -> str:
        seconds = time.monotonic() - self._began
        return f"{self._title}: {self._state or 'looking'} … {seconds:.0f} s"

    def _tick(self) -> None:
        if self._done.wait(FIRST):
            return
        self._shown = True
        if not self._live:
            print(self._line(), file=sys.stderr, flush=True)
            while not self._done.wait(EVERY):
                print(self._line(), file=sys.stderr, flush=True)
            return
        from rich.console import Console
        from rich.status import Status

        with Status(self._line(), console=Console(stderr=True)) as status:
            while not self._done.wait(0.2):
                status.update(self._line())

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._ticker.join()
        if self._shown and error is None:
            seconds = time.monotonic() - self._began
            print(f"{self._title}: done in {seconds:.0f} s", file=sys.stderr, flush=True)
