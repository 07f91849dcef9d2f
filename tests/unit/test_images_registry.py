"""What registries say in headers and bodies, and which proxy leads to them."""

import pytest
from yarl import URL

from hpk_kubelet.images.registry import parse_challenges, proxy_for, registry_words


def test_challenges() -> None:
    assert parse_challenges(
        'Bearer realm="https://auth.h.io/token",service="h.io",scope="repository:a/b:pull,push"'
    ) == [
        (
            "bearer",
            {
                "realm": "https://auth.h.io/token",
                "service": "h.io",
                "scope": "repository:a/b:pull,push",
            },
        )
    ]
    assert parse_challenges('basic realm="a \\"b\\"", Bearer realm=x, error="Basic y"') == [
        ("basic", {"realm": 'a "b"'}),
        ("bearer", {"realm": "x", "error": "Basic y"}),
    ]
    assert parse_challenges("Negotiate") == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"errors":[{"code":"DENIED","message":"no"},{"code":"X"}]}', "DENIED: no; X"),
        (b'{"errors":[{"code":"A","message":"","detail":{}}]}', "A"),
        (b'{"details":"incorrect username or password"}', "incorrect username or password"),
        (b'{"errors":null}', ""),
        (b'{"errors":["odd"]}', ""),
        (b"[]", ""),
        (b"<html>", ""),
        (b"", ""),
    ],
)
def test_words(body: bytes, words: str) -> None:
    assert registry_words(body) == words


def test_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "http_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_for(URL("https://h.io/v2/")) is None
    monkeypatch.setenv("HTTPS_PROXY", "proxy.site:3128")
    monkeypatch.setenv("NO_PROXY", "inside.site,registry.site:5000")
    assert proxy_for(URL("https://h.io/v2/")) == URL("http://proxy.site:3128")
    assert proxy_for(URL("http://h.io/v2/")) is None
    assert proxy_for(URL("https://a.inside.site/v2/")) is None
    assert proxy_for(URL("https://registry.site:5000/v2/")) is None
    assert proxy_for(URL("https://registry.site/v2/")) == URL("http://proxy.site:3128")
