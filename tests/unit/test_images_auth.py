"""Credentials: which entry of a Docker config fits which image."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from hpk_kubelet.errors import HPKError
from hpk_kubelet.images.auth import (
    Credential,
    Keyring,
    node_keyring,
    parse_docker_config,
    pull_secrets_keyring,
)


def names(keyring: Keyring, image: str) -> list[str]:
    return [credential.username for credential in keyring.lookup(image)]


def keyring(*locations: str) -> Keyring:
    return Keyring([{location: Credential(location, "p") for location in locations}])


@pytest.mark.parametrize(
    ("locations", "image", "expected"),
    [
        (["quay.io"], "quay.io/a/b", ["quay.io"]),
        (["quay.io"], "quay.io:443/a/b", []),
        (["h.io:5000"], "h.io:5000/a", ["h.io:5000"]),
        (["https://h.io/v2/"], "h.io/a", ["https://h.io/v2/"]),
        (["*.io"], "h.io/a", ["*.io"]),
        (["*.io"], "a.h.io/a", []),
        (["*.h.io"], "a.h.io/a", ["*.h.io"]),
        (["h.io", "h.io/team", "h.io/other"], "h.io/team/app", ["h.io/team", "h.io"]),
        (
            ["https://index.docker.io/v1/"],
            "docker.io/library/busybox",
            ["https://index.docker.io/v1/"],
        ),
        (["https://index.docker.io/v1/"], "quay.io/a", []),
    ],
)
def test_matching(locations: list[str], image: str, expected: list[str]) -> None:
    assert names(keyring(*locations), image) == expected


def test_all_that_fit_are_tried_the_pods_own_first_and_each_once() -> None:
    pod = Keyring([{"h.io": Credential("a", "1")}, {"h.io": Credential("b", "2")}])
    node = Keyring([{"h.io": Credential("b", "2"), "h.io/x": Credential("c", "3")}])
    assert names(pod + node, "h.io/x") == ["a", "b", "c"]
    assert names(pod, "h.io/x") == ["a", "b"]


def secret(kind: str, key: str, content: Any) -> dict[str, Any]:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return {
        "type": kind,
        "metadata": {"namespace": "ns", "name": "pull"},
        "data": {key: base64.b64encode(raw).decode()},
    }


def test_both_kinds_of_secret() -> None:
    auth = base64.b64encode(b"u:p:with:colons").decode().rstrip("=")
    found = pull_secrets_keyring(
        [
            secret("Opaque", ".dockerconfigjson", {"auths": {"h.io": {"username": "no"}}}),
            secret(
                "kubernetes.io/dockerconfigjson",
                ".dockerconfigjson",
                {"auths": {"h.io": {"auth": auth}, "helper.io": {}}},
            ),
            secret(
                "kubernetes.io/dockercfg",
                ".dockercfg",
                {"i.io": {"username": "v", "password": "w"}},
            ),
            {"type": "kubernetes.io/dockerconfigjson", "data": None},
        ]
    )
    assert found.lookup("h.io/a") == [Credential("u", "p:with:colons")]
    assert found.lookup("i.io/a") == [Credential("v", "w")]
    assert found.lookup("helper.io/a") == []


@pytest.mark.parametrize(
    "content", [b"{", b"[]", {"auths": {"h.io": {"auth": "!!"}}}, {"auths": {"h.io": 3}}]
)
def test_a_malformed_secret_is_named(content: Any) -> None:
    with pytest.raises(HPKError, match="ns/pull"):
        pull_secrets_keyring(
            [secret("kubernetes.io/dockerconfigjson", ".dockerconfigjson", content)]
        )


def test_the_users_own_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert node_keyring().lookup("h.io/a") == []
    (tmp_path / "config.json").write_text('{"auths": {"h.io": {"identitytoken": "t"}}}')
    assert node_keyring().lookup("h.io/a") == [Credential("", "", "t")]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HPKError, match=r"config\.json"):
        node_keyring()


def test_secrets_stay_out_of_messages() -> None:
    assert "hunter2" not in repr(Credential("u", "hunter2", "token-hunter2"))
    bad = base64.b64encode(b"hunter2").decode()
    with pytest.raises(ValueError, match=r"h\.io") as e:
        parse_docker_config({"h.io": {"auth": bad}})
    assert "hunter2" not in str(e.value)
    assert bad not in str(e.value)
