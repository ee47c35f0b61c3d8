"""Implements the `Pick` RPC, which chooses engines for requests that clients then send directly.

Each ticket reserves memory on its engine until its requests end or the ticket expires.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.router import RouterConfig
from ullage_common.tickets.tickets import CLOCK_SKEW_S, Claims
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_PRIORITY, MAX_SAMPLES, MAX_SESSION_ID_BYTES
from ullage_router import errors
from ullage_router.admission.load_balancer import LoadBalancer
from ullage_router.admission.queue import RequestQueue
from ullage_router.background import failures_logged
from ullage_router.call import num_samples
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.policy.affinity import CacheKey
from ullage_router.policy.facts import EngineView, RoutingPolicy, TimeLimits
from ullage_router.policy.next_step import Refuse, Run
from ullage_router.tenants.session import TenantSession
from ullage_router.tickets.batch import HELD, Ask, PickBatch, Room
from ullage_router.tickets.book import OpenTickets, TicketCharge
from ullage_router.tickets.paid import PaidTickets
from ullage_router.tickets.signing import TicketSigner, new_ids
from ullage_router.tickets.unpaid import Unpaid, caller_of
from ullage_router.tokenizer.model import Model

MAX_BATCH = 1024
"""Maximum number of requests in one `Pick` RPC, counting every repetition of a request."""
MAX_OPEN = 200_000
"""Maximum number of requests placed by this router that have neither ended nor expired."""
MAX_TOKENS = (1 << 31) - 1
MAX_AVOIDED = 8
MAX_PREFIXES = 64
MAX_FIELDS = 64
MAX_TICKET_CHARACTERS = 256
SWEEP_INTERVAL_S = 1.0
REPORT_LAG_S = 1.0
"""Maximum seconds after a ticket's expiry until the engine's reports include its requests."""
NO_CACHE_KEY = CacheKey("", ())
NOBODY: frozenset[str] = frozenset()
NO_NAME = "unknown"
"""Name used for callers that have neither an API key nor an address."""


@dataclass(slots=True)
class _Call:
    """State of one `Pick` RPC: a snapshot of the engines, and the response so far."""

    batch: PickBatch
    response: pb.PickResponse
    full: set[str] = field(default_factory=set)
    """Keys of engines on which the caller has reached the limit for unused free tickets."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Index of each address in the response's list of engine addresses."""

    def place(self, number: int, address: str, ticket: str, run: Run, count: int) -> None:
        """Add to the response that `count` identical requests have been placed on an engine."""
        self.response.placed.add(
            id=number,
            engine=self.addresses.setdefault(address, len(self.addresses)),
            ticket=ticket,
            max_tokens=run.max_tokens,
            predicted_bytes=run.demand.kv_bytes,
            count=count,
        )

    def refuse(self, error: ServiceError, count: int) -> None:
        """Add to the response that `count` identical requests have been refused, and why."""
        refusal = pb.Refusal(
            code=error.code.value[0],
            reason=error.reason,
            message=error.message,
            retry_after_s=errors.retry_after_s(error) or 0,
        )
        self.response.placed.add(refusal=refusal, count=count)

    def finish(self) -> pb.PickResponse:
        """Add the engines' addresses to the response, and return it."""
        self.response.engines.extend(self.addresses)
        return self.response


@dataclass(slots=True)
class _PendingPick:
    """A group of identical requests from one `Pick` RPC, some of which still have to be placed."""

    priced: pb.PricedRequest
    remaining: int
    """Number of requests that have been neither placed nor refused so far."""
    session: TenantSession | None
    """Tenant session to which the requests are charged, or None if there are no tenants."""
    entered: int = 0
    """How many of the remaining requests already count against the tenant's quota."""
    priority: int = 0
    paid_by: Claims | None = None
    """Claims of the ticket that paid for the answer that the request continues, or None."""
    unpaid: Unpaid | None = None
    """Limits on the caller's unused free tickets, or None if the caller pays for its tickets."""

    def bill(self, output_tokens: int) -> TicketCharge | None:
        """Return who pays how much for each use of a ticket, or None if there are no tenants."""
        if self.session is None:
            return None
        return TicketCharge(self.session, self.priced.prompt_tokens, output_tokens)

    def leave(self, error: ServiceError) -> None:
        """Release the quota of the remaining requests, which are refused because of this error.

        The client resends these requests through `Generate`, which counts them against the quota
        again. The refusals are recorded in the tenant's metrics.
        """
        if self.session:
            status = errors.http_status(error)
            entered = self.entered or 1
            self.session.give_back(self.entered)  # the client goes on with Generate, which counts
            self.session.settle(0, 0, status, entered)
            self.session.count_refusals(status, self.remaining - entered)


