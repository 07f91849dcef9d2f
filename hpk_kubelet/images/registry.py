"""The registry's HTTP API: manifests, blobs, and the token dance. No knowledge of what is on disk.

Sources: the OCI distribution specification v1.1 and Docker's token authentication
(distribution/docs/spec/auth/token.md).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.request import getproxies_environment, proxy_bypass

import aiohttp
from yarl import URL

from hpk_kubelet.images.auth import Credential
from hpk_kubelet.images.errors import ImagePullError
from hpk_kubelet.images.reference import DOCKER_HUB, Reference

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_ACCEPT = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
MAX_JSON = 8 << 20  # bytes of a manifest or config; containerd's limit
_CHUNK = 1 << 20
_BLOB_ATTEMPTS = 5  # in a row without one byte of progress
_REQUEST_ATTEMPTS = 3
BACKOFF = 0.2  # seconds before the second attempt is twice this, and doubles
_RETRIED = {408, 429, 500, 502, 503, 504}
_CHALLENGE = re.compile(r'([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,]+))')
_SCHEME = re.compile(r"(?:^|,)\s*(Bearer|Basic)(?:\s+|$)", re.IGNORECASE)


class Connections:
    """The HTTP session and the tokens that all repositories share.

    Registries in `insecure` (`host[:port]`) are spoken to over http, all others over https alone.
    """

    def __init__(self, insecure: Collection[str] = ()) -> None:
        self.insecure = frozenset(host.lower() for host in insecure)
        self.tokens: dict[tuple[str, str, Credential | None], tuple[str, float]] = {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Blobs are checked as they are sent: nothing may decompress them on the way.
                auto_decompress=False,
                headers={"User-Agent": "hpk", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=60),
                connector=aiohttp.TCPConnector(limit=32),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_CHUNK,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class Repository:
    """One repository, asked with one credential (None: anonymously)."""

    def __init__(
        self, connections: Connections, ref: Reference, credential: Credential | None
    ) -> None:
        self._connections = connections
        self._ref = ref
        self._credential = credential
        self._authorization = ""
        host = "registry-1.docker.io" if ref.registry == DOCKER_HUB else ref.registry
        self._plain = ref.registry.lower() in connections.insecure
        try:
            self._base = URL(f"{'http' if self._plain else 'https'}://{host}")
        except ValueError as e:
            raise ImagePullError(f"{host} is not a registry's address: {e}") from None

    async def digest_of(self, what: str) -> str:
        """The digest a tag stands for; "" when the registry does not say without sending it."""
        async with self._request("HEAD", f"manifests/{what}", {"Accept": _ACCEPT}) as response:
            return response.headers.get("Docker-Content-Digest", "")

    async def manifest(self, what: str) -> tuple[bytes, str]:
        """The manifest or index of a tag or digest, as sent, and its media type."""
        headers, why = {"Accept": _ACCEPT}, ""
        for attempt in range(_REQUEST_ATTEMPTS):
            await asyncio.sleep(BACKOFF * 2**attempt if attempt else 0)
            try:
                async with self._request("GET", f"manifests/{what}", headers) as response:
                    kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
                    return await self._body(response), kind
            except (aiohttp.ClientError, TimeoutError) as e:
                why = _words(e)
        raise Unreachable(f"{self._base.authority}: download of the manifest {why}")

    async def small_blob(self, digest: str, size: int) -> bytes:
        if size > MAX_JSON:
            raise ImagePullError(f"{digest} is {size} bytes: too much for an image's config")
        body = bytearray()
        async for chunk in self.blob(digest, size, body.clear):
            body += chunk
        return bytes(body)

    async def blob(
        self, digest: str, size: int, restart: Callable[[], None]
    ) -> AsyncIterator[bytes]:
        """The blob's bytes. A broken connection is taken up again where it broke.

        `restart` is called when the registry can't do that: what came so far comes again.
        """
        offset, failures = 0, 0
        while True:
            try:
                headers = {"Range": f"bytes={offset}-"} if offset else {}
                async with self._request("GET", f"blobs/{digest}", headers) as response:
                    if offset and response.status != HTTPStatus.PARTIAL_CONTENT:
                        restart()
                        offset = 0
                    async for chunk in response.content.iter_chunked(_CHUNK):
                        offset, failures = offset + len(chunk), 0
                        if offset > size:
                            raise ImagePullError(f"{digest} is longer than the {size} bytes said")
                        yield chunk
                if offset == size:
                    return
                why = f"ended after {offset} of {size} bytes"
            except (aiohttp.ClientError, TimeoutError, Unreachable) as e:
                why = _words(e)
            failures += 1
            if failures == _BLOB_ATTEMPTS:
                raise ImagePullError(f"{self._base.authority}: download of {digest} {why}")
            await asyncio.sleep(BACKOFF * 2**failures)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        body = await response.content.read(MAX_JSON + 1)
        while chunk := await response.content.read(MAX_JSON + 1 - len(body)):
            body += chunk
        if len(body) > MAX_JSON:
            raise ImagePullError(f"{response.url} answered more than {MAX_JSON} bytes")
        return body

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Asks with whatever authorization it takes; raises for every answer but a good one."""
        url = self._base.joinpath("v2", self._ref.repository, path)
        refused, failures = 0, 0
        while True:
            try:
                response = await self._follow(method, url, headers)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
                raise Unreachable(_words(e)) from None
            except (aiohttp.ClientError, TimeoutError) as e:
                failures += 1
                if failures == _REQUEST_ATTEMPTS:
                    raise Unreachable(f"{method} {url} {_words(e)}") from None
                await asyncio.sleep(BACKOFF * 2**failures)
                continue
            async with response:
                if response.status == HTTPStatus.UNAUTHORIZED and refused < 2:
                    challenges = response.headers.getall("WWW-Authenticate", [])
                    # A token that was sent or kept may have expired; a new one is the last try.
                    fresh = refused > 0 or bool(self._authorization)
                    refused += 2 if fresh else 1
                    authorization = await self._authorize(challenges, fresh=fresh)
                    if authorization not in ("", self._authorization):
                        self._authorization = authorization
                        continue
                if response.status in _RETRIED and failures < _REQUEST_ATTEMPTS:
                    failures += 1
                    await asyncio.sleep(_retry_after(response, BACKOFF * 2**failures))
                    continue
                if response.status >= HTTPStatus.BAD_REQUEST:
                    raise await self._refusal(method, response)
                yield response
                return

    async def _follow(
        self, method: str, url: URL, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Follows redirects by hand: credentials stay with the registry, https stays https."""
        origin = url.origin()
        for _ in range(6):
            sent = dict(headers)
            if self._authorization and url.origin() == origin:
                sent["Authorization"] = self._authorization
            response = await self._connections.session.request(
                method, url, headers=sent, allow_redirects=False, proxy=proxy_for(url)
            )
            location = response.headers.get("Location")
            if response.status not in (301, 302, 303, 307, 308) or not location:
                return response
            response.release()
            target = url.join(URL(location, encoded=True))
            if target.scheme != "https" and not (self._plain and target.scheme == "http"):
                raise ImagePullError(f"{url} redirects to {target.origin()}, which is not https")
            url = target
        raise ImagePullError(f"{origin} redirects without end")

    async def _authorize(self, challenges: list[str], *, fresh: bool) -> str:
        """An Authorization header that answers the challenge; "" when there is none.

        `fresh`: the token kept from before was refused, ask for a new one.
        """
        parsed = dict(pair for header in challenges for pair in parse_challenges(header))
        if "bearer" in parsed and parsed["bearer"].get("realm"):
            return "Bearer " + await self._token(parsed["bearer"], fresh=fresh)
        if "basic" in parsed and self._credential and self._credential.password:
            return _basic(self._credential)
        return ""

    async def _token(self, challenge: Mapping[str, str], *, fresh: bool) -> str:
        realm, credential = URL(challenge["realm"]), self._credential
        scope = challenge.get("scope") or f"repository:{self._ref.repository}:pull"
        if realm.scheme != "https" and not (self._plain and realm.scheme == "http"):
            raise ImagePullError(
                f"{self._base.authority} wants a token from {realm}, which is not https"
            )
        key = (f"{realm} {challenge.get('service', '')}", scope, credential)
        known, expires = self._connections.tokens.get(key, ("", 0.0))
        if known and not fresh and time.monotonic() < expires:
            return known
        fields = {"scope": scope, "service": challenge.get("service", "")}
        request: dict[str, Any] = {"proxy": proxy_for(realm), "allow_redirects": False}
        if credential and credential.identity_token:
            method = "POST"
            request["data"] = fields | {
                "grant_type": "refresh_token",
                "refresh_token": credential.identity_token,
                "client_id": "hpk",
            }
        else:
            method = "GET"
            request["params"] = {k: v for k, v in fields.items() if v}
            if credential:
                request["headers"] = {"Authorization": _basic(credential)}
        session = self._connections.session
        try:
            async with session.request(method, realm, **request) as response:
                if response.status != HTTPStatus.OK:
                    raise await self._refusal(method, response)
                answer = json.loads(await self._body(response))
                token = answer.get("token") or answer["access_token"]
                lifetime = float(answer.get("expires_in") or 60)
        except (aiohttp.ClientError, TimeoutError) as e:
            raise ImagePullError(f"failed to fetch a token from {realm}: {_words(e)}") from None
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ImagePullError(f"{realm} answered without a token") from None
        self._connections.tokens[key] = (token, time.monotonic() + lifetime * 0.9)
        return str(token)

    async def _refusal(self, method: str, response: aiohttp.ClientResponse) -> ImagePullError:
        body = b"" if method == "HEAD" else await self._body(response)
        status = f"{response.status} {response.reason or ''}".strip()
        words = registry_words(body)
        if not words:
            words = {
                401: "authentication required",
                403: "requested access to the resource is denied",
                404: "not found",
            }.get(response.status, "")
        message = f"{response.url.with_query(None)} answered {status}"
        error = RegistryRefusal(f"{message}: {words}" if words else message)
        error.status = response.status
        if response.status in _RETRIED:
            error.reason = "RegistryUnavailable"
        return error


class Unreachable(ImagePullError):
    """No answer at all."""


class RegistryRefusal(ImagePullError):
    """The registry's own no, with its HTTP status."""

    status = 0


def _basic(credential: Credential) -> str:
    pair = f"{credential.username}:{credential.password}".encode()
    return "Basic " + base64.b64encode(pair).decode()


def registry_words(body: bytes) -> str:
    """What a registry's JSON error body says: `MANIFEST_UNKNOWN: manifest unknown`."""
    try:
        answer = json.loads(body)
        errors = answer.get("errors") or []
        words = [
            ": ".join(str(e[key]) for key in ("code", "message") if e.get(key)) for e in errors
        ]
        return "; ".join(filter(None, words)) or str(answer.get("details") or "")
    except (ValueError, AttributeError, TypeError, KeyError):
        return ""


def parse_challenges(header: str) -> list[tuple[str, dict[str, str]]]:
    """`WWW-Authenticate` → [("bearer", {"realm": …, "service": …, "scope": …}), …]."""
    starts = list(_SCHEME.finditer(header))
    challenges = []
    for i, start in enumerate(starts):
        end = starts[i + 1].start() if i + 1 < len(starts) else len(header)
        parameters = {
            name.lower(): re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
            for name, quoted, plain in _CHALLENGE.findall(header[start.end() : end])
        }
        challenges.append((start.group(1).lower(), parameters))
    return challenges


def proxy_for(url: URL) -> URL | None:
    """HTTPS_PROXY, HTTP_PROXY and NO_PROXY (aiohttp's trust_env would send ~/.netrc's secrets)."""
    proxies = getproxies_environment()
    proxy = proxies.get(url.scheme)
    if not proxy or proxy_bypass(f"{url.host}:{url.port}", proxies):
        return None
    return URL(proxy if "://" in proxy else f"http://{proxy}")


def _retry_after(response: aiohttp.ClientResponse, default: float) -> float:
    text = response.headers.get("Retry-After", "")
    return min(float(text), 30.0) if text.isdigit() else default


def _words(error: Exception) -> str:
    if isinstance(error, Unreachable):
        return str(error)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"{error.host}:{error.port}: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        why = error.os_error
        # asyncio's own words for a plain errno are "Connect call failed ('10.0.0.1', 5000)".
        plain = why.errno and not isinstance(why, (socket.gaierror, ssl.SSLError))
        reason = os.strerror(why.errno or 0) if plain else why.strerror or why
        text = f"can't connect to {error.host}:{error.port}: {reason}"
        if isinstance(error, aiohttp.ClientSSLError):
            text += " (a registry without TLS is named in images.insecureRegistries of config.yaml)"
        return text
    if isinstance(error, TimeoutError):
        return str(error) or "timed out"
    if isinstance(error, OSError) and error.strerror:
        return f"broke: {os.strerror(error.errno) if error.errno else error.strerror}"
    return f"broke: {error or type(error).__name__}"
