"""image: the files of an OCI image, to be read (KEP-4639). Whoever pulls it fills in where they
are."""

from __future__ import annotations

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.plan import VolumePlan
from hpk_kubelet.volumes.base import VolumeInputs

PREFIX = "volume/"
"""Of a volume's key among the images of a pod's containers, which have no slash in their names."""


def plan(pod: Object, volume: Object, inputs: VolumeInputs) -> VolumePlan:
    if not volume["image"].get("reference"):
        raise HPKError("an image volume must name its image: reference is empty")
    return VolumePlan(kind="image", readOnly=True)


def image_volumes(pod: Object) -> list[Object]:
    """What is to be pulled for volumes, in the form of containers."""
    return [
        {
            "name": PREFIX + volume["name"],
            "image": source["reference"],
            "imagePullPolicy": source.get("pullPolicy"),
        }
        for volume in pod["spec"].get("volumes") or []
        if (source := volume.get("image")) and source.get("reference")
    ]
