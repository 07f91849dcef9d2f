"""A small asynchronous API client: raw JSON over one aiohttp session.

The kubeconfig (server, CA, certificate, token) is read by `kubernetes.aio`; its generated
calls and typed models are left alone because they cost more than the request itself.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, kube_config
from yarl import URL

from hpk_kubelet.errors import HPKError
from hpk_kubelet.kube.api_errors import ApiError, Object, Unreachable, error_of, retry_after
from hpk_kubelet.kube.paths import (
    configmaps,
    events,
    leases,
    nodes,
    pods,
    resource,
    secrets,
    serviceaccounts,
    services,
)

__all__ = [
    "APPLY",
    "JSON",
    "JSON_PATCH",
    "MERGE",
    "STRATEGIC",
    "ApiError",
    "Client",
    "Object",
    "Params",
    "Unreachable",
    "configmaps",
    "events",
    "leases",
    "nodes",
    "pods",
    "resource",
    "secrets",
    "serviceaccounts",
    "services",
]

Params = Mapping[str, str | int]

JSON = "application/json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"

RETRIED = frozenset({429, 500, 502, 503, 504})
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
WATCH_READ_TIMEOUT = 150.0
"""Seconds without a byte after which a watch is taken for dead: bookmarks come each minute."""

load_kube_config: Any = kube_config.load_kube_config  # the package is untyped here
drop_temporary_files: Any = kube_config._cleanup_temp_files

_encode = msgspec.json.Encoder().encode
_decode: Any = msgspec.json.Decoder().decode


class Client:
    """One user's access to one API server. Safe for any number of concurrent calls."""

    def __init__(
        self,
        server: str,
        *,
        tls: ssl.SSLContext | bool = True,
        ca: bytes = b"",
        headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
        server_hostname: str | None = None,
        concurrency: int = 64,
        patience: float = 60.0,
    ) -> None:
        self.server = server.rstrip("/")
        self.ca = ca
        self.patience = patience
        self._request: dict[str, Any] = {"proxy": proxy, "server_hostname": server_hostname}
        self._slots = asyncio.Semaphore(concurrency)
        common: dict[str, Any] = {
            "headers": {"Accept": JSON, "Accept-Encoding": "identity", **(headers or {})},
            "cookie_jar": aiohttp.DummyCookieJar(),
            "auto_decompress": False,
        }
        self._calls = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=90, connect=10),
            **common,
        )
        # Watches have connections of their own: they would hold the calls' slots for minutes.
        self._watches = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None, connect=10, sock_read=WATCH_READ_TIMEOUT),
            read_bufsize=2**20,
            **common,
        )

    @classmethod
    async def from_kubeconfig(
        cls,
        path: str | Path,
        *,
        user_agent: str = "hpk",
        concurrency: int = 64,
        patience: float = 60.0,
    ) -> Client:
        """Raises HPKError when the file is missing or names no usable server and credentials."""
        if not Path(path).is_file():
            raise HPKError(f"{path} does not exist; is a control plane up? hpk status tells")
        config = Configuration()
        try:
            await load_kube_config(str(path), client_configuration=config, persist_config=False)
            ca = Path(config.ssl_ca_cert).read_bytes() if config.ssl_ca_cert else b""
            tls = ssl.create_default_context(cadata=ca.decode() or None)
            if config.cert_file:
                tls.load_cert_chain(config.cert_file, config.key_file)
        except (ConfigException, OSError, ssl.SSLError, TypeError, ValueError) as e:
            raise HPKError(
                f"{path} is not a usable kubeconfig: {e}; hpk serve writes it anew at its start"
            ) from None
        finally:
            # Keys that a kubeconfig carries inline pass through temporary files; they must not
            # outlive this call (the library would leave them until the process exits cleanly).
            drop_temporary_files()
        if not config.verify_ssl:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        headers = {"User-Agent": user_agent}
        if token := config.api_key.get("BearerToken"):
            headers["Authorization"] = token
        return cls(
            config.host,
            tls=tls,
            ca=ca,
            headers=headers,
            proxy=config.proxy,
            server_hostname=config.tls_server_name,
            concurrency=concurrency,
            patience=patience,
        )

    async def close(self) -> None:
        await self._calls.close()
        await self._watches.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _url(self, path: str, params: Params | None) -> URL:
        # The path is quoted already (paths.py); parsing it once more is most of a URL's cost.
        if not params:
            return URL(self.server + path, encoded=True)
        query = urlencode({key: value for key, value in params.items() if value != ""})
        return URL(f"{self.server}{path}?{query}", encoded=True)

    async def raw(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: bytes | None = None,
        content_type: str = JSON,
        patience: float | None = None,
    ) -> bytes:
        """One request, tried again while the API server is away or asks to be left alone.

        `patience` is for how many seconds (None: the client's; 0: one try). Raises ApiError, and
        Unreachable when patience ran out. A create that is tried again after its connection was
        lost may answer AlreadyExists for the object the first try made.
        """
        url = self._url(path, params)
        headers = {"Content-Type": content_type} if body is not None else None
        give_up = time.monotonic() + (self.patience if patience is None else patience)
        pause = FIRST_PAUSE
        while True:
            failure: ApiError
            wait = pause * random.uniform(0.5, 1.0)
            try:
                async with (
                    self._slots,
                    self._calls.request(
                        method, url, data=body, headers=headers, **self._request
                    ) as answer,
                ):
                    data = await answer.read()
                    if answer.status < 300:
                        return data
                    failure = error_of(answer.status, data, f"{method} {path}")
                    if answer.status not in RETRIED:
                        raise failure
                    failure = Unreachable(
                        failure.status, failure.reason, failure.message, failure.body
                    )
                    wait = max(wait, retry_after(answer.headers.get("Retry-After")))
            except aiohttp.ClientSSLError as e:
                raise ApiError(0, "TLS", f"{self.server}: {e}") from None
            except (aiohttp.ClientError, TimeoutError, OSError) as e:
                text = str(e) or type(e).__name__
                failure = Unreachable(0, "Unreachable", f"API server {self.server}: {text}")
            if time.monotonic() + wait > give_up:
                raise failure
            await asyncio.sleep(wait)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _json_call(
        self,
        method: str,
        path: str,
        body: Object | list[Any] | None,
        params: Params | None,
        patience: float | None,
        content_type: str = JSON,
    ) -> Object:
        try:
            encoded = None if body is None else _encode(body)
        except (TypeError, ValueError) as e:  # ValueError: text that is no Unicode
            raise ApiError(400, "BadRequest", f"{method} {path}: no JSON: {e}") from None
        data = await self.raw(
            method,
            path,
            params=params,
            body=encoded,
            content_type=content_type,
            patience=patience,
        )
        answer: Object = _decode(data)
        return answer

    async def get(
        self, path: str, params: Params | None = None, *, patience: float | None = None
    ) -> Object:
        return await self._json_call("GET", path, None, params, patience)

    async def create(
        self,
        path: str,
        body: Object,
        params: Params | None = None,
        *,
        patience: float | None = None,
    ) -> Object:
        return await self._json_call("POST", path, body, params, patience)

    async def update(
        self,
        path: str,
        body: Object,
        params: Params | None = None,
        *,
        patience: float | None = None,
    ) -> Object:
        return await self._json_call("PUT", path, body, params, patience)

    async def patch(
        self,
        path: str,
        body: Object | list[Any],
        content_type: str = MERGE,
        params: Params | None = None,
        *,
        patience: float | None = None,
    ) -> Object:
        return await self._json_call("PATCH", path, body, params, patience, content_type)

    async def delete(
        self,
        path: str,
        *,
        grace: int | None = None,
        uid: str | None = None,
        propagation: str | None = None,
        patience: float | None = None,
    ) -> Object:
        """`grace` in seconds; with `uid` only that object is deleted (409 for another one)."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid:
            options["preconditions"] = {"uid": uid}
        if propagation:
            options["propagationPolicy"] = propagation
        return await self._json_call("DELETE", path, options, None, patience)

    async def list(self, path: str, params: Params | None = None, *, page: int = 500) -> Object:
        """The whole collection, page by page, as one list object of one resourceVersion.

        Items get the `kind` and `apiVersion` that lists leave out. A page token that expired
        (410) starts again from the first page.
        """
        query: dict[str, str | int] = {"limit": page, **(params or {})}
        items: list[Object] = []
        while True:
            try:
                answer = await self.get(path, query)
            except ApiError as e:
                if not (e.expired and "continue" in query):
                    raise
                del query["continue"]
                items = []
                continue
            items += answer.get("items") or ()
            token = answer["metadata"].get("continue")
            if not token:
                break
            query["continue"] = token
        kind, version = answer["kind"].removesuffix("List"), answer["apiVersion"]
        for item in items:
            item.setdefault("kind", kind)
            item.setdefault("apiVersion", version)
        answer["items"] = items
        return answer

    async def watch(
        self, path: str, params: Params | None = None
    ) -> AsyncIterator[tuple[str, Object]]:
        """(`ADDED`|`MODIFIED`|`DELETED`|`BOOKMARK`|`ERROR`, object) until the server ends it.

        Raises ApiError when the watch is refused and Unreachable when its connection breaks.
        """
        url = self._url(path, {"watch": "1", **(params or {})})
        try:
            async with self._watches.get(url, **self._request) as answer:
                if answer.status >= 300:
                    raise error_of(answer.status, await answer.read(), f"GET {path}")
                rest = b""
                async for chunk in answer.content.iter_any():
                    # Lines have no upper bound (an object may be over 1 MB): no readline().
                    *lines, tail = chunk.split(b"\n")
                    if lines:
                        lines[0] = rest + lines[0]
                        rest = tail
                    else:
                        rest += tail
                    for line in lines:
                        if line:
                            event = _decode(line)
                            yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            text = str(e) or type(e).__name__
            raise Unreachable(0, "Unreachable", f"watch of {path}: {text}") from None
