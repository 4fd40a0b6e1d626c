"""A throwaway certificate authority: for servers that tests start with TLS, and clients that they let in or not.

Files are PEM. Server certificates are made out to `localhost` and 127.0.0.1, unless a test asks for other names.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key; `both` holds the two in one file, as Kafka's brokers want it."""

    cert: Path
    key: Path
    both: Path


class Authority:
    """Signs certificates; `ca` is what a peer must trust."""

    def __init__(self, folder: Path, name: str = "relay tests") -> None:
        self._folder = folder
        self._issued: dict[str, Pair] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def server(self, name: str = "server", names: Sequence[str] = LOCAL) -> Pair:
        return self._issue(name, name, names, ExtendedKeyUsageOID.SERVER_AUTH)

    def client(self, common_name: str, *, password: str = "") -> Pair:
        """With a password the key is encrypted."""
        file = f"{common_name}-{zlib.crc32(password.encode())}" if password else common_name
        return self._issue(file, common_name, (), ExtendedKeyUsageOID.CLIENT_AUTH, password)

    def _issue(
        self, file: str, common_name: str, names: Sequence[str], purpose: x509.ObjectIdentifier, password: str = ""
    ) -> Pair:
        if file in self._issued:
            return self._issued[file]
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        pair = Pair(*(self._folder / f"{file}.{ending}" for ending in ("crt", "key", "pem")))
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            encryption = serialization.BestAvailableEncryption(password.encode())
        text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        signed = certificate.public_bytes(serialization.Encoding.PEM)
        pair.cert.write_bytes(signed)
        for path, content in ((pair.key, text), (pair.both, text + signed)):
            path.touch(mode=0o600)
            path.write_bytes(content)
        self._issued[file] = pair
        return pair

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=2))
        )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom the servers trust, and whom the relay shall trust."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Of the same name, and nobody trusts it."""
    return Authority(tmp_path_factory.mktemp("stranger"))
