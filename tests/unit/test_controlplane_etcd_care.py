"""Copies of etcd's data."""

from hpk_kubelet.controlplane import etcd_care
from hpk_kubelet.controlplane.etcd_care import back_up, compact

HOUR = 3600.0


class Client:
    def __init__(self, data, status=200):
        self.data, self.status, self.asked = data, status, []

    async def request(self, method, path, body, **_):
        self.asked.append((method, path))
        etcd_care.database(self.data).write_bytes(b"x" * 10)
        return self.status, b"no"


def made(tmp_path):
    data = tmp_path / "etcd"
    etcd_care.database(data).parent.mkdir(parents=True)
    etcd_care.database(data).write_bytes(b"the state")
    return data


def test_copies_are_made_now_and_then_and_the_newest_are_kept(tmp_path):
    data, said = made(tmp_path), []
    backups = tmp_path / "backup"
    first = back_up(data, backups, 0.0, said.append)
    assert first is not None
    assert etcd_care.database(first).read_bytes() == b"the state"
    assert back_up(data, backups, HOUR / 2, said.append) is None
    second = back_up(data, backups, 2 * HOUR, said.append)
    third = back_up(data, backups, 4 * HOUR, said.append)
    assert sorted(backups.iterdir()) == [second, third]
    assert backups.stat().st_mode & 0o777 == 0o700
    assert not said


def test_without_data_there_is_nothing_to_copy(tmp_path):
    assert back_up(tmp_path / "etcd", tmp_path / "backup", 0.0, print) is None
    assert not (tmp_path / "backup").exists()


async def test_a_small_file_is_left_alone_and_a_large_one_compacted(tmp_path, monkeypatch):
    data, said = made(tmp_path), []
    client = Client(data)
    await compact(data, client, said.append)
    assert client.asked == []
    monkeypatch.setattr(etcd_care, "_LARGE", 5)
    await compact(data, client, said.append)
    assert client.asked == [("POST", "/v3/maintenance/defragment")]
    await compact(data, Client(data, 500), said.append)
    assert "not compacted: 500 no" in said[-1]
