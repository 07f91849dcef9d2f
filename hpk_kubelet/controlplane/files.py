"""Files that are either the old content or the new, never half of one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def make_private_dir(path: Path) -> Path:
    """Creates `path` (and its parents) as 0700, and makes an existing one 0700."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)
    return path


def write_private(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Writes `path` as 0600 through a temporary name and a rename.

    `sync` is there because the state is on NFS or Lustre: after a crash an empty key or
    kubeconfig would be worse than the old one. A file that says this already is left alone.
    """
    data = content.encode() if isinstance(content, str) else content
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == data and not path.stat().st_mode & 0o077:
            return
    tmp = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            if sync:
                os.fsync(f.fileno())
        tmp.rename(path)
        if sync:
            _sync_directory(path.parent)
    except BaseException as e:
        tmp.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename is None:
            e.filename = str(path)  # write(2) and fsync(2) do not name what they were about
        raise


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
