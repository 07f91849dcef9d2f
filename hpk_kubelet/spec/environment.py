"""The variables of a container (kubelet_pods.go, makeEnvironmentVariables)."""

from __future__ import annotations

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec import downward
from hpk_kubelet.spec.errors import ConfigError
from hpk_kubelet.spec.expansion import expand, lookup_in
from hpk_kubelet.spec.inputs import Object, PlanInputs
from hpk_kubelet.spec.late import Value, parts
from hpk_kubelet.spec.network import api_address
from hpk_kubelet.spec.objects import config_map_data, secret_data
from hpk_kubelet.spec.services import service_variables


def container_environment(pod: Object, container: Object, inputs: PlanInputs) -> dict[str, Value]:
    """What Kubernetes sets: services, envFrom, env; not the image's own.

    Bytes of a Secret that are not UTF-8 become lone surrogates, as os.fsdecode makes them.
    Raises ConfigError with kubelet's words for what is missing and not optional.
    """
    services = service_variables(
        inputs.services, *api_address(pod, inputs), pod["spec"].get("enableServiceLinks", True)
    )
    try:
        variables = _env_from(container, inputs)
        lookup = lookup_in(variables, services)
        for entry in container.get("env") or []:
            value: Value | None = entry.get("value") or ""
            if value:
                value = expand(str(value), lookup)
            elif entry.get("valueFrom"):
                value = _value_from(pod, container, entry, inputs)
            if value is not None:
                variables[entry["name"]] = value
    except ConfigError:
        raise
    except HPKError as e:
        raise ConfigError(str(e), container=container["name"]) from None
    environment = services | variables
    for name, value in environment.items():
        if "\0" in name or "=" in name or not name:
            raise ConfigError(
                f"the name of variable {name!r} is empty or contains = or NUL",
                container=container["name"],
                reason="CreateContainerError",
            )
        if any("\0" in part for part in parts(value)):
            raise ConfigError(
                f"variable {name} contains a NUL byte, which no environment can hold",
                container=container["name"],
                reason="CreateContainerError",
            )
    return environment


def _env_from(container: Object, inputs: PlanInputs) -> dict[str, Value]:
    variables: dict[str, Value] = {}
    for source in container.get("envFrom") or []:
        data: dict[str, str] = {}
        if ref := source.get("configMapRef"):
            data = config_map_data(inputs.objects, ref.get("name", ""), _optional(ref)) or {}
        elif ref := source.get("secretRef"):
            secret = secret_data(inputs.objects, ref.get("name", ""), _optional(ref)) or {}
            data = {k: _text(v) for k, v in secret.items()}
        prefix = source.get("prefix") or ""
        variables |= {prefix + key: value for key, value in data.items()}
    return variables


def _value_from(pod: Object, container: Object, entry: Object, inputs: PlanInputs) -> Value | None:
    """None when an optional source is missing: the variable is then not set at all."""
    source = entry["valueFrom"]
    if ref := source.get("fieldRef"):
        return downward.environment_field(pod, ref.get("fieldPath", ""))
    if ref := source.get("resourceFieldRef"):
        return downward.resource_field(pod, ref, inputs.allocatable, container)
    namespace = pod["metadata"].get("namespace", "")
    if ref := source.get("configMapKeyRef"):
        name, key, optional = ref.get("name", ""), ref.get("key", ""), _optional(ref)
        config_map = config_map_data(inputs.objects, name, optional)
        if config_map is not None and key in config_map:
            return config_map[key]
        if optional:
            return None
        raise HPKError(f"couldn't find key {key} in ConfigMap {namespace}/{name}")
    if ref := source.get("secretKeyRef"):
        name, key, optional = ref.get("name", ""), ref.get("key", ""), _optional(ref)
        secret = secret_data(inputs.objects, name, optional)
        if secret is not None and key in secret:
            return _text(secret[key])
        if optional:
            return None
        raise HPKError(f"couldn't find key {key} in Secret {namespace}/{name}")
    kinds = ", ".join(sorted(source)) or "an empty source"
    raise HPKError(
        f"variable {entry['name']}: valueFrom with {kinds} is not supported by HPK; "
        "use fieldRef, resourceFieldRef, configMapKeyRef or secretKeyRef"
    )


def _optional(ref: Object) -> bool:
    return bool(ref.get("optional"))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
