"""Images made by hand, and a registry in this process that serves them and misbehaves on demand."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

OCI = "application/vnd.oci.image"
Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def info(name: str, mode: int, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode, member.type, member.linkname, member.mtime = mode, kind, link, 1_000_000_000
    return member


def file(name: str, content: bytes = b"", mode: int = 0o644) -> Entry:
    member = info(name, mode)
    member.size = len(content)
    return member, content


def directory(name: str, mode: int = 0o755) -> Entry:
    return info(name, mode, tarfile.DIRTYPE)


def symlink(name: str, target: str) -> Entry:
    return info(name, 0o777, tarfile.SYMTYPE, target)


def hardlink(name: str, target: str) -> Entry:
    return info(name, 0o644, tarfile.LNKTYPE, target)


def layer(*entries: Entry) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            member, content = entry if isinstance(entry, tuple) else (entry, b"")
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def sha256(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


@dataclass
class FakeRegistry:
    """Speaks the distribution API. Its switches are what the tests are about."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    auth: str = ""  # "", basic, bearer
    logins: dict[str, str] = field(default_factory=lambda: {"u": "p"})
    token: str = "t0ken"
    cut: int = 0  # how many blob answers break off half way
    ranges: bool = True
    statuses: list[int] = field(default_factory=list)  # answered before anything else
    hold: asyncio.Event | None = None  # blobs wait for it
    waiting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))  # how many do
    redirect: str = ""  # where blobs are, instead of here
    host: str = ""

    def blob(self, content: bytes, media_type: str) -> dict[str, Any]:
        self.blobs[sha256(content)] = content
        return {"mediaType": media_type, "digest": sha256(content), "size": len(content)}

    def manifest(self, document: dict[str, Any], *tags: str) -> dict[str, Any]:
        body = json.dumps(document).encode()
        for name in (sha256(body), *tags):
            self.manifests[name] = (body, document["mediaType"])
        return {"mediaType": document["mediaType"], "digest": sha256(body), "size": len(body)}

    def image(self, *tags: str, layers: list[bytes], **config: Any) -> dict[str, Any]:
        """Adds an image; returns its descriptor."""
        document = {"architecture": "amd64", "os": "linux", **config}
        return self.manifest(
            {
                "schemaVersion": 2,
                "mediaType": f"{OCI}.manifest.v1+json",
                "config": self.blob(json.dumps(document).encode(), f"{OCI}.config.v1+json"),
                "layers": [self.blob(content, f"{OCI}.layer.v1.tar+gzip") for content in layers],
            },
            *tags,
        )

    def asked(self, what: str) -> int:
        return sum(what in request for request in self.requests)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="<html>oops</html>")
        if request.path == "/token":
            return self._token(request)
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        *_, kind, name = request.path.split("/")
        if kind == "blobs" and name in self.blobs:
            return await self._blob(request, self.blobs[name])
        if kind == "manifests" and name in self.manifests:
            body, media_type = self.manifests[name]
            headers = {"Docker-Content-Digest": sha256(body), "Content-Type": media_type}
            return web.Response(body=body, headers=headers)
        message = f'manifest tagged by "{name}" is not found'
        errors = [{"code": "MANIFEST_UNKNOWN", "message": message}]
        return web.json_response({"errors": errors}, status=404)

    def _logins(self) -> set[str]:
        pairs = (f"{user}:{password}".encode() for user, password in self.logins.items())
        return {"Basic " + base64.b64encode(pair).decode() for pair in pairs}

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "")
        if self.auth == "basic":
            expected = self._logins()
            challenge = 'Basic realm="here"'
        elif self.auth == "bearer":
            expected = {f"Bearer {self.token}"}
            challenge = (
                f'Bearer realm="http://{self.host}/token",'
                'service="s, \\"q\\"",scope="repository:a:pull"'
            )
        else:
            return None
        if given in expected:
            return None
        errors = [{"code": "UNAUTHORIZED", "message": "authentication required"}]
        headers = {"WWW-Authenticate": challenge}
        return web.json_response({"errors": errors}, status=401, headers=headers)

    def _token(self, request: web.Request) -> web.Response:
        assert request.query["service"] == 's, "q"'
        given = request.headers.get("Authorization", "")
        if given not in self._logins():
            return web.json_response({"details": "incorrect username or password"}, status=401)
        return web.json_response({"token": self.token, "expires_in": 300})

    async def _blob(self, request: web.Request, content: bytes) -> web.StreamResponse:
        if self.redirect:
            return web.Response(status=307, headers={"Location": self.redirect + request.path})
        if self.hold is not None:
            self.waiting.release()
            await self.hold.wait()
        start = request.http_range.start or 0 if self.ranges else 0
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(content) - start
        await response.prepare(request)
        if self.cut:
            self.cut -= 1
            await response.write(content[start : start + (len(content) - start) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(content[start:])
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeRegistry]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.host = f"127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
