"""Tickets: a router's signed permission to send one or more equal requests directly to an engine.

A ticket is 54 bytes of claims and their HMAC-SHA256 (RFC 2104) in URL-safe base64. Routers and
engines share the signing keys. A ticket's claims name the engine and the expiry time, limit each
request's tokens, and state how often the ticket may be used. The keys are read from a folder at
startup, and again whenever the folder changes.
"""

import asyncio
import base64
import hashlib
import heapq
import hmac
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ullage_common.process.config_file import ConfigError
from ullage_common.process.file_watch import fingerprint, follow

TICKET_KEY = "x-ullage-ticket"
"""Metadata key that carries the ticket in a Generate RPC."""
MIN_KEY_BYTES = 32
CLOCK_SKEW_S = 5.0
"""How far an engine's clock may run ahead of the router's clock, in seconds."""

_CLAIMS = struct.Struct(">2sQQ8sIIBbH16s")
_VERSION = b"U2"
_SESSIONLESS = 1 << 15
"""Flag for `is_sessionless`, which shares a field with the ticket's number of uses.

Older engines read a ticket with this flag as valid for one use.
"""
_MAC_BYTES = 32
TICKET_BYTES = _CLAIMS.size + _MAC_BYTES


CACHE_SALT_BYTES = 16


def cache_salt(tenant: str, salt: str = "") -> bytes:
    """Return the cache salt of a tenant's request.

    Requests share cached KV only if their cache salts are equal.

    Args:
        tenant: the tenant's name.
        salt: the request's own salt (empty if it sets none).
    """
    tenant_salt = hashlib.blake2b(f"{tenant}\0".encode(), digest_size=CACHE_SALT_BYTES).digest()
    return narrowed_salt(tenant_salt, salt)


def narrowed_salt(tenant_salt: bytes, salt: str) -> bytes:
    """Return a request's cache salt, a hash of the tenant's cache salt and the request's own salt.

    Args:
        tenant_salt: the tenant's cache salt, which is returned if the request sets no salt.
        salt: the request's own salt (empty if it sets none).
    """
    if not salt:
        return tenant_salt
    return hashlib.blake2b(salt.encode(), key=tenant_salt, digest_size=CACHE_SALT_BYTES).digest()


class TicketError(Exception):
    """Raised if a ticket is not valid.

    Attributes:
        reason: BAD_TICKET or TICKET_EXPIRED.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Claims(NamedTuple):
    """The content of a ticket."""

    id: int
    """64 random bits that let an engine recognise a ticket that has already been used."""
    expires_ms: int
    """Unix time in milliseconds at which the ticket expires."""
    engine: bytes
    """Tag of the engine that the ticket is for (see `engine_tag`)."""
    prompt_tokens: int
    max_tokens: int
    samples: int
    priority: int
    uses: int = 1
    """Number of requests that may use the ticket. Each must be within the limits of the claims.

    Older routers write 0, which means one.
    """
    is_sessionless: bool = False
    """Whether the engine ignores a request's session.

    Sessions are ignored because different tenants may use the same session names. The engine then
    combines the ticket's cache salt with the request's salt.
    """
    cache_salt: bytes = bytes(CACHE_SALT_BYTES)
    """Cache salt of the tenant that the ticket is for."""


def engine_tag(engine_id: str) -> bytes:
    """Return the eight-byte tag that identifies an engine in tickets."""
    return hashlib.sha256(engine_id.encode()).digest()[:8]


class Signer:
    """Signs tickets with one key. Preparing the key once halves the work per signature."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")

    def sign(self, claims: Claims) -> str:
        """Return the signed ticket for these claims."""
        *fields, uses, is_sessionless, salt = claims
        text = _CLAIMS.pack(_VERSION, *fields, uses | is_sessionless * _SESSIONLESS, salt)
        mac = self._mac.copy()
        mac.update(text)
        return base64.urlsafe_b64encode(text + mac.digest()).decode()


def sign(claims: Claims, key: bytes) -> str:
    """Return the signed ticket for these claims."""
    return Signer(key).sign(claims)


