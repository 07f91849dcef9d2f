"""Copies of etcd's data."""

from types import SimpleNamespace

from hpk_kubelet.controlplane import backup
from hpk_kubelet.controlplane.backup import back_up

HOUR = 3600.0


def made(tmp_path):
    data = tmp_path / "etcd"
    backup.database(data).parent.mkdir(parents=True)
    backup.database(data).write_bytes(b"the state")
    return data


def test_copies_are_made_now_and_then_and_the_newest_are_kept(tmp_path):
    data, said = made(tmp_path), []
    backups = tmp_path / "backup"
    first = back_up(data, backups, 0.0, said.append)
    assert first is not None
    assert backup.database(first).read_bytes() == b"the state"
    assert back_up(data, backups, HOUR / 2, said.append) is None
    second = back_up(data, backups, 2 * HOUR, said.append)
    third = back_up(data, backups, 4 * HOUR, said.append)
    assert sorted(backups.iterdir()) == [second, third]
    assert backups.stat().st_mode & 0o777 == 0o700
    assert not said


def test_a_copy_is_due_after_a_day_where_there_is_room(tmp_path, monkeypatch):
    data, backups = made(tmp_path), tmp_path / "backup"
    assert backup.is_due(data, backups, 0.0)
    assert back_up(data, backups, 0.0, print)
    assert not backup.is_due(data, backups, 23 * HOUR)
    assert backup.is_due(data, backups, 24 * HOUR)
    monkeypatch.setattr(backup.os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=1))
    assert not backup.is_due(data, backups, 24 * HOUR)


def test_without_data_there_is_nothing_to_copy(tmp_path):
    assert back_up(tmp_path / "etcd", tmp_path / "backup", 0.0, print) is None
    assert not (tmp_path / "backup").exists()
