"""`hpk fetch`: obtains the pinned components that this machine does not have yet.

A component appears in the cache by one rename of a finished directory: what an interrupted
fetch leaves behind is never used, and removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpk_kubelet.controlplane.components import (
    DATA,
    Found,
    Recipe,
    cache_root,
    find,
    recipe,
    recipes,
)
from hpk_kubelet.controlplane.progress import Progress
from hpk_kubelet.errors import HPKError

GO_MINIMUM = (1, 26)


def fetch(names: Sequence[str], mirror: str = "") -> list[Found]:
    """Obtains the named components, or all that are not optional; HPKError at the first that
    can't be had. Those that are here already cost nothing."""
    wanted = [recipe(n) for n in names] or [r for r in recipes().values() if not r.optional]
    missing = [r for r in wanted if find(r.name) is None]
    for number, item in enumerate(missing, 1):
        with Progress(f"{item.name} v{item.version} ({number}/{len(missing)})") as progress:
            obtain(item, mirror, progress)
    return [found for r in wanted if (found := find(r.name))]


def obtain(item: Recipe, mirror: str, progress: Progress) -> Path:
    """Downloads or builds one component into the cache, once however many ask at once."""
    home = cache_root() / item.name
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home, progress):
        if item.cached.is_file():  # another process had the lock and did it
            return item.cached
        for stale in home.glob(".tmp-*"):
            _remove_tree(stale)
        work = Path(tempfile.mkdtemp(prefix=".tmp-", dir=home))
        try:
            done = work / "done"
            done.mkdir()
            target = done / item.name
            if item.url and item.sha256:
                address = mirrored(item.url, mirror)
                download(address, item, target, work, progress)
                origin = address
            else:
                build(item, target, work, progress)
                origin = f"built from {item.package}"
            target.chmod(0o755)
            (done / "origin").write_text(origin + "\n")
            with contextlib.suppress(OSError):
                # Where locks don't work another one may have been quicker: its result stays.
                done.rename(item.cached.parent)
            if not item.cached.is_file():
                raise HPKError(f"cannot put {item.name} into {item.cached.parent}")
        finally:
            _remove_tree(work)
    return item.cached


def mirrored(url: str, mirror: str) -> str:
    """`https://host/path` as the mirror serves it: `MIRROR/host/path`."""
    return f"{mirror.rstrip('/')}/{url.removeprefix('https://')}" if mirror else url