def verify(ticket: str, keys: Sequence[bytes], engine: bytes, now_s: float) -> Claims:
    """Verify that a ticket is signed, not expired and for this engine, and return its claims.

    Raises:
        TicketError: the signature is invalid, or the ticket has expired or is for another engine.
    """
    claims = read(ticket, keys)
    if claims.engine != engine:
        raise TicketError("BAD_TICKET", "the ticket is for another engine; pick again")
    if claims.expires_ms / 1000 + CLOCK_SKEW_S < now_s:
        raise TicketError("TICKET_EXPIRED", "the ticket has expired; pick again and send at once")
    return claims


def read(ticket: str, keys: Sequence[bytes]) -> Claims:
    """Verify a ticket's signature and return its claims, without checking the engine or the expiry.

    Raises:
        TicketError: the ticket was not signed by a router of this service and release.
    """
    try:
        raw = base64.b64decode(ticket, altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    text = raw[: _CLAIMS.size]
    mac = raw[_CLAIMS.size :]
    if len(raw) != TICKET_BYTES or not any(
        hmac.compare_digest(mac, hmac.digest(key, text, "sha256")) for key in keys
    ):
        raise TicketError("BAD_TICKET", "no router of this service signed the ticket; pick again")
    version, *fields, salt = _CLAIMS.unpack(text)
    if version != _VERSION:
        raise TicketError("BAD_TICKET", "the ticket is of another release; pick again")
    packed = Claims(*fields)
    is_sessionless, uses = divmod(packed.uses, _SESSIONLESS)
    return packed._replace(uses=uses, is_sessionless=bool(is_sessionless), cache_salt=salt)


def load_keys(folder: Path) -> tuple[bytes, ...]:
    """Return the keys in a folder, one per file, ordered by file name.

    The last key signs new tickets. All keys can verify tickets.

    Raises:
        ConfigError: the folder has no key, or a key is too short.
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


class TicketUses:
    """Counts the uses of each ticket until it expires.

    Args:
        capacity: maximum number of remembered tickets.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[int, tuple[int, float]] = {}
        """Maps a ticket's id to its number of uses and its expiry time (in Unix seconds)."""
        self._expiries: list[tuple[float, int]] = []
        """Heap of each ticket's expiry time and id. Clocks of routers may differ by hours."""

    def __len__(self) -> int:
        return len(self._counts)

    def has_room_for(self, ticket_id: int) -> bool:
        """Return whether a use of the ticket can be counted without exceeding the capacity."""
        return ticket_id in self._counts or len(self._counts) < self._capacity

    def count(self, ticket_id: int) -> int:
        return self._counts.get(ticket_id, (0, 0.0))[0]

    def add(self, ticket_id: int, until_s: float) -> None:
        """Count one more use of a ticket, and keep the expiry time from its first use."""
        if ticket_id not in self._counts:
            heapq.heappush(self._expiries, (until_s, ticket_id))
        count, until_s = self._counts.get(ticket_id, (0, until_s))
        self._counts[ticket_id] = (count + 1, until_s)

    def forget(self, now_s: float) -> None:
        """Remove all expired tickets."""
        while self._expiries and self._expiries[0][0] < now_s:
            _, ticket_id = heapq.heappop(self._expiries)
            del self._counts[ticket_id]


class TicketKeys:
    """Loads the ticket keys from a folder, and reloads them when the folder changes.

    Args:
        folder: the folder with one key per file.

    Raises:
        ConfigError: the folder has no usable key.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = fingerprint((folder,))
        self.all = load_keys(folder)
        """All current keys. Any of them can verify a ticket."""
        self.signer = Signer(self.all[-1])
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        failure = "ticket keys not read; the old ones stay"
        following = follow((self._folder,), self._seen, self._reload, failure)
        self._task = asyncio.create_task(following, name="ticket keys")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _reload(self) -> None:
        self.all = await asyncio.to_thread(load_keys, self._folder)
        self.signer = Signer(self.all[-1])
