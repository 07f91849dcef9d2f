"""ClusterIP disabled: the policies that make Services headless, and Events for what they can't.

The API server itself changes Services as they come in (manifests/services.yaml): no webhook,
nothing to be down. This controller installs the policies and then only tells.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from importlib.resources import files

from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube.apply import apply_all, load_manifests
from hpk_kubelet.kube.client import Client, Object, services
from hpk_kubelet.kube.events import EventRecorder
from hpk_kubelet.kube.reflector import Change, Reflector

log = logging.getLogger(__name__)

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


def warnings(service: Object) -> list[tuple[str, str]]:
    """(reason, message) of each Event a Service deserves, given how it is served here."""
    meta, spec = service["metadata"], service["spec"]
    address = spec.get("clusterIP") or ""
    if spec.get("type") == "ExternalName" or (meta.get("namespace"), meta["name"]) in SERVED:
        return []
    if address != "None":
        return [
            (
                "ClusterIPNotServed",
                f"nothing answers at the cluster address {address}: this Service was made before "
                "HPK made Services headless; delete it and create it again",
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
    """`run()` installs the policies, then watches Services until cancelled."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._events = EventRecorder(client, component="hpk-services")
        self._services = Reflector(client, services(), on_change=self._changed)

    async def run(self) -> None:
        await self.install()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            group.create_task(self._services.run())

    async def install(self) -> None:
        """Applies the policies and returns when the API server acts on them."""
        installed, told = False, ""
        while True:
            pause = POLL
            try:
                if not installed:
                    await apply_all(self._client, manifests(), manager="hpk-services")
                    installed = True
                if await self._headless():
                    log.info("Services are made headless from now on")
                    return
            except HPKError as e:  # forbidden until the API server has read its own roles
                if str(e) != told:
                    log.warning("cannot install the policies for Services yet: %s", e)
                pause, told = RETRY_PAUSE, str(e)
            await asyncio.sleep(pause)

    async def _headless(self) -> bool:
        """Whether a Service made now would be headless (asked by a dry run)."""
        made = await self._client.create(services("default"), PROBE, {"dryRun": "All"})
        return bool(made["spec"].get("clusterIP") == "None")

    def _changed(self, change: Change) -> None:
        if change.new is None:
            return
        before = warnings(change.old) if change.old else []
        for reason, message in warnings(change.new):
            if (reason, message) not in before:
                name = event_name(change.new, message)
                self._events.record(change.new, "Warning", reason, message, name=name)