@contextlib.contextmanager
def _lock(home: Path, progress: Progress) -> Iterator[None]:
    with (home / ".lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.update("waiting for another hpk fetch that is at it")
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks (some Lustre mounts): two would do the work twice, and
            # the rename still lets only one result in.
            progress.update("this file system has no locks")
        yield


def _remove_tree(path: Path) -> None:
    # Go writes its vendored and cached sources read-only.
    for directory in [path, *(p for p in path.rglob("*") if p.is_dir() and not p.is_symlink())]:
        directory.chmod(0o700)
    shutil.rmtree(path)


def download(url: str, item: Recipe, target: Path, work: Path, progress: Progress) -> None:
    """Fetches `url` (HTTPS_PROXY honoured), verifies it and takes the program out of it."""
    archive = work / "archive"
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as f:
            size = int(response.headers.get("Content-Length") or 0)
            done = 0
            while chunk := response.read(1 << 20):
                f.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress.update(
                    f"downloading, {done >> 20} MB" + (f" of {size >> 20} MB" if size else "")
                )
    except (urllib.error.URLError, OSError) as e:
        reason = getattr(e, "reason", e)
        raise HPKError(
            f"cannot download {url}: {reason}; behind a proxy set HTTPS_PROXY, or name a mirror "
            "in config.yaml (`mirror`)"
        ) from None
    if digest.hexdigest() != item.sha256:
        raise HPKError(
            f"{url} is not what HPK pins: its sha256 is {digest.hexdigest()}, "
            f"not {item.sha256}; nothing of it was kept"
        )
    if not item.member:
        archive.rename(target)
        return
    try:
        with tarfile.open(archive) as tar:
            source = tar.extractfile(item.member)
            if source is None:
                raise KeyError(item.member)
            with source, target.open("wb") as f:
                shutil.copyfileobj(source, f)
    except (tarfile.TarError, KeyError):
        raise HPKError(f"{url} has no file {item.member} in it") from None


def go_environment(go: str, cgo: bool) -> dict[str, str]:
    """The environment of a build; HPKError when there is no Go that can do it."""
    env = {**os.environ, "GOWORK": "off", "CGO_ENABLED": "1" if cgo else "0"}
    # GOTOOLCHAIN=local takes no newer toolchain from the network, auto does when it has to.
    local = {**env, "GOTOOLCHAIN": "local"}
    done = subprocess.run(
        [go, "env", "GOVERSION"], capture_output=True, text=True, env=local, check=False, cwd="/"
    )
    match = re.match(r"go(\d+)\.(\d+)", done.stdout)
    if match is None:
        raise HPKError(f"{go} does not work: {' '.join(done.stderr.split())}")
    version = (int(match[1]), int(match[2]))
    if version >= GO_MINIMUM:
        return local
    # From 1.21 on, Go fetches the toolchain that go.mod asks for, unless that is forbidden.
    if version < (1, 21) or os.environ.get("GOTOOLCHAIN", "auto").startswith("local"):
        raise HPKError(
            f"{go} is {done.stdout.strip()}, and building needs Go "
            f"{'.'.join(map(str, GO_MINIMUM))} or newer: see https://go.dev/dl"
        )
    return {**env, "GOTOOLCHAIN": "auto"}


def build(item: Recipe, target: Path, work: Path, progress: Progress) -> None:
    """Builds the pinned Go module's package into `target`."""
    go = shutil.which("go")
    if go is None:
        raise HPKError(
            f"{item.name} v{item.version} is neither here nor has a pinned download, and "
            "building it needs Go on PATH (https://go.dev/dl); or name a directory that has it "
            "with HPK_COMPONENTS"
        )
    env = go_environment(go, item.cgo)
    source = DATA / "modules" / item.module
    mode = "-mod=readonly"
    if item.vendor:
        source = _vendored(go, item, source, work, env, progress)
        mode = "-mod=vendor"
    progress.update("resolving modules")
    _, listing = _run([go, "list", mode, "-deps", item.package], source, env, progress, item)
    packages = len(listing.splitlines())
    flags = ["-s", "-w", *item.ldflags]
    if item.cgo:
        flags += ["-linkmode", "external", "-extldflags", "-static"]
    argv = [go, "build", "-v", mode, "-trimpath", "-buildvcs=false", "-ldflags", " ".join(flags)]
    _run([*argv, "-o", str(target), item.package], source, env, progress, item, packages)


def _vendored(
    go: str, item: Recipe, source: Path, work: Path, env: Mapping[str, str], progress: Progress
) -> Path:
    """A copy of the module with its dependencies inside, and our files put among them."""
    copy = work / "module"
    copy.mkdir()
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(source / name, copy / name)
    progress.update("copying its dependencies")
    _run([go, "mod", "vendor"], copy, env, progress, item)
    for target, ours in item.vendor.items():
        shutil.copyfile(source / ours, copy / "vendor" / target)
    return copy


def _run(
    argv: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    progress: Progress,
    item: Recipe,
    packages: int = 0,
) -> tuple[str, str]:
    """Runs a Go command to its end, showing the packages it names; (stderr's last, stdout)."""
    last: list[str] = []
    compiled = 0
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            for line in process.stderr:
                last = [*last[-5:], line.strip()]
                if line.startswith("go: downloading"):
                    progress.update(line.strip().removeprefix("go: "))
                elif packages:
                    compiled += 1
                    progress.update(f"compiled {compiled} of at most {packages} packages")
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the compilers too
            process.wait()
            raise
        if code:
            words = "; ".join(line for line in last if line and not line.startswith("#"))
            raise HPKError(f"building {item.name} v{item.version} failed: {words}")
        out.seek(0)
        return "\n".join(last), out.read()
