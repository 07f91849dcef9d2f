"""Which containers start again after they ended (pkg/api/v1/pod/util.go)."""

from __future__ import annotations

from typing import Literal

from hpk_kubelet.spec.inputs import Object

Policy = Literal["Always", "OnFailure", "Never"]


def is_sidecar(container: Object) -> bool:
    """An init container with restartPolicy Always runs beside the main ones (KEP-753)."""
    return container.get("restartPolicy") == "Always"


def pod_policy(pod: Object) -> Policy:
    policy: Policy = pod["spec"].get("restartPolicy") or "Always"
    return policy


def restart_policy(pod: Object, container: Object, *, init: bool) -> Policy:
    """The container's own, else the pod's; an init container that succeeded is never repeated."""
    own: Policy | None = container.get("restartPolicy")
    if own:
        return own
    policy = pod_policy(pod)
    return "OnFailure" if init and policy == "Always" else policy


def should_restart(pod: Object, container: Object, exit_code: int) -> bool:
    """kubelet's ContainerShouldRestart: rules, then the container's policy, then the pod's."""
    own: Policy | None = container.get("restartPolicy")
    if own:
        for rule in container.get("restartPolicyRules") or []:
            codes = rule.get("exitCodes") or {}
            matches = exit_code in (codes.get("values") or [])
            if codes.get("operator") == ("In" if matches else "NotIn"):
                return True  # both actions there are (Restart, RestartAllContainers) restart it
    policy = own or pod_policy(pod)
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)
