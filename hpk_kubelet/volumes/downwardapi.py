"""downwardAPI: fields and resources of the pod as files (pkg/volume/downwardapi)."""

from __future__ import annotations

from hpk_kubelet.spec.downward import file_field, resource_field
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.volumes.base import File, Files, VolumeInputs, default_mode


def files(pod: Object, volume: Object, inputs: VolumeInputs) -> Files:
    source = volume["downwardAPI"]
    return project(pod, source, inputs, default_mode(source))


def project(pod: Object, source: Object, inputs: VolumeInputs, mode: int) -> Files:
    result: Files = {}
    for item in source.get("items") or []:
        text = ""
        if ref := item.get("fieldRef"):
            text = file_field(pod, ref.get("fieldPath", ""))
        elif ref := item.get("resourceFieldRef"):
            text = resource_field(pod, ref, inputs.allocatable)
        own = item.get("mode")
        content = text.encode("utf-8", "surrogateescape")
        result[item["path"]] = File(content, mode if own is None else own)
    return result
