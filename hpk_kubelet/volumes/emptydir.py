"""emptyDir: made by the agent, on the compute node."""

from __future__ import annotations

from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.plan import VolumePlan
from hpk_kubelet.spec.quantity import ceil, parse_quantity
from hpk_kubelet.volumes.base import VolumeInputs


def plan(pod: Object, volume: Object, inputs: VolumeInputs) -> VolumePlan:
    source = volume["emptyDir"]
    medium = source.get("medium") or ""
    result = VolumePlan(kind="emptyDir", medium="Memory" if medium == "Memory" else "")
    if source.get("sizeLimit") is not None:
        limit = ceil(parse_quantity(source["sizeLimit"]))
        if limit > 0:
            result["sizeLimit"] = limit
    return result
