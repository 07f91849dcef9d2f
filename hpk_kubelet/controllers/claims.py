"""What a pod's PersistentVolumeClaims mean for its scheduling: pure functions, in the order and
words of kube-scheduler's VolumeBinding and VolumeRestrictions plugins
(pkg/scheduler/framework/plugins)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpk_kubelet.controllers.fit import matches, matches_term
from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.quantity import parse_quantity
from hpk_kubelet.spec.references import volume_claims

Object = dict[str, Any]

SELECTED_NODE = "volume.kubernetes.io/selected-node"
BOUND_BY_CONTROLLER = "pv.kubernetes.io/bound-by-controller"
BIND_COMPLETED = "pv.kubernetes.io/bind-completed"
NO_PROVISIONER = "kubernetes.io/no-provisioner"
IN_USE = (
    "node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already "
    "in-use by another pod"
)
_NO_MATCH = "node(s) didn't find available persistent volumes to bind"
_NODE_AFFINITY = "node(s) didn't match PersistentVolume's node affinity"
_NO_VOLUME = "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"


class Unschedulable(HPKError):
    """No node can help: the pod waits for its claims."""


@dataclass(frozen=True)
class Storage:
    """The cluster's: `claims` by namespace/name, the others by name."""

    claims: Mapping[str, Object]
    volumes: Mapping[str, Object]
    classes: Mapping[str, Object]


@dataclass(frozen=True)
class Claims:
    """A pod's."""

    bound: list[Object] = field(default_factory=list)
    delayed: list[Object] = field(default_factory=list)  # bound once there is a node

    @property
    def once_per_pod(self) -> list[str]:
        """Names of those that one pod alone may use."""
        return [
            claim["metadata"]["name"]
            for claim in (*self.bound, *self.delayed)
            if "ReadWriteOncePod" in (claim["spec"].get("accessModes") or ())
        ]


@dataclass(frozen=True)
class Step:
    """A change that leads to a claim's binding: a patch of the claim or of a volume."""

    claim: Object
    volume: Object | None = None  # None: the claim's provisioner is told the node


def claim_keys(pod: Object) -> set[str]:
    return {f"{pod['metadata']['namespace']}/{name}" for name, _ in volume_claims(pod)}


def claims_of(pod: Object, storage: Storage) -> Claims:
    """The pod's claims; Unschedulable where one is missing, or must be bound first."""
    found = Claims()
    namespace, uid = pod["metadata"]["namespace"], pod["metadata"]["uid"]
    for name, ephemeral in volume_claims(pod):
        claim = storage.claims.get(f"{namespace}/{name}")
        if claim is None:
            if ephemeral:
                raise Unschedulable(
                    "waiting for ephemeral volume controller to create the "
                    f'persistentvolumeclaim "{name}"'
                )
            raise Unschedulable(f'persistentvolumeclaim "{name}" not found')
        if (claim.get("status") or {}).get("phase") == "Lost":
            volume = claim["spec"].get("volumeName", "")
            raise Unschedulable(
                f'persistentvolumeclaim "{name}" bound to non-existent persistentvolume "{volume}"'
            )
        if claim["metadata"].get("deletionTimestamp"):
            raise Unschedulable(f'persistentvolumeclaim "{name}" is being deleted')
        if ephemeral and not owned_by(claim, uid):
            raise Unschedulable(
                f"PVC {namespace}/{name} was not created for pod {namespace}/"
                f"{pod['metadata']['name']} (pod is not owner)"
            )
        if is_bound(claim):
            found.bound.append(claim)
        elif _waits_for_consumer(claim, storage) and not claim["spec"].get("volumeName"):
            found.delayed.append(claim)
        else:
            raise Unschedulable("pod has unbound immediate PersistentVolumeClaims")
    return found


