"""Paths of API objects, e.g. `pods("ns", "p", "status")`. Every part is percent-quoted."""

from __future__ import annotations

from urllib.parse import quote


def resource(
    api: str,
    plural: str,
    namespace: str | None = None,
    name: str | None = None,
    sub: str | None = None,
) -> str:
    """The path of a resource; `api` is an apiVersion: `v1` or `coordination.k8s.io/v1`.

    Without a namespace: the cluster-wide collection, or a cluster-scoped object.
    """
    path = f"/apis/{api}/" if "/" in api else f"/api/{api}/"
    if namespace:
        path += f"namespaces/{quote(namespace, safe='')}/"
    path += plural
    if name:
        path += f"/{quote(name, safe='')}"
        if sub:
            path += f"/{sub}"
    return path


def pods(namespace: str | None = None, name: str | None = None, sub: str | None = None) -> str:
    return resource("v1", "pods", namespace, name, sub)


def services(namespace: str | None = None, name: str | None = None, sub: str | None = None) -> str:
    return resource("v1", "services", namespace, name, sub)


def events(namespace: str | None = None, name: str | None = None) -> str:
    return resource("v1", "events", namespace, name)


def configmaps(namespace: str | None = None, name: str | None = None) -> str:
    return resource("v1", "configmaps", namespace, name)


def secrets(namespace: str | None = None, name: str | None = None) -> str:
    return resource("v1", "secrets", namespace, name)


def serviceaccounts(
    namespace: str | None = None, name: str | None = None, sub: str | None = None
) -> str:
    return resource("v1", "serviceaccounts", namespace, name, sub)


def leases(namespace: str | None = None, name: str | None = None) -> str:
    return resource("coordination.k8s.io/v1", "leases", namespace, name)


def nodes(name: str | None = None, sub: str | None = None) -> str:
    return resource("v1", "nodes", None, name, sub)
