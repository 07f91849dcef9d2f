"""Layers onto a directory: whiteouts, links, modes, and layers that mean harm."""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from images_samples import Entry, directory, file, hardlink, info, layer, symlink

from hpk_kubelet.images.unpack import LayerError, Unpacker


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "outer" / "rootfs"
    path.mkdir(parents=True)
    return path


def apply(root: Path, *layers: bytes) -> Unpacker:
    unpacker = Unpacker(str(root))
    for content in layers:
        unpacker.apply(io.BytesIO(content))
    return unpacker


def tree(root: Path) -> dict[str, str]:
    """Every path and what it is: a file's content, a link's target, `/` for a directory."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text()
    return found


def test_files_links_modes_and_times(root: Path) -> None:
    unpacker = apply(
        root,
        layer(
            directory("./", 0o755),
            directory("bin/", 0o555),
            file("bin/su", b"su", 0o4755),
            hardlink("bin/su2", "./bin/su"),
            symlink("bin/sh", "/bin/su"),
            file("etc/shadow", b"x", 0o040),
            info("dev/null", 0o666, tarfile.CHRTYPE),
            info("run/pipe", 0o600, tarfile.FIFOTYPE),
            directory("closed", 0o000),
            file("closed/in", b"y"),
        ),
    )
    assert (root / "bin/su").stat().st_ino == (root / "bin/su2").stat().st_ino
    assert (root / "bin/sh").readlink() == Path("/bin/su")
    assert stat.S_IMODE((root / "bin/su").stat().st_mode) == 0o4755
    assert stat.S_IMODE((root / "bin").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "etc/shadow").stat().st_mode) == 0o440
    assert stat.S_IMODE((root / "closed").stat().st_mode) == 0o700
    assert stat.S_ISFIFO((root / "run/pipe").stat().st_mode)
    assert not (root / "dev/null").exists()
    for name in ("bin", "bin/su", "bin/sh", "closed"):
        assert (root / name).lstat().st_mtime == 1_000_000_000, name
    assert unpacker.disk == 4


def test_whiteouts_hide_lower_layers_only(root: Path) -> None:
    lower = layer(file("a/1", b"1"), file("a/2", b"2"), file("b/1", b"1"), file("c/d/1", b"1"))
    upper = layer(
        file("a/.wh.1"),
        file("b/new", b"n"),  # before the opaque mark, of the same layer: it stays
        file("b/.wh..wh..opq"),
        file("c/d/2", b"2"),
        file("c/.wh.d"),
        file(".wh..wh.plnk"),
        file(".wh.never-there"),
    )
    apply(root, lower, upper)
    assert tree(root) == {
        "a": "/", "a/2": "2", "b": "/", "b/new": "n", "c": "/", "c/d": "/", "c/d/2": "2",
    }  # fmt: skip


def test_what_is_in_the_way_gives_way(root: Path) -> None:
    unpacker = apply(
        root,
        layer(file("dir/deep/x", b"x"), file("file", b"old"), symlink("link", "dir")),
        layer(file("dir", b"now a file"), directory("file"), directory("link"), file("link/y")),
    )
    assert tree(root) == {"dir": "now a file", "file": "/", "link": "/", "link/y": ""}
    assert unpacker.disk == len("now a file")


def test_replacing_a_hard_linked_file_leaves_the_other_name(root: Path) -> None:
    apply(root, layer(file("a", b"old"), hardlink("b", "a")), layer(file("b", b"new")))
    assert tree(root) == {"a": "old", "b": "new"}


def test_a_file_system_without_hard_links_gets_copies(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    unpacker = apply(root, layer(file("a", b"same", 0o755), hardlink("d/b", "a")))
    assert tree(root) == {"a": "same", "d": "/", "d/b": "same"}
    assert stat.S_IMODE((root / "d/b").stat().st_mode) == 0o755
    assert unpacker.disk == 8


@pytest.mark.parametrize("name", ["/../../evil", "../evil", "a/../../../evil", "//evil", "./evil"])
def test_names_stay_below_the_root(root: Path, name: str) -> None:
    apply(root, layer(file(name, b"x")))
    assert tree(root.parent) == {"rootfs": "/", "rootfs/evil": "x"}


@pytest.mark.parametrize("target", ["/", "..", "../../..", "/outside", "../outside"])
def test_links_lead_nowhere_outside(root: Path, target: str) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    before = outside.stat()
    apply(
        root,
        layer(symlink("link", target), file("link/kept", b"x"), directory("link/dir", 0o777)),
        layer(file("link/.wh.kept"), file("link/.wh..wh..opq")),
    )
    assert tree(outside) == {"kept": "kept"}
    assert (outside.stat().st_mode, outside.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert not (root.parent / "dir").exists()


def test_a_directory_swapped_for_a_link_is_not_followed_afterwards(root: Path) -> None:
    """Modes and times of directories are set at the end of a layer, by path."""
    outside = root.parent / "outside"
    (outside / "sub").mkdir(parents=True, mode=0o700)
    before = (outside / "sub").stat()
    apply(
        root,
        layer(
            directory("d/sub", 0o777),
            symlink("d", "../outside"),
            file("d/sub/planted", b"x"),
        ),
    )
    assert tree(outside) == {"sub": "/"}
    assert (outside / "sub").stat().st_mode == before.st_mode
    assert (outside / "sub").stat().st_mtime == before.st_mtime


def test_hard_links_reach_nothing_outside(root: Path) -> None:
    secret = root.parent / "secret"
    secret.write_text("secret")
    for entries in (
        (hardlink("stolen", "../secret"),),
        (symlink("up", ".."), hardlink("stolen", "up/secret")),
        (symlink("s", str(secret)), hardlink("stolen", "s"), file("stolen", b"overwritten")),
    ):
        try:
            apply(root, layer(*entries))
        except LayerError as e:
            assert "No such file" in str(e)
    assert secret.read_text() == "secret"
    assert secret.stat().st_nlink == 1


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ((symlink("a", "b"), symlink("b", "a"), file("a/x")), "Too many levels of symbolic links"),
        ((file("f"), file("f/x")), "Not a directory"),
        ((directory("d"), hardlink("l", "d")), "hard link to a directory"),
        ((hardlink("l", "missing"),), "No such file"),
        ((file("x" * 300),), "File name too long"),
        ((file(".wh."),), "not a whiteout"),
        ((file("d/.wh..."),), "not a whiteout"),
    ],
)
def test_refused_with_the_entrys_name(root: Path, entries: tuple[Entry, ...], words: str) -> None:
    with pytest.raises(LayerError, match=words):
        apply(root, layer(*entries))


@pytest.mark.parametrize(
    "compress",
    [
        bytes,
        gzip.compress,
        lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]) + b"\0" * 512,
        lambda data: zstandard.ZstdCompressor().compress(data),
        lambda data: b"\x50\x2a\x4d\x18\x04\0\0\0skip" + zstandard.ZstdCompressor().compress(data),
    ],
    ids=["plain", "gzip", "gzip-members", "zstd", "zstd-skippable"],
)
def test_compression(root: Path, compress: Callable[[bytes], bytes]) -> None:
    big = os.urandom(3_000_000)
    apply(root, compress(layer(file("small", b"s"), file("big", big), file("last", b"l"))))
    assert (root / "big").read_bytes() == big
    assert (root / "last").read_text() == "l"


def test_an_empty_layer_is_a_layer(root: Path) -> None:
    apply(root, b"", layer(), gzip.compress(b""), gzip.compress(layer()))
    assert tree(root) == {}


@pytest.mark.parametrize("cut", [3, 40, 0.5, 0.9])
def test_a_layer_cut_short_is_an_error(root: Path, cut: float) -> None:
    whole = gzip.compress(layer(file("big", os.urandom(200_000))))
    with pytest.raises(LayerError):
        apply(root, whole[: int(cut if cut >= 1 else len(whole) * cut)])
    with pytest.raises(LayerError):
        apply(root, b"this is no tar" * 100)


def test_names_that_are_not_utf8_survive(root: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        tar.addfile(info("caf\xe9", 0o644))
    apply(root, out.getvalue())
    assert [os.fsencode(path.name) for path in root.iterdir()] == [b"caf\xe9"]


def test_mount_points_are_there(root: Path) -> None:
    unpacker = apply(
        root,
        layer(
            symlink("tmp", "/var/tmp"),
            symlink("etc/resolv.conf", "../run/resolve/stub.conf"),
            file("etc/hosts", b"kept"),
        ),
    )
    unpacker.finish()
    found = tree(root)
    assert {"proc", "sys", "dev", "var/tmp", "root", "home", "etc/passwd", "etc/group"} <= set(
        found
    )
    assert found["etc/hosts"] == "kept"
    assert found["run/resolve/stub.conf"] == ""
    assert stat.S_IMODE((root / "var/tmp").stat().st_mode) == 0o1777
