"""Whether there is room in HPK's home, where etcd, logs and every pod's directory are."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

_LEAST_MB = 256
_LEAST_FILES = 1000
_REMEMBERED = 120.0  # seconds for which a refused write counts: a quota shows in nothing else
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    def __init__(self, home: Path) -> None:
        self.home = home
        self._refused = -_REMEMBERED
        self._words = ""

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
