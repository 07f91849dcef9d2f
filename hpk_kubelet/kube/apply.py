"""Server-side apply of manifests (what `kubectl apply --server-side --force-conflicts` does)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import yaml

from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube.client import APPLY, ApiError, Client, Object, resource

CRD_PATIENCE = 30.0
"""Seconds a freshly made CustomResourceDefinition may take until it is served."""


def load_manifests(text: str) -> list[Object]:
    """The objects of a YAML stream; `List`s are flattened. Raises HPKError."""
    found: list[Object] = []
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as e:
        raise HPKError(f"manifest is not YAML: {e}") from None
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict) or "kind" not in document:
            raise HPKError("manifest has a document without a kind")
        if document["kind"] == "List":
            found += document.get("items") or []
        else:
            found.append(document)
    return found


async def path_of(client: Client, body: Object, namespace: str, known: dict[str, Object]) -> str:
    """The object's own path, its plural and scope taken from discovery (`known` caches it)."""
    api, kind, meta = body["apiVersion"], body["kind"], body["metadata"]
    for attempt in (0, 1):
        if attempt or api not in known:
            prefix = "/apis/" if "/" in api else "/api/"
            known[api] = await client.get(prefix + api)
        for entry in known[api]["resources"]:
            if entry["kind"] == kind and "/" not in entry["name"]:
                space = meta.get("namespace", namespace) if entry["namespaced"] else None
                return resource(api, entry["name"], space, meta["name"])
    raise HPKError(f"{kind} {meta['name']}: the API server serves no {kind} in {api}")


async def apply(
    client: Client,
    body: Object,
    *,
    manager: str = "hpk",
    namespace: str = "default",
    path: str | None = None,
) -> Object:
    """Applies one object, taking fields over from other managers. Raises ApiError."""
    if path is None:
        path = await path_of(client, body, namespace, {})
    return await client.patch(path, body, APPLY, {"fieldManager": manager, "force": "true"})


async def apply_all(
    client: Client,
    manifests: Iterable[Object],
    *,
    manager: str = "hpk",
    namespace: str = "default",
) -> list[Object]:
    """Applies objects in the order given; custom kinds are waited for until they are served."""
    known: dict[str, Object] = {}
    crds: set[tuple[str, str]] = set()
    done: list[Object] = []
    for body in manifests:
        if body["kind"] == "CustomResourceDefinition":
            spec = body["spec"]
            crds |= {
                (f"{spec['group']}/{v['name']}", spec["names"]["kind"]) for v in spec["versions"]
            }
        waited = (body["apiVersion"], body["kind"]) in crds
        give_up = time.monotonic() + (CRD_PATIENCE if waited else 0)
        while True:
            try:
                path = await path_of(client, body, namespace, known)
                break
            except ApiError as e:
                if not e.not_found or time.monotonic() > give_up:
                    raise
            except HPKError:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(0.1)
        done.append(await apply(client, body, manager=manager, path=path))
    return done
