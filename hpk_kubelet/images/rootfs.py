"""Paths inside an unpacked image, resolved as the container would: symlinks never lead outside.

Only for trees nobody else writes to: the checks and the use are two steps.
"""

from __future__ import annotations

import errno
import os
import stat

MAX_LINKS = 255  # as the kernel's own limit is for: symlinks that lead in circles


def clean(name: str) -> str:
    """A tar member's name as a path below the root: no leading slash, no `.`, no `..`."""
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def resolve(root: str, path: str, *, make_directories: bool = False) -> str:
    """The real path of `path` in `root`, following every symlink within `root`.

    What is missing stays as written, or with `make_directories` becomes directories (0755).
    Raises NotADirectoryError where a file is in the way, OSError(ELOOP) for endless links.
    """
    done: list[str] = []
    todo = path.split("/")[::-1]
    links = 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if done:
                done.pop()
            continue
        here = "/".join((root, *done, part))
        try:
            mode = os.lstat(here).st_mode
        except FileNotFoundError:
            if make_directories:
                os.mkdir(here, 0o755)  # noqa: PTH102
                os.chmod(here, 0o755)  # noqa: PTH101
        else:
            if stat.S_ISLNK(mode):
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), here)
                target = os.readlink(here)  # noqa: PTH115
                if target.startswith("/"):
                    done.clear()
                todo.extend(target.split("/")[::-1])
                continue
            if not stat.S_ISDIR(mode) and (todo or make_directories):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), here)
        done.append(part)
    return "/".join((root, *done))
