import json
import os

from hpk_kubelet.node import crash
from hpk_kubelet.node.crash import crash_point
from hpk_kubelet.node.store import Journal, PodDir, pod_dirs

STATE = {"jobId": "1", "containers": {}, "finished": False}


def line(**fields):
    return json.dumps(fields).encode() + b"\n"


def test_a_journal_is_read_line_by_whole_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    assert journal.read() == [] and not journal.exists
    event = {"seq": 1, "reason": "Created"}
    path.write_bytes(line(seq=0, state=STATE) + line(seq=1, event=event) + b'{"seq": 2, "sta')
    assert journal.read() == [event]
    assert journal.state == STATE and journal.exists
    assert journal.read() == []
    with path.open("ab") as f:
        f.write(b'te": {"finished": true}}\n')
    journal.read()
    assert journal.state == {"finished": True}


def test_a_torn_line_of_a_journal_is_passed_over(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"seq": 0, "st\n[]\n' + line(seq=1, state=STATE))
    journal = Journal(path)
    journal.read()
    assert journal.state == STATE


def test_a_plan_without_its_script_is_none(tmp_path):
    directory = PodDir(tmp_path / "uid")
    directory.create()
    plan = {"agent": {"token": "t"}, "env": "\udcff"}
    directory.write_plan(plan, None)
    assert directory.plan() is None
    directory.write_plan(plan, "#!/bin/sh\n")
    assert directory.plan() == plan
    (directory.path / "plan.json").write_bytes(b"")
    assert directory.plan() is None


def test_an_intent_survives_and_a_broken_one_is_none(tmp_path):
    directory = PodDir(tmp_path / "uid")
    directory.create()
    assert directory.intent() is None
    intent = {"uid": "u", "namespace": "n", "name": "p", "node": "m", "partition": "m",
              "comment": "c"}  # fmt: skip
    directory.write_intent(intent)
    assert PodDir(tmp_path / "uid").intent() == intent
    directory.write_intent({**intent, "jobId": "7"}, sync=False)
    assert directory.intent()["jobId"] == "7"
    (directory.path / "intent.json").write_bytes(b"{")
    assert directory.intent() is None


def test_directories_are_found_and_removed(tmp_path):
    assert pod_dirs(tmp_path / "none") == {}
    PodDir(tmp_path / "a").create()
    (tmp_path / "file").touch()
    found = pod_dirs(tmp_path)
    assert list(found) == ["a"]
    found["a"].remove()
    found["a"].remove()
    assert pod_dirs(tmp_path) == {}


def test_a_crash_happens_at_its_point_and_once(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(crash, "_LOOK", 0.0)
    crash_point(tmp_path, "intent")
    (tmp_path / "crash-at").write_text("intent\n")
    crash_point(tmp_path, "created")
    assert ended == []
    crash_point(tmp_path, "intent")
    crash_point(tmp_path, "intent")
    assert ended == [137]
