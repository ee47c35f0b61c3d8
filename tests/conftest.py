"""Settings that must be in the environment before any test module is imported, and certificates."""

import asyncio
import datetime
import inspect
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

# Tests that compute share the cores with the processes they start. Threads that spin while they
# wait for one another burn the very time slices that those processes need: minutes for seconds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Triton decides when it is imported whether kernels are compiled; without a GPU its interpreter
# runs them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


DAY = datetime.timedelta(days=1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs tests that are coroutine functions, each on an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(test(**arguments))
    return True


class Authority:
    """Signs certificates and lays them out as a mounted Secret has them."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        made = _builder(self._name, self._name, self._key.public_key(), DAY)
        made = made.add_extension(constraints, critical=True)
        self.pem = made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(self, folder: Path, name: str, left: datetime.timedelta = DAY) -> Path:
        """tls.crt, tls.key and ca.crt of a name on loopback, valid for the time left."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([x509.DNSName(name), loopback])
        made = _builder(subject, self._name, key.public_key(), left)
        signed = made.add_extension(names, critical=False).sign(self._key, hashes.SHA256())
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
    left: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - 2 * DAY,
        not_valid_after=now + left,
    )


@pytest.fixture
def make_authority() -> Callable[[], Authority]:
    return Authority
