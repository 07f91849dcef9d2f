"""secret: the keys of a Secret as files (pkg/volume/secret)."""

from __future__ import annotations

from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.objects import secret_data
from hpk_kubelet.volumes.base import Files, VolumeInputs, default_mode, items


def files(pod: Object, volume: Object, inputs: VolumeInputs) -> Files:
    source = volume["secret"]
    return project(source | {"name": source.get("secretName", "")}, inputs, default_mode(source))


def project(source: Object, inputs: VolumeInputs, mode: int) -> Files:
    data = secret_data(inputs.objects, source.get("name", ""), bool(source.get("optional"))) or {}
    return items(data, source, mode, "references non-existent secret key")
