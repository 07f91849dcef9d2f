"""For tests of what a crash leaves behind, and for nothing else.

A file `crash-at` in the run directory that holds the name of a step makes the kubelet exit there,
as SIGKILL would; the file is removed first, so that it happens once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

Point = Literal[
    "created", "pulled", "planned", "intent", "allocated", "submitted", "noted", "started"
]


_LOOK = 0.02  # seconds for which the file's content is remembered: many pods ask at once
_seen: tuple[float, str] = (-_LOOK, "")


def crash_point(run: Path, point: Point) -> None:
    """Ends the process here if the test asks for it."""
    global _seen
    wanted = run / "crash-at"
    now = time.monotonic()
    if now - _seen[0] >= _LOOK:
        try:
            _seen = now, wanted.read_text().strip()
        except FileNotFoundError:
            _seen = now, ""
    if _seen[1] != point:
        return
    wanted.unlink()
    os._exit(137)
