"""Image layers and OCI archives, written with the standard library alone. Reproducible."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

MEDIA = "application/vnd.oci.image"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Layer:
    """A tar file that grows by files, directories and links; everything belongs to root. `out`
    may be a tar file already: what is added follows what it has."""

    def __init__(self, out: BinaryIO) -> None:
        self.made: set[str] = set()
        if out.seek(0, 2):
            out.seek(0)
            self.tar = tarfile.TarFile(fileobj=out, mode="a", format=tarfile.PAX_FORMAT)
            self.made = {member.name.removeprefix("./").rstrip("/") for member in self.tar}
        else:
            self.tar = tarfile.TarFile(fileobj=out, mode="w", format=tarfile.PAX_FORMAT)

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self.tar.close()

    def directory(self, path: str, mode: int = 0o755) -> None:
        name = path.strip("/")
        if not name or name in self.made:
            return
        self.directory(name.rpartition("/")[0])
        info = tarfile.TarInfo(name)
        info.type, info.mode = tarfile.DIRTYPE, mode
        self.tar.addfile(info)
        self.made.add(name)

    def file(self, path: str, data: Path | bytes, mode: int = 0o644) -> None:
        name = path.strip("/")
        self.directory(name.rpartition("/")[0])
        info = tarfile.TarInfo(name)
        info.mode = mode
        if isinstance(data, bytes):
            info.size = len(data)
            self.tar.addfile(info, io.BytesIO(data))
        else:
            info.size = data.stat().st_size
            with data.open("rb") as file:
                self.tar.addfile(info, file)

    def link(self, path: str, target: str) -> None:
        name = path.strip("/")
        self.directory(name.rpartition("/")[0])
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        self.tar.addfile(info)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_archive(layer: Path, config: Mapping[str, Any], target: Path) -> None:
    """Makes an OCI archive of one layer (an uncompressed tar). config: the image's run settings."""
    packed = target.with_suffix(".gz")
    with (
        layer.open("rb") as source,
        packed.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as zipped,
    ):
        shutil.copyfileobj(source, zipped, 1 << 20)
    image = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{file_digest(layer)}"]},
    }
    with target.open("wb") as out, Layer(out) as archive:

        def descriptor(media: str, data: bytes) -> dict[str, Any]:
            digest = hashlib.sha256(data).hexdigest()
            archive.file(f"blobs/sha256/{digest}", data)
            return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

        archive.file("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        digest = file_digest(packed)
        archive.file(f"blobs/sha256/{digest}", packed)
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{MEDIA}.manifest.v1+json",
            "config": descriptor(f"{MEDIA}.config.v1+json", json.dumps(image).encode()),
            "layers": [{
                "mediaType": f"{MEDIA}.layer.v1.tar+gzip",
                "digest": f"sha256:{digest}", "size": packed.stat().st_size,
            }],
        }  # fmt: skip
        index = {
            "schemaVersion": 2,
            "manifests": [descriptor(f"{MEDIA}.manifest.v1+json", json.dumps(manifest).encode())],
        }
        archive.file("index.json", json.dumps(index).encode())
    packed.unlink()
