"""Tickets: a router's signed leave to send one request straight to one engine.

A ticket is 38 bytes of claims and their HMAC-SHA256 (RFC 2104) under a key that routers and engines
share, in URL-safe base64. It names the engine, ends at a time, bounds the request's tokens, and is
taken once.
"""

import base64
import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ullage_rpc.config import ConfigError

TICKET_KEY = "x-ullage-ticket"
"""Metadata of Generate that carries the ticket."""
MIN_KEY_BYTES = 32
CLOCK_SKEW_S = 5.0
"""How much later than the router's an engine's clock may be read."""

_CLAIMS = struct.Struct(">2sQQ8sIIBb2x")
_VERSION = b"U1"
_MAC_BYTES = 32
TICKET_BYTES = _CLAIMS.size + _MAC_BYTES


class TicketError(Exception):
    """A ticket that is none.

    reason
        BAD_TICKET or TICKET_EXPIRED
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Claims:
    """What a ticket allows."""

    id: int
    """64 random bits, by which an engine knows that it was taken."""
    expires_ms: int
    """Unix time, milliseconds."""
    engine: bytes
    """`engine_tag` of the engine."""
    prompt_tokens: int
    max_tokens: int
    samples: int
    priority: int


def engine_tag(engine_id: str) -> bytes:
    """Eight bytes for an engine's name."""
    return hashlib.sha256(engine_id.encode()).digest()[:8]


def sign(claims: Claims, key: bytes) -> str:
    """The ticket."""
    text = _CLAIMS.pack(
        _VERSION,
        claims.id,
        claims.expires_ms,
        claims.engine,
        claims.prompt_tokens,
        claims.max_tokens,
        claims.samples,
        claims.priority,
    )
    return base64.urlsafe_b64encode(text + hmac.digest(key, text, "sha256")).decode()


def verify(ticket: str, keys: Sequence[bytes], engine: bytes, now_s: float) -> Claims:
    """What a ticket allows, if a router signed it for this engine and its time has not passed.

    Raises:
        TicketError: it did not, or it has.
    """
    try:
        raw = base64.b64decode(ticket, altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    text, mac = raw[: _CLAIMS.size], raw[_CLAIMS.size :]
    if len(raw) != TICKET_BYTES or not any(
        hmac.compare_digest(mac, hmac.digest(key, text, "sha256")) for key in keys
    ):
        raise TicketError("BAD_TICKET", "no router of this service signed the ticket; pick again")
    version, number, expires_ms, wanted, prompt, most, samples, priority = _CLAIMS.unpack(text)
    if version != _VERSION or wanted != engine:
        raise TicketError("BAD_TICKET", "the ticket is for another engine; pick again")
    if expires_ms / 1000 + CLOCK_SKEW_S < now_s:
        raise TicketError("TICKET_EXPIRED", "the ticket has expired; pick again and send at once")
    return Claims(number, expires_ms, wanted, prompt, most, samples, priority)


def load_keys(folder: Path) -> tuple[bytes, ...]:
    """The keys in a folder, one a file, by the files' names; the last one signs, all verify.

    Raises:
        ConfigError: there is none, or one is too short to be one.
    """
    try:
        paths = sorted(p for p in folder.iterdir() if p.name[0] != "." and p.is_file())
        keys = [(path, path.read_bytes().strip()) for path in paths]
    except OSError as error:
        message = f"tickets.keys_dir: {folder}: {error.strerror}; mount a Secret"
        raise ConfigError(message) from error
    if not keys:
        raise ConfigError(f"tickets.keys_dir: {folder} has no file; put a random key into one")
    for path, key in keys:
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"tickets.keys_dir: {path} has {len(key)} bytes; a key has at least "
                f"{MIN_KEY_BYTES}, such as `openssl rand -hex 32` prints"
            )
    return tuple(key for _, key in keys)
