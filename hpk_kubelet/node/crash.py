"""For tests of what a crash leaves behind, and for nothing else.

A file `crash-at` in the run directory that holds the name of a step makes the kubelet exit there,
as SIGKILL would; the file is removed first, so that it happens once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Point = Literal["created", "pulled", "planned", "intent", "submitted", "noted", "started"]


def crash_point(run: Path, point: Point) -> None:
    """Ends the process here if the test asks for it."""
    wanted = run / "crash-at"
    try:
        if wanted.read_text().strip() != point:
            return
    except FileNotFoundError:
        return
    wanted.unlink()
    os._exit(137)
