"""The downward API: fields and resources of a pod as texts.

As kubelet's podFieldSelectorRuntimeValue and defaultPodLimitsForDownwardAPI (kubelet_pods.go,
kubelet_resources.go), pkg/fieldpath and pkg/api/v1/resource. Raises HPKError with their words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.spec.late import Value, field
from hpk_kubelet.spec.plan import LateField
from hpk_kubelet.spec.quantity import ceil, milli, parse_quantity

_LATE: dict[str, LateField] = {
    "status.hostIP": "hostIP",
    "status.hostIPs": "hostIPs",
    "status.podIP": "podIP",
    "status.podIPs": "podIPs",
}
_ESCAPES = {
    "\a": r"\a",
    "\b": r"\b",
    "\f": r"\f",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    "\v": r"\v",
    "\\": r"\\",
    '"': r"\"",
}


def environment_field(pod: Object, path: str) -> Value:
    """The value of `fieldRef.fieldPath` in a variable."""
    if path in _LATE:
        return field(_LATE[path])
    if path in ("spec.nodeName", "spec.host"):
        return str(pod["spec"].get("nodeName", ""))
    if path == "spec.serviceAccountName":
        return str(pod["spec"].get("serviceAccountName", ""))
    return file_field(pod, path)


def file_field(pod: Object, path: str) -> str:
    """The value of `fieldRef.fieldPath` in a volume, which knows only metadata."""
    metadata = pod["metadata"]
    name, bracket, rest = path.partition("['")
    if bracket and name and rest.endswith("']"):
        if name not in ("metadata.annotations", "metadata.labels"):
            raise HPKError(f'fieldPath "{path}" does not support subscript')
        return str((metadata.get(name.removeprefix("metadata.")) or {}).get(rest[:-2], ""))
    match path:
        case "metadata.annotations" | "metadata.labels":
            return _format_map(metadata.get(path.removeprefix("metadata.")) or {})
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(metadata.get(path.removeprefix("metadata."), ""))
    raise HPKError(f"unsupported fieldPath: {path}")


def resource_field(
    pod: Object,
    selector: Mapping[str, Any],
    allocatable: Mapping[str, str],
    container: Object | None = None,
) -> str:
    """The value of `resourceFieldRef`; a missing limit is the pod's, else the node's allocatable.

    `container` is the one whose variable this is; volumes name theirs (containerName).
    """
    wanted = selector.get("containerName") or (container or {}).get("name", "")
    spec = pod["spec"]
    everyone = [*spec.get("containers", []), *spec.get("initContainers", [])]
    found = next((c for c in everyone if c["name"] == wanted), None)
    if found is None:
        raise HPKError(f"container {wanted} not found")
    kind, _, name = str(selector.get("resource", "")).partition(".")
    known = name in ("cpu", "memory", "ephemeral-storage") or name.startswith("hugepages-")
    if kind not in ("limits", "requests") or not known:
        raise HPKError(f"unsupported container resource : {selector.get('resource', '')}")
    value = parse_quantity((found.get("resources", {}).get(kind) or {}).get(name, "0"))
    if not value and kind == "limits" and not name.startswith("hugepages-"):
        pod_limits = (spec.get("resources") or {}).get("limits") or {}
        value = parse_quantity(pod_limits.get(name, "0"))
        value = value or parse_quantity(allocatable.get(name, "0"))
    divisor = parse_quantity(selector.get("divisor") or "1") or parse_quantity("1")
    if name == "cpu":
        return str(-(-milli(value) // milli(divisor)))
    return str(-(-ceil(value) // ceil(divisor)))


def _format_map(entries: Mapping[str, str]) -> str:
    return "\n".join(f"{key}={_quote(value)}" for key, value in sorted(entries.items()))


def _quote(text: str) -> str:
    """As Go's strconv.Quote."""
    return '"' + "".join(_ESCAPES.get(c) or _escape(c) for c in text) + '"'


def _escape(c: str) -> str:
    if c.isprintable():
        return c
    code = ord(c)
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
