"""NetworkPolicies are not enforced, and nobody should believe that they are: an Event on each."""

from __future__ import annotations

import asyncio

from hpk_kubelet.controllers.services import event_name
from hpk_kubelet.kube.client import Client
from hpk_kubelet.kube.events import EventRecorder
from hpk_kubelet.kube.paths import resource
from hpk_kubelet.kube.reflector import Change, Reflector

REASON = "NotEnforced"
MESSAGE = (
    "HPK does not enforce NetworkPolicies: this one restricts nothing. Pods of other users' "
    "clusters can't reach yours in any case; pods of your own cluster can reach each other"
)


class NetworkPolicyController:
    """`run()` watches until cancelled."""

    def __init__(self, client: Client) -> None:
        self._events = EventRecorder(client, component="hpk-network-policies")
        path = resource("networking.k8s.io/v1", "networkpolicies")
        self._policies = Reflector(client, path, on_change=self._changed)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._events.run())
            group.create_task(self._policies.run())

    def _changed(self, change: Change) -> None:
        if change.new is not None and change.old is None:
            name = event_name(change.new, MESSAGE)
            self._events.record(change.new, "Warning", REASON, MESSAGE, name=name)
