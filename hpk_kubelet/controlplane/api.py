"""A minimal HTTPS client for the control plane's own use: readiness, and applying manifests.

Standard library on purpose: this process starts the API server and then mostly waits, and
aiohttp would cost it 0.18 s at the start and 25 MB for the rest of its life (both measured).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpk_kubelet.errors import HPKError

Manifest = dict[str, Any]
FIELD_MANAGER = "hpk"


class ApiClient:
    """Requests to one server, each over a connection of its own."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self.url = url
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._ssl = context
        self._resources: dict[str, dict[str, tuple[str, bool]]] = {}

    @classmethod
    def from_kubeconfig(cls, path: Path) -> ApiClient:
        """From a kubeconfig that HPK wrote (JSON, with certificates inside)."""
        try:
            config = json.loads(path.read_text())
            cluster = config["clusters"][0]["cluster"]
            user = config["users"][0]["user"]
        except FileNotFoundError:
            raise HPKError(f"{path} does not exist; is a control job running? hpk status") from None
        except (ValueError, KeyError, IndexError):
            raise HPKError(f"{path} is not a kubeconfig that HPK wrote") from None
        context = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as f:  # 0600; ssl loads a key from files alone
            f.write(base64.b64decode(user["client-key-data"]))
            f.write(base64.b64decode(user["client-certificate-data"]))
            f.flush()
            context.load_cert_chain(f.name)
        return cls(cluster["server"], context)

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
        timeout: float = 10.0,  # noqa: ASYNC109 - every caller wants one
    ) -> tuple[int, bytes]:
        """Status code and body. OSError (TimeoutError is one) when there is no answer."""
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
            try:
                data = b"" if body is None else json.dumps(body).encode()
                writer.write(
                    f"{method} {path} HTTP/1.0\r\nHost: {self._host}:{self._port}\r\n"
                    f"Accept: application/json\r\nContent-Type: {content_type}\r\n"
                    f"Content-Length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                await writer.drain()
                head, _, content = (await reader.read(-1)).partition(b"\r\n\r\n")
            except asyncio.IncompleteReadError as e:
                raise ConnectionError(str(e)) from e
            finally:
                writer.close()
        try:
            return int(head.split(b" ", 2)[1]), content
        except (IndexError, ValueError):
            raise ConnectionError(f"{self.url} did not answer with HTTP") from None

    async def ok(self, path: str) -> bool:
        """Whether a GET of `path` is answered with 200; False while nothing listens."""
        try:
            return (await self.request("GET", path, timeout=5.0))[0] == 200
        except (OSError, ssl.SSLError):
            return False

    async def get_json(self, path: str) -> Any:
        """The decoded answer; HPKError when it is not 200."""
        status, content = await self.request("GET", path)
        if status != 200:
            raise HPKError(f"GET {path}: {status} {_reason(content)}")
        return json.loads(content)

    async def _resource(self, api_version: str, kind: str) -> tuple[str, bool]:
        """The plural name of a kind and whether it is namespaced, from discovery."""
        base = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
        known = self._resources.get(base)
        if known is None or kind not in known:
            listing = await self.get_json(base)
            known = self._resources[base] = {
                r["kind"]: (f"{base}|{r['name']}", r["namespaced"])
                for r in listing["resources"]
                if "/" not in r["name"]
            }
        try:
            return known[kind]
        except KeyError:
            raise HPKError(f"the API server has no {kind} in {api_version}") from None


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:300]


async def apply_manifests(client: ApiClient, manifests: Sequence[Manifest]) -> None:
    """Server-side apply, in the order given; what is there already is brought to this state."""
    for manifest in manifests:
        meta = manifest["metadata"]
        resource, namespaced = await client._resource(manifest["apiVersion"], manifest["kind"])
        base, plural = resource.split("|")
        where = f"/namespaces/{meta.get('namespace', 'default')}" if namespaced else ""
        status, content = await client.request(
            "PATCH",
            f"{base}{where}/{plural}/{meta['name']}?fieldManager={FIELD_MANAGER}&force=true",
            manifest,
            "application/apply-patch+yaml",
        )
        if status not in (200, 201):
            name = f"{manifest['kind']} {meta['name']}"
            raise HPKError(f"cannot apply {name}: {status} {_reason(content)}")


def load_manifests(directory: Path) -> list[Manifest]:
    """Every document of every `*.json` file below `directory`, by file name."""
    found: list[Manifest] = []
    for path in sorted(directory.glob("*.json"), key=lambda p: p.name):
        content = json.loads(path.read_text())
        found.extend(content["items"] if content.get("kind") == "List" else [content])
    return found


def client_context(ca: Path, cert: Path, key: Path) -> ssl.SSLContext:
    """TLS as a client of ours: the server's authority checked, our certificate shown."""
    context = ssl.create_default_context(cafile=os.fspath(ca))
    context.load_cert_chain(cert, key)
    return context
