import errno
import os
from types import SimpleNamespace

import pytest

from hpk_kubelet.node import disk
from hpk_kubelet.node.disk import Disk


def statvfs(**free):
    whole = {"f_bavail": 10**9, "f_frsize": 4096, "f_files": 10**6, "f_favail": 10**5} | free
    return lambda path: SimpleNamespace(**whole)


@pytest.mark.parametrize(
    ("free", "words"),
    [
        ({}, ""),
        ({"f_bavail": 1024}, "4 MB are free"),
        ({"f_favail": 7}, "7 files are free"),
        ({"f_files": 0, "f_favail": 0}, ""),  # a file system that does not count them
    ],
)
def test_room(monkeypatch, tmp_path, free, words):
    monkeypatch.setattr(os, "statvfs", statvfs(**free))
    said = Disk(tmp_path).pressure()
    assert said.startswith(words) and (not words or "make room" in said)


def test_a_quota_shows_in_a_refused_write_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", statvfs())
    home = Disk(tmp_path)
    assert not home.note(PermissionError(errno.EACCES, "denied", "/x"))
    assert home.pressure() == ""
    assert home.note(OSError(errno.EDQUOT, "Disk quota exceeded", "/x/y"))
    assert home.pressure().startswith("/x/y: Disk quota exceeded")
    now = disk.time.monotonic()
    monkeypatch.setattr(disk.time, "monotonic", lambda: now + 1000)
    assert home.pressure() == ""


def test_a_slow_home_says_so_while_it_is(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])
    home, meanwhile, takes = Disk(tmp_path), [], [5.0]

    def write_private(path, data):
        assert path.is_relative_to(tmp_path)
        now[0] += takes[0]
        meanwhile.append(home.slow())
        home.probe()  # the next look, while the first still waits: it asks nothing

    monkeypatch.setattr(disk, "write_private", write_private)
    assert home.slow() == ""
    home.probe()
    assert meanwhile == [f"the file system of {tmp_path} took 5.0 s to keep a small file"]
    assert home.slow() == meanwhile[0]
    takes[0] = 0.01
    home.probe()
    assert home.slow() == "" and len(meanwhile) == 2


def test_a_home_that_can_not_be_written(monkeypatch, tmp_path):
    home = Disk(tmp_path)  # without run/, which is no quota
    home.probe()
    assert home.slow() == ""


def test_each_probe_is_written(tmp_path):
    (tmp_path / "run").mkdir()
    home = Disk(tmp_path)
    home.probe()
    first = (tmp_path / "run" / "probe").read_text()
    home.probe()
    assert (tmp_path / "run" / "probe").read_text() != first
