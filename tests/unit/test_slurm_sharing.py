"""What a partition has to offer to pods."""

from dataclasses import replace

import pytest

from hpk_kubelet.slurm.model import ComputeNode, Job, Partition
from hpk_kubelet.slurm.sharing import POLICIES, Amounts, expand, held, offered, tres

FREE = ComputeNode("n1", True, 8, 1000, 2)
BUSY = ComputeNode("n2", True, 8, 1000, 2, cpus_held=6, memory_held_mb=700, gpus_held=1)
DRAINED = ComputeNode("n3", False, 8, 1000, 2)
PARTITION = Partition(
    name="p", up=True, default=True, nodes=3, nodes_usable=2, cpus=24, cpus_usable=16,
    memory_mb=3000, memory_usable_mb=2000, largest_cpus=8, largest_memory_mb=1000,
    members=(FREE, BUSY, DRAINED),
)  # fmt: skip
OWN = {"n2": Amounts(4, 500, 1)}


def test_shared_nodes_offer_what_others_leave():
    assert offered(PARTITION, OWN, POLICIES["shared"]) == Amounts(8 + 6, 1000 + 800, 4)


def test_exclusive_nodes_offer_all_or_nothing():
    assert offered(PARTITION, OWN, POLICIES["exclusive"]) == Amounts(8, 1000, 2)
    alone = {"n2": Amounts(6, 700, 1)}
    assert offered(PARTITION, alone, POLICIES["exclusive"]) == Amounts(16, 2000, 4)


def test_an_older_answer_about_our_jobs_offers_no_less_than_nothing():
    gone = {"n1": Amounts(99, 9999, 9)}
    assert offered(replace(PARTITION, members=(FREE,)), gone, POLICIES["shared"]).cpus == 8


def test_what_jobs_hold():
    jobs = [
        Job("1", "RUNNING", nodes="n1", tres="cpu=2,mem=1.50G,node=1,billing=2,gres/gpu=1"),
        Job("2", "RUNNING", nodes="n[1-2]", tres="cpu=3,mem=100M,node=2"),
        Job("3", "PENDING", nodes="", tres=""),
        Job("4", "COMPLETED", nodes="n1", tres="cpu=9,mem=9G,node=1"),
    ]
    assert held(jobs) == {"n1": Amounts(4, 1586, 1), "n2": Amounts(2, 50, 0)}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-2,07-08],gpu3", ["n1", "n2", "n07", "n08", "gpu3"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a-[09-10]-x", ["a-09-x", "a-10-x"]),
    ],
)
def test_hostlists(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "amounts"),
    [("", Amounts()), ("cpu=1,mem=2T", Amounts(1, 2 * 1024 * 1024)), ("mem=512K", Amounts(0, 0))],
)
def test_tres(text, amounts):
    assert tres(text) == amounts
