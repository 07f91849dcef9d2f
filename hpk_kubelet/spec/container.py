"""One container of a pod → what to run (kuberuntime_container.go, generateContainerConfig)."""

from __future__ import annotations

import posixpath
import signal
from collections.abc import Mapping
from typing import Any, cast

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.environment import container_environment
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.expansion import expand, lookup_in
from hpk_kubelet.spec.inputs import Image, Object, PlanInputs
from hpk_kubelet.spec.late import Value, field, parts
from hpk_kubelet.spec.plan import ContainerPlan, ImagePlan, Late, MountPlan
from hpk_kubelet.spec.quantity import ceil, parse_quantity
from hpk_kubelet.spec.restart import is_sidecar, restart_policy
from hpk_kubelet.spec.security import security_plan

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def container_plan(
    pod: Object, container: Object, inputs: PlanInputs, hostname: str, *, init: bool
) -> ContainerPlan:
    """Everything the agent needs for one container; ConfigError when that can't be."""
    name = container["name"]
    image = inputs.images[name]
    kube_environment = container_environment(pod, container, inputs)
    security, user = security_plan(pod, container, image, inputs)
    argv, late_argv = _argv(container, image, kube_environment)
    env, late_env = _environment(container, image, kube_environment, hostname, user.home)
    limits = (container.get("resources") or {}).get("limits") or {}
    plan = ContainerPlan(
        name=name,
        image=ImagePlan(
            reference=container.get("image", ""),
            id=image.id,
            digest=image.digest,
            rootfs=str(image.rootfs),
        ),
        argv=argv,
        env=env,
        workingDir=posixpath.join("/", container.get("workingDir") or image.config.working_dir),
        mounts=_mounts(container, inputs, kube_environment),
        security=security,
        restartPolicy=restart_policy(pod, container, init=init),
        sidecar=init and is_sidecar(container),
        tty=bool(container.get("tty")),
        stdin=bool(container.get("stdin")),
        stdinOnce=bool(container.get("stdinOnce")),
        stopSignal=_stop_signal(
            (container.get("lifecycle") or {}).get("stopSignal") or image.config.stop_signal
        ),
        terminationMessagePath=container.get("terminationMessagePath") or "/dev/termination-log",
        terminationMessagePolicy=container.get("terminationMessagePolicy") or "File",
    )
    if late_argv:
        plan["lateArgv"] = late_argv
    if late_env:
        plan["lateEnv"] = late_env
    if container.get("restartPolicyRules"):
        plan["restartPolicyRules"] = container["restartPolicyRules"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if container.get(probe):
            # cast: a TypedDict's key must be a literal
            cast(dict[str, Any], plan)[probe] = _probe(container, container[probe])
    if container.get("lifecycle"):
        plan["lifecycle"] = {
            hook: _with_port(container, handler) if isinstance(handler, dict) else handler
            for hook, handler in container["lifecycle"].items()
        }
    for key, resource in (("memoryLimit", "memory"), ("storageLimit", "ephemeral-storage")):
        if limits.get(resource) is not None:
            limit = _bytes(name, limits[resource])
            if limit > 0:  # 0 is no limit
                cast(dict[str, Any], plan)[key] = limit
    return plan


def _argv(
    container: Object, image: Image, environment: Mapping[str, Value]
) -> tuple[list[str], dict[str, Late]]:
    """command and args over the image's entrypoint and cmd: a command hides both."""
    lookup = lookup_in(environment)
    command: list[Value] = [expand(word, lookup) for word in container.get("command") or []]
    args: list[Value] = [expand(word, lookup) for word in container.get("args") or []]
    if not command:
        command = list(image.config.entrypoint)
        args = args or list(image.config.cmd)
    words = command + args
    if not words:
        raise ConfigError(
            "no command specified: neither the container nor its image has one",
            container=container["name"],
            reason="CreateContainerError",
        )
    if any("\0" in part for word in words for part in parts(word)):
        raise ConfigError(
            "a word of command or args contains a NUL byte, which no command line can hold",
            container=container["name"],
            reason="CreateContainerError",
        )
    return (
        [word if isinstance(word, str) else "" for word in words],
        {str(index): word for index, word in enumerate(words) if not isinstance(word, str)},
    )


def _environment(
    container: Object,
    image: Image,
    kube_environment: Mapping[str, Value],
    hostname: str,
    home: str,
) -> tuple[dict[str, str], dict[str, Late]]:
    """The image's variables under Kubernetes' own, with what containerd and runc add."""
    environment: dict[str, Value] = {"PATH": DEFAULT_PATH, "HOSTNAME": hostname}
    if not hostname:
        environment["HOSTNAME"] = field("hostname")
    environment |= image.config.env
    if container.get("tty"):
        environment["TERM"] = "xterm"
    environment |= kube_environment
    environment.setdefault("HOME", home or "/")
    return (
        {name: value for name, value in environment.items() if isinstance(value, str)},
        {name: value for name, value in environment.items() if not isinstance(value, str)},
    )


def _mounts(
    container: Object, inputs: PlanInputs, environment: Mapping[str, Value]
) -> list[MountPlan]:
    name = container["name"]
    if container.get("volumeDevices"):
        device = container["volumeDevices"][0].get("name", "")
        raise ConfigError(
            f'cannot find volume "{device}" to pass into container "{name}": '
            "HPK has no block devices",
            container=name,
        )
    mounts = []
    for mount in container.get("volumeMounts") or []:
        volume = inputs.volumes.get(mount["name"])
        if volume is None:
            raise ConfigError(
                f'cannot find volume "{mount["name"]}" to mount into container "{name}"',
                container=name,
            )
        sub_path: Value = mount.get("subPath") or ""
        if mount.get("subPathExpr"):
            sub_path = _expand_sub_path(name, mount["subPathExpr"], environment)
        for part in parts(sub_path):
            _check_sub_path(name, part)
        plan = MountPlan(
            volume=mount["name"],
            subPath=sub_path if isinstance(sub_path, str) else "",
            target=posixpath.join("/", mount["mountPath"]),
            # what the kubelet writes itself (configMap, …) is not the container's to write
            readOnly=bool(mount.get("readOnly") or volume.get("readOnly"))
            or volume["kind"] == "directory",
        )
        if not isinstance(sub_path, str):
            plan["lateSubPath"] = sub_path
        mounts.append(plan)
    return mounts


def _expand_sub_path(name: str, text: str, environment: Mapping[str, Value]) -> Value:
    missing = set()

    def look(variable: str) -> Value:
        if not environment.get(variable):
            missing.add(variable)
        return environment.get(variable, "")

    expanded = expand(text, look)
    if missing:
        raise ConfigError(f"missing value for {', '.join(sorted(missing))}", container=name)
    return expanded


def _check_sub_path(name: str, path: str) -> None:
    if path.startswith("/"):
        raise ConfigError(f"error SubPath `{path}` must not be an absolute path", container=name)
    if ".." in path.split("/") or "\0" in path:
        raise ConfigError(
            f"unable to provision SubPath `{path}`: must not contain '..'", container=name
        )


def _probe(container: Object, probe: Object) -> Object:
    """The probe with named ports as numbers; commands see the variables with plain values only."""
    probe = _with_port(container, probe)
    if command := (probe.get("exec") or {}).get("command"):
        plain = {e["name"]: e.get("value") or "" for e in container.get("env") or []}
        lookup = lookup_in(plain)
        probe["exec"] = probe["exec"] | {"command": [expand(word, lookup) for word in command]}
    return probe


def _with_port(container: Object, handler: Object) -> Object:
    handler = dict(handler)
    for kind in ("httpGet", "tcpSocket"):
        if action := handler.get(kind):
            handler[kind] = action | {"port": _port(container, action.get("port"))}
    return handler


def _port(container: Object, port: object) -> int:
    if isinstance(port, int):
        return port
    for declared in container.get("ports") or []:
        if declared.get("name") == port:
            return int(declared["containerPort"])
    if isinstance(port, str) and port.isdecimal() and port.isascii():
        return int(port)
    raise ConfigError(
        f'couldn\'t find port: a probe or hook names port "{port}", '
        "which is none of the container's ports",
        container=container["name"],
    )


def _stop_signal(name: str) -> str:
    """`SIGTERM`, `TERM`, `15` → SIGTERM; real-time signals (SIGRTMIN+3) stay as they are."""
    if not name:
        return "SIGTERM"
    if name.isdecimal() and name.isascii():
        numbers = {int(s): s.name for s in signal.Signals}
        return numbers.get(int(name), "SIGTERM")
    name = name.upper()
    return name if name.startswith("SIG") else f"SIG{name}"


def _bytes(container: str, quantity: object) -> int:
    try:
        return ceil(parse_quantity(quantity))
    except HPKError as e:
        raise ConfigError(str(e), container=container) from None