class TicketIssuer:
    """Chooses engines for requests, issues tickets for them, and processes clients' reports.

    Args:
        config: The configured limits and model name.
        engines: The engines on which requests may be placed.
        queue: The queued requests, which take precedence over new ones.
        policy: The routing policy, with the admission ladder.
        balancer: Finds the engine that has a request's prefix cached.
        signer: Signs tickets, or None if `Pick` is disabled.
        on_no_engine: Called when no engine is available for a request.
        clock: Returns monotonic time in seconds.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        queue: RequestQueue,
        policy: RoutingPolicy,
        balancer: LoadBalancer,
        signer: TicketSigner | None,
        on_no_engine: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._engines = engines
        self._queue = queue
        self._policy = policy
        self._balancer = balancer
        self._signer = signer
        self._on_no_engine = on_no_engine
        self._ids = new_ids()
        self._task: asyncio.Task[None] | None = None

        longest_s = config.limits.total_timeout
        self.paid = PaidTickets(signer, engines, longest_s) if signer else None
        ticket_s = (signer.ttl_s if signer else 0.0) + CLOCK_SKEW_S + REPORT_LAG_S
        self._book = OpenTickets(ticket_s, longest_s, clock)
        self.counts = self._book.counts
        """Number of requests from `Pick` RPCs by outcome: placed, refused, ended or expired."""
        self.refusal: ServiceError | None = None
        """The error for every request while the service is stopped, or None otherwise."""

    def start(self) -> None:
        """Start watching the signing keys and regularly removing expired tickets."""
        if self._signer:
            self._signer.keys.start()
            self._task = asyncio.create_task(self._keep_sweeping(), name="sweep picks")

    async def close(self) -> None:
        """Stop watching the signing keys and removing expired tickets."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._signer:
            await self._signer.keys.close()

    def as_json(self) -> dict[str, object]:
        """Return the ticket counts for /stats."""
        kinds = ("placed", "refused", "ended", "expired")
        return {"open": self.open, **{kind: self.counts[kind] for kind in kinds}}

    @property
    def open(self) -> int:
        """Number of placed requests that have neither ended nor expired."""
        return self._book.open

    def pick(
        self, request: pb.PickRequest, session: TenantSession | None, peer: str = ""
    ) -> pb.PickResponse:
        """Record what the client reports about earlier tickets, and place its new requests.

        Args:
            request: The reports about earlier tickets, and the requests to place.
            session: The tenant's session, or None if there are no tenants.
            peer: The caller's address, in gRPC's notation.

        Raises:
            ServiceError: `Pick` is disabled, a request is invalid, no model is known, or too many
                placed requests are open.
        """
        signer = self._enabled()
        model = self._engines.model
        if request.requests and self.refusal:
            raise self.refusal
        if request.requests and model is None:
            # Before the reports are recorded, since the client sends them again after UNAVAILABLE.
            raise errors.no_engine()

        self._book.sweep()
        self._book.report(request.accepted, request.ended)
        response = pb.PickResponse(ttl_s=signer.ttl_s)
        if model is None or not request.requests:
            return response

        unpaid = self._unpaid(session, peer)
        self._check(request, unpaid)
        call = _Call(self._batch(model), response)
        if unpaid:
            full = [e.key for e in self._engines.all() if self._is_full(e, unpaid)]
            call.full.update(full)
        for priced in request.requests:
            pick = _PendingPick(priced, priced.count or 1, session, unpaid=unpaid)
            self._place(pick, call)
        return call.finish()

    def _unpaid(self, session: TenantSession | None, peer: str) -> Unpaid | None:
        """Return the limits on a caller's unused free tickets, or None if the caller pays."""
        if session and session.is_limited:
            return None
        holder = session.name if session else caller_of(peer)
        return Unpaid(holder or NO_NAME, self._config.slo.ttft_p95)

    def _is_full(self, engine: Engine, unpaid: Unpaid) -> bool:
        """Return whether the caller has reached its limit on unused free tickets for an engine."""
        view = engine.view(time.monotonic())
        return view is not None and not unpaid.room(view, engine.held(unpaid.holder), 1, 1)

    def prepay(
        self, request: pb.GenerateRequest, ticket: str | None, session: TenantSession
    ) -> Claims | None:
        """Defer the charge for a request that resumes an answer already paid for by a ticket.

        Args:
            request: The request, with the prompt and the answer's tokens so far.
            ticket: The answer's first ticket, or None if the request has none.
            session: The tenant session of the request.

        Returns:
            The ticket's claims, to pass to `on_resumed` once the request has started, or None if
            the request is charged normally.
        """
        num_prompt = len(request.token_ids.ids)
        if not (self.paid and ticket and num_prompt):
            return None
        size = (num_prompt, request.stop.max_tokens, num_samples(request.samples))
        return self.paid.prepay(ticket, session, size)

    def on_resumed(self, paid_by: Claims | None) -> None:
        """Count one more resumption of an answer for which an earlier ticket has already paid.

        Do nothing if `paid_by` is None, because the request is then charged normally.
        """
        if paid_by and self.paid:
            self.paid.on_resumed(paid_by)

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            with failures_logged("sweep picks"):
                self._book.sweep()

    def _enabled(self) -> TicketSigner:
        if self._signer is None:
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED,
                "PICK_OFF",
                "this service issues no tickets (spec.tickets); use Generate",
            )
        return self._signer

    def _check(self, request: pb.PickRequest, unpaid: Unpaid | None) -> None:
        count = sum([priced.count or 1 for priced in request.requests])
        if count > MAX_BATCH:
            message = f"requests has {count} with their counts; send at most {MAX_BATCH} at once"
            raise invalid("requests", message)
        if self.open + count > MAX_OPEN:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_PICKS",
                f"{self.open} picks are open; report those that ended, and retry",
                retry_after_s=1.0,
            )
        if unpaid and self._book.open_of(unpaid.holder) + count > MAX_OPEN // 2:
            raise errors.refusal(HELD)
        for i, priced in enumerate(request.requests):
            _check_priced(priced, f"requests[{i}]")

    def _batch(self, model: Model) -> PickBatch:
        limits = self._config.limits
        slo = self._config.slo
        return PickBatch(
            self._engines.views(model, with_trials=False),
            self._policy,
            self._queue.ahead(0),
            limits.max_output_tokens,
            TimeLimits(
                slo.ttft_p95,
                slo.e2e_p95,
                first_token_s=limits.request_timeout,
                end_s=limits.total_timeout,
            ),
        )

    def _place(self, pick: _PendingPick, call: _Call) -> None:
        """Place requests until they no longer fit or the quota runs out, and refuse the rest."""
        share = call.batch.share(pick.remaining) if pick.remaining > 1 else 1
        session = pick.session
        try:
            while pick.remaining:
                if not pick.entered:
                    self._enter(pick, session)
                self._grant(pick, share, call)
        except ServiceError as error:
            pick.leave(error)
            call.refuse(error, pick.remaining)
            self.counts["refused"] += pick.remaining

    def _enter(self, pick: _PendingPick, session: TenantSession | None) -> None:
        """Count as many of the requests as currently allowed against the tenant's quota.

        If there are no tenants, all requests are allowed.

        Raises:
            ServiceError: The quota allows none of the requests.
        """
        priced = pick.priced
        if session is None:
            pick.entered = pick.remaining
            pick.priority = priced.priority
            return

        pick.session = mine = session.new_session()
        size = (priced.prompt_tokens, priced.max_tokens, priced.samples or 1)
        pick.paid_by = None
        if priced.paid_by and self.paid:
            pick.paid_by = self.paid.prepay(priced.paid_by, mine, size)
        most = min(priced.max_tokens or MAX_TOKENS, self._most(mine))
        output = min(most, self._engines.expected_output) * (priced.samples or 1)
        count = 1
        if pick.remaining > 1:
            count = mine.num_allowed(pick.remaining, priced.prompt_tokens + output)

        # A request that the quota does not allow raises here.
        request = pb.GenerateRequest(priority=priced.priority)
        mine.open_request(request, self._config.model, max(1, count))
        pick.entered = max(1, count)
        pick.priority = request.priority
        mine.charge(priced.prompt_tokens, output)

    def _grant(self, pick: _PendingPick, share: int, call: _Call) -> None:
        """Issue one ticket for as many requests as fit on one engine, up to `share` requests."""
        number = next(self._ids)
        priced = pick.priced
        run, count = self._run(pick, call, number, min(share, pick.entered))
        engine = self._engines.at(run.engine)
        size = run.demand.kv_bytes
        prompt_tokens = priced.prompt_tokens
        samples = priced.samples or 1

        holder = ""
        step_limit_s = run.step_limit_s
        if pick.unpaid:
            holder = pick.unpaid.holder
            # A free ticket must not shorten the engine's steps for its caller alone.
            step_limit_s = math.inf
        credits = [engine.reserve(size, prompt_tokens, step_limit_s, holder) for _ in range(count)]
        if pick.unpaid and self._is_full(engine, pick.unpaid):
            call.full.add(engine.key)

        bill = pick.bill(run.max_tokens * samples)
        self._book.add(number, engine, credits, bill, holder)
        self.on_resumed(pick.paid_by)
        pick.remaining -= count
        pick.entered -= count

        ticket = self._enabled().sign(
            number,
            engine.id,
            prompt_tokens,
            run.max_tokens,
            samples=samples,
            priority=pick.priority,
            count=count,
            tenant=pick.session.name if pick.session else None,
        )
        call.place(number, engine.address, ticket, run, count)

    def _most(self, session: TenantSession | None) -> int:
        """Return the service's or the tenant's limit on output tokens, whichever is lower."""
        most = self._config.limits.max_output_tokens
        return min(most, session.rules.max_tokens or most) if session else most

    def _run(self, pick: _PendingPick, call: _Call, draw: int, most: int) -> tuple[Run, int]:
        """Choose an engine for up to `most` of the requests.

        Returns:
            The decision, and the number of requests to which it applies.

        Raises:
            ServiceError: None of the requests can run unmodified right now.
        """
        priced = pick.priced
        balancer = self._balancer
        has_cache_key = bool(priced.session_id or priced.prefixes)
        tenant = pick.session.name if pick.session else ""
        cache_key = NO_CACHE_KEY
        if has_cache_key:
            cache_key = CacheKey(priced.session_id, tuple(priced.prefixes), tenant)
        preferred = balancer.preferred(cache_key)

        avoid = self._keys(priced.avoid) if priced.avoid else NOBODY
        if priced.fields:
            avoid = avoid.union(self._engines.without_fields(priced.fields))
        limit = self._most(pick.session)
        samples = priced.samples or 1
        ask = Ask(
            priced.prompt_tokens,
            priced.max_tokens,
            samples,
            preferred.engine,
            avoid.union(self._engines.claimed(self._queue.claims()), call.full),
            limit,
            priced.comes_at_end,
        )

        decision, count = call.batch.place(ask, draw, most, self._room(pick.unpaid))
        if isinstance(decision, Refuse):
            if call.full and decision.reason == "KV_HEADROOM":
                decision = HELD
            if decision.kind == "unavailable":
                self._on_no_engine()
            raise errors.refusal(decision)

        if has_cache_key:
            balancer.on_placed(cache_key, preferred, self._engines.at(decision.engine))
        return decision, count

    def _room(self, unpaid: Unpaid | None) -> Room | None:
        """Return a function that limits how many requests a non-paying caller places on an engine.

        For an engine and the size of a request, the function returns how many more of these
        requests the caller may place on the engine. Return None instead if the caller pays.
        """
        if unpaid is None:
            return None

        def room(view: EngineView, size: int, tokens: int) -> int:
            held = self._engines.at(view.id).held(unpaid.holder)
            return unpaid.room(view, held, size, tokens)

        return room

    def _keys(self, addresses: Iterable[str]) -> frozenset[str]:
        """Return the keys by which the router identifies the engines at these addresses."""
        wanted = frozenset(addresses)
        return frozenset(e.key for e in self._engines.all() if e.address in wanted)


