"""Loads, validates and reloads TLS certificates for gRPC and HTTPS from a mounted Secret.

Each folder is a mounted `kubernetes.io/tls` Secret in cert-manager's format. Its files are
`tls.crt` (the certificate, then its intermediates), `tls.key` and, if peers are verified, `ca.crt`.
"""

import asyncio
import contextlib
import datetime
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from ullage_common.process.config_file import ConfigError
from ullage_common.process.file_watch import fingerprint, follow

CERTIFICATE = "tls.crt"
KEY = "tls.key"
CA = "ca.crt"

_PROBE_S = 2.0
"""Seconds within which a server must answer a probe for TLS support."""
_TLS_RECORDS = (0x15, 0x16)
"""Possible first bytes of a TLS server's answer: an alert or a handshake."""
_HTTP2_FRAME = 0x00
"""First byte of an HTTP/2 server's answer in plaintext: a frame shorter than 65,536 bytes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Material:
    """A certificate, its private key and the trusted authority, all in PEM."""

    certificate: bytes
    key: bytes
    ca: bytes | None
    """The authority's certificate, or None if peers need no certificate."""
    expires: datetime.datetime
    """Expiry of the certificate, UTC."""


def read_material(folder: Path, ca_folder: Path | None, now: datetime.datetime) -> Material:
    """Read and check the files of a certificate.

    Args:
        folder: the folder of the certificate and its key.
        ca_folder: the folder of `ca.crt`, or None if peers are not verified.
        now: the current time in UTC.

    Raises:
        ConfigError: a file is missing, cannot be read, or is not valid now, or the key does not
            match the certificate.
    """
    path = folder / CERTIFICATE
    certificate = _read(path)
    key = _read(folder / KEY)
    leaf = _certificates(path, certificate)[0]
    _check_dates(path, leaf, now)
    if _public(_private_key(folder / KEY, key)) != _public(leaf):
        raise ConfigError(f"{folder}: {KEY} is not the key of {CERTIFICATE}; renew both together")

    ca = None
    if ca_folder is not None:
        ca = _read(ca_folder / CA)
        authorities = _certificates(ca_folder / CA, ca)
        newest = max(authorities, key=lambda authority: authority.not_valid_after_utc)
        _check_dates(ca_folder / CA, newest, now)
    return Material(certificate, key, ca, leaf.not_valid_after_utc)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; the Secret must have the key {path.name}"
        ) from error


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path}: not a certificate in PEM: {error}") from error


def _private_key(path: Path, pem: bytes) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):  # the error itself may show parts of the key
        raise ConfigError(f"{path}: not a private key in PEM without a password") from None


def _public(of: PrivateKeyTypes | x509.Certificate) -> bytes:
    form = PublicFormat.SubjectPublicKeyInfo
    return of.public_key().public_bytes(Encoding.DER, form)


def _check_dates(path: Path, certificate: x509.Certificate, now: datetime.datetime) -> None:
    if now > certificate.not_valid_after_utc:
        raise ConfigError(f"{path}: expired at {certificate.not_valid_after_utc}; renew it")
    if now < certificate.not_valid_before_utc:
        raise ConfigError(
            f"{path}: not valid before {certificate.not_valid_before_utc}; "
            "wait, or correct the clock"
        )


