"""Paths, the one error type, progress lines and child processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

CHECKOUT = Path(__file__).resolve().parents[2]
"""The checkout this sandbox installs into the nodes."""

CLEAN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
"""The whole environment of what runs inside a node or the root file system."""


CONTAINED = (
    "setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child",
)  # fmt: skip
"""Before a command that builds something: when we die, so does all it started, with its mounts."""


class SandboxError(Exception):
    """One sentence for the user: what failed, where, and what to do."""


def cache_dir() -> Path:
    """The user's cache (`$XDG_CACHE_HOME/hpk`); under sudo, that of who called it."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "hpk"
    user = os.environ.get("SUDO_USER")
    home = Path(pwd.getpwnam(user).pw_dir) if user else Path.home()
    return home / ".cache" / "hpk"


NAME = os.environ.get("HPK_SANDBOX") or "hpk"
"""Tells sandboxes on one machine apart: in paths, interfaces and network namespaces."""


def run_dir() -> Path:
    """What a sandbox keeps: homes, logs, the registry's blobs."""
    return Path(os.environ.get("HPK_SANDBOX_DIR") or f"/var/lib/{NAME}-sandbox").absolute()


def say(text: str) -> None:
    """A progress line; on stderr, so that a command's own output stays clean."""
    print(f"sandbox: {text}", file=sys.stderr, flush=True)


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    check: bool = True,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command and returns its output; raises SandboxError with its last words."""
    words = [str(a) for a in argv]
    try:
        done = subprocess.run(
            words, env=env, input=input, capture_output=True, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL if input is None else None,
        )  # fmt: skip
    except FileNotFoundError:
        raise SandboxError(f"{words[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise SandboxError(f"{' '.join(words)} did not end within {timeout} s") from None
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise SandboxError(f"{' '.join(words)} failed ({done.returncode}): {' / '.join(said)}")
    return done


def run_long(
    title: str,
    argv: Sequence[str | Path],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs something that takes a while, its output to `log`, with a line every ten seconds."""
    say(f"{title} …")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("ab") as out:
        child = subprocess.Popen(
            [str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
        )
        try:
            while True:
                try:
                    code = child.wait(10)
                    break
                except subprocess.TimeoutExpired:
                    say(f"  {title}: {time.monotonic() - start:.0f} s, {last_line(log)[:90]}")
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if code:
        raise SandboxError(f"{title} failed ({code}): {last_line(log)}; all of it is in {log}")
    say(f"  {title}: done in {time.monotonic() - start:.0f} s")


def last_line(path: Path) -> str:
    """The last line of a log that says something; apt's 'W:' and progress bars included."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def wait_for(what: str, ready: Callable[[], bool], seconds: float, interval: float = 0.05) -> None:
    """Polls until `ready()`; raises SandboxError naming `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise SandboxError(
                f"waited {seconds:.0f} s in vain for {what}; see {run_dir() / 'log'}"
            )
        time.sleep(interval)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[IO[str]]:
    """One at a time: a second caller waits, and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another sandbox command (it holds {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that becomes it when the block ends well.

    What an interrupted build left is removed first and never used.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with lock(target.parent / ".lock"):
        temporary = target.parent / f"{target.name}.building"
        remove(temporary)
        yield temporary
        if not target.exists():
            temporary.rename(target)
        remove(temporary)


def remove(path: Path) -> None:
    """Removes a file or a tree; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
