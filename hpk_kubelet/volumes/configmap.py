"""configMap: the keys of a ConfigMap as files (pkg/volume/configmap)."""

from __future__ import annotations

from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.objects import config_map_bytes
from hpk_kubelet.volumes.base import Files, VolumeInputs, default_mode, items


def files(pod: Object, volume: Object, inputs: VolumeInputs) -> Files:
    source = volume["configMap"]
    return project(source, inputs, default_mode(source))


def project(source: Object, inputs: VolumeInputs, mode: int) -> Files:
    data = config_map_bytes(inputs.objects, source.get("name", ""), bool(source.get("optional")))
    return items(data, source, mode, "configmap references non-existent config key")
