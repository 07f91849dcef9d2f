"""What a pod asks for in all (component-helpers' PodRequests)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hpk_kubelet.spec.quantity import parse_quantity

Object = dict[str, Any]
Requests = dict[str, Fraction]


def pod_requests(pod: Object) -> Requests:
    """Name → amount. Init containers run one after another beside the sidecars started so far,
    all others at once; requests of the pod itself replace the sum, the overhead comes on top."""
    spec = pod["spec"]
    total: Requests = {}
    for container in spec["containers"]:
        add(total, requests(container))
    peak: Requests = {}
    sidecars: Requests = {}
    for container in spec.get("initContainers") or ():
        wanted = requests(container)
        if container.get("restartPolicy") == "Always":
            add(sidecars, wanted)
            add(total, wanted)
            raise_to(peak, sidecars)
        else:
            raise_to(peak, add(dict(sidecars), wanted))
    raise_to(total, peak)
    total.update(requests(spec))
    return add(total, parsed(spec.get("overhead") or {}))


def requests(holder: Object) -> Requests:
    """`resources.requests` of a container or of a pod's spec."""
    return parsed((holder.get("resources") or {}).get("requests") or {})


def parsed(quantities: dict[str, Any]) -> Requests:
    return {name: parse_quantity(text) for name, text in quantities.items()}


def add(total: Requests, more: Requests) -> Requests:
    for name, amount in more.items():
        total[name] = total.get(name, Fraction(0)) + amount
    return total


def raise_to(total: Requests, floor: Requests) -> None:
    for name in floor:
        total[name] = max(total.get(name, Fraction(0)), floor[name])
