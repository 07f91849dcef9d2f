"""Pulling, from reference to unpacked directory, against a registry in this process."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from images_samples import OCI, FakeRegistry, file, layer, sha256

from hpk_kubelet.errors import HPKError
from hpk_kubelet.images import gc
from hpk_kubelet.images.auth import Credential, Keyring
from hpk_kubelet.images.cli import table
from hpk_kubelet.images.errors import ImagePullError
from hpk_kubelet.images.manifest import Platform
from hpk_kubelet.images.store import Image, ImageStore, pulled_message
from hpk_kubelet.node.store import PodDir

AMD64 = Platform("amd64", "linux")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setattr("hpk_kubelet.images.registry.BACKOFF", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "XDG_RUNTIME_DIR", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    async with FakeRegistry().serving() as fake:
        yield fake


@pytest.fixture
async def store(registry: FakeRegistry, tmp_path: Path) -> AsyncIterator[ImageStore]:
    store = ImageStore(tmp_path / "images", [registry.host], AMD64)
    yield store
    await store.close()


def compressed(*names: str, content: bytes = b"x") -> bytes:
    return gzip.compress(layer(*(file(name, content) for name in names)), mtime=0)


async def test_pull_unpacks_and_finds_again(registry: FakeRegistry, store: ImageStore) -> None:
    described = registry.image(
        "v1",
        layers=[compressed("a", "b"), gzip.compress(layer(file(".wh.a"), file("c", b"ccc")))],
        config={
            "Entrypoint": ["/b"], "Cmd": None, "Env": ["A=1=2", "B="], "WorkingDir": "/w",
            "User": "nobody", "Volumes": {"/v": {}}, "StopSignal": "SIGQUIT",
            "ExposedPorts": {"80/tcp": {}},
        },
    )  # fmt: skip
    said: list[str] = []
    progress: list[tuple[int, int]] = []
    image = await store.pull(
        f"{registry.host}/org/app:v1",
        "IfNotPresent",
        on_pulling=lambda: said.append("Pulling"),
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert said == ["Pulling"]
    assert progress[-1][0] == progress[-1][1] > 0
    assert image.id == f"{registry.host}/org/app@{described['digest']}"
    assert {path.name for path in image.rootfs.iterdir()} >= {"b", "c", "etc", "proc"}
    assert not (image.rootfs / "a").exists()
    assert image.config.entrypoint == ["/b"]
    assert image.config.cmd == []
    assert image.config.env == {"A": "1=2", "B": ""}
    assert image.config.stop_signal == "SIGQUIT"
    assert (image.pulled, image.disk) == (True, 4)
    assert os.listdir(store.tmp) == []  # noqa: PTH208
    assert (store.root.stat().st_mode & 0o777, image.rootfs.parent.stat().st_mode & 0o777) == (
        0o700,
        0o700,
    )

    asked = len(registry.requests)
    for other in (store, ImageStore(store.root, [registry.host], AMD64)):
        again = await other.pull(f"{registry.host}/org/app:v1", "Never", on_pulling=said.clear)
        assert (again.rootfs, again.config, again.pulled) == (image.rootfs, image.config, False)
    by_digest = await store.pull(image.id, "IfNotPresent")
    assert by_digest.rootfs == image.rootfs
    assert len(registry.requests) == asked
    assert said == ["Pulling"]


async def test_policies(registry: FakeRegistry, store: ImageStore) -> None:
    name = f"{registry.host}/app:v1"
    with pytest.raises(ImagePullError) as e:
        await store.pull(name, "Never")
    assert e.value.reason == "ErrImageNeverPull"
    assert str(e.value) == f'Container image "{name}" is not present with pull policy of Never'

    registry.image("v1", layers=[compressed("old")])
    old = await store.pull(name, "Always")
    registry.requests.clear()
    assert (await store.pull(name, "Always")).rootfs == old.rootfs
    assert registry.requests == ["HEAD /v2/app/manifests/v1"]

    registry.image("v1", layers=[compressed("new")])
    assert (await store.pull(name, "IfNotPresent")).digest == old.digest
    new = await store.pull(name, "Always")
    assert (new.rootfs / "new").exists()
    assert (await store.pull(name, "IfNotPresent")).digest == new.digest
    assert (await store.pull(old.id, "Never")).rootfs == old.rootfs


async def test_the_registrys_words(registry: FakeRegistry, store: ImageStore) -> None:
    name = f"{registry.host}/app:nope"
    with pytest.raises(ImagePullError) as e:
        await store.pull(name, "Always")
    assert e.value.reason == "ErrImagePull"
    assert str(e.value) == (
        f'failed to pull and unpack image "{name}": http://{registry.host}/v2/app/manifests/nope '
        'answered 404 Not Found: MANIFEST_UNKNOWN: manifest tagged by "nope" is not found'
    )


async def test_an_unreachable_registry(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images", ["127.0.0.1:1"])
    with pytest.raises(ImagePullError, match=r"can't connect to 127\.0\.0\.1:1: Connection ref"):
        await store.pull("127.0.0.1:1/app", "Always")
    with pytest.raises(ImagePullError, match="99999"):
        await store.pull("127.0.0.1:99999/app", "Always")
    await store.close()


async def test_http_needs_to_be_allowed(registry: FakeRegistry, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ImagePullError, match="insecureRegistries"):
        await store.pull(f"{registry.host}/app", "Always")
    assert registry.requests == []
    await store.close()


async def test_a_struggling_registry_is_asked_again(
    registry: FakeRegistry, store: ImageStore
) -> None:
    registry.image("v1", layers=[compressed("a")])
    registry.statuses = [503, 429]
    await store.pull(f"{registry.host}/app:v1", "Always")
    registry.statuses = [503] * 20
    with pytest.raises(ImagePullError, match="because the registry is unavailable") as e:
        await store.pull(f"{registry.host}/app:v1", "Always")
    assert e.value.reason == "RegistryUnavailable"


@pytest.mark.parametrize("ranges", [True, False])
async def test_broken_downloads_go_on(
    registry: FakeRegistry, store: ImageStore, ranges: bool
) -> None:
    content = os.urandom(500_000)
    registry.image("v1", layers=[compressed("big", content=content)])
    registry.cut, registry.ranges = 3, ranges
    image = await store.pull(f"{registry.host}/app:v1", "Always")
    assert (image.rootfs / "big").read_bytes() == content
    assert registry.cut == 0


async def test_content_that_is_not_what_its_digest_says(
    registry: FakeRegistry, store: ImageStore
) -> None:
    described = registry.image("v1", layers=[compressed("a")])
    good = next(digest for digest, blob in registry.blobs.items() if blob[:2] == b"\x1f\x8b")
    registry.blobs[good] = registry.blobs[good][:-1] + b"?"
    with pytest.raises(ImagePullError, match="does not match its digest"):
        await store.pull(f"{registry.host}/app:v1", "Always")
    registry.blobs[good] += b"more"
    with pytest.raises(ImagePullError, match="longer than"):
        await store.pull(f"{registry.host}/app:v1", "Always")
    body, kind = registry.manifests[described["digest"]]
    registry.manifests[described["digest"]] = (body + b" ", kind)
    with pytest.raises(ImagePullError, match="the registry answers sha256"):
        await store.pull(f"{registry.host}/app@{described['digest']}", "Always")
    assert not list(store.digests.glob("*"))
    assert not list(store.tmp.glob("*"))


async def test_index_picks_this_machine(registry: FakeRegistry, store: ImageStore) -> None:
    entries = [
        registry.image(layers=[compressed(arch)], architecture=arch)
        | {"platform": {"architecture": arch, "os": system, "variant": variant}}
        for arch, system, variant in (
            ("arm64", "linux", "v8"), ("unknown", "unknown", ""), ("amd64", "linux", "v3"),
            ("amd64", "linux", ""),
        )
    ]  # fmt: skip
    kind = f"{OCI}.index.v1+json"
    index = registry.manifest(
        {"schemaVersion": 2, "mediaType": kind, "manifests": entries}, "multi"
    )
    image = await store.pull(f"{registry.host}/app:multi", "Always")
    assert (image.rootfs / "amd64").exists()
    assert image.id.endswith(index["digest"])
    assert image.digest == entries[3]["digest"]
    registry.manifest({"schemaVersion": 2, "mediaType": kind, "manifests": entries[:2]}, "others")
    with pytest.raises(ImagePullError, match="no match for platform linux/amd64"):
        await store.pull(f"{registry.host}/app:others", "Always")
    registry.image("arm", layers=[], architecture="arm64")
    with pytest.raises(ImagePullError, match="the image is for linux/arm64"):
        await store.pull(f"{registry.host}/app:arm", "Always")


async def test_documents_that_are_no_image(registry: FakeRegistry, store: ImageStore) -> None:
    chart = registry.blob(b"chart", "application/vnd.cncf.helm.chart.content.v1.tar+gzip")
    config = registry.blob(b"{}", "application/vnd.cncf.helm.config.v1+json")
    kind = f"{OCI}.manifest.v1+json"
    base = {"schemaVersion": 2, "mediaType": kind, "config": config}
    registry.manifest({**base, "layers": [chart | {"mediaType": "application/json"}]}, "json")
    registry.manifest({**base, "layers": [chart | {"digest": "sha256:../../x"}]}, "path")
    registry.manifest({**base, "layers": [chart | {"size": -1}]}, "size")
    registry.manifest({"mediaType": "application/vnd.docker.distribution.manifest.v1+json"}, "v1")
    for name in ("text", sha256(b"hello")):
        registry.manifests[name] = (b"hello", "text/plain")
    for tag, words in {
        "json": "not a container image", "path": "unsupported digest", "size": "negative size",
        "v1": "unsupported manifest media type", "text": "not JSON",
    }.items():  # fmt: skip
        with pytest.raises(ImagePullError, match=words):
            await store.pull(f"{registry.host}/app:{tag}", "Always")


async def test_a_layer_that_cannot_be_unpacked(registry: FakeRegistry, store: ImageStore) -> None:
    registry.image("v1", layers=[compressed("a"), b"rubbish" * 1000, compressed("b")])
    with pytest.raises(ImagePullError, match="failed to unpack: malformed"):
        await store.pull(f"{registry.host}/app:v1", "Always")
    assert not list(store.tmp.glob("*"))


@pytest.mark.parametrize("auth", ["basic", "bearer"])
async def test_credentials_are_tried_in_order(
    registry: FakeRegistry, store: ImageStore, auth: str
) -> None:
    registry.image("v1", layers=[compressed("a"), compressed("b")])
    registry.auth = auth
    name = f"{registry.host}/app:v1"
    with pytest.raises(ImagePullError, match="401 Unauthorized"):
        await store.pull(name, "Always")
    wrong = Keyring([{registry.host: Credential("u", "wrong")}])
    right = Keyring([{registry.host: Credential("u", "p")}])
    with pytest.raises(ImagePullError, match="401 Unauthorized"):
        await store.pull(name, "Always", wrong)
    registry.requests.clear()
    await store.pull(name, "Always", wrong + right)
    assert registry.asked("/token") == (3 if auth == "bearer" else 0)  # HEAD and GET, then right
    registry.token = "another"  # the one we keep has expired on their side
    await store.pull(name, "Always", right)


async def test_redirects_keep_credentials_at_home(
    registry: FakeRegistry, store: ImageStore
) -> None:
    registry.auth = "basic"
    registry.image("v1", layers=[compressed("a")])
    async with FakeRegistry(blobs=registry.blobs).serving() as elsewhere:
        registry.redirect = f"http://{elsewhere.host}"
        elsewhere.auth = ""
        login = Keyring([{registry.host: Credential("u", "p")}])
        await store.pull(f"{registry.host}/app:v1", "Always", login)
        assert elsewhere.asked("GET") == 2
        elsewhere.auth = "basic"  # would let us in, were the credentials sent along
        registry.image("v2", layers=[compressed("b")])
        with pytest.raises(ImagePullError, match="401"):
            await store.pull(f"{registry.host}/app:v2", "Always", login)


async def test_concurrent_pulls_share_one_download(
    registry: FakeRegistry, store: ImageStore
) -> None:
    registry.image("v1", "v2", layers=[compressed("a")])
    registry.hold = asyncio.Event()
    names = [f"{registry.host}/app:v1"] * 5 + [f"{registry.host}/app:v2"] * 5
    pulls = [asyncio.create_task(store.pull(name, "IfNotPresent")) for name in names]
    await registry.waiting.acquire()
    pulls[0].cancel()  # one pod deleted: the others still want it
    registry.hold.set()
    results = await asyncio.gather(*pulls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    images = [result for result in results[1:] if isinstance(result, Image)]
    assert len(images) == 9
    assert len({image.rootfs for image in images}) == 1
    assert registry.asked("/blobs/") == 2  # config and layer, once


async def test_a_pull_nobody_waits_for_ends(registry: FakeRegistry, store: ImageStore) -> None:
    registry.image("v1", layers=[compressed("a")])
    registry.hold = asyncio.Event()
    name = f"{registry.host}/app:v1"
    pull = asyncio.create_task(store.pull(name, "IfNotPresent"))
    await registry.waiting.acquire()
    pull.cancel()
    await asyncio.gather(pull, return_exceptions=True)
    registry.hold.set()
    assert (await store.pull(name, "IfNotPresent")).pulled
    assert not list(store.tmp.glob("*"))


async def test_a_shared_failure_is_told_to_each_once(
    registry: FakeRegistry, store: ImageStore
) -> None:
    registry.image("v1", layers=[b"rubbish" * 1000])
    name = f"{registry.host}/app:v1"
    pulls = [store.pull(name, "Always") for _ in range(3)]
    errors = await asyncio.gather(*pulls, return_exceptions=True)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).count("failed to pull and unpack") == 1


async def test_two_processes_at_once(registry: FakeRegistry, store: ImageStore) -> None:
    registry.image("v1", layers=[compressed("a")])
    registry.hold = asyncio.Event()
    other = ImageStore(store.root, [registry.host], AMD64)
    name = f"{registry.host}/app:v1"
    pulls = [asyncio.create_task(s.pull(name, "IfNotPresent")) for s in (store, other)]
    await registry.waiting.acquire()
    await registry.waiting.acquire()
    registry.hold.set()
    first, second = await asyncio.gather(*pulls)
    assert first.rootfs == second.rootfs
    assert not list(store.tmp.glob("*"))
    await other.close()


@pytest.mark.parametrize("text", [b"", b'{"config": 1}', None])
async def test_a_damaged_description_is_made_new_and_the_files_stay(
    registry: FakeRegistry, store: ImageStore, text: bytes | None
) -> None:
    registry.image("v1", layers=[compressed("a")])
    name = f"{registry.host}/app:v1"
    first = await store.pull(name, "Always")
    (first.rootfs / "in-use").touch()
    description = first.rootfs.with_name("image.json")
    before = description.read_bytes()
    description.unlink()
    if text is not None:
        description.write_bytes(text)
    other = ImageStore(store.root, [registry.host], AMD64)
    again = await other.pull(name, "IfNotPresent")
    assert (again.pulled, again.rootfs) == (True, first.rootfs)
    assert description.read_bytes() == before
    assert (first.rootfs / "in-use").exists(), "pods may run on them"
    assert not list(store.tmp.glob("*"))
    await other.close()


async def test_a_present_image_costs_microseconds(
    registry: FakeRegistry, store: ImageStore
) -> None:
    registry.image("v1", layers=[compressed("a")])
    name = f"{registry.host}/app:v1"
    await store.pull(name, "Always")
    started = time.perf_counter()
    for _ in range(100):
        await store.pull(name, "IfNotPresent")
    assert (time.perf_counter() - started) / 100 < 0.001


async def test_gc(registry: FakeRegistry, store: ImageStore, tmp_path: Path) -> None:
    index_kind = f"{OCI}.index.v1+json"
    one = registry.image("one", layers=[compressed("1")])
    registry.manifest({"schemaVersion": 2, "mediaType": index_kind, "manifests": [one]}, "index")
    registry.image("two", layers=[compressed("2")])
    first = await store.pull(f"{registry.host}/app:index", "Always")
    second = await store.pull(f"{registry.host}/app:two", "Always")
    assert [len(image.references) for image in gc.images(store)] == [2, 2]

    assert gc.collect(store, set()) == gc.Collected([], 0)  # asked for just now
    stale, fresh = store.tmp / "pull-old", store.tmp / "pull-new"
    for path in (stale, fresh):
        (path / "rootfs").mkdir(parents=True)
    os.utime(stale, (1, 1))

    plans = tmp_path / "pods"
    (plans / "uid").mkdir(parents=True)
    plan = {"initContainers": [], "containers": [{"image": {"digest": first.digest}}]}
    (plans / "uid" / "plan.json").write_text(json.dumps(plan))
    (plans / "unplanned").mkdir()
    in_use = gc.digests_in_use(plans)
    assert in_use == {first.digest}
    debug: Any = {"name": "debug", "image": {"digest": "sha256:another"}}
    PodDir(plans / "uid").write_ephemeral(debug)
    assert gc.digests_in_use(plans) == {first.digest, "sha256:another"}
    result = gc.collect(store, in_use, unused=0)
    assert [image.digest for image in result.images] == [second.digest]
    assert result.leftovers == 1
    assert not stale.exists()
    assert fresh.exists()
    assert first.rootfs.exists()
    assert not second.rootfs.exists()
    with pytest.raises(ImagePullError):
        await store.pull(f"{registry.host}/app:two", "Never")
    assert (await store.pull(f"{registry.host}/app:two", "IfNotPresent")).pulled

    by_index = {first.id.rpartition("@")[2]}
    assert [image.digest for image in gc.collect(store, by_index, unused=0).images] == [
        second.digest
    ]
    (plans / "uid" / "plan.json").write_text("{")
    with pytest.raises(HPKError, match="which images are in use"):
        gc.digests_in_use(plans)


async def test_gc_with_a_reference_that_can_not_be_read(
    registry: FakeRegistry, store: ImageStore
) -> None:
    registry.image("one", layers=[compressed("1")])
    image = await store.pull(f"{registry.host}/app:one", "Always")
    (store.refs / "amd64-broken.json").write_text("{")
    assert [listed.digest for listed in gc.images(store)] == [image.digest]
    assert len(gc.collect(store, set(), unused=0).images) == 1


def test_the_list_is_never_wrapped() -> None:
    name = "registry.example.org:5000/" + "a-long-path/" * 12 + "image:1.2.3"
    digest = "sha256:" + "ab" * 32
    listed = gc.Listed([name, "x:1", f"x@{digest}"], digest, 5000, 7000, 100.0, frozenset())
    header, first, second = table([listed], 220.0)
    assert header.startswith("REFERENCE ")
    assert re.split(" {2,}", first) == [name, "abababababab", "5.0 kB", "7.0 kB", "2m ago"]
    assert second == "x:1"


def test_the_pulled_event() -> None:
    image = Image(
        reference="r", id="i", digest="d", rootfs=Path("/"), config=None,  # type: ignore[arg-type]
        size=5, disk=6, pulled=True, pull_seconds=61.2345,
    )  # fmt: skip
    assert pulled_message("app", image, 0.85) == (
        'Successfully pulled image "app" in 1m1.234s (850ms including waiting). '
        "Image size: 5 bytes."
    )
