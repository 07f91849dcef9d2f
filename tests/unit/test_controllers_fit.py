"""Where a pod may go, and what is said when it may go nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from hpk_kubelet.controllers.fit import choose, compare, fit, matches, matches_term, tolerates
from hpk_kubelet.controllers.requests import pod_requests

Object = dict[str, Any]
AFFINITY = "node(s) didn't match Pod's node affinity/selector"


def node(name: str = "n", ready: str = "True", **more: Any) -> Object:
    meta = {"name": name, "labels": {"hpk.io/partition": name, **more.pop("labels", {})}}
    has = {"cpu": "8", "memory": "16Gi", **more.pop("has", {})}
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": meta,
        "spec": more,
        "status": {"conditions": conditions, "capacity": has, "allocatable": {"cpu": "0"}},
    }


def container(**requests: str) -> Object:
    return {"name": "main", "resources": {"requests": requests}}


def pod(*containers: Object, **spec: Any) -> Object:
    return {"metadata": {"name": "p"}, "spec": {"containers": containers or [container()], **spec}}


def affine(*terms: Object) -> Object:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required}


@pytest.mark.parametrize(
    ("expression", "labels", "expected"),
    [
        ({"operator": "In", "values": ["a", "b"]}, {"k": "b"}, True),
        ({"operator": "In", "values": ["a"]}, {"k": "b"}, False),
        ({"operator": "In", "values": ["a"]}, {}, False),
        ({"operator": "NotIn", "values": ["a"]}, {"k": "a"}, False),
        ({"operator": "NotIn", "values": ["a"]}, {"k": "b"}, True),
        ({"operator": "NotIn", "values": ["a"]}, {}, True),
        ({"operator": "Exists"}, {"k": ""}, True),
        ({"operator": "Exists"}, {}, False),
        ({"operator": "DoesNotExist"}, {}, True),
        ({"operator": "DoesNotExist"}, {"k": ""}, False),
        ({"operator": "Gt", "values": ["5"]}, {"k": "6"}, True),
        ({"operator": "Gt", "values": ["5"]}, {"k": "5"}, False),
        ({"operator": "Gt", "values": ["5"]}, {"k": "x"}, False),
        ({"operator": "Gt", "values": ["5"]}, {}, False),
        ({"operator": "Lt", "values": ["5"]}, {"k": "4"}, True),
        ({"operator": "Lt", "values": ["5"]}, {"k": "10"}, False),
    ],
)
def test_expressions(expression: Object, labels: dict[str, str], expected: bool) -> None:
    assert matches({"key": "k", **expression}, labels) is expected


def test_terms() -> None:
    by_name = {"key": "metadata.name", "operator": "In", "values": ["n"]}
    by_label = {"key": "hpk.io/partition", "operator": "Exists"}
    assert matches_term({"matchFields": [by_name], "matchExpressions": [by_label]}, node())
    assert not matches_term({"matchFields": [by_name]}, node("other"))
    assert not matches_term({}, node())  # an empty term matches nothing
    other = {"matchExpressions": [{"key": "x", "operator": "Exists"}]}
    assert fit(pod(affinity=affine(other, {"matchFields": [by_name]})), node()) == []  # or
    assert fit(pod(affinity=affine(other)), node()) == [AFFINITY]
    assert fit(pod(affinity=affine()), node()) == [AFFINITY]
    # nodeSelector and affinity must both hold
    both = pod(nodeSelector={"x": "y"}, affinity=affine({"matchFields": [by_name]}))
    assert fit(both, node()) == [AFFINITY]
    assert fit(both, node(labels={"x": "y"})) == []


@pytest.mark.parametrize(
    ("toleration", "expected"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "k", "operator": "Exists"}, True),
        ({"key": "j", "operator": "Exists"}, False),
        ({"key": "k", "value": "5"}, True),
        ({"key": "k", "operator": "Equal", "value": "6"}, False),
        ({"key": "k", "value": "5", "effect": "NoExecute"}, False),
        ({"key": "k", "value": "5", "effect": "NoSchedule"}, True),
        ({"key": "k", "operator": "Gt", "value": "4"}, True),
        ({"key": "k", "operator": "Lt", "value": "4"}, False),
    ],
)
def test_tolerations(toleration: Object, expected: bool) -> None:
    taint = {"key": "k", "value": "5", "effect": "NoSchedule"}
    assert tolerates(toleration, taint) is expected


def test_compare_takes_whole_numbers_only() -> None:
    assert not compare("Gt", "a", "1") and not compare("Between", "1", "2")


def test_taints_and_cordons() -> None:
    gpu = {"key": "gpu", "value": "a100", "effect": "NoSchedule"}
    assert fit(pod(), node(taints=[gpu])) == ["node(s) had untolerated taint {gpu: a100}"]
    assert fit(pod(tolerations=[{"key": "gpu", "operator": "Exists"}]), node(taints=[gpu])) == []
    soft = {"key": "gpu", "effect": "PreferNoSchedule"}
    assert fit(pod(), node(taints=[soft])) == []
    assert fit(pod(), node(unschedulable=True)) == ["node(s) were unschedulable"]
    anything = [{"operator": "Exists"}]
    assert fit(pod(tolerations=anything), node(unschedulable=True)) == []


def test_a_node_that_is_not_ready_takes_only_who_tolerates_it() -> None:
    for ready, key in (("False", "not-ready"), ("Unknown", "unreachable")):
        expected = f"node(s) had untolerated taint {{node.kubernetes.io/{key}: }}"
        assert fit(pod(), node(ready=ready)) == [expected]
        assert fit(pod(tolerations=[{"operator": "Exists"}]), node(ready=ready)) == []
    silent = {"metadata": {"name": "n"}}
    assert fit(pod(), silent) == ["node(s) had untolerated taint {node.kubernetes.io/not-ready: }"]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ({"cpu": "8", "memory": "16Gi"}, []),
        ({"cpu": "8001m"}, ["Insufficient cpu"]),
        ({"cpu": "9", "memory": "17Gi"}, ["Insufficient cpu", "Insufficient memory"]),
        ({"nvidia.com/gpu": "1"}, ["Insufficient nvidia.com/gpu"]),
        ({"nvidia.com/gpu": "0"}, []),
        ({"ephemeral-storage": "1Ti"}, []),  # the node doesn't tell: Slurm knows
    ],
)
def test_only_what_the_partition_could_never_give(
    requests: dict[str, str], expected: list[str]
) -> None:
    assert fit(pod(container(**requests)), node()) == expected


def test_requests_of_a_pod() -> None:
    sidecar = {**container(cpu="1"), "restartPolicy": "Always"}
    early = container(cpu="5")
    late = container(cpu="4", memory="1Gi")
    mains = (container(cpu="500m"), container(cpu="2"))
    # mains + sidecar = 3.5; init: 5, then 4 beside the sidecar = 5
    whole = pod(*mains, initContainers=[early, sidecar, late], overhead={"cpu": "250m"})
    assert {k: float(v) for k, v in pod_requests(whole).items()} == {"cpu": 5.25, "memory": 2**30}
    assert float(pod_requests(pod(*mains, initContainers=[sidecar]))["cpu"]) == 3.5
    own = pod(*mains, resources={"requests": {"cpu": "7"}})
    assert float(pod_requests(own)["cpu"]) == 7


def names(pod: Object, *nodes: Object) -> str:
    chosen, message = choose(pod, nodes)
    assert (chosen is None) == bool(message)
    return chosen["metadata"]["name"] if chosen else message


def test_the_default_partition_comes_first_then_the_name() -> None:
    default = {"hpk.io/default-partition": "true"}
    assert names(pod(), node("b"), node("a")) == "a"
    assert names(pod(), node("a"), node("b", labels=default)) == "b"
    annotated = node("b")
    annotated["metadata"]["annotations"] = default
    assert names(pod(), node("a"), annotated) == "b"


def test_preferences_come_before_the_default_partition() -> None:
    def prefers(*weights: tuple[int, str]) -> Object:
        terms = [
            {
                "weight": weight,
                "preference": {"matchExpressions": [{"key": key, "operator": "Exists"}]},
            }
            for weight, key in weights
        ]
        return pod(
            affinity={"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}
        )

    default = node("a", labels={"hpk.io/default-partition": "true", "x": ""})
    other = node("b", labels={"y": "", "z": ""})
    assert names(prefers((5, "x"), (3, "y"), (3, "z")), default, other) == "b"
    assert names(prefers((7, "x"), (3, "y"), (3, "z")), default, other) == "a"
    avoided = node("a", taints=[{"key": "k", "effect": "PreferNoSchedule"}])
    assert names(pod(), avoided, node("b")) == "b"


def test_the_message_counts_nodes_per_reason() -> None:
    assert names(pod()) == "no nodes available to schedule pods"
    nodes = [node("a", unschedulable=True), node("b"), node("c"), node("d", has={"cpu": "100"})]
    wants = pod(container(cpu="64"))
    assert names(wants, *nodes) == "d"
    assert names(wants, *nodes[:3]) == (
        "0/3 nodes are available: 1 node(s) were unschedulable, 2 Insufficient cpu."
    )
