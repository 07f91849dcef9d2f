"""USER and runAsUser against an image's own passwd and group."""

import os
from pathlib import Path

import pytest

from hpk_kubelet.errors import HPKError
from hpk_kubelet.images.users import User, resolve_user


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    root = tmp_path / "rootfs"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\n\nbroken\napp:x:1000:1001::/home/app:/bin/sh\n"
    )
    (root / "etc/group").write_text("root:x:0:\napp:x:1001:app\nvideo:x:44:app,web\nweb:x:33:\n")
    return root


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("", User(0, 0, [], "/root")),
        ("0", User(0, 0, [], "/root")),
        ("app", User(1000, 1001, [44], "/home/app")),
        ("1000", User(1000, 1001, [44], "/home/app")),
        ("app:web", User(1000, 33, [], "/home/app")),
        ("app:7", User(1000, 7, [], "/home/app")),
        ("4000", User(4000, 0, [], "/")),
        ("4000:web", User(4000, 33, [], "/")),
    ],
)
def test_resolve(rootfs: Path, user: str, expected: User) -> None:
    assert resolve_user(rootfs, user) == expected


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("web", "unable to find user web: no matching entries in passwd file"),
        ("app:nope", "unable to find group nope: no matching entries in group file"),
        ("4294967296", "must be in range"),
        ("-1", "unable to find user -1"),
    ],
)
def test_unknown(rootfs: Path, user: str, words: str) -> None:
    with pytest.raises(HPKError, match=words):
        resolve_user(rootfs, user)


def test_odd_files_have_no_entries(tmp_path: Path) -> None:
    root = tmp_path / "rootfs"
    root.mkdir()
    assert resolve_user(root, "5") == User(5, 0, [], "/")
    (root / "etc").mkdir()
    os.mkfifo(root / "etc/passwd")
    assert resolve_user(root, "5") == User(5, 0, [], "/")
    (tmp_path / "passwd").write_text("evil:x:7:7::/:\n")
    (root / "etc/passwd").unlink()
    (root / "etc/passwd").symlink_to("../../passwd")
    with pytest.raises(HPKError):
        resolve_user(root, "evil")
