"""Files that change all at once: kubelet's AtomicWriter (pkg/volume/util/atomic_writer.go).

VOLUME/..2026_01_31_12_00_00.x1y2z3/   the files of one version
VOLUME/..data -> ..2026_01_31_…        renamed into place: the one step that makes it current
VOLUME/NAME   -> ..data/NAME           first path element of every file
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hpk_kubelet.errors import HPKError
from hpk_kubelet.volumes.base import Files

_DATA = "..data"
_NEW_DATA = "..data_tmp"
_MAX_PATH = 4096
_MAX_NAME = 255


def check_path(path: str) -> None:
    """HPKError unless the path stays inside its volume and clear of the writer's own names."""
    if not path:
        raise HPKError('invalid path: must not be empty: ""')
    if path.startswith("/"):
        raise HPKError(f"invalid path: must be relative path: {path}")
    if "\0" in path:
        raise HPKError(f"invalid path: must not contain NUL: {path!r}")
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        raise HPKError(f"invalid path: must be a text: {path!r}") from None
    if len(path) > _MAX_PATH:
        raise HPKError(f"invalid path: must be less than or equal to {_MAX_PATH} characters")
    if b".." in names:
        raise HPKError(f"invalid path: must not contain '..': {path}")
    if max(map(len, names)) > _MAX_NAME:
        raise HPKError(
            f"invalid path: filenames must be less than or equal to {_MAX_NAME} characters"
        )
    if names[0].startswith(b".."):
        raise HPKError(f"invalid path: must not start with '..': {path}")
    if all(name in (b"", b".") for name in names):
        raise HPKError(f"invalid path: names no file: {path}")


def write_files(
    directory: Path,
    files: Files,
    mount_points: Iterable[str] = (),
    finish: Callable[[Path], None] | None = None,
) -> bool:
    """Makes `directory` hold exactly these files (their paths checked and normalised); False when
    it did already. `finish` gets the directory of a new version before anybody sees it. What an
    interrupted write left behind goes away. OSError is the caller's."""
    _make_directory(directory)
    first = {path.split("/")[0] for path in files}
    for mount_point in mount_points:
        # beside the links, unless it is inside a directory that belongs to a version
        if mount_point.split("/")[0] not in first:
            _make_directory(directory / mount_point)
    current = _current(directory)
    changed = current is None or _read(directory / current) != {
        path: file.content for path, file in files.items()
    }
    if changed:
        stamp = time.strftime("..%Y_%m_%d_%H_%M_%S.", time.gmtime())
        version = Path(tempfile.mkdtemp(prefix=stamp, dir=directory))
        version.chmod(0o755)
        _write_version(version, files, mount_points)
        if finish is not None:
            finish(version)
        current = version.name
        (directory / _NEW_DATA).unlink(missing_ok=True)
        (directory / _NEW_DATA).symlink_to(current)
        (directory / _NEW_DATA).rename(directory / _DATA)
    _make_links(directory, files)
    for entry in list(directory.iterdir()):
        if entry.name.startswith("..2") and entry.name != current:
            shutil.rmtree(entry)
    return changed


def _write_version(version: Path, files: Files, mount_points: Iterable[str]) -> None:
    first = {path.split("/")[0] for path in files}
    inside = [m for m in mount_points if m.split("/")[0] in first and m not in files]
    try:
        for path, file in files.items():
            target = version / path
            _make_directory(target.parent)
            # made private first: the mode may ask for less than writing takes
            target.touch(mode=0o600, exist_ok=False)
            target.write_bytes(file.content)
            target.chmod(file.mode)
        for mount_point in inside:
            _make_directory(version / mount_point)
    except (FileExistsError, NotADirectoryError) as e:
        where = Path(str(e.filename)).relative_to(version)
        raise HPKError(f"path {where} is a file and a directory of the same volume") from None


def _make_directory(path: Path) -> None:
    """As mkdir -p with mode 0755 whatever the umask: containers run as other users, too."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir()
        path.chmod(0o755)


def _make_links(directory: Path, files: Files) -> None:
    wanted = {path.split("/")[0] for path in files}
    for entry in list(directory.iterdir()):
        if entry.is_symlink() and entry.name != _DATA and entry.name not in wanted:
            entry.unlink()
    for name in wanted:
        link = directory / name
        if not link.is_symlink():
            link.symlink_to(f"{_DATA}/{name}")


def _current(directory: Path) -> str | None:
    try:
        name = (directory / _DATA).readlink().name
    except FileNotFoundError:
        return None
    return name if (directory / name).is_dir() else None


def _read(version: Path) -> dict[str, bytes] | None:
    """The files of a version; None when one has a mode that forbids even its owner to read."""
    try:
        return {
            str(path.relative_to(version)): path.read_bytes()
            for path in version.rglob("*")
            if path.is_file()
        }
    except PermissionError:
        return None
