"""ConfigMaps and Secrets as the kubelet reads them."""

from __future__ import annotations

import base64
import binascii

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Objects


def config_map_data(objects: Objects, name: str, optional: bool = False) -> dict[str, str] | None:
    """`data` of a ConfigMap; None when it does not exist and is optional; HPKError otherwise."""
    config_map = objects.get(("ConfigMap", name))
    if config_map is None:
        if optional:
            return None
        raise HPKError(f'configmap "{name}" not found')
    return config_map.get("data") or {}


def config_map_bytes(objects: Objects, name: str, optional: bool) -> dict[str, bytes]:
    """`data` and `binaryData` of a ConfigMap; nothing when it is missing and optional."""
    data = config_map_data(objects, name, optional) or {}
    config_map = objects.get(("ConfigMap", name)) or {}
    binary = config_map.get("binaryData") or {}
    return {k: v.encode("utf-8", "surrogateescape") for k, v in data.items()} | {
        k: _decode("configmap", name, k, v) for k, v in binary.items()
    }


def secret_data(objects: Objects, name: str, optional: bool = False) -> dict[str, bytes] | None:
    """`data` of a Secret, decoded; None when it does not exist and is optional."""
    secret = objects.get(("Secret", name))
    if secret is None:
        if optional:
            return None
        raise HPKError(f'secret "{name}" not found')
    return {k: _decode("secret", name, k, v) for k, v in (secret.get("data") or {}).items()}


def _decode(kind: str, name: str, key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise HPKError(f'{kind} "{name}": key {key} is not base64') from None
