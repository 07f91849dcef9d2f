"""Whether there is room in HPK's home, where etcd, logs and every pod's directory are, and
whether it answers in time."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from hpk_kubelet.controlplane.files import write_private

_LEAST_MB = 256
_LEAST_FILES = 1000
_REMEMBERED = 120.0  # seconds for which a refused write counts: a quota shows in nothing else
_SLOW_S = 2.0  # for a small file to be kept: etcd wants less than a tenth of a second
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    def __init__(self, home: Path) -> None:
        self.home = home
        self._refused = -_REMEMBERED
        self._words = ""
        self._took = 0.0  # seconds, the last probe
        self._asked = 0.0  # time.monotonic() since when one is under way

    def probe(self) -> None:
        """Keeps a small file, for the time it takes. Blocks as long as the file system does."""
        if self._asked:
            return  # the last one still waits
        self._asked = time.monotonic()
        try:
            write_private(self.home / "run" / "probe", str(time.time()))  # the same is not written
        except OSError as e:
            self.note(e)
        finally:
            self._took, self._asked = time.monotonic() - self._asked, 0.0

    def slow(self) -> str:
        """That it does not answer in time; "" while it does."""
        under_way = time.monotonic() - self._asked if self._asked else 0.0
        took = max(self._took, under_way)
        if took < _SLOW_S:
            return ""
        return f"the file system of {self.home} took {took:.1f} s to keep a small file"

    def note(self, error: OSError) -> bool:
        """Whether the error says that there is no room; then it is remembered."""
        if error.errno not in _FULL:
            return False
        self._refused = time.monotonic()
        self._words = f"{error.filename or self.home}: {error.strerror}"
        return True

    def pressure(self) -> str:
        """Why no new pods should come, and what to do; "" while there is room."""
        if time.monotonic() - self._refused < _REMEMBERED:
            return self._say(self._words)
        try:
            found = os.statvfs(self.home)
        except OSError as e:
            return self._say(f"{self.home}: {e.strerror}")
        free_mb = found.f_bavail * found.f_frsize >> 20
        if free_mb < _LEAST_MB:
            return self._say(f"{free_mb} MB are free on the file system of {self.home}")
        if found.f_files and found.f_favail < _LEAST_FILES:
            return self._say(f"{found.f_favail} files are free on the file system of {self.home}")
        return ""

    def _say(self, words: str) -> str:
        return f"{words}; make room there (ended pods, `hpk image` and old logs are the first)"
