"""What the command line says when the machine refuses: one sentence, never a traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpk_kubelet import cli
from hpk_kubelet.controlplane import doctor


def run(monkeypatch: pytest.MonkeyPatch, home: Path, *argv: str) -> int:
    monkeypatch.setenv("HPK_HOME", str(home))
    monkeypatch.setattr("sys.argv", ["hpk", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def no_home(tmp_path: Path) -> Path:
    """A directory nobody can be, root neither: below a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "hpk"


def test_a_home_that_can_not_be_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, no_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, no_home, "serve") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"hpk: {no_home}") or said.startswith(f"hpk: {no_home}/config.yaml")
    assert "Not a directory" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_file_system_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number), "/home/me/.hpk/etcd")

    monkeypatch.setattr(cli, "load_config", full)
    assert run(monkeypatch, tmp_path, "serve") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"hpk: /home/me/.hpk/etcd: {os.strerror(number)}; ")
    assert not (tmp_path / "log").exists()


def test_a_bug_is_named_even_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, no_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(cli, "load_config", bug)
    assert run(monkeypatch, no_home, "serve") == 1
    said = capsys.readouterr().err
    assert said.startswith("hpk: this is a bug: ZeroDivisionError: by zero; ")
    assert said.count("\n") == 1


def test_doctor_reports_a_state_directory_that_can_not_be(no_home: Path) -> None:
    findings = list(doctor.state_file_system(doctor.Paths(no_home)))
    assert [(f.level, f.what) for f in findings] == [("fail", "state")]
    assert "Not a directory" in findings[0].text
