"""Which objects of its namespace a pod needs before it can start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpk_kubelet.spec.inputs import Object

Kind = Literal["ConfigMap", "Secret", "PersistentVolumeClaim", "PersistentVolume"]
ROOT_CA = "kube-root-ca.crt"
_CLAIM: Kind = "PersistentVolumeClaim"


@dataclass(frozen=True)
class Reference:
    kind: Kind
    name: str
    optional: bool  # every place that names it can do without


def references(pod: Object) -> list[Reference]:
    """Each object once, in order of first use; imagePullSecrets apart (image_pull_secrets)."""
    merged: dict[tuple[Kind, str], bool] = {}
    claims = ((_CLAIM, name, False) for name, _ in volume_claims(pod))
    for kind, name, optional in (*_all(pod["spec"]), *claims):
        if name:
            merged[kind, name] = merged.get((kind, name), True) and optional
    return [Reference(kind, name, optional) for (kind, name), optional in merged.items()]


def image_pull_secrets(pod: Object) -> list[str]:
    return [s["name"] for s in pod["spec"].get("imagePullSecrets") or [] if s.get("name")]


def volume_files(pod: Object) -> list[tuple[Kind, str]]:
    """The ConfigMaps and Secrets that are files of the pod, which follow their changes. Each
    namespace's kube-root-ca.crt, which is in every pod, never changes."""
    found = []
    for volume in pod["spec"].get("volumes") or []:
        for source in (volume, *((volume.get("projected") or {}).get("sources") or [])):
            found += [(k, n) for k, n, _ in _of(source, "configMap", "secret")]
    return [key for key in dict.fromkeys(found) if key[1] and key[1] != ROOT_CA]


def volume_claims(pod: Object) -> list[tuple[str, bool]]:
    """(name, made for this pod alone) of each claim among the pod's volumes; what is ephemeral is
    named as the ephemeral volume controller names it."""
    found = []
    for volume in pod["spec"].get("volumes") or []:
        if claim := volume.get("persistentVolumeClaim"):
            found.append((str(claim.get("claimName", "")), False))
        elif volume.get("ephemeral") is not None:
            found.append((f"{pod['metadata']['name']}-{volume['name']}", True))
    return found


def _all(spec: Object) -> Iterator[tuple[Kind, str, bool]]:
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        for source in container.get("envFrom") or []:
            yield from _of(source, "configMapRef", "secretRef")
        for entry in container.get("env") or []:
            yield from _of(entry.get("valueFrom") or {}, "configMapKeyRef", "secretKeyRef")
    for volume in spec.get("volumes") or []:
        yield from _of(volume, "configMap", "secret")
        for source in (volume.get("projected") or {}).get("sources") or []:
            yield from _of(source, "configMap", "secret")


def _of(source: Object, config_map: str, secret: str) -> Iterator[tuple[Kind, str, bool]]:
    if ref := source.get(config_map):
        yield "ConfigMap", ref.get("name", ""), bool(ref.get("optional"))
    if ref := source.get(secret):
        # volumes say secretName where everything else says name
        name = ref.get("secretName") or ref.get("name", "")
        yield "Secret", name, bool(ref.get("optional"))
