"""Which container of a pod is MPI ranks."""

from __future__ import annotations

from hpk_kubelet.spec.inputs import Object


def main_container(pod: Object) -> str:
    """The container whose program becomes MPI ranks: the one called `main`, else the first."""
    names: list[str] = [container["name"] for container in pod["spec"]["containers"]]
    return "main" if "main" in names else names[0]
