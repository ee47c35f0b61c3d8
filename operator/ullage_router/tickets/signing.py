"""The router's side of tickets: sign them, and recognise those that paid for a resumed answer."""

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
"""Tags of engines that are kept; engines' names come and go with their pods."""
RESUMES_A_USE = 4
"""Times that an answer is resumed for one payment; after that it is charged like a new one."""
MAX_RESUMED = 100_000
"""Tickets that are remembered because their answers were resumed."""

_BLOCK = struct.Struct("64Q")


def new_ids() -> Iterator[int]:
    """Yield ticket ids of 64 random bits, never 0, so that nobody guesses another's."""
    while True:
        yield from filter(None, _BLOCK.unpack(os.urandom(_BLOCK.size)))


class TicketSigner:
    """Sign tickets.

    Args:
        section: The folder of the keys and the lifetime of a ticket.

    Raises:
        ConfigError: The keys cannot be read.
    """

    def __init__(self, section: RouterTickets) -> None:
        self.ttl_s = section.ttl
        self.is_required = section.required
        """Whether engines refuse requests without a ticket."""
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
        """Return a ticket for `count` requests of at most this size to one engine.

        Args:
            number: Id of the ticket.
            engine_id: The engine.
            prompt_tokens: Most tokens of each prompt.
            max_tokens: Most output tokens of each answer.
            samples: Most answers to each request.
            priority: Priority of the requests.
            count: Number of requests.
            tenant: The tenant that sends the requests; None where there are no tenants.
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
        """Return metadata with a ticket for one request that has token ids and an output limit."""
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


class PaidTickets:
    """Recognise the tickets that paid for answers which resume on another engine.

    The ticket itself carries the tenant and the size that were paid for, so every router with its
    key can read them. Each process counts the resumptions that it has seen itself.

    Args:
        keys: The keys of the tickets.
        request_s: Longest seconds that a request runs.
        clock: Unix time, in seconds.
    """

    def __init__(
        self, keys: TicketKeys, request_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._keys = keys
        self._request_s = request_s
        self._clock = clock
        self._resumed = TicketUses(MAX_RESUMED)

    def find(self, ticket: str, tenant: str, size: tuple[int, int, int]) -> Claims | None:
        """Return the claims of a ticket that paid for a request; None: it did not.

        Args:
            ticket: The ticket as the client sent it.
            tenant: The tenant that sends the request.
            size: The request's prompt tokens, most output tokens of each answer, and number of
                answers. An output limit of 0 means the service's, for which no ticket pays.
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
        """Count that an answer of the ticket was resumed."""
        self._resumed.add(claims.id, self._until(claims))

    def _until(self, claims: Claims) -> float:
        return claims.expires_ms / 1000 + CLOCK_SKEW_S + self._request_s
