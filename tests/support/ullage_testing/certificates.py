"""Certificates of an authority that a test makes."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates and lays them out as a mounted Secret has them."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(self._name, self._name, self._key.public_key(), DAY)
        builder = builder.add_extension(constraints, critical=True)
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(
        self,
        folder: Path,
        name: str,
        validity: datetime.timedelta = DAY,
        starts_in: datetime.timedelta = -2 * DAY,
    ) -> Path:
        """tls.crt, tls.key and ca.crt of a name on loopback, valid for the time left."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([x509.DNSName(name), loopback])
        builder = _builder(subject, self._name, key.public_key(), validity, starts_in)
        signed = builder.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        folder.mkdir(exist_ok=True)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / "tls.key").write_bytes(private)
        (folder / "tls.crt").write_bytes(signed.public_bytes(Encoding.PEM))
        (folder / "ca.crt").write_bytes(self.pem)
        return folder


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    validity: datetime.timedelta,
    starts_in: datetime.timedelta = -2 * DAY,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now + starts_in,
        not_valid_after=now + validity,
    )
