"""TLS certificates for the etcd that a cluster runs: by them the holders of the cluster's key authenticate each other.

The private key of the certificate authority is derived from the cluster's key, so only holders of the cluster's key can
sign, and no certificate has to be copied between hosts. A node signs its own certificate, for a private key that it
generates at its start and keeps in memory. The certificate proves that its owner has the cluster's key, as CURVE does
on the control channel.

Invariants: the authority's private key is in no file. Certificates never expire: a holder of the key is trusted until
the cluster gets another key, and clocks may be wrong.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dataplane.wire.auth import Key

if TYPE_CHECKING:
    from cryptography import x509

_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of the curve P-256 (https://neuromancer.sk/std/nist/P-256)."""


def check_installed() -> None:
    """Raises ValueError if certificates cannot be made."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ValueError("--seeds needs cryptography: pip install 'rollout-dataplane[etcd]'") from error


@dataclass(frozen=True, slots=True)
class Certificates:
    """The authority's certificate, and a node's own with its private key, as PEM."""

    authority: bytes
    own: bytes
    private: bytes

    def client(self) -> ssl.SSLContext:
        """The TLS context for servers of this authority at any address: holders of the key run them."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_REQUIRED
        tls.load_verify_locations(cadata=self.authority.decode())
        held = in_memory("certificate", self.own + self.private)
        try:
            tls.load_cert_chain(f"/dev/fd/{held}")
        finally:
            os.close(held)
        return tls


def certificates(key: Key, hosts: Iterable[str]) -> Certificates:
    """A node's certificates, valid for a server at these hosts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    seed = hashlib.blake2b(key.secret, digest_size=64, person=b"dataplane tls").digest()
    authority = ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, ec.SECP256R1())
    cluster = hashlib.blake2b(key.public, digest_size=8).hexdigest()
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dataplane {cluster}")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey, serial: int) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder(issuer, subject, public, serial, _FROM, _UNTIL)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        known = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
        return made.add_extension(known, critical=False)

    root = builder(issuer, authority.public_key(), 1)
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    root = root.add_extension(_usage(signs=True), critical=True)
    private = ec.generate_private_key(ec.SECP256R1())
    own = builder(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dataplane node")]),
        private.public_key(),
        x509.random_serial_number(),
    )
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    own = own.add_extension(_usage(signs=False), critical=True)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    own = own.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        with suppress(ValueError):
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
            continue
        names.append(x509.DNSName(host))
    own = own.add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = serialization.Encoding.PEM
    return Certificates(
        root.sign(authority, hashes.SHA256()).public_bytes(pem),
        own.sign(authority, hashes.SHA256()).public_bytes(pem),
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def in_memory(name: str, content: bytes) -> int:
    """The descriptor of an anonymous file in memory with this content, which only this user can read."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content)
    return descriptor