def _check_priced(priced: pb.PricedRequest, where: str) -> None:
    """Check the fields of a request, and raise an error that names the first invalid field."""
    has_more = priced.samples or priced.priority or priced.session_id or priced.avoid
    has_more = has_more or priced.paid_by or priced.fields
    is_sized = 0 < priced.prompt_tokens <= MAX_TOKENS and priced.max_tokens <= MAX_TOKENS
    if is_sized and not (has_more or priced.prefixes):
        return  # most requests end here

    bounds: Sequence[tuple[str, int, int, int]] = (
        ("prompt_tokens", priced.prompt_tokens, 1, MAX_TOKENS),
        ("max_tokens", priced.max_tokens, 0, MAX_TOKENS),
        ("samples", priced.samples, 0, MAX_SAMPLES),
        ("priority", priced.priority, -MAX_PRIORITY, MAX_PRIORITY),
        ("session_id", len(priced.session_id), 0, MAX_SESSION_ID_BYTES),
        ("avoid", len(priced.avoid), 0, MAX_AVOIDED),
        ("prefixes", len(priced.prefixes), 0, MAX_PREFIXES),
        ("paid_by", len(priced.paid_by), 0, MAX_TICKET_CHARACTERS),
        ("fields", len(priced.fields), 0, MAX_FIELDS),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            message = f"{where}.{name} is {value}; possible: {low} to {high}"
            raise invalid(f"{where}.{name}", message)
    if priced.paid_by and priced.count > 1:
        message = (
            f"{where}.count is {priced.count}; possible: 1 with paid_by, which is one answer's"
        )
        raise invalid(f"{where}.count", message)
