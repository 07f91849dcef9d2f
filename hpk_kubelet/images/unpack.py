"""Applies an image's layers to a directory, as an ordinary user: `python -m … DIRECTORY`.

A process of its own, so that neither the kubelet's loop nor its memory feels a large image. It is
told on standard input, one JSON object a line: `{"layer": PATH}` for each layer in order (removed
once applied), then `{"end": true}`. It answers with one line: `{"disk": BYTES}` or
`{"error": WORDS}`.

Layer semantics: OCI image specification v1.1, layer.md, and containerd's pkg/archive/tar.go.
What an ordinary user can't have is left out: owners, devices, extended attributes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import shutil
import stat
import sys
import tarfile
import zlib
from collections.abc import Callable
from typing import IO, Any, Protocol, cast

from hpk_kubelet.images.rootfs import clean, resolve

_CHUNK = 1 << 20
_BUFFER = 1 << 16  # of streams: larger ones are copied more often than they save calls
_MEMORY = 1 << 30  # bytes of address space: a hostile header must not take the control job's memory
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
# What the runtime binds something over, whatever the image forgot to bring.
_DIRECTORIES = ("dev", "etc", "home", "proc", "root", "run", "sys", "tmp", "var/tmp")
_FILES = tuple(f"etc/{name}" for name in ("group", "hostname", "hosts", "passwd", "resolv.conf"))

# A file system without hard links, or not between directories, or not so many: copies then.
_NO_LINKS = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EXDEV)


class LayerError(Exception):
    """The layer can't be applied; the message says which entry and why."""


