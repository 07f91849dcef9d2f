"""ClusterIP disabled: the policies that make Services headless, and Events for what they can't.

The API server itself changes Services as they come in (manifests/services.yaml): no webhook,
nothing to be down. This controller installs the policies and then only tells. With `serviceMode:
clusterIP` it takes them away: kube-proxy serves Services then.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from importlib.resources import files
from typing import Literal

from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube.apply import apply_all, load_manifests, path_of
from hpk_kubelet.kube.client import ApiError, Client, Object, services
from hpk_kubelet.kube.events import EventRecorder
from hpk_kubelet.kube.reflector import Change, Reflector

log = logging.getLogger(__name__)

Mode = Literal["headless", "clusterIP"]

REQUESTED_TYPE = "services.hpk.io/requested-type"
"""Annotation the policy leaves on a Service it made headless: the `type` that was asked for."""
SERVED = {("default", "kubernetes"), ("kube-system", "kube-dns")}
"""Services whose cluster addresses the node networks answer at, whatever the mode."""
POLL, RETRY_PAUSE = 0.05, 1.0
PROBE: Object = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"generateName": "hpk-probe-", "namespace": "default"},
    "spec": {"ports": [{"port": 80}]},
}


def manifests() -> list[Object]:
    """The admission policies and their bindings."""
    text = (files(__package__) / "manifests" / "services.yaml").read_text()
    return load_manifests(text)


def warnings(service: Object, mode: Mode = "headless") -> list[tuple[str, str]]:
    """(reason, message) of each Event a Service deserves, given how it is served here."""
    meta, spec = service["metadata"], service["spec"]
    if spec.get("type") == "ExternalName" or (meta.get("namespace"), meta["name"]) in SERVED:
        return []
    return _proxied(meta, spec) if mode == "clusterIP" else _headless(meta, spec)


def _proxied(meta: Object, spec: Object) -> list[tuple[str, str]]:
    if spec.get("clusterIP") == "None":
        if REQUESTED_TYPE not in (meta.get("annotations") or {}):
            return []
        return [
            (
                "StillHeadless",
                "this Service was made headless while serviceMode was headless, and stays so: "
                "delete it and create it again to give it a cluster address",
            )
        ]
    if spec.get("type") not in ("NodePort", "LoadBalancer"):
        return []
    return [
        (
            "NodePortNotServed",
            f"nothing listens on the nodes for this {spec['type']} Service: pods reach it at "
            f"{spec.get('clusterIP')}, and people by kubectl port-forward service/{meta['name']}",
        )
    ]


def _headless(meta: Object, spec: Object) -> list[tuple[str, str]]:
    address = spec.get("clusterIP") or ""
    if address != "None":
        return [
            (
                "ClusterIPNotServed",
                f"nothing answers at the cluster address {address}: this Service was made before "
                "HPK made Services headless; delete it and create it again (or set serviceMode: "
                "clusterIP)",
            )
        ]
    if REQUESTED_TYPE not in (meta.get("annotations") or {}):
        return []  # headless because its author wanted it so
    unmapped = [
        f"port {port['targetPort']} instead of {port['port']}"
        for port in spec.get("ports") or ()
        if isinstance(port.get("targetPort"), int) and port["targetPort"] != port["port"]
    ]
    if not unmapped:
        return []
    return [
        (
            "PortNotMapped",
            "HPK serves this Service as headless, so its ports are not mapped: clients must use "
            + ", ".join(unmapped),
        )
    ]


def event_name(service: Object, message: str) -> str:
    """The same for the same words about the same Service, also after a restart."""
    meta = service["metadata"]
    digest = hashlib.sha256(f"{meta['uid']} {message}".encode()).hexdigest()[:16]
    return f"{meta['name']}.{digest}"


class ServiceController:
    """`run()` installs or removes the policies, then watches Services until cancelled."""

    def __init__(self, client: Client, mode: Mode = "headless") -> None:
        self._client = client
        self._mode = mode
        self._events = EventRecorder(client, component="hpk-services")
        self._services = Reflector(client, services(), on_change=self._changed)

    async def run(self) -> None:
        await self.install()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            group.create_task(self._services.run())

    async def install(self) -> None:
        """Applies (or deletes) the policies and returns when the API server acts so."""
        installed, told = False, ""
        wanted = self._mode == "headless"
        while True:
            pause = POLL
            try:
                if not installed:
                    await self._apply() if wanted else await self._remove()
                    installed = True
                if await self._headless() == wanted:
                    log.info("serviceMode is %s from now on", self._mode)
                    return
            except HPKError as e:  # forbidden until the API server has read its own roles
                if str(e) != told:
                    log.warning("cannot install the policies for Services yet: %s", e)
                pause, told = RETRY_PAUSE, str(e)
            await asyncio.sleep(pause)

    async def _apply(self) -> None:
        await apply_all(self._client, manifests(), manager="hpk-services")

    async def _remove(self) -> None:
        for manifest in reversed(manifests()):
            path = await path_of(self._client, manifest, "", {})
            try:
                await self._client.delete(path)
            except ApiError as e:
                if e.status != 404:
                    raise

    async def _headless(self) -> bool:
        """Whether a Service made now would be headless (asked by a dry run)."""
        made = await self._client.create(services("default"), PROBE, {"dryRun": "All"})
        return bool(made["spec"].get("clusterIP") == "None")

    def _changed(self, change: Change) -> None:
        if change.new is None:
            return
        before = warnings(change.old, self._mode) if change.old else []
        for reason, message in warnings(change.new, self._mode):
            if (reason, message) not in before:
                name = event_name(change.new, message)
                self._events.record(change.new, "Warning", reason, message, name=name)
