"""persistentVolumeClaim and ephemeral: whatever the claim is bound to."""

from __future__ import annotations

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.plan import VolumePlan
from hpk_kubelet.volumes import hostpath
from hpk_kubelet.volumes.base import VolumeInputs


def plan(pod: Object, volume: Object, inputs: VolumeInputs) -> VolumePlan:
    """The claim's volume, in kubelet's words where there is none (desired_state_of_world_populator,
    getPVCExtractPV). A claim made for this pod is named as its controller names it."""
    source = volume.get("persistentVolumeClaim")
    meta = pod["metadata"]
    name = source["claimName"] if source else f"{meta['name']}-{volume['name']}"
    where = f"error processing PVC {meta['namespace']}/{name}"
    claim = inputs.objects.get(("PersistentVolumeClaim", name))
    if claim is None:
        raise HPKError(
            f"{where}: failed to fetch PVC from API server: "
            f'persistentvolumeclaims "{name}" not found'
        )
    owners = claim["metadata"].get("ownerReferences") or ()
    if not source and not any(owner["uid"] == meta["uid"] for owner in owners):
        raise HPKError(f"{where}: PVC was not created for pod (pod is not owner)")
    bound = claim["spec"].get("volumeName") or ""
    if not bound or (claim.get("status") or {}).get("phase") != "Bound":
        raise HPKError(f"{where}: PVC is not bound")
    found = inputs.objects.get(("PersistentVolume", bound))
    if found is None:
        raise HPKError(f'{where}: persistentvolumes "{bound}" not found')
    ref = found["spec"].get("claimRef") or {}
    if ref.get("uid") != claim["metadata"]["uid"]:
        raise HPKError(f"{where}: persistentvolume {bound} is bound to another claim")
    result = _of_volume(found, inputs)
    if source and source.get("readOnly"):
        result["readOnly"] = True
    return result


def _of_volume(found: Object, inputs: VolumeInputs) -> VolumePlan:
    spec, name = found["spec"], found["metadata"]["name"]
    if spec.get("volumeMode") == "Block":
        raise HPKError(f"persistentvolume {name} is a block device, which HPK has none of")
    if source := spec.get("local"):
        return VolumePlan(kind="claim", path=hostpath.absolute(source.get("path", "")))
    if source := spec.get("hostPath"):
        path = hostpath.absolute(source.get("path", ""))
        if hostpath.is_provisioned(path, inputs.hpk_home):
            return VolumePlan(kind="claim", path=path)
        return hostpath.plan_of(source, inputs)
    kind = "".join(sorted(spec.keys() - _NO_SOURCE))
    raise HPKError(
        f"persistentvolume {name} is of type {kind}, which HPK does not have: claims are served "
        "by class hpk-home, and volumes made by hand may be of type hostPath or local"
    )


_NO_SOURCE = {
    "accessModes",
    "capacity",
    "claimRef",
    "mountOptions",
    "nodeAffinity",
    "persistentVolumeReclaimPolicy",
    "storageClassName",
    "volumeAttributesClassName",
    "volumeMode",
}
