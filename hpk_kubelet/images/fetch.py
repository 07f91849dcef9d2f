"""From a registry to an unpacked directory: blobs downloaded and checked, layers applied.

Nothing here touches what other pulls see; the store puts the finished directory in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import hpk_kubelet
from hpk_kubelet.images.errors import ImagePullError
from hpk_kubelet.images.manifest import Descriptor, Manifest
from hpk_kubelet.images.registry import Repository

_PARALLEL = 3  # downloads at once for one image, as containerd does
HEARTBEAT = 60.0  # seconds; a working directory untouched for much longer belongs to nobody

Progress = Callable[[int, int], None]


def check(body: bytes, digest: str) -> bytes:
    """`body`, when it is what `digest` says."""
    algorithm, _, expected = digest.partition(":")
    if hashlib.new(algorithm, body).hexdigest() != expected:
        raise ImagePullError(f"content does not match its digest {digest}")
    return body


async def unpack_layers(
    repository: Repository, manifest: Manifest, work: Path, progress: Progress | None
) -> int:
    """Fills `work/rootfs`; returns the bytes its files take. Raises ImagePullError."""
    rootfs = work / "rootfs"
    rootfs.mkdir(mode=0o755)
    total = sum(layer.size for layer in manifest.layers)
    slots = asyncio.Semaphore(_PARALLEL)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    async def fetch(number: int, layer: Descriptor) -> Path:
        path = work / f"layer-{number}"
        async with slots:
            await _download(repository, layer, path, advance)
        return path

    async with _unpacker(rootfs) as process, _alive(work):
        # Downloads run ahead while layers are applied in order.
        fetches = [
            asyncio.create_task(fetch(number, layer))
            for number, layer in enumerate(manifest.layers)
        ]
        ended = asyncio.create_task(process.wait())
        try:
            for task in fetches:
                await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    break  # it has said why
                await _tell(process, {"layer": str(task.result())})
            await _tell(process, {"end": True})
            assert process.stdout is not None
            answer = await process.stdout.readline()
        finally:
            ended.cancel()
            for task in fetches:
                task.cancel()
            await asyncio.gather(*fetches, ended, return_exceptions=True)
    try:
        result = json.loads(answer)
    except ValueError:
        raise ImagePullError(
            f"failed to unpack: the unpacking process ended with {process.returncode}"
        ) from None
    if "error" in result:
        raise ImagePullError(f"failed to unpack: {result['error']}")
    return int(result["disk"])


async def _tell(process: Process, order: dict[str, object]) -> None:
    """An unpacker that stopped listening has said why; its answer is read at the end."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await process.stdin.drain()


@asynccontextmanager
async def _unpacker(rootfs: Path) -> AsyncIterator[Process]:
    package = Path(hpk_kubelet.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "utf8", "-m", "hpk_kubelet.images.unpack", str(rootfs)),
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        yield process
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    finally:
        await process.wait()


@asynccontextmanager
async def _alive(work: Path) -> AsyncIterator[None]:
    """Keeps the working directory's time young, so that gc lets it be."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            await asyncio.to_thread(os.utime, work)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _download(
    repository: Repository, blob: Descriptor, path: Path, advance: Callable[[int], None]
) -> None:
    """The blob as a file, checked against its digest while it is written."""
    algorithm, _, expected = blob.digest.partition(":")
    hasher = hashlib.new(algorithm)
    with path.open("xb", buffering=0) as file:

        def restart() -> None:
            nonlocal hasher
            advance(-file.tell())
            hasher = hashlib.new(algorithm)
            file.seek(0)
            file.truncate()

        def write(chunk: bytes) -> None:
            hasher.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]

        try:
            async for chunk in repository.blob(blob.digest, blob.size, restart):
                # Off the loop: hashing is work, and a full network file system blocks.
                await asyncio.to_thread(write, chunk)
                advance(len(chunk))
        except OSError as e:
            raise ImagePullError(f"{e.filename or path}: {e.strerror or e}") from None
    if hasher.hexdigest() != expected:
        raise ImagePullError(
            f"content does not match its digest: got {algorithm}:{hasher.hexdigest()}, "
            f"want {blob.digest}"
        )
