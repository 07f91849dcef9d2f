"""Node heartbeats: the Lease in kube-node-lease that kube-controller-manager watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from hpk_kubelet.kube.client import ApiError, Client, Object, leases
from hpk_kubelet.kube.times import now, rfc3339_micro

NAMESPACE = "kube-node-lease"
RETRY_PAUSE = 1.0


def lease(node: str, node_uid: str | None, duration: int, time: datetime) -> Object:
    """The Lease as kubelet makes it; with `node_uid` it goes when its node goes."""
    meta: Object = {"name": node, "namespace": NAMESPACE}
    if node_uid:
        meta["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node_uid}
        ]
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": meta,
        "spec": {
            "holderIdentity": node,
            "leaseDurationSeconds": duration,
            "renewTime": rfc3339_micro(time),
        },
    }


async def renew(
    client: Client, node: str, node_uid: str | None, duration: int, time: datetime
) -> None:
    """Renews the Lease, making it when it is not there. Raises ApiError."""
    body = lease(node, node_uid, duration, time)
    try:
        await client.patch(leases(NAMESPACE, node), {"spec": body["spec"]}, patience=0)
    except ApiError as e:
        if not e.not_found:
            raise
        await client.create(leases(NAMESPACE), body, patience=0)


async def heartbeat(
    client: Client,
    node: str,
    *,
    node_uid: str | None = None,
    interval: float = 10.0,
    duration: int = 40,
    on_result: Callable[[ApiError | None], None] | None = None,
) -> None:
    """Renews every `interval` seconds until cancelled; a failed try is repeated after a second.

    `on_result` gets the error of each try, or None.
    """
    while True:
        failure: ApiError | None = None
        try:
            await renew(client, node, node_uid, duration, now())
        except ApiError as e:
            failure = e
        if on_result:
            on_result(failure)
        await asyncio.sleep(RETRY_PAUSE if failure else interval)
