"""Registry credentials: dockerconfigjson and dockercfg, and which of them fit an image.

Matching is the kubelet's (pkg/credentialprovider/keyring.go): globs in each part of the host
name, equal ports, the path as a prefix; the most specific entry first, and all that fit are tried.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hpk_kubelet.errors import HPKError

_HUB_KEY = "index.docker.io"


class Credential(NamedTuple):
    username: str
    password: str
    identity_token: str = (
        ""  # an OAuth2 refresh token: some registries have `docker login` keep one
    )

    def __repr__(self) -> str:
        return f"Credential({self.username!r}, …)"


class Keyring:
    """Credentials by the place they are for. Immutable once built; `+` asks the left one first."""

    def __init__(self, configs: Iterable[Mapping[str, Credential]] = ()) -> None:
        entries: dict[str, list[Credential]] = {}
        for config in configs:
            for location, credential in config.items():
                entries.setdefault(_key(location), []).append(credential)
        self._layers = [entries] if entries else []

    def __add__(self, other: Keyring) -> Keyring:
        union = Keyring()
        union._layers = [*self._layers, *other._layers]
        return union

    def lookup(self, name: str) -> list[Credential]:
        """Those that fit `registry/repository`, best first, each once."""
        found: dict[Credential, None] = {}
        for entries in self._layers:
            found.update(dict.fromkeys(_lookup(entries, name)))
        return list(found)


def _lookup(entries: Mapping[str, list[Credential]], name: str) -> Iterator[Credential]:
    matched = False
    for key in sorted(entries, reverse=True):
        if _matches(key, name):
            matched = True
            yield from entries[key]
    if not matched and name.partition("/")[0] in ("docker.io", _HUB_KEY):
        yield from entries.get(_HUB_KEY, ())


def _key(location: str) -> str:
    """`https://host/v1/` → `host/`; `host/path` stays."""
    if not location.startswith(("https://", "http://")):
        location = f"https://{location}"
    url = urlsplit(location)
    path = url.path
    if path.startswith(("/v1/", "/v2/")):
        path = path[3:]
    return url.netloc + (path if path != "/" else "")


def _matches(key: str, name: str) -> bool:
    key_host, _, key_path = key.partition("/")
    host, _, path = name.partition("/")
    key_host, _, key_port = key_host.partition(":")
    host, _, port = host.partition(":")
    key_parts, parts = key_host.split("."), host.split(".")
    return (
        key_port == port
        and len(key_parts) == len(parts)
        and path.startswith(key_path)
        and all(fnmatchcase(part, glob) for glob, part in zip(key_parts, parts, strict=True))
    )


def pull_secrets_keyring(secrets: Iterable[Mapping[str, Any]]) -> Keyring:
    """From Secret objects as the API returns them; Secrets of other types are passed over.

    Raises HPKError that names the Secret when its content can't be read.
    """
    configs = []
    for secret in secrets:
        data = secret.get("data") or {}
        try:
            if secret.get("type") == "kubernetes.io/dockerconfigjson":
                raw = base64.b64decode(data.get(".dockerconfigjson") or "")
                if raw:
                    configs.append(parse_docker_config(json.loads(raw).get("auths") or {}))
            elif secret.get("type") == "kubernetes.io/dockercfg":
                raw = base64.b64decode(data.get(".dockercfg") or "")
                if raw:
                    configs.append(parse_docker_config(json.loads(raw)))
        except (ValueError, AttributeError, TypeError) as e:
            meta = secret.get("metadata") or {}
            raise HPKError(
                f"image pull secret {meta.get('namespace')}/{meta.get('name')} can't be read: {e}"
            ) from None
    return Keyring(configs)


def parse_docker_config(auths: Mapping[str, Any]) -> dict[str, Credential]:
    """The `auths` object of a Docker config file; raises ValueError for a malformed entry.

    Entries without a password (a credential helper keeps it) are left out.
    """
    config = {}
    for location, entry in auths.items():
        username, password = entry.get("username") or "", entry.get("password") or ""
        if encoded := entry.get("auth"):
            username, password = _decode_auth(location, encoded)
        token = entry.get("identitytoken") or ""
        if password or token:
            config[location] = Credential(username, password, token)
    return config


def _decode_auth(location: str, encoded: str) -> tuple[str, str]:
    text = encoded.strip().rstrip("=")
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        decoded = ""
    username, colon, password = decoded.partition(":")
    if not colon:
        raise ValueError(
            f"unable to parse auth field of {location}, "
            "must be formatted as base64(username:password)"
        )
    return username, password.rstrip("\0")


def node_keyring() -> Keyring:
    """What the user's own logins left: `docker login`, `podman login`, `apptainer registry login`.

    Raises HPKError with the file's name when one can't be read.
    """
    home = Path.home()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    files = [
        Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json",
        home / ".apptainer" / "docker-config.json",
    ]
    if runtime:
        files.append(Path(runtime) / "containers" / "auth.json")
    configs = []
    for file in files:
        try:
            configs.append(parse_docker_config(json.loads(file.read_bytes()).get("auths") or {}))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, AttributeError, TypeError) as e:
            raise HPKError(f"{file}: registry credentials can't be read: {e}") from None
    return Keyring(configs)