class _Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Gunzip:
    """A gzip stream of any number of members (eStargz has one per file)."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._inflate = zlib.decompressobj(wbits=31)
        self._input = b""
        self._begun = False

    def read(self, size: int, /) -> bytes:
        while True:
            if self._inflate.eof:
                self._input = self._inflate.unused_data.lstrip(b"\0")
                self._inflate = zlib.decompressobj(wbits=31)
                self._begun = False
            if not self._input:
                self._input = self._raw.read(_BUFFER)
                if not self._begun:
                    self._input = self._input.lstrip(b"\0")
            if not self._input:
                if self._begun:
                    raise LayerError("the gzip stream is cut short")
                return b""
            self._begun = True
            out = self._inflate.decompress(self._input, size)
            self._input = self._inflate.unconsumed_tail
            if out:
                return out


def _decompress(raw: IO[bytes]) -> _Reader:
    """By content, not by media type: both are wrong now and then, the content less often."""
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return _Gunzip(raw)
    if magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5):
        import zstandard  # only where it is needed: gzip is nearly all there is

        return zstandard.ZstdDecompressor().stream_reader(raw, _BUFFER, read_across_frames=True)
    return raw


class Unpacker:
    """Applies layers to `root`, an existing directory that nobody else touches."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.disk = 0  # bytes in regular files
        self._parents: dict[str, str] = {}  # path as named → real directory
        self._times: dict[str, tuple[int, float]] = {}  # directories of this layer: mode, mtime
        self._added: set[str] = set()  # real paths of this layer and all above them

    def apply(self, layer: IO[bytes]) -> None:
        """One layer. Raises LayerError, or OSError when the disk refuses."""
        self._times.clear()
        self._added.clear()
        try:
            # Not a `with`: closing would read the rest of a stream that failed.
            tar = tarfile.open(  # noqa: SIM115
                fileobj=cast("IO[bytes]", _decompress(layer)),  # all that is asked of it is read
                mode="r|",
                bufsize=_BUFFER,
                encoding="utf-8",
                errors="surrogateescape",
            )
            while (member := tar.next()) is not None:
                self._entry(tar, member)
                cast(Any, tar).members.clear()  # else all stay in memory
        except tarfile.ReadError as e:
            if str(e) != "empty file":
                raise LayerError(f"malformed tar: {e}") from None
        except (tarfile.TarError, zlib.error, EOFError, ValueError, UnicodeError) as e:
            raise LayerError(f"malformed layer: {e}") from None
        except Exception as e:
            if type(e).__name__ == "ZstdError":
                raise LayerError(f"malformed layer: {e}") from None
            raise
        for path, (mode, mtime) in reversed(self._times.items()):
            os.chmod(path, mode)  # noqa: PTH101
            os.utime(path, (mtime, mtime))

    def finish(self) -> None:
        """Makes what the runtime mounts over, then puts everything on the disk."""
        for name in _DIRECTORIES:
            path = resolve(self.root, name)
            if not os.path.lexists(path):
                os.makedirs(path)  # noqa: PTH103
                if name.endswith("tmp"):
                    os.chmod(path, 0o1777)  # noqa: PTH101
        for name in _FILES:
            path = resolve(self.root, name)
            if not os.path.lexists(path):
                os.makedirs(path.rpartition("/")[0], exist_ok=True)  # noqa: PTH103
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        fd = os.open(self.root, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), self.root)
        finally:
            os.close(fd)

    def _entry(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = clean(member.name)
        folder, _, base = name.rpartition("/")
        try:
            if not base:
                self._times[self.root] = (_directory_mode(member), _mtime(member))
                return
            parent = self._parent(folder)
            if base.startswith(_WHITEOUT):
                self._whiteout(parent, base)
            else:
                self._place(tar, member, f"{parent}/{base}")
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):  # not the image's fault
                raise
            raise LayerError(f"{name}: {e.strerror or e}") from None

    def _parent(self, folder: str) -> str:
        known = self._parents.get(folder)
        if known is None:
            known = resolve(self.root, folder, make_directories=True)
            self._parents[folder] = known
        return known

    def _place(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if member.isdir():
            self._make(path, lambda: os.mkdir(path, 0o700), directory=True)  # noqa: PTH102
            self._times.pop(path, None)  # the order is that of the last mention
            self._times[path] = (_directory_mode(member), _mtime(member))
        elif member.issym():
            self._make(path, lambda: os.symlink(member.linkname, path))  # noqa: PTH211
            os.utime(path, (_mtime(member),) * 2, follow_symlinks=False)
        elif member.islnk():
            self._hardlink(member, path)
        elif member.isfifo():
            self._make(path, lambda: os.mkfifo(path, 0o600))
            os.chmod(path, member.mode & 0o7777 | 0o600)  # noqa: PTH101
        elif member.ischr() or member.isblk():
            return  # the runtime brings its own /dev
        else:
            self._file(tar, member, path)
        self._note(path)

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = self._make(path, lambda: os.open(path, flags, 0o600))
        try:
            # Straight from the stream, which stands at the data; sparse files need tarfile's help.
            source: Any = tar.extractfile(member) if member.issparse() else tar.fileobj
            left = member.size
            while left:
                chunk = source.read(min(left, _CHUNK))
                if not chunk:
                    raise LayerError(f"{member.name}: the layer is cut short")
                left -= len(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
            os.fchmod(fd, member.mode & 0o7777 | 0o400)
            os.utime(fd, (_mtime(member),) * 2)
        finally:
            os.close(fd)
        self.disk += member.size

    def _hardlink(self, member: tarfile.TarInfo, path: str) -> None:
        folder, _, base = clean(member.linkname).rpartition("/")
        target = f"{self._parent(folder)}/{base}"
        if target == path:
            return
        if stat.S_ISDIR(os.lstat(target).st_mode):
            raise LayerError(f"{member.name}: a hard link to a directory")
        try:
            self._make(path, lambda: os.link(target, path, follow_symlinks=False))
        except OSError as e:
            if e.errno not in _NO_LINKS:
                raise
            shutil.copy2(target, path, follow_symlinks=False)
            self.disk += os.lstat(path).st_size

    def _make(self, path: str, make: Callable[[], Any], *, directory: bool = False) -> Any:
        """Creates `path`; what a lower layer or an earlier entry left there gives way."""
        try:
            return make()
        except FileExistsError:
            if directory and stat.S_ISDIR(os.lstat(path).st_mode):
                return None
            self._remove(path)
            return make()

    def _whiteout(self, parent: str, base: str) -> None:
        if base == _OPAQUE:
            self._remove_lower(parent)
        elif not base.startswith(_WHITEOUT * 2):  # others of these are AUFS's own bookkeeping
            name = base.removeprefix(_WHITEOUT)
            if name in ("", ".", ".."):
                raise LayerError(f"{base}: not a whiteout")
            path = f"{parent}/{name}"
            if path in self._added:
                self._remove_lower(path)
            elif os.path.lexists(path):
                self._remove(path)

    def _remove_lower(self, path: str) -> None:
        """Removes from a directory what this layer did not put there."""
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return
        for name in os.listdir(path):  # noqa: PTH208
            child = f"{path}/{name}"
            if child in self._added:
                self._remove_lower(child)
            else:
                self._remove(child)

    def _remove(self, path: str) -> None:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            # A path that led through it leads elsewhere now.
            self._parents.clear()
        if not stat.S_ISDIR(info.st_mode):
            if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
                self.disk -= info.st_size
            os.unlink(path)  # noqa: PTH108
            return
        for name in os.listdir(path):  # noqa: PTH208
            self._remove(f"{path}/{name}")
        os.rmdir(path)  # noqa: PTH106
        # Whatever comes to this place next must not be taken for the directory that was here.
        self._parents.clear()
        self._times.pop(path, None)

    def _note(self, path: str) -> None:
        while path not in self._added and path != self.root:
            self._added.add(path)
            path = path.rpartition("/")[0]


def _directory_mode(member: tarfile.TarInfo) -> int:
    return member.mode & 0o7777 | 0o700  # else neither the user nor gc could enter


def _mtime(member: tarfile.TarInfo) -> float:
    return min(max(float(member.mtime), 0.0), 2.0**32 - 1)  # what every file system can hold


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    os.umask(0o022)
    os.nice(5)
    unpacker = Unpacker(sys.argv[1])
    answer: dict[str, Any] = {"error": "the kubelet went away"}
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if order.get("end"):
                unpacker.finish()
                answer = {"disk": unpacker.disk}
                break
            with open(order["layer"], "rb") as layer:  # noqa: PTH123
                unpacker.apply(layer)
            os.unlink(order["layer"])  # noqa: PTH108
    except LayerError as e:
        answer = {"error": str(e)}
    except OSError as e:
        answer = {"error": f"{e.filename or sys.argv[1]}: {e.strerror or e}"}
    except (MemoryError, RecursionError):
        answer = {"error": "a layer needs more memory to unpack than is reasonable"}
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer), flush=True)
    return "error" in answer


if __name__ == "__main__":
    sys.exit(main())
