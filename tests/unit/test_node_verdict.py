import pytest

from hpk_kubelet.node import verdict
from hpk_kubelet.node.backoff import Backoff
from hpk_kubelet.node.decide import Job as View
from hpk_kubelet.node.decide import Progress, Want
from hpk_kubelet.node.jobs import changed, snapshot
from hpk_kubelet.node.nodes import (
    Host,
    conditions,
    labels,
    missing_partition,
    node_name,
    node_status,
    without_times,
)
from hpk_kubelet.slurm.backend import Job, Partition
from hpk_kubelet.slurm.sharing import Amounts

NOW = "2026-01-02T03:04:05Z"


def job(id="1", word="RUNNING", uid="u", **fields):
    return Job(id=id, word=word, comment=f"hpk:c:{uid}:ns/p", **fields)


def pod(phase="Running", **metadata):
    return {"metadata": metadata, "spec": {"terminationGracePeriodSeconds": 7},
            "status": {"phase": phase}}  # fmt: skip


@pytest.mark.parametrize(
    ("object_", "given_up", "expected"),
    [
        (None, False, Want.GONE),
        (pod(), False, Want.RUN),
        (pod(), True, Want.DONE),
        (pod("Succeeded"), False, Want.DONE),
        (pod("Failed"), False, Want.DONE),
        (pod("Succeeded", deletionTimestamp=NOW), False, Want.STOP),
        (pod(deletionTimestamp=NOW), True, Want.STOP),
    ],
)
def test_want(object_, given_up, expected):
    assert verdict.want(object_, given_up) is expected


def test_the_grace_is_the_deletions_else_the_pods():
    assert verdict.grace_period(None) == 0
    assert verdict.grace_period(pod()) == 7
    assert verdict.grace_period(pod(deletionGracePeriodSeconds=0)) == 0


def test_progress():
    assert verdict.progress(None) is Progress.NONE
    assert verdict.progress({"finished": False}) is Progress.STARTED
    assert verdict.progress({"finished": True}) is Progress.FINISHED


def test_a_snapshot_holds_our_jobs_only():
    jobs = [job("1"), job("2", uid="v"), Job(id="3", word="RUNNING", comment="mine"),
            Job(id="4", word="RUNNING", comment="hpk:other:u:ns/p")]  # fmt: skip
    assert snapshot(0, jobs, "c").by_id.keys() == {"1", "2"}


@pytest.mark.parametrize(
    ("jobs", "began", "job_id", "since", "expected"),
    [
        (None, 0, "", 0, View.UNKNOWN),
        (None, 0, "1", 0, View.UNKNOWN),
        (None, 0, "1", 5, View.PENDING),  # submitted by this process
        ([], 4, "1", 5, View.PENDING),  # the query began before
        ([], 6, "1", 5, View.ENDED),
        ([], 4, "", 5, View.UNKNOWN),  # a try of which nobody knows how it went
        ([], 6, "", 5, View.ENDED),
        ([], 1, "", 0, View.ENDED),  # a crash before this process
        ([job()], 4, "1", 5, View.RUNNING),
        ([job()], 4, "", 5, View.RUNNING),  # found by its comment
        ([job(word="PENDING")], 4, "", 5, View.PENDING),
        ([job(word="COMPLETING")], 4, "1", 5, View.RUNNING),
        ([job(word="NODE_FAIL")], 4, "1", 5, View.ENDED),
        ([job(uid="other")], 6, "", 5, View.ENDED),
    ],
)
def test_what_slurm_says(jobs, began, job_id, since, expected):
    seen = None if jobs is None else snapshot(began, jobs, "c")
    assert verdict.job_view(seen, "u", job_id, since) is expected


def test_of_two_jobs_of_a_pod_the_first_active_one_counts():
    jobs = [job("10"), job("9", "COMPLETED"), job("11")]
    assert verdict.find_job(snapshot(0, jobs, "c"), "u", "").id == "10"
    assert verdict.find_job(snapshot(0, jobs[1:2], "c"), "u", "").id == "9"


def test_changes_name_the_pods():
    before = snapshot(0, [job("1"), job("2", uid="v"), job("3", uid="w")], "c")
    after = snapshot(1, [job("1"), job("2", "COMPLETED", uid="v")], "c")
    assert changed(None, before) == {"u", "v", "w"}
    assert changed(before, after) == {"v", "w"}
    assert changed(after, after) == set()


def test_the_queue_explains_itself():
    assert verdict.waiting(None, "5").reason == "SlurmPending"
    assert verdict.waiting(job(word="PENDING", reason="Priority"), "5").reason == "SlurmPriority"
    assert verdict.waiting(job(), "5") is None


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("TIMEOUT", "SlurmTimeout"),
        ("OUT_OF_MEMORY", "SlurmOutOfMemory"),
        ("NODE_FAIL", "NodeFail"),
        ("PREEMPTED", "Preempted"),
        ("CANCELLED by 1000", "SlurmCancelled"),
        ("BOOT_FAIL", "SlurmBootFail"),
        ("DEADLINE", "SlurmDeadline"),
        ("FAILED", "AgentLost"),
    ],
)
def test_every_end_has_a_reason_and_words(word, reason):
    ended = verdict.ended(job(word=word, nodes="n7", ended=12.0, exit_code=3), "5", "a\nlast\n\n")
    assert ended.reason == reason
    assert ended.finished_at == 12.0
    for part in ("5", "n7", "3", "last"):
        assert part in ended.message
    assert "a;" not in ended.message


