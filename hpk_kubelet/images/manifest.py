"""OCI and Docker schema 2 documents, decoded: indexes, manifests, image configs. Pure.

Source: the OCI image specification v1.1 (image-index.md, manifest.md, config.md).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from hpk_kubelet.images.errors import ImagePullError
from hpk_kubelet.images.reference import is_digest
from hpk_kubelet.images.registry import INDEX_TYPES, MANIFEST_TYPES

T = TypeVar("T")

# `uname -m` → GOARCH, variant
_MACHINES = {
    "x86_64": ("amd64", ""),
    "amd64": ("amd64", ""),
    "aarch64": ("arm64", "v8"),
    "arm64": ("arm64", "v8"),
    "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"),
    "i686": ("386", ""),
    "ppc64le": ("ppc64le", ""),
    "riscv64": ("riscv64", ""),
    "s390x": ("s390x", ""),
}


class Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    platform: Platform | None = None

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise ValueError(f"unsupported digest {self.digest!r}")
        if self.size < 0:
            raise ValueError(f"negative size of {self.digest}")


class Manifest(msgspec.Struct, frozen=True):
    config: Descriptor
    layers: list[Descriptor]

    @property
    def size(self) -> int:
        """Bytes as stored in the registry: what the kubelet reports as the image's size."""
        return self.config.size + sum(layer.size for layer in self.layers)


class Index(msgspec.Struct, frozen=True):
    manifests: list[Descriptor]


class ImageRunConfig(msgspec.Struct, frozen=True):
    """What the image says about running it."""

    entrypoint: list[str] = []
    cmd: list[str] = []
    env: dict[str, str] = {}
    working_dir: str = ""  # "" means /
    user: str = ""  # as written: "", "1000", "1000:100", "nobody:users"; see users.resolve_user
    volumes: list[str] = []
    stop_signal: str = ""  # "" means SIGTERM
    ports: list[str] = []  # 8080/tcp


class _Config(msgspec.Struct, frozen=True, rename="pascal"):
    entrypoint: list[str] | str | None = None
    cmd: list[str] | str | None = None
    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    volumes: dict[str, Any] | None = None
    stop_signal: str | None = None
    exposed_ports: dict[str, Any] | None = None


class _ImageDocument(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    config: _Config | None = None


def this_platform() -> Platform:
    machine = platform.machine()
    architecture, variant = _MACHINES.get(machine, (machine, ""))
    return Platform(architecture, "linux", variant)


def media_type(body: bytes, declared: str) -> str:
    """The document's own mediaType, else the header's, else what its shape says."""
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError as e:
        raise ImagePullError(f"the manifest is not JSON: {e}") from None
    if not isinstance(document, Mapping):
        raise ImagePullError("the manifest is not a JSON object")
    known = (*INDEX_TYPES, *MANIFEST_TYPES)
    for candidate in (document.get("mediaType"), declared):
        if candidate in known:
            return str(candidate)
    if document.get("schemaVersion") == 2:
        if "manifests" in document:
            return INDEX_TYPES[0]
        if "layers" in document and "config" in document:
            return MANIFEST_TYPES[0]
    raise ImagePullError(
        f"unsupported manifest media type {document.get('mediaType') or declared or 'unknown'}"
    )


def choose(body: bytes, wanted: Platform) -> Descriptor:
    """The entry of an index for this machine, containerd's preference among variants."""
    candidates = [
        entry
        for entry in _decode(body, Index, "image index").manifests
        if entry.media_type in ("", *INDEX_TYPES, *MANIFEST_TYPES)
        and (
            entry.platform is None
            or (entry.platform.os, entry.platform.architecture) == (wanted.os, wanted.architecture)
        )
    ]

    # The exact variant, one that says none, an older one (v8 machines run v7), then unlabelled.
    def rank(entry: Descriptor) -> tuple[int, str]:
        if entry.platform is None:
            return 3, ""
        variant = entry.platform.variant
        if variant == wanted.variant:
            return 0, ""
        return (1, "") if not variant else (2, variant)

    usable = [e for e in candidates if not e.platform or _runs(e.platform.variant, wanted)]
    if not usable:
        raise ImagePullError(f"no match for platform {wanted} in the image index: not found")
    return min(usable, key=rank)


def _runs(variant: str, wanted: Platform) -> bool:
    if not variant or variant == wanted.variant:
        return True
    if wanted.architecture == "amd64":
        return variant == "v1"  # v2 and up need what the oldest node of a cluster may not have
    return bool(wanted.variant) and variant < wanted.variant


def parse_manifest(body: bytes) -> Manifest:
    manifest = _decode(body, Manifest, "image manifest")
    for layer in manifest.layers:
        if layer.media_type and ".tar" not in layer.media_type:
            raise ImagePullError(
                f"not a container image: a layer's media type is {layer.media_type}"
            )
    return manifest


def parse_config(body: bytes, wanted: Platform) -> ImageRunConfig:
    """Raises ImagePullError for an image of another architecture, in containerd's words."""
    document = _decode(body, _ImageDocument, "image config")
    made_for = Platform(document.architecture, document.os)
    if (document.os and document.os != wanted.os) or (
        document.architecture and document.architecture != wanted.architecture
    ):
        raise ImagePullError(
            f"no match for platform in manifest: the image is for {made_for}, this is {wanted}"
        )
    config = document.config or _Config()
    pairs = (item.partition("=") for item in config.env or [])
    return ImageRunConfig(
        entrypoint=_words(config.entrypoint),
        cmd=_words(config.cmd),
        env={name: value for name, _, value in pairs if name},
        working_dir=config.working_dir or "",
        user=config.user or "",
        volumes=sorted(config.volumes or {}),
        stop_signal=config.stop_signal or "",
        ports=sorted(config.exposed_ports or {}),
    )


def _words(value: list[str] | str | None) -> list[str]:
    return [value] if isinstance(value, str) and value else list(value or [])


def _decode(body: bytes, shape: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, ValueError) as e:
        raise ImagePullError(f"malformed {what}: {e}") from None
