"""What pods refer to in the API, fetched as the node that they run on."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpk_kubelet.kube.client import ApiError, Client, resource
from hpk_kubelet.kube.client import serviceaccounts as service_accounts
from hpk_kubelet.kube.times import parse
from hpk_kubelet.volumes import TokenRequest, refresh_at, token_requests

Object = dict[str, Any]
Key = tuple[str, str]  # kind, name

PLURALS = {
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "PersistentVolume": "persistentvolumes",
}
_CLUSTER_WIDE = ("PersistentVolume",)
# The Node authorizer learns from a watch which pods are on which node, so for a moment after the
# binding it still says no.
_AUTHORIZER_LAG = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0)


@dataclass
class _Cached:
    task: asyncio.Task[Object | None]
    expires: float


class ObjectCache:
    """Objects of one node's pods. What was fetched within `fresh` seconds is not fetched again:
    the hundred pods of a Job want the same ones."""

    def __init__(self, client: Client, fresh: float = 2.0) -> None:
        self._client = client
        self._fresh = fresh
        self._cache: dict[tuple[str, str, str], _Cached] = {}

    async def get(self, namespace: str, wanted: Sequence[Key]) -> dict[Key, Object | None]:
        """Each object, None for one that does not exist."""
        found = await asyncio.gather(*(self._one(namespace, kind, name) for kind, name in wanted))
        return dict(zip(wanted, found, strict=True))

    def forget(self, namespace: str, kind: str, name: str) -> None:
        """It has changed: the next one who wants it gets it new."""
        self._cache.pop((namespace, kind, name), None)

    async def _one(self, namespace: str, kind: str, name: str) -> Object | None:
        key = (namespace, kind, name)
        now = time.monotonic()
        cached = self._cache.get(key)
        if cached is None or cached.expires < now:
            if len(self._cache) > 10_000:
                self._cache = {k: c for k, c in self._cache.items() if c.expires >= now}
            space = None if kind in _CLUSTER_WIDE else namespace
            path = resource("v1", PLURALS[kind], space, name)
            cached = _Cached(asyncio.create_task(self._fetch(path)), now + self._fresh)
            self._cache[key] = cached
        try:
            # The others wait for the same fetch: one pod's end must not end it.
            value = await asyncio.shield(cached.task)
        except Exception:
            self._cache.pop(key, None)
            raise
        if value is None:
            self._cache.pop(key, None)  # it may come at any moment, and is waited for
        return value

    async def _fetch(self, path: str) -> Object | None:
        for pause in (*_AUTHORIZER_LAG, None):
            try:
                return await self._client.get(path)
            except ApiError as e:
                if e.not_found:
                    return None
                if not e.forbidden or pause is None:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError


@dataclass(frozen=True)
class Token:
    value: str = field(repr=False)
    refresh: float  # Unix seconds


async def request_tokens(
    client: Client, pod: Object, wanted: Sequence[TokenRequest], have: Mapping[TokenRequest, Token]
) -> dict[TokenRequest, Token]:
    """A token for each request, bound to the pod: those of `have` that are fresh enough, and
    new ones."""
    now = time.time()

    async def one(request: TokenRequest) -> Token:
        if (token := have.get(request)) is not None and now < token.refresh:
            return token
        return await _request_token(client, pod, request)

    tokens = await asyncio.gather(*(one(request) for request in wanted))
    return dict(zip(wanted, tokens, strict=True))


def written_tokens(pod: Object, directory: Path) -> dict[TokenRequest, Token]:
    """Those that an earlier kubelet put into the pod's volumes, with their times as they say them
    themselves (RFC 7519). Blocks."""
    found = {}
    for request in token_requests(pod):
        path = directory / "volumes" / request.volume / "..data" / request.path
        try:
            text = path.read_text()
            claims = text.split(".")[1]
            times = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
            refresh = refresh_at(float(times["iat"]), float(times["exp"]))
        except (OSError, ValueError, LookupError, TypeError):
            continue  # there is none, or none that can be told to be good: it is requested anew
        found[request] = Token(text, refresh)
    return found


async def _request_token(client: Client, pod: Object, request: TokenRequest) -> Token:
    metadata = pod["metadata"]
    account = pod["spec"].get("serviceAccountName") or "default"
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [request.audience] if request.audience else [],
            "expirationSeconds": request.expiration_seconds,
            "boundObjectRef": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }
    path = service_accounts(metadata["namespace"], account, "token")
    for pause in (*_AUTHORIZER_LAG, None):
        issued = time.time()
        try:
            status = (await client.create(path, body))["status"]
        except ApiError as e:
            if not e.forbidden or pause is None:
                raise
            await asyncio.sleep(pause)
            continue
        expires = parse(status["expirationTimestamp"]).timestamp()
        return Token(status["token"], refresh_at(issued, expires))
    raise AssertionError
