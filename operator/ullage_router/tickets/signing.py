"""The router's side of tickets: signing them, and recognising those that paid for an answer which
goes on elsewhere."""

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import RouterTickets
from ullage_common.tickets.tickets import (
    CLOCK_SKEW_S,
    TICKET_KEY,
    Claims,
    TicketError,
    TicketKeys,
    TicketUses,
    cache_salt,
    engine_tag,
    read,
)

MAX_TAGS = 10_000
"""Engines' names come and go with their pods."""

_BLOCK = struct.Struct("64Q")


def new_ids() -> Iterator[int]:
    """64 random bits each, never 0: nobody guesses another's."""
    while True:
        yield from filter(None, _BLOCK.unpack(os.urandom(_BLOCK.size)))


class TicketSigner:
    """Signs tickets.

    Args:
        section: where the keys are and how long a ticket lasts.

    Raises:
        ConfigError: the keys cannot be read.
    """

    def __init__(self, section: RouterTickets) -> None:
        self.ttl_s = section.ttl
        self.is_required = section.required
        """Engines take nothing without a ticket."""
        self.keys = TicketKeys(Path(section.keys_dir))
        self.ids = new_ids()
        self._tags: dict[str, bytes] = {}

    def sign(
        self,
        number: int,
        engine_id: str,
        prompt_tokens: int,
        max_tokens: int,
        *,
        samples: int = 1,
        priority: int = 0,
        count: int = 1,
        tenant: str | None = None,
    ) -> str:
        """Leave for so many requests, each of at most this size, to this engine.

        `tenant`: whose requests they are; None where there are no tenants.
        """
        expires_ms = int((time.time() + self.ttl_s) * 1000)
        tag = self.tag(engine_id)
        size = (prompt_tokens, max_tokens, samples)
        claims = Claims(number, expires_ms, tag, *size, priority, count)
        if tenant is not None:
            claims = claims._replace(is_sessionless=True, cache_salt=cache_salt(tenant))
        return self.keys.signer.sign(claims)

    def sign_request(
        self, engine_id: str, request: inference_pb2.GenerateRequest
    ) -> tuple[str, str]:
        """Metadata with a ticket for just this request, in token ids and with its limit."""
        samples = request.samples
        return TICKET_KEY, self.sign(
            next(self.ids),
            engine_id,
            len(request.token_ids.ids),
            request.stop.max_tokens,
            samples=max(1, samples.n, samples.best_of, samples.beam.width),
            priority=request.priority,
        )

    def tag(self, engine_id: str) -> bytes:
        """Return the tag by which tickets name an engine."""
        tag = self._tags.get(engine_id)
        if tag is None:
            if len(self._tags) >= MAX_TAGS:
                self._tags.clear()
            tag = self._tags[engine_id] = engine_tag(engine_id)
        return tag


RESUMES_A_USE = 4
"""Times that an answer goes on elsewhere for one payment; then it is charged like a new one."""
MAX_RESUMED = 100_000
"""Tickets that are remembered because their answers went on elsewhere."""


class PaidTickets:
    """Recognises the tickets with which answers were paid for that go on elsewhere.

    The ticket itself says who paid for what, so that every router with its key knows; how often it
    was shown is counted by each process for itself.

    Args:
        keys: of the tickets.
        request_s: the longest that a request runs.
        clock: Unix time, seconds.
    """

    def __init__(
        self, keys: TicketKeys, request_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._keys = keys
        self._request_s = request_s
        self._clock = clock
        self._resumed = TicketUses(MAX_RESUMED)

    def find(self, ticket: str, tenant: str, size: tuple[int, int, int]) -> Claims | None:
        """Return the claims of a ticket that paid for a request; None where none did.

        Args:
            tenant: whose request it is.
            size: its tokens of the prompt, most output tokens of each answer (0: as many as the
                service gives, for which no ticket pays), and answers.
        """
        try:
            claims = read(ticket, self._keys.all)
        except TicketError:
            return None
        now = self._clock()
        self._resumed.forget(now)
        paid = (claims.prompt_tokens, claims.max_tokens, claims.samples)
        is_covered = all(0 < asked <= most for asked, most in zip(size, paid, strict=True))
        is_own = claims.is_sessionless and claims.cache_salt == cache_salt(tenant)
        most = RESUMES_A_USE * max(1, claims.uses)
        is_left = self._resumed.has_room_for(claims.id) and self._resumed.count(claims.id) < most
        is_running = now <= self._until(claims)
        return claims if is_covered and is_own and is_left and is_running else None

    def on_resumed(self, claims: Claims) -> None:
        """Counts that an answer of the ticket went on elsewhere."""
        self._resumed.add(claims.id, self._until(claims))

    def _until(self, claims: Claims) -> float:
        return claims.expires_ms / 1000 + CLOCK_SKEW_S + self._request_s