def owned_by(claim: Object, uid: str) -> bool:
    owners = claim["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner["uid"] == uid for owner in owners)


def is_bound(claim: Object) -> bool:
    annotations = claim["metadata"].get("annotations") or {}
    return bool(claim["spec"].get("volumeName")) and BIND_COMPLETED in annotations


def class_of(claim: Object) -> str:
    legacy = (claim["metadata"].get("annotations") or {}).get(
        "volume.beta.kubernetes.io/storage-class"
    )
    return str(legacy or claim["spec"].get("storageClassName") or "")


def _waits_for_consumer(claim: Object, storage: Storage) -> bool:
    of_class = storage.classes.get(class_of(claim)) or {}
    return of_class.get("volumeBindingMode") == "WaitForFirstConsumer"


def conflicts(claims: Claims, node: Object, storage: Storage) -> list[str]:
    """Why the node can't have the pod's volumes; empty: it can."""
    for claim in claims.bound:
        volume = storage.volumes.get(claim["spec"]["volumeName"])
        if volume is None:
            return [_NO_VOLUME]
        if not reaches(volume, node):
            return [_NODE_AFFINITY]
    try:
        binding(claims, node, storage)
    except Unschedulable as e:
        return [str(e)]
    return []


def reaches(volume: Object, node: Object) -> bool:
    """Whether the node has the volume, by its nodeAffinity."""
    required = (volume["spec"].get("nodeAffinity") or {}).get("required")
    if required is None:
        return True
    return any(matches_term(term, node) for term in required.get("nodeSelectorTerms") or ())


def binding(claims: Claims, node: Object, storage: Storage) -> list[Step]:
    """What is to be written so that the delayed claims are bound for this node; nothing for
    those on their way. Unschedulable where the node has no volume for one."""
    steps: list[Step] = []
    taken: set[str] = set()
    for claim in claims.delayed:
        volume = find_volume(claim, node, storage, taken)
        if volume is not None:
            taken.add(volume["metadata"]["name"])
            if not volume["spec"].get("claimRef"):
                steps.append(Step(claim, volume))
            continue
        of_class = storage.classes.get(class_of(claim)) or {}
        selected = (claim["metadata"].get("annotations") or {}).get(SELECTED_NODE)
        if of_class.get("provisioner", NO_PROVISIONER) == NO_PROVISIONER:
            raise Unschedulable(_NO_MATCH)
        if selected not in (None, "", node["metadata"]["name"]):
            raise Unschedulable(_NO_MATCH)  # its provisioner works for another node
        if not _allowed(of_class, node):
            raise Unschedulable(_NO_MATCH)
        if not selected:
            steps.append(Step(claim))
    return steps


def _allowed(of_class: Object, node: Object) -> bool:
    """StorageClass.allowedTopologies."""
    terms = of_class.get("allowedTopologies")
    labels = node["metadata"].get("labels") or {}
    return not terms or any(
        all(
            matches({**expression, "operator": "In"}, labels)
            for expression in term.get("matchLabelExpressions") or ()
        )
        for term in terms
    )


def find_volume(claim: Object, node: Object, storage: Storage, taken: set[str]) -> Object | None:
    """The smallest available volume that suits (component-helpers' FindMatchingVolume), or the
    one that is the claim's already."""
    wanted = storage_request(claim)
    mode = claim["spec"].get("volumeMode") or "Filesystem"
    best: tuple[Any, str] | None = None
    for name, volume in storage.volumes.items():
        spec = volume["spec"]
        if name in taken or volume["metadata"].get("deletionTimestamp"):
            continue
        size = capacity(volume)
        if size < wanted or (spec.get("volumeMode") or "Filesystem") != mode:
            continue
        if ref := spec.get("claimRef"):
            if refers_to(ref, claim):
                return volume if reaches(volume, node) else None
            continue
        if (volume.get("status") or {}).get("phase") != "Available":
            continue
        modes = set(spec.get("accessModes") or ())
        if (
            (spec.get("storageClassName") or "") == class_of(claim)
            and modes.issuperset(claim["spec"].get("accessModes") or ())
            and selects(claim["spec"].get("selector"), volume["metadata"].get("labels") or {})
            and reaches(volume, node)
        ):
            best = min(best or (size, name), (size, name))
    return storage.volumes[best[1]] if best else None


def storage_request(claim: Object) -> Any:
    """Bytes that the claim asks for, exact."""
    requests = (claim["spec"].get("resources") or {}).get("requests") or {}
    return parse_quantity(requests.get("storage", "0"))


def capacity(volume: Object) -> Any:
    return parse_quantity((volume["spec"].get("capacity") or {}).get("storage", "0"))


def refers_to(ref: Object, claim: Object) -> bool:
    """Whether a volume's claimRef means this claim (one without uid was written by hand)."""
    meta = claim["metadata"]
    return (
        ref.get("name") == meta["name"]
        and ref.get("namespace") == meta["namespace"]
        and ref.get("uid") in (None, "", meta["uid"])
    )


def selects(selector: Object | None, labels: dict[str, str]) -> bool:
    if not selector:
        return True
    if any(labels.get(k) != v for k, v in (selector.get("matchLabels") or {}).items()):
        return False
    return all(matches(e, labels) for e in selector.get("matchExpressions") or ())


def users(pods: Iterator[Object] | list[Object], names: list[str], but: str) -> bool:
    """Whether another pod than the one with uid `but` has one of these claims in use."""
    wanted = set(names)
    return any(
        pod["metadata"]["uid"] != but
        and pod["spec"].get("nodeName")
        and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        and wanted & {name for name, _ in volume_claims(pod)}
        for pod in pods
    )