class Certificates:
    """A folder's certificate and key, which are reloaded when the files change.

    Broken files never replace valid ones.

    Args:
        folder: the folder of the certificate and its key.
        ca_folder: the folder with the certificate authority (`ca.crt`) that must have signed the
            peers' certificates, or None if peers need no certificate.
        on_change: called when a new certificate is in use.
    """

    def __init__(
        self, folder: Path, ca_folder: Path | None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._folder = folder
        self._ca_folder = ca_folder
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._material: Material | None = None
        self._context: ssl.SSLContext | None = None
        self.problem = ""
        """The reason why the latest files are not in use (empty if they are)."""

    async def start(self) -> None:
        """Load the files, and start watching them for changes.

        Raises:
            ConfigError: the files cannot be used.
        """
        folders = tuple(path for path in (self._folder, self._ca_folder) if path)
        seen = await asyncio.to_thread(fingerprint, folders)
        self._use(self._load())
        failure = "certificate not read; the old one stays"
        following = follow(folders, seen, self._reload, failure)
        self._task = asyncio.create_task(following, name="certificates")

    async def close(self) -> None:
        """Stop watching the files."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def material(self) -> Material:
        """The latest valid certificate and key."""
        assert self._material, "not started"
        return self._material

    def state(self) -> dict[str, object]:
        """Return the certificate's folder, expiry and problem (empty if none) for /stats."""
        expires = self.material.expires
        left_s = (expires - _now()).total_seconds()
        return {
            "folder": str(self._folder),
            "expires": expires.isoformat(),
            "expires_in_s": round(left_s),
            "problem": self.problem or ("the certificate has expired" if left_s < 0 else ""),
        }

    def server_context(self) -> ssl.SSLContext:
        """Return an SSL context for HTTPS whose handshakes always use the latest certificate."""
        outer = server_context(self.material)

        def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._context

        outer.sni_callback = choose
        return outer

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return gRPC server credentials whose handshakes always use the latest certificate."""
        given = self.material

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if given is self.material:
                return None
            given = self.material
            return _configuration(given)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given),
            fetch,  # type: ignore[arg-type]  # None means no change, which the stubs lack
            require_client_authentication=given.ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for new gRPC channels, from the current certificate and authority."""
        return channel_credentials(self.material)

    def _load(self) -> tuple[Material, ssl.SSLContext]:
        material = read_material(self._folder, self._ca_folder, _now())
        return material, server_context(material)

    def _use(self, loaded: tuple[Material, ssl.SSLContext]) -> None:
        self._material, self._context = loaded
        self.problem = ""

        expires = self.material.expires.isoformat()
        log.info("certificate read", extra={"folder": str(self._folder), "expires": expires})

    async def _reload(self) -> None:
        try:
            loaded = await asyncio.to_thread(self._load)
        except Exception as error:
            self.problem = str(error) or repr(error)
            raise
        self._use(loaded)
        self._on_change()


async def speaks_tls(address: str) -> bool | None:
    """Return whether a gRPC server uses TLS.

    The function sends a ClientHello and examines the first byte of the server's answer.

    Args:
        address: `ip:port` of the server.

    Returns:
        None if the server cannot be reached or answers with neither TLS nor HTTP/2.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            with contextlib.closing(writer):
                writer.write(_client_hello())
                answer = await reader.read(1)
    except (OSError, TimeoutError):
        return None
    if not answer or answer[0] not in (*_TLS_RECORDS, _HTTP2_FRAME):
        return None
    return answer[0] in _TLS_RECORDS


def _client_hello() -> bytes:
    """Return a ClientHello, the first message of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    sent = ssl.MemoryBIO()
    # There is no host name, because no certificate will be checked.
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Return credentials for gRPC channels with this certificate."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)


def server_context(material: Material) -> ssl.SSLContext:
    """Return an SSL context for servers with TLS 1.2 or newer.

    TLS session tickets are off, because a resumed session would outlive its certificate authority.

    Raises:
        ConfigError: OpenSSL refuses the files.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    try:
        _load_chain(context, material)
        if material.ca is not None:
            context.load_verify_locations(cadata=material.ca.decode())
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the certificate cannot be used: {error}") from error
    return context


def _load_chain(context: ssl.SSLContext, material: Material) -> None:
    """Load the certificate chain from an in-memory file.

    OpenSSL reads the file twice, and a mounted file could be replaced in between. The copy stays in
    memory, because the private key must not be written to disk.
    """
    with os.fdopen(os.memfd_create("ullage-tls"), "wb") as file:
        file.write(material.key + b"\n" + material.certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], material.ca
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
