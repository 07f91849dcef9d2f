"""The image cache: one unpacked directory per digest, shared by every pod on every node.

On disk, below the root (0700), all on one file system:
    digests/SHA256-HEX/image.json, rootfs/   an image; renamed into place whole, then never written
    digests/SHA256-HEX/used                  its time says when the image was last asked for
    refs/ARCH-HASH.json                      what a reference stands for, on this architecture
    tmp/…                                    work in progress; whatever a crash leaves is old there
Two processes that pull the same image at once both work; the one that renames second discards.
No locks: Lustre and NFS may not have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec

from hpk_kubelet.config import Config, cache_dir
from hpk_kubelet.errors import HPKError
from hpk_kubelet.images.auth import Credential, Keyring, node_keyring
from hpk_kubelet.images.errors import ImagePullError, Reason
from hpk_kubelet.images.fetch import Progress, check, unpack_layers
from hpk_kubelet.images.image import Image, pulled_message
from hpk_kubelet.images.manifest import (
    ImageRunConfig,
    Manifest,
    Platform,
    choose,
    media_type,
    parse_config,
    parse_manifest,
    this_platform,
)
from hpk_kubelet.images.reference import Reference, is_digest, parse_reference
from hpk_kubelet.images.registry import INDEX_TYPES, Connections, RegistryRefusal, Repository

__all__ = ["Image", "ImageStore", "Policy", "default_root", "pulled_message"]

Policy = Literal["Always", "IfNotPresent", "Never"]
_PULLS = 3  # images at once: each costs a process and its memory in the control job
_TOUCH = 60.0  # seconds between two notes that an image is in use; gc waits much longer


class StoredImage(msgspec.Struct, frozen=True):
    """image.json"""

    config: ImageRunConfig
    size: int
    disk: int


class StoredReference(msgspec.Struct, frozen=True):
    """refs/*.json"""

    reference: str
    id: str
    digest: str


class _Shared:
    """A pull and how many wait for it: the last one to leave ends it."""

    def __init__(self, task: asyncio.Task[float]) -> None:
        self.task = task
        self.waiting = 0


def default_root(config: Config) -> Path:
    if config.images.cache:
        return Path(config.images.cache).expanduser().absolute()
    return cache_dir().absolute() / "images"


class ImageStore:
    """The cache at `root`. `insecure`: registries (`host[:port]`) spoken to over http."""

    def __init__(
        self, root: Path, insecure: Collection[str] = (), platform: Platform | None = None
    ) -> None:
        self.root = root
        self.digests = root / "digests"
        self.refs = root / "refs"
        self.tmp = root / "tmp"
        self._platform = platform or this_platform()
        self._connections = Connections(insecure)
        self._known: dict[str, tuple[tuple[int, int], Image]] = {}
        self._touched: dict[str, float] = {}
        self._pulls: dict[str, _Shared] = {}
        self._slots = asyncio.Semaphore(_PULLS)

    async def close(self) -> None:
        await self._connections.close()

    async def pull(
        self,
        reference: str,
        policy: Policy,
        auths: Keyring | None = None,
        on_pulling: Callable[[], None] | None = None,
        on_progress: Progress | None = None,
    ) -> Image:
        """The image, as imagePullPolicy says. `on_pulling` is called before a registry is asked.

        Raises ImagePullError, whose reason and text are the container's waiting state.
        """
        ref = parse_reference(reference)
        started = time.monotonic()
        try:
            if policy != "Always":
                found = self.find(ref)
                if found is not None:
                    return found
                if policy == "Never":
                    raise ImagePullError(
                        f'Container image "{reference}" is not present with pull policy of Never',
                        "ErrImageNeverPull",
                    )
            if on_pulling:
                on_pulling()
            repository, digest, found = await self._resolve(ref, auths or Keyring())
            waited = 0.0
            if found is None:
                found, waited = await self._obtain(repository, ref, digest, on_progress)
        except HPKError as e:
            # A new one: what a shared pull raises goes to everyone who waited for it.
            reason = e.reason if isinstance(e, ImagePullError) else "ErrImagePull"
            raise ImagePullError(_failure(ref, str(e), reason), reason) from None
        except OSError as e:
            why = f"{e.filename or self.root}: {e.strerror or e}"
            raise ImagePullError(_failure(ref, why, "ErrImagePull")) from None
        seconds = time.monotonic() - started - waited
        return msgspec.structs.replace(found, pulled=True, pull_seconds=seconds)

    def find(self, ref: Reference) -> Image | None:
        """The image, when the cache has it: one stat when it was asked for before."""
        path = self._ref_path(str(ref))
        try:
            info = os.stat(path)  # noqa: PTH116 - this is the start of every pod
        except FileNotFoundError:
            return None
        version = (info.st_ino, info.st_mtime_ns)
        known = self._known.get(path)
        if known is None or known[0] != version:
            image = self._load(path)
            if image is None:
                return None
            known = self._known[path] = (version, image)
        self._touch(known[1].digest)
        return known[1]

    def directory(self, digest: str) -> Path:
        return self.digests / digest.replace(":", "-")

    async def _resolve(
        self, ref: Reference, auths: Keyring
    ) -> tuple[Repository, str, Image | None]:
        """Asks the registry what `ref` is now, with each credential that fits in turn.

        The image comes back when it is here already.
        """
        errors: list[ImagePullError] = []
        credentials: list[Credential | None] = [*(auths + node_keyring()).lookup(ref.name)]
        for credential in credentials or [None]:
            repository = Repository(self._connections, ref, credential)
            what = ref.digest or ref.tag
            try:
                try:
                    digest = await repository.digest_of(what)
                except RegistryRefusal as e:
                    if e.reason == "RegistryUnavailable":
                        raise
                    digest = ""  # the answer to a HEAD has no words; GET's has
                if not is_digest(digest):
                    body, _ = await repository.manifest(what)
                    digest = ref.digest or f"sha256:{hashlib.sha256(body).hexdigest()}"
            except ImagePullError as e:
                errors.append(e)
                continue
            if ref.digest and digest != ref.digest:
                raise ImagePullError(f"the registry answers {digest} for {ref}")
            found = self.find(Reference(ref.registry, ref.repository, "", digest))
            if found is not None:
                found = await self._name(ref, digest, found.digest) or found
            return repository, digest, found
        if len(errors) == 1:
            raise errors[0]
        raise ImagePullError(f"[{', '.join(map(str, errors))}]", errors[-1].reason)

    async def _obtain(
        self, repository: Repository, ref: Reference, digest: str, progress: Progress | None
    ) -> tuple[Image, float]:
        """Downloads, together with whoever wants the same now. Returns the image and the wait."""
        chosen = digest
        body, declared = await repository.manifest(digest)
        kind = media_type(check(body, digest), declared)
        for _ in range(2):  # an index may hold an index
            if kind not in INDEX_TYPES:
                break
            chosen = choose(body, self._platform).digest
            body, declared = await repository.manifest(chosen)
            kind = media_type(check(body, chosen), declared)
        waited = 0.0
        if self._described(chosen) is None:
            waited = await self._share(repository, chosen, parse_manifest(body), progress)
        image = await self._name(ref, digest, chosen)
        if image is None:
            raise ImagePullError(f"{self.directory(chosen)} was removed while it was pulled")
        return image, waited

    async def _share(
        self, repository: Repository, digest: str, manifest: Manifest, progress: Progress | None
    ) -> float:
        """Joins or starts the one download of `digest`; returns the seconds it waited its turn."""
        shared = self._pulls.get(digest)
        if shared is None:
            task = asyncio.create_task(self._download(repository, digest, manifest, progress))
            shared = self._pulls[digest] = _Shared(task)
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting or shared.task.done():
                shared.task.cancel()
                if self._pulls.get(digest) is shared:
                    del self._pulls[digest]

    async def _download(
        self, repository: Repository, digest: str, manifest: Manifest, progress: Progress | None
    ) -> float:
        started = time.monotonic()
        async with self._slots:
            waited = time.monotonic() - started
            document = manifest.config
            config = parse_config(
                check(await repository.small_blob(document.digest, document.size), document.digest),
                self._platform,
            )
            async with self._workspace() as work:
                disk = await unpack_layers(repository, manifest, work, progress)
                stored = StoredImage(config, manifest.size, disk)
                await asyncio.to_thread(_place, work, self.directory(digest), stored)
        return waited

    @asynccontextmanager
    async def _workspace(self) -> AsyncIterator[Path]:
        """A new directory in tmp; what is left of it at the end goes."""
        self._make_directories()
        work = self.tmp / f"pull-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        work.mkdir(mode=0o700)
        try:
            yield work
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    async def _name(self, ref: Reference, digest: str, chosen: str) -> Image | None:
        """Notes what `ref` stands for, by its digest and by its tag; returns the image."""
        image = None
        for name in (Reference(ref.registry, ref.repository, "", digest), ref):
            stored = StoredReference(str(name), ref.with_digest(digest), chosen)
            image = self.find(name)
            if image is None or (image.id, image.digest) != (stored.id, stored.digest):
                await asyncio.to_thread(self._write_reference, stored)
                image = self.find(name)
        return image

    def _write_reference(self, stored: StoredReference) -> None:
        temporary = self.tmp / f"ref-{uuid.uuid4().hex}"
        self._make_directories()
        _write(temporary, msgspec.json.encode(stored))
        temporary.rename(self._ref_path(stored.reference))

    def _make_directories(self) -> None:
        for directory in (self.root, self.digests, self.refs, self.tmp):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _load(self, path: str) -> Image | None:
        """None when the image behind the reference is gone: it is pulled again then."""
        try:
            stored = msgspec.json.decode(Path(path).read_bytes(), type=StoredReference)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        image = self._described(stored.digest)
        if image is None:
            return None
        return Image(
            reference=stored.reference,
            id=stored.id,
            digest=stored.digest,
            rootfs=self.directory(stored.digest) / "rootfs",
            config=image.config,
            size=image.size,
            disk=image.disk,
        )

    def _described(self, digest: str) -> StoredImage | None:
        """None where there is no such image, or its image.json is damaged."""
        try:
            text = (self.directory(digest) / "image.json").read_bytes()
            return msgspec.json.decode(text, type=StoredImage)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _touch(self, digest: str) -> None:
        now = time.monotonic()
        if now - self._touched.get(digest, -_TOUCH) >= _TOUCH:
            self._touched[digest] = now
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.directory(digest) / "used")

    def _ref_path(self, name: str) -> str:
        key = hashlib.sha256(name.encode()).hexdigest()[:40]
        return f"{self.refs}/{self._platform.architecture}-{key}.json"


def _place(work: Path, final: Path, stored: StoredImage) -> None:
    """Makes a finished working directory the image."""
    _write(work / "image.json", msgspec.json.encode(stored))
    (work / "used").touch()
    try:
        work.rename(final)
    except OSError as e:
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        # Another process was first. Its image is this one: the digest says so. Or it was here
        # and its image.json damaged: pods may run on its rootfs, so that alone is made new.
        (work / "image.json").replace(final / "image.json")


def _write(path: Path, content: bytes) -> None:
    """A new file, 0600, on the disk before anyone can rename it into place."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:  # noqa: PTH123 - from a descriptor
        file.write(content)
        file.flush()
        os.fsync(fd)


def _failure(ref: Reference, why: str, reason: Reason) -> str:
    """containerd's words for the general case, the kubelet's for the others."""
    if reason == "ErrImageNeverPull":
        return why
    if reason == "RegistryUnavailable":
        return f"image pull failed for {ref} because the registry is unavailable: {why}"
    return f'failed to pull and unpack image "{ref}": {why}'
