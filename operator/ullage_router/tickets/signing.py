"""Signs the tickets that allow clients to send requests directly to engines."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import RouterTickets
from ullage_common.tickets.tickets import (
    TICKET_KEY,
    Claims,
    TicketKeys,
    cache_salt,
    engine_tag,
)

MAX_TAGS = 10_000
"""Maximum number of cached engine tags, since engine names change whenever pods are replaced."""

_BLOCK = struct.Struct("64Q")


def new_ids() -> Iterator[int]:
    """Yield unguessable 64-bit random ticket ids, which are never 0."""
    while True:
        yield from filter(None, _BLOCK.unpack(os.urandom(_BLOCK.size)))


class TicketSigner:
    """Signs tickets for requests to engines.

    Args:
        section: The folder with the signing keys, and the ticket lifetime.

    Raises:
        ConfigError: The keys cannot be read.
    """

    def __init__(self, section: RouterTickets) -> None:
        self.ttl_s = section.ttl
        self.is_required = section.required
        """Whether engines reject requests without a ticket."""
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
        """Return a signed ticket that allows `count` requests of limited size to one engine.

        Args:
            number: Id of the ticket.
            engine_id: Name of the engine.
            prompt_tokens: Maximum number of prompt tokens per request.
            max_tokens: Maximum number of output tokens per answer.
            samples: Maximum number of answers per request.
            priority: Priority of the requests.
            count: Number of requests.
            tenant: The tenant that sends the requests, or None if there are no tenants.
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
        """Return the metadata entry that contains a ticket for a request sent by the router itself.

        The request must have token ids and an output limit.
        """
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
        """Return the tag that identifies an engine in tickets."""
        tag = self._tags.get(engine_id)
        if tag is None:
            if len(self._tags) >= MAX_TAGS:
                self._tags.clear()
            tag = self._tags[engine_id] = engine_tag(engine_id)
        return tag
