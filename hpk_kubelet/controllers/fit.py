"""Which virtual node a pod may go to: pure functions, in kube-scheduler's order and words.

Of kube-scheduler's filters these are kept: NodeUnschedulable, TaintToleration, NodeAffinity and,
of NodeResourcesFit, only what a partition could never give: the queue for everything else is
Slurm's (pkg/scheduler/framework/plugins in Kubernetes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hpk_kubelet.controllers.requests import pod_requests
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.quantity import parse_quantity

Object = dict[str, Any]

DEFAULT_PARTITION = "hpk.io/default-partition"
"""Label or annotation, `"true"` on the node of Slurm's default partition."""
BLOCKING = ("NoSchedule", "NoExecute")
UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
NOT_READY = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}


def fit(pod: Object, node: Object) -> list[str]:
    """Why the pod can't go to the node, as kube-scheduler says it; empty: it can."""
    spec, node_spec = pod["spec"], node.get("spec") or {}
    tolerations = spec.get("tolerations") or ()
    if node_spec.get("unschedulable") and not tolerated(UNSCHEDULABLE, tolerations):
        return ["node(s) were unschedulable"]
    for taint in taints(node):
        if taint["effect"] in BLOCKING and not tolerated(taint, tolerations):
            value = taint.get("value") or ""
            return [f"node(s) had untolerated taint {{{taint['key']}: {value}}}"]
    if not matches_affinity(spec, node):
        return ["node(s) didn't match Pod's node affinity/selector"]
    return insufficient(pod, node)


def taints(node: Object) -> list[Object]:
    """The node's taints, and those its conditions are about to bring (node lifecycle controller):
    between a node's loss and its taint no pod should slip through."""
    found = list((node.get("spec") or {}).get("taints") or ())
    status = ready_status(node)
    if status != "True":
        implied = UNREACHABLE if status == "Unknown" else NOT_READY
        if not any(t["key"] == implied["key"] for t in found):
            found.append(implied)
    return found


def ready_status(node: Object) -> str:
    """`True`, `False` or `Unknown`; `False` when the node has not said yet."""
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready":
            return str(condition["status"])
    return "False"


def tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    return any(tolerates(toleration, taint) for toleration in tolerations)


def tolerates(toleration: Object, taint: Object) -> bool:
    """Toleration.ToleratesTaint of core/v1, with the numeric operators."""
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    operator = toleration.get("operator") or "Equal"
    if operator == "Exists":
        return True
    mine, its = toleration.get("value") or "", taint.get("value") or ""
    if operator == "Equal":
        return bool(mine == its)
    return compare(operator, its, mine)


def compare(operator: str, value: str, bound: str) -> bool:
    """Gt and Lt on whole numbers; False when either is none."""
    try:
        left, right = int(value), int(bound)
    except ValueError:
        return False
    return left > right if operator == "Gt" else left < right if operator == "Lt" else False


def matches_affinity(spec: Object, node: Object) -> bool:
    """nodeSelector and the required terms of nodeAffinity."""
    labels = node["metadata"].get("labels") or {}
    for key, value in (spec.get("nodeSelector") or {}).items():
        if labels.get(key) != value:
            return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(matches_term(term, node) for term in required.get("nodeSelectorTerms") or ())


def matches_term(term: Object, node: Object) -> bool:
    """Whether all of a term's expressions and fields match; an empty term matches no node."""
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    labels = node["metadata"].get("labels") or {}
    names = {"metadata.name": node["metadata"]["name"]}
    return all(matches(e, labels) for e in expressions) and all(matches(f, names) for f in fields)


def matches(expression: Object, labels: dict[str, str]) -> bool:
    """One NodeSelectorRequirement; NotIn also holds where the label is missing."""
    value = labels.get(expression["key"])
    operator: str = expression["operator"]
    values: list[str] = expression.get("values") or []
    if operator == "In":
        return value is not None and value in values
    if operator == "NotIn":
        return value is None or value not in values
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    return value is not None and len(values) == 1 and compare(operator, value, values[0])


def insufficient(pod: Object, node: Object) -> list[str]:
    """`Insufficient cpu` and the like where the request is more than the whole node has.

    Capacity counts, not allocatable: while compute nodes are down, Slurm's queue is where to
    wait. What of cpu, memory and ephemeral-storage the node doesn't tell is left to Slurm.
    """
    status = node.get("status") or {}
    has = status.get("capacity") or {}
    short = []
    for name, wanted in pod_requests(pod).items():
        if wanted == 0 or (name not in has and "/" not in name):
            continue
        try:
            enough = wanted <= parse_quantity(has.get(name, "0"))
        except HPKError:
            enough = False
        if not enough:
            short.append(f"Insufficient {name}")
    return short


def choose(
    pod: Object,
    nodes: Iterable[Object],
    also: Callable[[Object], list[str]] = lambda node: [],
) -> tuple[Object | None, str]:
    """The node for a pod and "", or None and kube-scheduler's sentence why there is none. `also`
    says what else speaks against a node that fits.

    Of the nodes that fit: most weight of preferred affinity, then fewest PreferNoSchedule
    taints not tolerated, then Slurm's default partition, then by name.
    """
    reasons: Counter[str] = Counter()
    fitting: list[Object] = []
    total = 0
    for node in nodes:
        total += 1
        why = fit(pod, node) or also(node)
        reasons.update(why)
        if not why:
            fitting.append(node)
    if fitting:
        return min(fitting, key=order(pod)), ""
    if not total:
        return None, "no nodes available to schedule pods"
    parts = sorted(f"{count} {reason}" for reason, count in reasons.items())
    return None, f"0/{total} nodes are available: {', '.join(parts)}."


def order(pod: Object) -> Callable[[Object], tuple[int, int, bool, str]]:
    spec = pod["spec"]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    tolerations = spec.get("tolerations") or ()

    def key(node: Object) -> tuple[int, int, bool, str]:
        meta = node["metadata"]
        weight = sum(p["weight"] for p in preferred if matches_term(p["preference"], node))
        avoided = sum(
            t["effect"] == "PreferNoSchedule" and not tolerated(t, tolerations)
            for t in taints(node)
        )
        marks = {**(meta.get("annotations") or {}), **(meta.get("labels") or {})}
        return -weight, avoided, marks.get(DEFAULT_PARTITION) != "true", meta["name"]

    return key
