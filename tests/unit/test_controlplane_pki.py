"""Certificates and kubeconfigs: who is let in where, and what is made anew."""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import json
import os
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hpk_kubelet.config import Paths
from hpk_kubelet.controlplane import pki as module
from hpk_kubelet.controlplane.api import ApiClient, apply_manifests, client_context
from hpk_kubelet.controlplane.files import write_private
from hpk_kubelet.controlplane.kubeconfig import (
    USERS,
    Control,
    read_control,
    write_component_kubeconfig,
    write_node_kubeconfig,
)
from hpk_kubelet.controlplane.pki import KeyPair, Leaf, Pki, kubelet_server, node_client
from hpk_kubelet.errors import HPKError


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


def certificate(pair: KeyPair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.cert.read_bytes())


def test_a_node_is_who_the_node_authorizer_expects(pki: Pki) -> None:
    cert = certificate(node_client(pki, "main"))
    assert cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "system:node:main"
    assert cert.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value == "system:nodes"
    usage = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    cert.verify_directly_issued_by(certificate(pki.ca))


def test_a_good_certificate_is_kept(pki: Pki) -> None:
    first = kubelet_server(pki, ["n1", "10.0.0.1"]).cert.read_bytes()
    assert kubelet_server(pki, ["10.0.0.1", "n1"]).cert.read_bytes() == first


@pytest.mark.parametrize("lost", ["ca.crt", "ca.key"])
def test_an_authority_that_was_damaged_is_never_replaced(pki: Pki, lost: str) -> None:
    kubelet_server(pki, ["n1"])
    before = pki.ca.cert.read_bytes()
    (pki.directory / lost).write_text("")
    with pytest.raises(HPKError, match=r"the authority in .*ca\.crt .* can't be read"):
        kubelet_server(pki, ["n2"])
    if lost == "ca.key":
        pki.ca.key.unlink()
        with pytest.raises(HPKError, match="No such file"):
            kubelet_server(pki, ["n2"])
        assert pki.ca.cert.read_bytes() == before


