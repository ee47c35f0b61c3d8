"""The router's side of tickets: signing them."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import RouterTickets
from ullage_common.tickets.tickets import TICKET_KEY, Claims, TicketKeys, cache_salt, engine_tag

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
        tag = self._tags.get(engine_id) or self._tag(engine_id)
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

    def _tag(self, engine_id: str) -> bytes:
        if len(self._tags) >= MAX_TAGS:
            self._tags.clear()
        return self._tags.setdefault(engine_id, engine_tag(engine_id))
