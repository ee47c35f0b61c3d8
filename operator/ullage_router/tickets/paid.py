"""Recognises tickets that have already paid for an answer, so that resuming the answer is free.

If a client's engine is lost, the client continues its answer with a new ticket or through the
router. It presents the answer's first ticket, so that the tenant does not pay twice.
"""

import functools
import time
from collections.abc import Callable

from ullage_common.tickets.tickets import (
    CLOCK_SKEW_S,
    Claims,
    TicketError,
    TicketUses,
    cache_salt,
    read,
)
from ullage_router.engines.engines import Engines
from ullage_router.tenants.session import TenantSession
from ullage_router.tickets.signing import TicketSigner

RESUMES_A_USE = 4
"""Maximum number of times that an answer can be resumed for free.

After that, each resumption is charged like a new request.
"""
MAX_RESUMED = 100_000
"""Maximum number of resumed tickets to remember."""


class PaidTickets:
    """Checks whether tickets have paid for requests, and counts how often answers were resumed.

    A ticket states its tenant and the request size that was paid for, so every router with the
    signing key can check it. Each router process counts only the resumptions that it has handled
    itself.

    Args:
        signer: Provides the keys, the engines' tags and the ticket lifetime.
        engines: The engines, some of which may have been lost.
        request_s: Maximum duration of a request, in seconds.
        clock: Returns the Unix time in seconds.
    """

    def __init__(
        self,
        signer: TicketSigner,
        engines: Engines,
        request_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._signer = signer
        self._engines = engines
        self._request_s = request_s
        self._clock = clock
        self._resumed = TicketUses(MAX_RESUMED)

    def prepay(
        self, ticket: str, session: TenantSession, size: tuple[int, int, int]
    ) -> Claims | None:
        """Check whether a ticket paid for a request. If so, do not charge the session in advance.

        When such a request ends, it is charged only if the ticket's engine was not lost after all.

        Args:
            ticket: The ticket as the client sent it.
            session: The tenant session of the request.
            size: The request's prompt tokens, maximum output tokens per answer, and number of
                answers. An output limit of 0 means the service's limit, which no ticket covers.

        Returns:
            The ticket's claims, or None if the ticket did not pay for the request.
        """
        claims = self._find(ticket, session.name, size)
        if claims:
            session.prepay(functools.partial(self.was_lost, claims))
        return claims

    def on_resumed(self, claims: Claims) -> None:
        """Count one more resumption of an answer that the ticket paid for."""
        self._resumed.add(claims.id, self._until(claims))

    def was_lost(self, claims: Claims) -> bool:
        """Return whether a ticket's engine was lost after the ticket was signed.

        The signing time comes from the clock of the router that signed the ticket.
        """
        tag = self._signer.tag
        engine = next((e for e in self._engines.all() if tag(e.id) == claims.engine), None)
        if engine is None or engine.state != "ready":
            return True
        signed_unix = claims.expires_ms / 1000 - self._signer.ttl_s
        return engine.lost_unix >= signed_unix - CLOCK_SKEW_S

    def _find(self, ticket: str, tenant: str, size: tuple[int, int, int]) -> Claims | None:
        try:
            claims = read(ticket, self._signer.keys.all)
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

    def _until(self, claims: Claims) -> float:
        """Return the Unix time by which all requests with the ticket must have ended."""
        return claims.expires_ms / 1000 + CLOCK_SKEW_S + self._request_s