def test_a_job_that_nobody_knows():
    assert verdict.ended(None, "5", "").reason == "JobLost"
    assert verdict.ended(None, "5.2", "").reason == "ControlJobEnded"


def test_conditions_of_others_stay():
    api = {"phase": "Pending", "conditions": [{"type": "PodScheduled"}, {"type": "Ready", "x": 1}]}
    own = {"phase": "Running", "conditions": [{"type": "Ready", "x": 2}]}
    assert verdict.merged(api, None) == api
    assert verdict.merged(api, own) == {
        "phase": "Running",
        "conditions": [{"type": "Ready", "x": 2}, {"type": "PodScheduled"}],
    }


def test_back_off_doubles_up_to_its_longest():
    back = Backoff(10, 300)
    assert [back.failed(0) for _ in range(7)] == [10, 20, 40, 80, 160, 300, 300]
    back.succeeded()
    assert (back.until, back.failed(5), back.until) == (0, 10, 15)


# --- nodes

PARTITION = Partition(
    name="gpu", up=True, default=True, nodes=2, nodes_usable=1, cpus=64, cpus_usable=32,
    memory_mb=2000, memory_usable_mb=1000, largest_cpus=32, largest_memory_mb=1000, gpus=4,
    tmp_mb=500, features=frozenset({"a100", "odd name"}),
)  # fmt: skip
HOST = Host("10.0.0.1", "login", 10250, "1.4.5", "x86_64", "6.1")


@pytest.mark.parametrize("partition", ["main", "a-b", "p1"])
def test_a_partition_with_a_valid_name_is_the_nodes_name(partition):
    assert node_name(partition) == partition


def test_other_partitions_get_names_that_differ():
    names = {node_name(p) for p in ("GPU", "gpu", "g_u", "g.u", "__", "x" * 90, "x" * 91)}
    assert len(names) == 7
    assert all(len(n) <= 63 and n.strip("-") == n and n.islower() for n in names)


def test_labels():
    assert labels("gpu", PARTITION, HOST) == {
        "kubernetes.io/hostname": "gpu",
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "hpk.io/partition": "gpu",
        "hpk.io/default-partition": "true",
        "feature.hpk.io/a100": "true",
    }


def test_a_nodes_status():
    status = node_status(PARTITION, HOST, 110, "", {}, NOW, Amounts(32, 900, 1))
    assert status["capacity"] == {
        "cpu": "64", "memory": "2000Mi", "pods": "110", "ephemeral-storage": "500Mi",
        "nvidia.com/gpu": "4",
    }  # fmt: skip
    assert status["allocatable"] == {
        "cpu": "32", "memory": "900Mi", "pods": "110", "ephemeral-storage": "500Mi",
        "nvidia.com/gpu": "1",
    }  # fmt: skip
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "HomeAnswers": "True",
        "PIDPressure": "False", "SlurmReachable": "True", "PartitionUp": "True",
    }  # fmt: skip


def test_an_unreachable_slurm_is_a_condition_and_the_node_stays_ready():
    before = conditions(PARTITION, "", [], "then")
    after = {c["type"]: c for c in conditions(PARTITION, "no answer", before, NOW)}
    assert after["SlurmReachable"]["status"] == "False"
    assert after["SlurmReachable"]["lastTransitionTime"] == NOW
    assert after["SlurmReachable"]["message"] == "no answer"
    assert after["Ready"]["status"] == "True"
    assert after["Ready"]["lastTransitionTime"] == "then"


def test_a_heartbeat_alone_is_nothing_new():
    one = node_status(PARTITION, HOST, 1, "", {}, "then", Amounts())
    two = node_status(PARTITION, HOST, 1, "", one, NOW, Amounts())
    assert one != two and without_times(one) == without_times(two)
    assert without_times(one) != without_times(
        node_status(missing_partition("gpu"), HOST, 1, "", one, NOW, Amounts())
    )


@pytest.mark.parametrize(
    ("said", "word", "expected"),
    [
        ("Terminated", "CANCELLED", "SlurmCancelled"),
        ("Terminated", "PREEMPTED", "Preempted"),
        ("SlurmTimeout", "PREEMPTED", "Preempted"),
        ("SlurmTimeout", "FAILED", "SlurmTimeout"),
        ("Terminated", "COMPLETED", "Terminated"),
        ("Terminated", "COMPLETING", "Terminated"),
        ("DeadlineExceeded", "CANCELLED", "DeadlineExceeded"),
        ("", "CANCELLED", ""),
    ],
)
def test_slurm_knows_better_why_an_agent_was_told_to_end(said, word, expected):
    state = {"finished": True, "reason": said, "message": "its own"}
    judged = verdict.judged(state, job(word=word))
    assert judged["reason"] == expected
    assert (judged["message"] == "its own") == (expected == said)


def test_an_answer_older_than_the_agents_word_calls_no_job_queued():
    queued = snapshot(5.0, [job(word="PENDING")], "c")
    assert verdict.job_view(queued, "u", "1", 1.0, told=6.0) is View.RUNNING
    assert verdict.job_view(queued, "u", "1", 1.0, told=4.0) is View.PENDING


@pytest.mark.parametrize(
    ("word", "moves"), [("SUSPENDED", False), ("STOPPED", False), ("RUNNING", True)]
)
def test_a_suspended_job_says_so(word, moves):
    assert (verdict.suspended(job(word=word)) == "") is moves
