"""Components: which source wins, and that nothing half-done or unverified is ever used."""

from __future__ import annotations

import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpk_kubelet.controlplane import components, fetch
from hpk_kubelet.controlplane.components import Recipe, find, parse_recipes, prints_version, recipes
from hpk_kubelet.controlplane.progress import Progress
from hpk_kubelet.errors import HPKError

TOOL = Recipe("tool", "1.2.3", ("--version",), "etcd", "example.com/tool")


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HPK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("HPK_COMPONENTS", raising=False)
    monkeypatch.setattr(components, "recipes", lambda: {"tool": TOOL})
    (tmp_path / "bin").mkdir()


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def put(recipe: Recipe) -> None:
    program(recipe.cached, "true")
    recipe.cached.with_name("origin").write_text("built\n")


def test_the_table_is_complete() -> None:
    table = recipes()
    assert {"etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "coredns"} <= set(table)
    for recipe in table.values():
        module = components.DATA / "modules" / recipe.module
        pins = (module / "go.mod").read_text()
        assert recipe.package.split("/v3")[0] in pins or "k8s.io/kubernetes" in recipe.package
        assert recipe.version in pins or recipe.version in (module / "go.sum").read_text()
        assert "{" not in recipe.url + "".join(recipe.ldflags)
        for ours in recipe.vendor.values():
            assert (module / ours).is_file()


def test_parse_fills_in_version_and_architecture() -> None:
    entry = {
        "version": "9", "prints": [], "module": "m", "package": "p",
        "download": ["https://x/v{version}/{arch}.tgz", "d-{arch}/p"],
        "sha256": {"arm64": "abc"},
    }  # fmt: skip
    (arm,) = parse_recipes({"p": entry}, "arm64").values()
    (amd,) = parse_recipes({"p": entry}, "amd64").values()
    assert (arm.url, arm.member, arm.sha256) == ("https://x/v9/arm64.tgz", "d-arm64/p", "abc")
    assert amd.sha256 == ""


def test_sources_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("tool") is None
    put(TOOL)
    assert (found := find("tool")) and (found.path, found.origin) == (TOOL.cached, "built")
    on_path = program(tmp_path / "bin" / "tool", "echo tool v1.2.3")
    assert (found := find("tool")) and (found.path, found.origin) == (on_path, "PATH")
    named = program(tmp_path / "named" / "tool" / "1.2.3" / "tool", "true")
    monkeypatch.setenv("HPK_COMPONENTS", f"/nowhere:{tmp_path / 'named'}")
    assert (found := find("tool")) and found.path == named
    flat = program(tmp_path / "named" / "bin" / "tool", "true")
    monkeypatch.setenv("HPK_COMPONENTS", str(flat.parent))
    assert (found := find("tool")) and found.path == flat


@pytest.mark.parametrize(
    ("says", "good"),
    [
        ("echo v1.2.3", True),
        ("echo 'tool: v1.2.3+unknown'", True),
        ("echo 1.2.3 >&2; exit 1", True),
        ("echo v1.2.30", False),
        ("echo v11.2.3", False),
        ("echo v1.2.3-rc.1", False),
        ("echo v1.2.4", False),
        ("exit 1", False),
    ],
)
def test_only_the_exact_version_is_taken_from_path(tmp_path: Path, says: str, good: bool) -> None:
    assert prints_version(program(tmp_path / "bin" / "tool", says), TOOL) is good


def test_what_cannot_tell_its_version_is_not_taken_from_path(tmp_path: Path) -> None:
    path = program(tmp_path / "bin" / "tool", "echo 1.2.3")
    assert not prints_version(path, replace(TOOL, prints=()))


def test_serve_names_the_command_and_fetches_nothing() -> None:
    with pytest.raises(HPKError, match=r"tool v1\.2\.3 is not here yet.*run: hpk fetch"):
        components.installed("tool")
    with pytest.raises(HPKError, match="no component nope; there are: tool"):
        components.installed("nope")


class Server(http.server.ThreadingHTTPServer):
    files: dict[str, bytes]
    asked: list[str]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if self.path.startswith("/cut"):
            self.wfile.write((content or b"")[:3])
            self.close_connection = True
        else:
            self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        made.files, made.asked = {}, []
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


def obtain(recipe: Recipe, mirror: str = "") -> Path:
    with Progress("tool") as progress:
        return fetch.obtain(recipe, mirror, progress)


def left_behind() -> list[str]:
    return sorted(p.name for p in (components.cache_root() / "tool").iterdir())


CONTENT = b"#!/bin/sh\necho the tool\n"
SHA = hashlib.sha256(CONTENT).hexdigest()


def test_a_verified_download_is_used(server: Server) -> None:
    server.files["/tool"] = CONTENT
    path = obtain(replace(TOOL, url=url(server, "/tool"), sha256=SHA))
    assert path == TOOL.cached and path.read_bytes() == CONTENT and os.access(path, os.X_OK)
    assert path.with_name("origin").read_text().strip() == url(server, "/tool")
    assert left_behind() == [".lock", "1.2.3"]


def test_a_member_of_an_archive(server: Server) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("d/tool")
        info.size = len(CONTENT)
        tar.addfile(info, io.BytesIO(CONTENT))
    server.files["/a.tgz"] = buffer.getvalue()
    recipe = replace(
        TOOL, url=url(server, "/a.tgz"), sha256=hashlib.sha256(buffer.getvalue()).hexdigest()
    )
    assert obtain(replace(recipe, member="d/tool")).read_bytes() == CONTENT
    other = replace(recipe, member="d/nope", version="2")
    with pytest.raises(HPKError, match="has no file d/nope"):
        obtain(other)


@pytest.mark.parametrize(
    ("path", "sha", "words"),
    [
        ("/tool", "0" * 64, "not what HPK pins"),
        ("/cut", SHA, "not what HPK pins|cannot download"),
        ("/missing", SHA, "cannot download.*Not Found"),
    ],
)
def test_what_is_not_verified_leaves_nothing(
    server: Server, path: str, sha: str, words: str
) -> None:
    server.files.update({"/tool": CONTENT, "/cut": CONTENT})
    with pytest.raises(HPKError, match=words):
        obtain(replace(TOOL, url=url(server, path), sha256=sha))
    assert find("tool") is None
    assert left_behind() == [".lock"]


def test_a_mirror_takes_the_place_of_the_host(server: Server) -> None:
    assert fetch.mirrored("https://dl.k8s.io/v1/x", "") == "https://dl.k8s.io/v1/x"
    server.files["/pub/dl.k8s.io/v1/tool"] = CONTENT
    obtain(replace(TOOL, url="https://dl.k8s.io/v1/tool", sha256=SHA), url(server, "/pub/"))
    assert server.asked == ["/pub/dl.k8s.io/v1/tool"]


GO = """
case "$1 $2" in
  "env GOVERSION") echo {version} ;;
  "list "*) printf 'a\\nb\\n' ;;
  "build "*) {build}
    while [ "$1" != -o ]; do shift; done; echo built > "$2" ;;
esac"""


def go(tmp_path: Path, version: str = "go1.26.8", build: str = ":") -> None:
    program(tmp_path / "bin" / "go", GO.format(version=version, build=build))


def test_without_a_checksum_it_is_built_not_downloaded(tmp_path: Path, server: Server) -> None:
    go(tmp_path, build=f'echo "$@" > {tmp_path}/flags; env > {tmp_path}/env')
    recipe = replace(TOOL, url=url(server, "/tool"), ldflags=("-X", "v=1"), cgo=True)
    assert obtain(recipe).read_text() == "built\n"
    assert server.asked == []
    flags = (tmp_path / "flags").read_text()
    assert "-mod=readonly -trimpath" in flags
    assert "-s -w -X v=1 -linkmode external -extldflags -static" in flags
    env = (tmp_path / "env").read_text().splitlines()
    assert {"GOTOOLCHAIN=local", "CGO_ENABLED=1", "GOWORK=off"} <= set(env)


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    go(tmp_path, build="echo '# pkg' >&2; echo 'x.go:1: undefined: y' >&2; exit 1")
    with pytest.raises(HPKError, match=r"building tool v1\.2\.3 failed: x\.go:1: undefined: y"):
        obtain(TOOL)
    assert left_behind() == [".lock"]


def test_no_go_and_an_old_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(HPKError, match="needs Go on PATH"):
        obtain(TOOL)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("GOTOOLCHAIN", "auto")
    go(tmp_path, version="go1.24.1")
    assert fetch.go_environment("go", cgo=False)["GOTOOLCHAIN"] == "auto"
    for version, toolchain in (("go1.24.1", "local"), ("go1.20", "auto")):
        go(tmp_path, version=version)
        monkeypatch.setenv("GOTOOLCHAIN", toolchain)
        with pytest.raises(HPKError, match=r"needs Go 1\.26"):
            fetch.go_environment("go", cgo=False)


def test_what_an_interrupted_fetch_left_is_removed_unused(tmp_path: Path) -> None:
    half = components.cache_root() / "tool" / ".tmp-old" / "done"
    half.mkdir(parents=True)
    (half / "tool").write_text("half")
    half.chmod(0o500)
    assert find("tool") is None
    go(tmp_path)
    obtain(TOOL)
    assert left_behind() == [".lock", "1.2.3"]


def test_two_at_once_build_once(tmp_path: Path) -> None:
    go(tmp_path, build=f"echo x >> {tmp_path}/builds; sleep 0.3")
    threads = [threading.Thread(target=obtain, args=(TOOL,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "builds").read_text() == "x\n"
    assert find("tool")


def test_progress_is_silent_when_quick_and_plain_when_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("quick"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("hpk_kubelet.controlplane.progress.FIRST", 0.0)
    with Progress("tool v1 (1/2)") as progress:
        progress.update("compiled 1 of 2")
        progress._ticker.join(0.2)
    said = capsys.readouterr().err
    assert "tool v1 (1/2)" in said and "done in" in said
