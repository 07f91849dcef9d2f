"""`kubectl top`: metrics.k8s.io is an aggregated API that the kubelet's own port serves."""

from __future__ import annotations

import base64
import json

from hpk_kubelet.controlplane.api import ApiClient, Manifest, apply_manifests

NAME, NAMESPACE = "hpk-metrics", "kube-system"
SERVER_NAME = f"{NAME}.{NAMESPACE}.svc"
"""What the API server expects in the kubelet's certificate."""
_PATH = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.metrics.k8s.io"


def manifests(address: str, port: int, ca: bytes) -> list[Manifest]:
    """The Service without a selector, where it leads, and the API; `ca` as PEM."""
    meta = {"name": NAME, "namespace": NAMESPACE}
    ports = [{"name": "https", "port": 443, "targetPort": port, "protocol": "TCP"}]
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**meta, "labels": {"kubernetes.io/service-name": NAME}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.metrics.k8s.io"},
            "spec": {
                "group": "metrics.k8s.io",
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "service": {"name": NAME, "namespace": NAMESPACE, "port": 443},
                "caBundle": base64.b64encode(ca).decode(),
            },
        },
    ]


async def offer(client: ApiClient, address: str, port: int, ca: bytes) -> None:
    """Registers the API, unless the user has put another server of it in place."""
    status, content = await client.request("GET", _PATH)
    if status == 200:
        service = json.loads(content)["spec"].get("service") or {}
        if service.get("name") != NAME:
            return
    await apply_manifests(client, manifests(address, port, ca))
