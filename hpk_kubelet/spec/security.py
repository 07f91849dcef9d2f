"""Who a container runs as.

kubelet's kuberuntime/security_context*.go and pkg/securitycontext; what a user string means inside
an image is containerd's business (oci.WithUser, WithAdditionalGIDs), which `resolve_user` repeats.
"""

from __future__ import annotations

from typing import Any

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.inputs import Image, Object, PlanInputs, User
from hpk_kubelet.spec.plan import SecurityPlan


def security_plan(
    pod: Object, container: Object, image: Image, inputs: PlanInputs
) -> tuple[SecurityPlan, User]:
    """The container's ids and rights, and the user as the image knows it."""
    of_pod: dict[str, Any] = pod["spec"].get("securityContext") or {}
    of_container: dict[str, Any] = container.get("securityContext") or {}
    effective = of_pod | {k: v for k, v in of_container.items() if v is not None}
    name = container["name"]
    _check_non_root(pod, name, effective, image.config.user)
    run_as = effective.get("runAsUser")
    try:
        user = inputs.resolve_user(
            image.rootfs, image.config.user if run_as is None else str(run_as)
        )
    except HPKError as e:
        raise ConfigError(str(e), container=name, reason="CreateContainerError") from None
    gid = effective.get("runAsGroup")
    gid = user.gid if gid is None else int(gid)
    groups = [] if of_pod.get("supplementalGroupsPolicy") == "Strict" else list(user.groups)
    if of_pod.get("fsGroup") is not None:
        groups.append(int(of_pod["fsGroup"]))
    groups += [int(g) for g in of_pod.get("supplementalGroups") or []]
    plan = SecurityPlan(
        uid=user.uid,
        gid=gid,
        groups=[g for g in dict.fromkeys(groups) if g != gid],
        readOnlyRootFilesystem=bool(effective.get("readOnlyRootFilesystem")),
        privileged=bool(effective.get("privileged")),
    )
    if effective.get("allowPrivilegeEscalation") is False:
        plan["noNewPrivileges"] = True
    seccomp = effective.get("seccompProfile") or {}
    if seccomp.get("type") == "RuntimeDefault" and not plan["privileged"]:
        plan["seccomp"] = "RuntimeDefault"
    elif seccomp.get("type") == "Localhost" and not plan["privileged"]:
        try:
            plan["seccomp"] = inputs.seccomp_profile(seccomp.get("localhostProfile") or "")
        except HPKError as e:
            raise ConfigError(str(e), container=name, reason="CreateContainerError") from None
    if plan["privileged"] or of_container.get("procMount") == "Unmasked":
        plan["unmasked"] = True
    capabilities = of_container.get("capabilities") or {}
    if capabilities.get("add"):
        plan["capabilities"] = [c.removeprefix("CAP_") for c in capabilities["add"]]
    if capabilities.get("drop"):
        plan["dropCapabilities"] = [c.removeprefix("CAP_") for c in capabilities["drop"]]
    return plan, user


def _check_non_root(pod: Object, name: str, effective: dict[str, Any], image_user: str) -> None:
    """kubelet's verifyRunAsNonRoot, in its words."""
    if not effective.get("runAsNonRoot"):
        return
    metadata = pod["metadata"]
    pod_name = f"{metadata['name']}_{metadata.get('namespace', '')}({metadata.get('uid', '')})"
    where = f'(pod: "{pod_name}", container: {name})'
    if effective.get("runAsUser") is not None:
        if effective["runAsUser"] == 0:
            raise ConfigError(
                f"container's runAsUser breaks non-root policy {where}", container=name
            )
        return
    user = image_user.partition(":")[0]
    if user and not user.isdecimal():
        raise ConfigError(
            f"container has runAsNonRoot and image has non-numeric user ({user}), "
            f"cannot verify user is non-root {where}",
            container=name,
        )
    if int(user or 0) == 0:
        raise ConfigError(
            f"container has runAsNonRoot and image will run as root {where}", container=name
        )
