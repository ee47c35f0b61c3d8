"""Admits requests based on tickets signed by a router."""

import time
from collections.abc import Callable
from pathlib import Path

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import TicketsSection
from ullage_common.tickets.tickets import (
    CLOCK_SKEW_S,
    TICKET_KEY,
    Claims,
    TicketError,
    TicketKeys,
    TicketUses,
    engine_tag,
    narrowed_salt,
    verify,
)
from ullage_common.wire.errors import ServiceError

MAX_REMEMBERED = 200_000
"""Maximum number of used tickets to remember until they expire."""


class TicketVerifier:
    """Admits requests based on their tickets. A ticket states how often it may be used.

    Args:
        section: the configured keys. Without keys, all requests are admitted and tickets are
            ignored.
        engine_id: id of this engine, which a ticket must name.
        model: the served model. A request with a tenant's ticket may not name any other model.
        clock: returns the Unix time in seconds.

    Raises:
        ConfigError: the keys cannot be read.
    """

    def __init__(
        self,
        section: TicketsSection | None,
        engine_id: str,
        model: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = TicketKeys(Path(section.keys_dir)) if section else None
        self._is_required = bool(section and section.required)
        self._tag = engine_tag(engine_id)
        self._model = model
        self._clock = clock
        self._uses = TicketUses(MAX_REMEMBERED)
        """Number of times each ticket has been used.

        Checking and counting a use is atomic, because there is no await in between.
        """

    def start(self) -> None:
        if self._keys:
            self._keys.start()

    async def close(self) -> None:
        if self._keys:
            await self._keys.close()

    @property
    def num_remembered(self) -> int:
        """Number of used tickets currently remembered."""
        return len(self._uses)

    def check(self, ticket: str | None) -> None:
        """Check an RPC's ticket before its request arrives. `admit` later counts the use.

        Raises:
            ServiceError: UNAUTHENTICATED if the ticket is invalid, or is required but missing.
        """
        if self._keys is None:
            return
        if ticket is not None:
            self._claims(ticket)
        elif self._is_required:
            raise _refused(
                "TICKET_REQUIRED", "no ticket; send requests through a router, or with its ticket"
            )

    def admit(
        self, request: pb.GenerateRequest, metadata: "grpc.aio.Metadata | tuple[()] | None"
    ) -> None:
        """Count a use of the request's ticket, if it has one, and enforce the ticket's claims.

        Raises:
            ServiceError: UNAUTHENTICATED if the ticket is invalid or used up, or is required but
                missing. PERMISSION_DENIED if the request exceeds the ticket's claims.
                RESOURCE_EXHAUSTED if there are too many used tickets to remember that have not
                expired yet.
        """
        if self._keys is None:
            return
        ticket = dict(metadata or ()).get(TICKET_KEY)
        if ticket is not None:
            self._take(request, ticket if isinstance(ticket, str) else ticket.decode("latin-1"))
        elif self._is_required:
            raise _refused(
                "TICKET_REQUIRED", "no ticket; send requests through a router, or with its ticket"
            )

    def _take(self, request: pb.GenerateRequest, ticket: str) -> None:
        claims = self._claims(ticket)
        self._uses.forget(self._clock())
        self._count(claims)
        # The router knows which adapters a tenant may use.
        if claims.is_sessionless and request.model not in ("", self._model):
            raise _over("model", repr(request.model), repr(self._model))
        _hold(request, claims)

    def _claims(self, ticket: str) -> Claims:
        """Verify a ticket, and return its claims.

        Raises:
            ServiceError: UNAUTHENTICATED if the ticket is invalid.
        """
        assert self._keys
        try:
            return verify(ticket, self._keys.all, self._tag, self._clock())
        except TicketError as error:
            raise _refused(error.reason, str(error)) from error

    def _count(self, claims: Claims) -> None:
        """Count a use of a ticket, or refuse the ticket if its uses are exhausted."""
        if not self._uses.has_room_for(claims.id):
            raise _too_many()
        if self._uses.count(claims.id) >= max(1, claims.uses):  # older routers leave uses out
            raise _refused("TICKET_USED", "the ticket was used; pick again")
        self._uses.add(claims.id, claims.expires_ms / 1000 + CLOCK_SKEW_S)


def _hold(request: pb.GenerateRequest, claims: Claims) -> None:
    """Check a request against its ticket's limits, and set the fields that the ticket decides.

    The ticket limits the prompt's length, the output's length and the number of answers. It
    decides, for example, the request's priority.

    Raises:
        ServiceError: PERMISSION_DENIED if the request exceeds a limit, or if its prompt is not
            given as token ids.
    """
    if request.WhichOneof("input") != "token_ids":
        raise _over("the input", "text", "token ids")
    samples = request.samples
    requested = {
        "prompt": (len(request.token_ids.ids), claims.prompt_tokens),
        "max_tokens": (request.stop.max_tokens, claims.max_tokens),
        "answers": (max(1, samples.n, samples.best_of, samples.beam.width), claims.samples),
    }
    for name, (value, limit) in requested.items():
        if value > limit:
            raise _over(name, str(value), f"at most {limit}")
    if not (request.stop.HasField("max_tokens") or request.embed):
        request.stop.max_tokens = claims.max_tokens
    request.priority = claims.priority
    request.step_limit_s = 0.0  # a client could keep other requests out with a limit
    if claims.is_sessionless:
        request.session_id = ""
        request.cache_salt = narrowed_salt(claims.cache_salt, request.cache_salt).hex()


def _too_many() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "TOO_MANY_TICKETS",
        f"{MAX_REMEMBERED} used tickets have not expired yet; try again later",
        retry_after_s=1.0,
    )


def _over(field: str, value: str, budget: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.PERMISSION_DENIED,
        "TICKET_BUDGET",
        f"{field} is {value} and the ticket is for {budget}; pick for the request that you send",
        metadata={"field": field},
    )


def _refused(reason: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, reason, message)