def test_another_node_gets_another_certificate(pki: Pki) -> None:
    first = kubelet_server(pki, ["n1", "10.0.0.1"]).cert.read_bytes()
    cert = certificate(kubelet_server(pki, ["n2", "10.0.0.2"]))
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["n2"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.2"]
    assert cert.public_bytes(module_encoding()) != first


def module_encoding() -> object:
    from cryptography.hazmat.primitives.serialization import Encoding

    return Encoding.PEM


def test_a_certificate_near_its_end_is_renewed(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = Leaf("x")
    first = pki.leaf("x", leaf).cert.read_bytes()
    monkeypatch.setattr(module, "RENEW_BEFORE", dt.timedelta(days=module.LEAF_DAYS + 1))
    assert pki.leaf("x", leaf).cert.read_bytes() != first


@pytest.mark.parametrize("damage", ["cert", "key", "swap"])
def test_a_damaged_pair_is_made_again(pki: Pki, damage: str) -> None:
    pair = pki.leaf("x", Leaf("x"))
    if damage == "swap":
        pair.key.write_bytes(pki.leaf("y", Leaf("y")).key.read_bytes())
    else:
        getattr(pair, damage).write_bytes(b"")
    pair = pki.leaf("x", Leaf("x"))
    ssl.create_default_context().load_cert_chain(pair.cert, pair.key)


def test_a_new_authority_replaces_what_the_old_one_signed(pki: Pki) -> None:
    first = pki.leaf("x", Leaf("x")).cert.read_bytes()
    pki.ca.cert.unlink()
    assert pki.leaf("x", Leaf("x")).cert.read_bytes() != first


def test_everything_is_the_owners_alone(pki: Pki) -> None:
    node_client(pki, "main")
    pki.service_account_key()
    for path in pki.directory.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert pki.directory.stat().st_mode & 0o777 == 0o700


def test_write_private_leaves_no_half_file(tmp_path: Path) -> None:
    target = tmp_path / "f"
    write_private(target, "one")
    write_private(target, "two")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert target.read_text() == "two"
    target.chmod(0o644)
    write_private(target, "two")
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_private(tmp_path / "f", "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_private(tmp_path / "f", "one")
    assert raised.value.filename == str(tmp_path / "f")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "before"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path / "home")
    paths.run.mkdir(parents=True)
    control = Control("https://10.0.0.1:6443", "n1", 7, 42, "2026-01-01T00:00:00+00:00")
    paths.control.write_text(control.to_json())
    return paths


def test_a_nodes_kubeconfig_is_complete(paths: Paths) -> None:
    path = write_node_kubeconfig(paths, "main")
    config = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    assert config["clusters"][0]["cluster"]["server"] == "https://10.0.0.1:6443"
    assert config["users"][0]["name"] == "system:node:main"
    ApiClient.from_kubeconfig(path)


@pytest.mark.parametrize("name", ["../x", "", "A", "a/b", "-a"])
def test_a_nodes_name_never_becomes_a_path(paths: Paths, name: str) -> None:
    with pytest.raises(HPKError, match="valid node name"):
        write_node_kubeconfig(paths, name)


def test_an_unreadable_control_file_is_one_sentence(paths: Paths) -> None:
    paths.control.write_text("{")
    with pytest.raises(HPKError, match=r"control\.json is not readable"):
        read_control(paths)


async def serve_tls(pki: Pki, trusted: Path, answers: dict[str, tuple[int, object]]):
    """A server that wants a certificate of `trusted` and notes what it was asked."""
    pair = pki.leaf("server", Leaf("server", names=("localhost", "127.0.0.1"), server=True))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=trusted)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(pair.cert, pair.key)
    asked: list[tuple[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line = head.splitlines()[0].rsplit(" ", 1)[0]
        length = next(int(x.split(":")[1]) for x in head.splitlines() if "Length" in x)
        body = json.loads(await reader.readexactly(length)) if length else None
        asked.append((line, body))
        code, content = answers.get(line, (404, {"message": "not there"}))
        writer.write(f"HTTP/1.0 {code} X\r\n\r\n{json.dumps(content)}".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    return server, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def test_etcd_admits_only_its_own_authoritys_clients(pki: Pki) -> None:
    mine = pki.leaf("etcd-client", Leaf("c"), pki.etcd_ca)
    node = node_client(pki, "main")
    server, url, _ = await serve_tls(pki, pki.etcd_ca.cert, {"GET /health": (200, {})})
    async with server:
        for pair, admitted in ((mine, True), (node, False)):
            client = ApiClient(url, client_context(pki.ca.cert, pair.cert, pair.key))
            assert await client.ok("/health") is admitted


async def test_manifests_are_applied_where_discovery_says(pki: Pki, paths: Paths) -> None:
    resources = [
        {"name": "roles", "kind": "Role", "namespaced": True},
        {"name": "roles/status", "kind": "Role", "namespaced": True},
    ]
    where = "/apis/g/v1/namespaces/n/roles/r?fieldManager=hpk&force=true"
    answers = {"GET /apis/g/v1": (200, {"resources": resources}), f"PATCH {where}": (201, {})}
    server, url, asked = await serve_tls(pki, pki.ca.cert, answers)
    manifest = {"apiVersion": "g/v1", "kind": "Role", "metadata": {"name": "r", "namespace": "n"}}
    async with server:
        config = write_component_kubeconfig(Paths(pki.directory.parent), pki, "services", url)
        client = ApiClient.from_kubeconfig(config)
        await apply_manifests(client, [manifest])
        assert asked[-1] == (f"PATCH {where}", manifest)
        wrong = {**manifest, "metadata": {"name": "other", "namespace": "n"}}
        with pytest.raises(HPKError, match="cannot apply Role other: 404 not there"):
            await apply_manifests(client, [wrong])
        with pytest.raises(HPKError, match="no Nope in g/v1"):
            await apply_manifests(client, [{**manifest, "kind": "Nope"}])


def test_no_two_components_are_the_same_user() -> None:
    assert len({leaf.common_name for leaf in USERS.values()}) == len(USERS)
    assert [n for n, leaf in USERS.items() if leaf.organization == "system:masters"] == ["admin"]
