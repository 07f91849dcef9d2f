"""Which HPK_HOMEs there are."""

from pathlib import Path

import pytest

from hpk_kubelet import homes
from hpk_kubelet.config import cache_dir


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_every_one_that_still_exists(tmp_path):
    one, two, gone = (tmp_path / name for name in ("one", "two", "gone"))
    assert homes.known(one) == [one]
    for home in (one, two, gone, two):
        home.mkdir(exist_ok=True)
        homes.remember(home)
    gone.rmdir()
    assert homes.known(one) == [one, two]
    assert homes.known(tmp_path / "new") == [tmp_path / "new", one, two]


def test_a_note_that_was_cut_short():
    homes.remember(Path("/nowhere"))
    for file in (cache_dir() / "homes").iterdir():
        file.write_bytes(b"")
    assert homes.known(Path("/a")) == [Path("/a")]
