from pathlib import Path

import pytest

from hpk_kubelet.agent import logs
from hpk_kubelet.agent.logs import LogFile, LogOptions, LogWriter, read_log

T = 1_767_323_045_000_000_006  # 2026-01-02T03:04:05.000000006Z


def test_times_go_both_ways() -> None:
    assert logs.timestamp(T) == "2026-01-02T03:04:05.000000006Z"
    assert logs.parse_time("2026-01-02T03:04:05.000000006Z") == T
    assert logs.parse_time("2026-01-02T03:04:05Z") == T - 6
    assert logs.parse_time("2026-01-02T05:04:05.5+02:00") == T - 6 + 500_000_000
    for wrong in ("yesterday", "2026-01-02T03:04:05", "2026-01-02T03:04:05+x"):
        with pytest.raises(ValueError):
            logs.parse_time(wrong)


def test_lines_are_cut_as_containerd_does() -> None:
    cutter = logs.LineCutter("stdout")
    head = b"2026-01-02T03:04:05.000000006Z stdout "
    assert cutter.feed(b"one\ntw", T) == [head + b"F one\n"]
    assert cutter.feed(b"o\n\n", T) == [head + b"F two\n", head + b"F \n"]
    assert cutter.feed(b"x" * (logs.MAX_LINE + 1), T) == [
        head + b"P " + b"x" * logs.MAX_LINE + b"\n"
    ]
    assert cutter.feed(b"y\nrest", T) == [head + b"F xy\n"]
    assert cutter.end(T) == [head + b"P rest\n"]
    assert cutter.end(T) == []


def write(folder: Path, text: bytes, run: int = 0) -> None:
    path = Path(logs.path_of(str(folder), "main", run))
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = LogWriter(str(path), print)
    writer.write("stdout", text)
    writer.end("stdout")
    writer.close()


def read(folder: Path, **options: object) -> bytes:
    return b"".join(read_log(str(folder), "main", 0, LogOptions(**options)))  # type: ignore[arg-type]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    text = b"a\n" + b"long" * 10_000 + b"\n\nlast without newline"
    write(tmp_path, text)
    assert read(tmp_path) == text
    assert logs.runs(str(tmp_path), "main") == [0]
    assert logs.runs(str(tmp_path), "other") == []


def test_options(tmp_path: Path) -> None:
    write(tmp_path, b"".join(b"line %d\n" % i for i in range(20_000)))
    assert read(tmp_path, tail_lines=2) == b"line 19998\nline 19999\n"
    assert read(tmp_path, tail_lines=0) == b""
    assert read(tmp_path, tail_lines=10**6).startswith(b"line 0\n")
    assert read(tmp_path, tail_lines=15_000).startswith(b"line 5000\n")
    assert read(tmp_path, limit_bytes=9) == b"line 0\nli"
    assert read(tmp_path, limit_bytes=0) == b""
    stamped = read(tmp_path, tail_lines=1, timestamps=True)
    stamp, _, rest = stamped.partition(b" ")
    assert rest == b"line 19999\n"
    last = logs.parse_time(stamp.decode())
    assert read(tmp_path, since=last).endswith(b"line 19999\n")
    assert read(tmp_path, since=last + 1) == b""


def test_a_timestamp_stands_once_before_a_long_line(tmp_path: Path) -> None:
    write(tmp_path, b"x" * (logs.MAX_LINE + 5) + b"\nnext\n")
    assert read(tmp_path, timestamps=True).count(b"Z ") == 2


def test_rotation_keeps_the_newest_files_and_a_reader_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_SIZE", 1000)
    monkeypatch.setattr(logs, "INTERVAL", 0.0)
    path = tmp_path / "main" / "0.log"
    path.parent.mkdir()
    writer = LogWriter(str(path), print)
    writer.write("stdout", b"first\n")
    reader = LogFile(str(path), LogOptions())
    assert reader.read() == b"first\n"
    expected = b""
    seen = b""
    for i in range(200):
        line = b"%04d %s\n" % (i, b"x" * 50)
        expected += line
        writer.write("stderr", line)
        seen += reader.read()
    while more := reader.read():
        seen += more
    assert seen == expected
    assert len(logs.rotated(str(path))) == logs.MAX_FILES - 1
    reader.close()
    writer.close()


def test_a_burst_stays_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_SIZE", 1000)
    monkeypatch.setattr(logs, "MAX_BURST", 5000)
    path = str(tmp_path / "0.log")
    writer = LogWriter(path, print)
    for _ in range(40):
        writer.write("stdout", b"x" * 60 + b"\n")
    assert logs.rotated(path) == []
    for _ in range(40):
        writer.write("stdout", b"x" * 60 + b"\n")
    assert len(logs.rotated(path)) == 1
    writer.close()


def test_a_reader_that_is_far_behind_goes_on_with_the_oldest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_SIZE", 10)
    monkeypatch.setattr(logs, "INTERVAL", 0.0)
    path = str(tmp_path / "0.log")
    writer = LogWriter(path, print)
    writer.write("stdout", b"0\n")
    reader = LogFile(path, LogOptions())
    for i in range(1, 9):
        writer.write("stdout", b"%d\n" % i)
    seen = b""
    while more := reader.read():
        seen += more
    assert seen == b"0\n4\n5\n6\n7\n8\n"
    reader.close()
    writer.close()


def test_a_full_disk_loses_lines_but_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    writer = LogWriter(str(tmp_path / "0.log"), said.append)
    good = writer._fd
    writer._fd = logs.os.open("/dev/full", logs.os.O_WRONLY)
    writer.write("stdout", b"one\ntwo\n")
    writer.write("stdout", b"three\n")
    assert len(said) == 1 and "No space left on device" in said[0]
    writer._fd = good
    writer.write("stdout", b"four\n")
    assert said[1].startswith("3 lines of the log")
    assert (tmp_path / "0.log").read_bytes().endswith(b"stdout F four\n")
