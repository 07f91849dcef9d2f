"""projected: several sources in one directory (pkg/volume/projected)."""

from __future__ import annotations

from collections.abc import Iterator

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.inputs import Object
from hpk_kubelet.volumes import configmap, downwardapi, secret
from hpk_kubelet.volumes.base import File, Files, TokenRequest, VolumeInputs, default_mode

DEFAULT_EXPIRATION = 3600
MAX_TOKEN_AGE = 24 * 3600.0


def files(pod: Object, volume: Object, inputs: VolumeInputs) -> Files:
    """Later sources win where paths collide; all that is wrong is told at once, as kubelet does."""
    mode = default_mode(volume["projected"])
    result: Files = {}
    errors: list[str] = []
    for source in volume["projected"].get("sources") or []:
        try:
            result |= _source(pod, volume["name"], source, inputs, mode)
        except HPKError as e:
            errors.append(str(e))
    if errors:
        errors = list(dict.fromkeys(errors))
        raise HPKError(errors[0] if len(errors) == 1 else f"[{', '.join(errors)}]")
    return result


def _source(pod: Object, volume: str, source: Object, inputs: VolumeInputs, mode: int) -> Files:
    if config := source.get("configMap"):
        return configmap.project(config, inputs, mode)
    if config := source.get("secret"):
        return secret.project(config, inputs, mode)
    if config := source.get("downwardAPI"):
        return downwardapi.project(pod, config, inputs, mode)
    if config := source.get("serviceAccountToken"):
        request = _request(volume, config)
        token = inputs.tokens.get(request)
        if token is None:
            raise HPKError(f"no token for path {request.path} could be had from the API server")
        return {request.path: File(token.encode(), mode)}
    kinds = ", ".join(sorted(source)) or "an empty source"
    raise HPKError(
        f"projection of {kinds} is not supported by HPK; "
        "use configMap, secret, downwardAPI or serviceAccountToken"
    )


def token_requests(pod: Object) -> Iterator[TokenRequest]:
    """The tokens a pod's volumes want; each is asked of the API server and given back in
    VolumeInputs.tokens."""
    for volume in pod["spec"].get("volumes") or []:
        for source in (volume.get("projected") or {}).get("sources") or []:
            if config := source.get("serviceAccountToken"):
                yield _request(volume["name"], config)


def _request(volume: str, config: Object) -> TokenRequest:
    return TokenRequest(
        volume=volume,
        path=config["path"],
        audience=config.get("audience") or "",
        expiration_seconds=config.get("expirationSeconds") or DEFAULT_EXPIRATION,
    )


def refresh_at(issued: float, expires: float) -> float:
    """When a token is replaced: after 80 % of its life, at the latest after a day
    (pkg/kubelet/token/token_manager.go). Unix seconds."""
    return min(issued + 0.8 * (expires - issued), issued + MAX_TOKEN_AGE)
