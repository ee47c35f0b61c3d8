"""Serves `Pick`: places requests that clients stream from engines themselves, and reserves their
memory until they end or their tickets expire.

A batch of picks is decided over one view of the engines, by the rules of every other request: over
a few drawn engines where a request fits at home as it is, otherwise over all. What a batch has
placed already counts for the rest of it. Equal requests are placed several at once, where the same
decisions, made one by one, could have placed each of them.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.router import RouterConfig
from ullage_common.request_cost import Demand
from ullage_common.tickets.tickets import CLOCK_SKEW_S, Claims
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_PRIORITY, MAX_SAMPLES, MAX_SESSION_ID_BYTES
from ullage_router import errors
from ullage_router.admission.load_balancer import LoadBalancer
from ullage_router.admission.queue import RequestQueue
from ullage_router.call import num_samples
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.engines.roster import DrawGroup
from ullage_router.policy.affinity import CacheKey
from ullage_router.policy.decide import decide, decide_among, min_output
from ullage_router.policy.facts import (
    WELL,
    EngineState,
    EngineView,
    RequestFacts,
    RoutingPolicy,
    TimeLimits,
)
from ullage_router.policy.forecast import is_on_time
from ullage_router.policy.next_step import NextStep, Refuse, Run, ShrinkContext
from ullage_router.policy.placement import room_of
from ullage_router.tenants import TenantSession
from ullage_router.tickets.book import OpenTickets, TicketCharge
from ullage_router.tickets.signing import PaidTickets, TicketSigner, new_ids
from ullage_router.tickets.unpaid import Unpaid, caller_of
from ullage_router.tokenizer import Model

WAIT_RETRY_S = 1
MAX_SHARES = 16
"""Decisions that like requests are spread by, where all fit."""
HELD = Refuse(
    "busy",
    "TICKETS_HELD",
    "tickets that are not used yet hold as much of the engines as they may; report those that were "
    "accepted or ended, or send the request to the router with Generate",
    retry_after_s=WAIT_RETRY_S,
)

Room = Callable[[EngineView, int, int], int]
"""Says of an engine, and of the bytes and prompt tokens of each request, how many may be reserved.
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as its client priced it."""

    prompt_tokens: int
    max_tokens: int
    """Largest number of output tokens of each answer; 0: the service's limit."""
    samples: int = 1
    preferred: str = ""
    """Key of the engine that has its beginning in its caches."""
    refused_by: frozenset[str] = frozenset()
    limit: int = 0
    """Largest number of output tokens that the tenant may have; 0: no other than the service's."""
    comes_at_end: bool = False
    """Whether no part of the answer comes before its end."""


