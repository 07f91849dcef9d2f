"""Certificates: who each component is, and to whom.

Three authorities, as kubeadm has them: the cluster's, etcd's and the front proxy's. The
latter two are not luxury: etcd admits whoever its authority signed, so with a single one every
node and every service would read all Secrets; and a certificate of the front-proxy authority
lets its holder name the user it speaks for.

Keys are ECDSA P-256 (a millisecond to make). Files are 0600 below `pki/`; leaves are valid for a
year and renewed at a start less than `RENEW_BEFORE` before their end.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpk_kubelet.controlplane.files import make_private_dir, write_private
from hpk_kubelet.errors import HPKError

if TYPE_CHECKING:  # cryptography costs 60 ms: only a function that needs it imports it
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

LEAF_DAYS = 365
CA_DAYS = 3650
RENEW_BEFORE = dt.timedelta(days=60)
_CLOCK_SKEW = dt.timedelta(minutes=10)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its key on disk, both PEM."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Leaf:
    """What a certificate says. `names` are DNS names and IP addresses of a server."""

    common_name: str
    organization: str = ""
    names: tuple[str, ...] = ()
    server: bool = False
    client: bool = True


class Pki:
    """The authorities and certificates below one directory (`Paths.pki`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = make_private_dir(directory)
        self.ca = self._pair("ca")
        self.etcd_ca = self._pair("etcd-ca")
        self.front_proxy_ca = self._pair("front-proxy-ca")
        self.service_accounts = KeyPair(directory / "sa.pub", directory / "sa.key")

    def cluster_id(self) -> str:
        """Keeps one user's several clusters apart; as long-lived as the authority."""
        return hashlib.sha256(self.authority(self.ca).cert.read_bytes()).hexdigest()[:8]

    def _pair(self, name: str) -> KeyPair:
        return KeyPair(self.directory / f"{name}.crt", self.directory / f"{name}.key")

    def authority(self, pair: KeyPair) -> KeyPair:
        """Makes the authority at `pair` if there is none yet. Its name is the file's.

        The certificate is written last. One without its key was lost by someone: another in its
        place would cut off every pod that runs.
        """
        if not pair.cert.exists():
            _write_authority(pair)
        return pair

    def service_account_key(self) -> KeyPair:
        """The key that signs service-account tokens, and its public half."""
        pair = self.service_accounts
        if not (pair.cert.exists() and pair.key.exists()):
            key = _new_key()
            write_private(pair.key, _key_pem(key))
            write_private(pair.cert, _public_pem(key))
        return pair

    def leaf(self, name: str, leaf: Leaf, authority: KeyPair | None = None) -> KeyPair:
        """The certificate `name` saying `leaf`; made anew when it says otherwise or ends soon."""
        issuer = self.authority(authority or self.ca)
        pair = self._pair(name)
        make_private_dir(pair.cert.parent)
        if not _is_current(pair, leaf, issuer):
            _write_leaf(pair, leaf, issuer)
        return pair


def node_client(pki: Pki, node: str) -> KeyPair:
    """`system:node:NODE`, as the Node authorizer and NodeRestriction want it."""
    return pki.leaf(f"node-{node}", Leaf(f"system:node:{node}", "system:nodes"))


def kubelet_server(pki: Pki, names: Iterable[str]) -> KeyPair:
    """The serving certificate of the kubelet's HTTPS port, for host names and addresses."""
    leaf = Leaf("hpk-kubelet", names=tuple(names), server=True, client=False)
    return pki.leaf("kubelet-server", leaf)


def _new_key() -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    # SEC 1 ("EC PRIVATE KEY"): the one form that kube-apiserver's service-account signer,
    # etcd and Python's ssl all read.
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.TraditionalOpenSSL, s.NoEncryption())


def _public_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_authority(pair: KeyPair) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import NameOID

    key = _new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"hpk-{pair.cert.stem}")])
    cert = (
        _builder(name, name, key, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_private(pair.key, _key_pem(key))
    write_private(pair.cert, cert.public_bytes(serialization.Encoding.PEM))


def _load(pair: KeyPair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    cert = x509.load_pem_x509_certificate(pair.cert.read_bytes())
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{pair.key} is not an ECDSA key")
    return cert, key


def _subject(leaf: Leaf) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    parts = [x509.NameAttribute(NameOID.COMMON_NAME, leaf.common_name)]
    if leaf.organization:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, leaf.organization))
    return x509.Name(parts)


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_leaf(pair: KeyPair, leaf: Leaf, authority: KeyPair) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import ExtendedKeyUsageOID as Eku

    try:
        ca_cert, ca_key = _load(authority)
    except (OSError, ValueError) as e:
        raise HPKError(
            f"the authority in {authority.cert} and {authority.key} can't be read ({e}); restore "
            f"both from a backup, or start a new cluster: remove {authority.cert.parent.parent}"
        ) from None
    key = _new_key()
    purposes = [Eku.SERVER_AUTH] * leaf.server + [Eku.CLIENT_AUTH] * leaf.client
    builder = (
        _builder(_subject(leaf), ca_cert.subject, key, ca_key, LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    )
    if leaf.names:
        names = [_general_name(n) for n in dict.fromkeys(leaf.names)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    cert = builder.sign(ca_key, hashes.SHA256())
    # The key goes first: a crash in between leaves a pair that _is_current refuses.
    write_private(pair.key, _key_pem(key))
    write_private(pair.cert, cert.public_bytes(serialization.Encoding.PEM))


def _is_current(pair: KeyPair, leaf: Leaf, authority: KeyPair) -> bool:
    """Whether the pair on disk is this leaf, of this authority, and not near its end."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509.oid import ExtendedKeyUsageOID as Eku

    try:
        cert, key = _load(pair)
        ca_cert = x509.load_pem_x509_certificate(authority.cert.read_bytes())
        cert.verify_directly_issued_by(ca_cert)
        usage = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        try:
            san = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            names = set(san)
        except x509.ExtensionNotFound:
            names = set()
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return (
        cert.public_key() == key.public_key()
        and cert.subject == _subject(leaf)
        and names == {_general_name(n) for n in leaf.names}
        and (Eku.SERVER_AUTH in usage) == leaf.server
        and (Eku.CLIENT_AUTH in usage) == leaf.client
        and cert.not_valid_after_utc - dt.datetime.now(dt.UTC) > RENEW_BEFORE
    )
