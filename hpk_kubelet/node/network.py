"""The facts of the pod network as the kubelet passes them on: into plans, and to agents that run
while they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hpk_kubelet.config import Paths
from hpk_kubelet.network.facts import facts_file, read_facts
from hpk_kubelet.spec.plan import NetworkFacts, NetworkPlan

log = logging.getLogger(__name__)

_LOOK = 1.0  # seconds between two looks at the file, which this node's control plane writes


class NetworkNews:
    """`facts` is None where pods use their nodes' networks, or the site's by its `program`."""

    def __init__(self, paths: Paths, cluster: str, program: str = "") -> None:
        self.facts: NetworkFacts | None = None
        self._paths = paths
        self._cluster = cluster
        self._program = program
        self._seen: tuple[int, int] | None = None
        self._look()

    def plan(self) -> NetworkPlan | None:
        """What a pod's plan says now."""
        if self._program:
            return NetworkPlan(mode="site", program=self._program)
        if self.facts is None:
            return None
        return NetworkPlan(mode="rootless", cluster=self._cluster, facts=self.facts)

    def _look(self) -> bool:
        """Whether there are new facts."""
        try:
            stat = facts_file(self._paths).stat()
            now = (stat.st_mtime_ns, stat.st_ino)
        except FileNotFoundError:
            now = None
        if now == self._seen:
            return False
        try:
            self.facts = read_facts(self._paths)
        except ValueError as e:
            log.error("%s can't be understood: %s", facts_file(self._paths), e)
            return False
        self._seen = now
        return self.facts is not None

    async def watch(self, changed: Callable[[NetworkFacts], None]) -> None:
        """Calls `changed` with new facts until cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            if self._look() and self.facts is not None:
                changed(self.facts)