class Batch:
    """Decides requests one after another.

    Args:
        views: the engines at this moment.
        policy: the ladder's.
        ahead: bytes that others wait for, by pool.
        max_output_tokens: the service's limit.
        limits: times that each request must keep; one whose answer comes at its end keeps those of
            the end.
    """

    def __init__(
        self,
        views: Sequence[EngineView],
        policy: RoutingPolicy,
        ahead: Mapping[str, int],
        max_output_tokens: int,
        limits: TimeLimits,
    ) -> None:
        self._policy = policy
        self._ahead = ahead
        self._max_output_tokens = max_output_tokens
        self._limits = limits
        self._limits_at_end = replace(limits, first_token_s=limits.end_s)
        self._views = {view.id: view for view in views}
        home = policy.pools[0]
        large = policy.large_pool
        has_large = any(view.pool == large for view in views)
        names = (home, large) if has_large and home != large else (home,)
        self._groups: dict[str, DrawGroup[str]] = {name: DrawGroup() for name in names}
        for view in views:
            if view.standing is EngineState.USABLE and (group := self._groups.get(view.pool)):
                group.usable.append(view.id)
                group.set_idle(view.id, _is_idle(view))

    def share(self, count: int) -> int:
        """Return how many of that many equal requests are placed at once, so that they spread over
        engines."""
        home = self._groups[self._policy.pools[0]].usable
        usable = sum(view.standing is EngineState.USABLE for view in self._views.values())
        return -(-count // min(len(home) or usable or 1, MAX_SHARES))

    def place(
        self, ask: Ask, draw: int, most: int = 1, room: Room | None = None
    ) -> tuple[Run | Refuse, int]:
        """Place like requests on one engine, or return the reason why none runs now as it is.

        Args:
            most: of them; 1 or more.
            room: how many the caller may reserve on an engine; None: as many as fit.

        Returns:
            The decision, and how many of them it holds for.
        """
        limit = min(ask.limit or self._max_output_tokens, self._max_output_tokens)
        facts = self._facts(ask, min(ask.max_tokens or limit, limit), draw)
        run = self._decide(facts)
        if isinstance(run, Refuse):
            return run, most
        view = self._views[run.engine]
        prompt = ask.prompt_tokens
        if room:
            most = min(most, room(view, run.demand.kv_bytes, prompt))
        if not most:
            return HELD, 1
        count = self._fitting(view, facts, run.demand, most)
        view = self._views[run.engine] = replace(
            view,
            available=view.available - count * run.demand.kv_bytes,
            load=view.load + count,
            backlog_tokens=view.backlog_tokens + count * prompt,
            step_limit_s=min(view.step_limit_s, run.step_limit_s),
        )
        if group := self._groups.get(view.pool):
            group.set_idle(view.id, _is_idle(view))
        return run, count

    def _facts(self, ask: Ask, most: int, draw: int) -> RequestFacts:
        asked = most if ask.max_tokens else None
        return RequestFacts(
            prompt_tokens=ask.prompt_tokens,
            max_tokens=most,
            min_tokens=min_output(asked, most, self._policy.rungs.shrink_output),
            samples=ask.samples,
            ahead=self._ahead,
            refused_by=ask.refused_by,
            limits=self._limits_at_end if ask.comes_at_end else self._limits,
            preferred=ask.preferred,
            draw=draw,
        )

    def _decide(self, facts: RequestFacts) -> Run | Refuse:
        decision: NextStep | None = decide_among(facts, self._sample(facts), self._policy)
        if decision is None:
            decision = decide(facts, list(self._views.values()), self._policy)
        match decision:
            case Run():
                room = room_of(facts, self._views[decision.engine])
                if decision.max_tokens < min(facts.max_tokens, room):
                    return _left_to_generate(decision.reason, "a shorter answer")
                return decision
            case Refuse():
                return decision
            case ShrinkContext():
                return _left_to_generate(decision.reason, "a shorter prompt")
            case _:
                return _left_to_generate(decision.reason, "waiting for memory")

    def _sample(self, facts: RequestFacts) -> list[EngineView]:
        """Return the engines for `decide_among`: random ones and the preferred one."""
        sample = []
        for pool, group in self._groups.items():
            drawn = group.draw(facts.draw)
            preferred = self._views.get(facts.preferred)
            if preferred and preferred.pool == pool and preferred.id not in drawn:
                drawn += [preferred.id] if preferred.standing is EngineState.USABLE else []
            views = [self._views[name] for name in drawn]
            if not views and pool == self._policy.large_pool:
                views = [next(view for view in self._views.values() if view.pool == pool)]
            sample += views
        return sample

    def _fitting(self, view: EngineView, facts: RequestFacts, demand: Demand, most: int) -> int:
        """Return how many of such requests, the first of which fits, fit one after another."""
        size = demand.kv_bytes
        prompt = facts.prompt_tokens
        output = demand.tokens - prompt
        count = min(most, view.available // size) if size else most
        while count > 1:
            before = replace(
                view,
                load=view.load + count - 1,
                backlog_tokens=view.backlog_tokens + (count - 1) * prompt,
            )
            if is_on_time(before, prompt, output, facts.limits):
                break
            count //= 2
        return count


def _is_idle(view: EngineView) -> bool:
    return not view.backlog_tokens and view.health >= WELL


def _left_to_generate(reason: str, what: str) -> Refuse:
    return Refuse(
        "busy",
        reason,
        f"the request needs {what}; send it to the router with Generate, which does that",
        retry_after_s=WAIT_RETRY_S,
    )


MAX_BATCH = 1024
MAX_OPEN = 200_000
MAX_TOKENS = (1 << 31) - 1
MAX_AVOIDED = 8
MAX_PREFIXES = 64
MAX_TICKET_CHARACTERS = 256
SWEEP_INTERVAL_S = 1.0
NO_CACHE_KEY = CacheKey("", ())
NOBODY: frozenset[str] = frozenset()
NO_NAME = "unknown"
"""Name of callers of whom nothing is known."""
REPORT_LAG_S = 1.0
"""Seconds after which an engine's reports include a request that was sent with the ticket's last
moment."""


@dataclass(slots=True)
class _Call:
    """One Pick call: the engines as they were at its beginning, and its response."""

    batch: Batch
    response: pb.PickResponse
    full: set[str] = field(default_factory=set)
    """Keys of engines of which the caller holds as much as it may."""
    addresses: dict[str, int] = field(default_factory=dict)
    """Index of each engine in the response's list."""

    def place(self, number: int, address: str, ticket: str, run: Run, count: int) -> None:
        self.response.placed.add(
            id=number,
            engine=self.addresses.setdefault(address, len(self.addresses)),
            ticket=ticket,
            max_tokens=run.max_tokens,
            predicted_bytes=run.demand.kv_bytes,
            count=count,
        )

    def refuse(self, error: ServiceError, count: int) -> None:
        refusal = pb.Refusal(
            code=error.code.value[0],
            reason=error.reason,
            message=error.message,
            retry_after_s=errors.retry_after_s(error) or 0,
        )
        self.response.placed.add(refusal=refusal, count=count)

    def finish(self) -> pb.PickResponse:
        self.response.engines.extend(self.addresses)
        return self.response


@dataclass(slots=True)
class _PendingPick:
    """Equal requests on their way through one call."""

    priced: pb.PricedRequest
    remaining: int
    """Number of requests that are neither placed nor refused."""
    session: TenantSession | None
    """The tenant's session of the requests that were let in; None: there are no tenants."""
    entered: int = 0
    """Number of the remaining requests that were let in."""
    priority: int = 0
    paid_by: Claims | None = None
    """The ticket with which the answer was paid for that the request goes on with."""
    unpaid: Unpaid | None = None
    """Bounds of what the caller may hold; None: it pays for its tickets."""

    def bill(self, output_tokens: int) -> TicketCharge | None:
        if self.session is None:
            return None
        return TicketCharge(self.session, self.priced.prompt_tokens, output_tokens)

    def leave(self, error: ServiceError) -> None:
        """None of those left is placed: whatever they were charged comes back."""
        if self.session:
            status = errors.http_status(error)
            entered = self.entered or 1
            self.session.give_back(self.entered)  # the client goes on with Generate, which counts
            self.session.settle(0, 0, status, entered)
            self.session.count_refusals(status, self.remaining - entered)


class TicketIssuer:
    """Serves Pick.

    Args:
        config: limits and the model's name.
        engines: where requests may go.
        queue: the requests that wait before.
        policy: of the ladder.
        balancer: which engine has a request's beginning.
        signer: None: Pick is off.
        on_no_engine: called when a request finds no engine at all.
        clock: monotonic, seconds.
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
        longest_s = config.limits.total_timeout
        self._paid = PaidTickets(signer.keys, longest_s) if signer else None
        self._ids = new_ids()
        self._task: asyncio.Task[None] | None = None
        ticket_s = (signer.ttl_s if signer else 0.0) + CLOCK_SKEW_S + REPORT_LAG_S
        self._book = OpenTickets(ticket_s, longest_s, clock)
        self.counts = self._book.counts
        self.refusal: ServiceError | None = None
        """The answer to all requests while the service is stopped; None while it is not."""
        """placed, refused, ended, expired."""

    def start(self) -> None:
        if self._signer:
            self._signer.keys.start()
            self._task = asyncio.create_task(self._keep_sweeping(), name="sweep picks")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._signer:
            await self._signer.keys.close()

    def as_json(self) -> dict[str, object]:
        """Return the counts for /stats."""
        kinds = ("placed", "refused", "ended", "expired")
        return {"open": self.open, **{kind: self.counts[kind] for kind in kinds}}

    @property
    def open(self) -> int:
        """Picks that have neither ended nor expired."""
        return self._book.open

    def pick(
        self, request: pb.PickRequest, session: TenantSession | None, peer: str = ""
    ) -> pb.PickResponse:
        """Take the reports and place the requests, without waiting.

        Args:
            session: of the tenant; None where there are no tenants.
            peer: where the call comes from, as gRPC names it.

        Raises:
            ServiceError: Pick is off, a request is wrong, no model is known, or too many are open.
        """
        signer = self._enabled()
        model = self._engines.model
        if request.requests and self.refusal:
            raise self.refusal
        if request.requests and model is None:
            raise errors.no_engine()  # before the reports: unavailable means that none is used
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
        """Return the bounds of a caller whose tickets cost it nothing."""
        if session and session.is_limited:
            return None
        holder = session.name if session else caller_of(peer)
        return Unpaid(holder or NO_NAME, self._config.slo.ttft_p95)

    def _is_full(self, engine: Engine, unpaid: Unpaid) -> bool:
        """Return whether a caller may hold no more of an engine, for a request of any size."""
        view = engine.view(time.monotonic())
        return view is not None and not unpaid.room(view, engine.held(unpaid.holder), 1, 1)

    def prepay(
        self, request: pb.GenerateRequest, ticket: str | None, session: TenantSession
    ) -> Claims | None:
        """Spares a request that goes on with an answer from being charged again.

        Args:
            ticket: the first one of the answer, if the request came with one.

        Returns:
            What `on_resumed` takes once the request has begun; None: it is charged like any other.
        """
        num_prompt = len(request.token_ids.ids)
        if not (ticket and num_prompt):
            return None
        size = (num_prompt, request.stop.max_tokens, num_samples(request.samples))
        return self._paid_by(ticket, session, size)

    def on_resumed(self, paid_by: Claims | None) -> None:
        """Counts that an answer which was paid for goes on elsewhere."""
        if paid_by and self._paid:
            self._paid.on_resumed(paid_by)

    def _paid_by(
        self, ticket: str, session: TenantSession, size: tuple[int, int, int]
    ) -> Claims | None:
        """Return the claims of the ticket that may have paid for a request of this size; None
        where none did. The session is charged at the end then, if no engine was lost."""
        claims = self._paid.find(ticket, session.name, size) if ticket and self._paid else None
        if claims:
            session.prepay(functools.partial(self._was_lost, claims))
        return claims

    def _was_lost(self, claims: Claims) -> bool:
        """Whether the engine of a ticket was lost since the ticket was signed, by the clock of
        whichever router signed it."""
        signer = self._enabled()
        engine = next((e for e in self._engines.all() if signer.tag(e.id) == claims.engine), None)
        if engine is None or engine.state != "ready":
            return True
        return engine.lost_unix >= claims.expires_ms / 1000 - signer.ttl_s - CLOCK_SKEW_S

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._book.sweep()

    def _enabled(self) -> TicketSigner:
        if self._signer is None:
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED,
                "PICK_OFF",
                "this service gives no tickets (spec.tickets); use Generate",
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
                f"{self.open} picks are open; report those that ended, and come back",
                retry_after_s=1.0,
            )
        if unpaid and self._book.open_of(unpaid.holder) + count > MAX_OPEN // 2:
            raise errors.refusal(HELD)
        for i, priced in enumerate(request.requests):
            _check_priced(priced, f"requests[{i}]")

    def _batch(self, model: Model) -> Batch:
        limits = self._config.limits
        slo = self._config.slo
        return Batch(
            self._engines.views(model),
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
        """Places what its tenant may have and what fits; the rest is refused."""
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
        """Takes as many requests as the tenant may have now from its quota.

        Raises:
            ServiceError: it may have none.
        """
        priced = pick.priced
        if session is None:
            pick.entered = pick.remaining
            pick.priority = priced.priority
            return
        pick.session = mine = session.new_session()
        size = (priced.prompt_tokens, priced.max_tokens, priced.samples or 1)
        pick.paid_by = self._paid_by(priced.paid_by, mine, size)
        most = min(priced.max_tokens or MAX_TOKENS, self._most(mine))
        output = min(most, self._engines.expected_output) * (priced.samples or 1)
        count = (
            mine.num_allowed(pick.remaining, priced.prompt_tokens + output)
            if pick.remaining > 1
            else 1
        )
        request = pb.GenerateRequest(priority=priced.priority)
        mine.open_request(request, self._config.model, max(1, count))
        pick.entered = max(1, count)
        pick.priority = request.priority
        mine.charge(priced.prompt_tokens, output)

    def _grant(self, pick: _PendingPick, share: int, call: _Call) -> None:
        """Grant one ticket, for as many requests as fit where one fits."""
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
            # A ticket that costs nothing must not shorten the engine's steps for its caller alone.
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
        """Output tokens that the service and the tenant's rules allow."""
        most = self._config.limits.max_output_tokens
        return min(most, session.rules.max_tokens or most) if session else most

    def _run(self, pick: _PendingPick, call: _Call, draw: int, most: int) -> tuple[Run, int]:
        """Return the place of some of the requests, and their number; raise ServiceError when none
        runs now as it is."""
        priced = pick.priced
        balancer = self._balancer
        has_cache_key = bool(priced.session_id or priced.prefixes)
        tenant = pick.session.name if pick.session else ""
        cache_key = (
            CacheKey(priced.session_id, tuple(priced.prefixes), tenant)
            if has_cache_key
            else NO_CACHE_KEY
        )
        preferred = balancer.preferred(cache_key)
        avoid = self._keys(priced.avoid) if priced.avoid else NOBODY
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
        """Return how many requests a caller may reserve on an engine; None: it pays for them."""
        if unpaid is None:
            return None

        def room(view: EngineView, size: int, tokens: int) -> int:
            held = self._engines.at(view.id).held(unpaid.holder)
            return unpaid.room(view, held, size, tokens)

        return room

    def _keys(self, addresses: Iterable[str]) -> frozenset[str]:
        """Return the keys of the engines at these addresses."""
        there = frozenset(addresses)
        return frozenset(e.key for e in self._engines.all() if e.address in there)


def _check_priced(priced: pb.PricedRequest, where: str) -> None:
    """Raise ServiceError INVALID_ARGUMENT that names the field."""
    has_more = priced.samples or priced.priority or priced.session_id or priced.avoid
    has_more = has_more or priced.paid_by
    is_sized = 0 < priced.prompt_tokens <= MAX_TOKENS and priced.max_tokens <= MAX_TOKENS
    if is_sized and not (has_more or priced.prefixes):
        return  # as most are
    bounds: Sequence[tuple[str, int, int, int]] = (
        ("prompt_tokens", priced.prompt_tokens, 1, MAX_TOKENS),
        ("max_tokens", priced.max_tokens, 0, MAX_TOKENS),
        ("samples", priced.samples, 0, MAX_SAMPLES),
        ("priority", priced.priority, -MAX_PRIORITY, MAX_PRIORITY),
        ("session_id", len(priced.session_id), 0, MAX_SESSION_ID_BYTES),
        ("avoid", len(priced.avoid), 0, MAX_AVOIDED),
        ("prefixes", len(priced.prefixes), 0, MAX_PREFIXES),
        ("paid_by", len(priced.paid_by), 0, MAX_TICKET_CHARACTERS),
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
