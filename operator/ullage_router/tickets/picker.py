"""Serves `Pick`: places requests that clients stream from engines themselves, and reserves their
memory until they end or their tickets expire.

A batch of picks is decided over one view of the engines. A request that fits the first pool as it
is gets what `decide` would say, without its ladder; `decide` is asked for every other one. What a
batch has placed already counts for the rest of it. Equal requests are placed several at once, where
the same decisions, made one by one, could have placed each of them.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.router import LARGE_POOL, RouterConfig
from ullage_common.request_cost import Demand, MemoryProfile, predict
from ullage_common.tickets.tickets import CLOCK_SKEW_S
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_PRIORITY, MAX_SAMPLES, MAX_SESSION_ID_BYTES
from ullage_router import errors
from ullage_router.admission.load_balancer import LoadBalancer
from ullage_router.admission.queue import RequestQueue
from ullage_router.engines.engines import Engines
from ullage_router.policy.affinity import CacheKey
from ullage_router.policy.decide import (
    Refuse,
    Run,
    ShrinkContext,
    decide,
    min_output,
    room_of,
)
from ullage_router.policy.decision import (
    EngineState,
    EngineView,
    RequestFacts,
    RoutingPolicy,
    TimeLimits,
)
from ullage_router.policy.forecast import is_on_time, step_limit_s
from ullage_router.tenants import TenantSession
from ullage_router.tickets.book import OpenTickets, TicketCharge
from ullage_router.tickets.signing import TicketSigner, new_ids
from ullage_router.tokenizer import Model

WAIT_RETRY_S = 1
MAX_SHARES = 16
"""Decisions that like requests are spread by, where all fit."""


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


@dataclass(slots=True)
class _BatchEngine:
    """One engine with the picks that the batch placed on it."""

    view: EngineView
    longest: int
    """Tokens of the longest sequence it can ever hold."""
    available: int
    load: int
    backlog_tokens: int
    kind: int
    """Engines of one kind price alike."""

    def now(self) -> EngineView:
        return replace(
            self.view,
            available=self.available,
            load=self.load,
            backlog_tokens=self.backlog_tokens,
        )


class Batch:
    """Decides requests one after another.

    Args:
        views: the engines at this moment.
        policy: the ladder's.
        ahead: bytes that others wait for, by pool.
        max_output_tokens: the service's limit.
        limits: times that each request must keep.
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
        kinds: dict[tuple[MemoryProfile, int], int] = {}
        self._engines_by_id = {view.id: _batch_engine(view, kinds) for view in views}
        self._prices: dict[tuple[int, int, int], Demand] = {}
        """Prices by kind of engine, prompt and output tokens: both engines of a pair are mostly of
        one kind."""
        self._has_large = any(view.pool == LARGE_POOL for view in views)
        self._home = self._find_home()

    def share(self, count: int) -> int:
        """Returns how many of that many equal requests are placed at once, so that they spread over
        engines."""
        usable = sum(s.view.standing is EngineState.USABLE for s in self._engines_by_id.values())
        engines = len(self._home) or usable or 1
        return -(-count // min(engines, MAX_SHARES))

    def place(self, ask: Ask, draw: int, most: int = 1) -> tuple[Run | Refuse, int]:
        """Places like requests on one engine, or says why they cannot run now as they are.

        Args:
            most: of them; 1 or more.

        Returns:
            The decision, and how many of them it holds for.
        """
        limit = min(ask.limit or self._max_output_tokens, self._max_output_tokens)
        output = min(ask.max_tokens or limit, limit)
        run = self._quick(ask, output, draw) or self._slow(ask, output, draw)
        if isinstance(run, Refuse):
            return run, most
        engine = self._engines_by_id[run.engine]
        count = self._fitting(engine, ask.prompt_tokens, run.demand, most)
        engine.available -= count * run.demand.kv_bytes
        engine.load += count
        engine.backlog_tokens += count * ask.prompt_tokens
        return run, count

    def _fitting(self, engine: _BatchEngine, prompt: int, demand: Demand, most: int) -> int:
        """Returns how many of such requests, the first of which fits, fit one after another."""
        size, output = demand.kv_bytes, demand.tokens - prompt
        count = min(most, engine.available // size) if size else most
        while count > 1:
            before = replace(
                engine.now(),
                load=engine.load + count - 1,
                backlog_tokens=engine.backlog_tokens + (count - 1) * prompt,
            )
            if is_on_time(before, prompt, output, self._limits):
                break
            count //= 2
        return count

    def _find_home(self) -> list[_BatchEngine]:
        """Engines that a request which simply fits may take, by name."""
        first = self._policy.pools[0]
        if first in self._ahead:
            return []
        usable = (
            engine
            for engine in self._engines_by_id.values()
            if engine.view.pool == first and engine.view.standing is EngineState.USABLE
        )
        return sorted(usable, key=lambda engine: engine.view.id)

    def _quick(self, ask: Ask, most: int, draw: int) -> Run | None:
        home = self._home
        if not home or ask.refused_by or ask.samples != 1:
            return None
        fits = [(s, d) for s in _pair(home, draw) if (d := self._demand(s, ask, most))]
        if not fits:
            return None
        drawn, demand = fits[0] if len(fits) == 1 else max(fits, key=_merit)
        if ask.preferred and (engine := self._engines_by_id.get(ask.preferred)) in home:
            is_idle = engine.load <= drawn.load + self._policy.max_extra_load
            if is_idle and (there := self._demand(engine, ask, most)):
                drawn, demand = engine, there
        view = drawn.view
        output = max(1, demand.tokens - ask.prompt_tokens)
        limit_s = step_limit_s(drawn.now(), ask.prompt_tokens, output, self._limits)
        return Run("accept", "FITS", view.pool, view.id, most, demand, "accept", limit_s)

    def _demand(self, engine: _BatchEngine, ask: Ask, most: int) -> Demand | None:
        """Its bytes there; None where it does not simply fit."""
        view, prompt = engine.view, ask.prompt_tokens
        if prompt + most > engine.longest:
            return None
        key = (engine.kind, prompt, most)
        demand = self._prices.get(key)
        if demand is None:
            demand = predict(view.profile, prompt, most, view.expected_output)
            self._prices[key] = demand
        size = demand.kv_bytes
        if self._has_large and (
            prompt > self._policy.large_request_tokens or size > self._policy.large_request_kv
        ):
            return None
        if size > engine.available:
            return None
        output = demand.tokens - prompt
        return demand if is_on_time(engine.now(), prompt, output, self._limits) else None

    def _slow(self, ask: Ask, most: int, draw: int) -> Run | Refuse:
        asked = most if ask.max_tokens else None
        facts = RequestFacts(
            prompt_tokens=ask.prompt_tokens,
            max_tokens=most,
            min_tokens=min_output(asked, most, self._policy.rungs.shrink_output),
            samples=ask.samples,
            ahead=self._ahead,
            refused_by=ask.refused_by,
            limits=self._limits,
            preferred=ask.preferred,
            draw=draw,
        )
        decision = decide(
            facts, [engine.now() for engine in self._engines_by_id.values()], self._policy
        )
        match decision:
            case Run():
                room = room_of(facts, self._engines_by_id[decision.engine].view)
                if decision.max_tokens < min(most, room):
                    return _left_to_generate(decision.reason, "a shorter answer")
                return decision
            case Refuse():
                return decision
            case ShrinkContext():
                return _left_to_generate(decision.reason, "a shorter prompt")
            case _:
                return _left_to_generate(decision.reason, "waiting for memory")


def _batch_engine(view: EngineView, kinds: dict[tuple[MemoryProfile, int], int]) -> _BatchEngine:
    kind = kinds.setdefault((view.profile, view.expected_output), len(kinds))
    return _BatchEngine(
        view, view.longest(0, 1), view.available, view.load, view.backlog_tokens, kind
    )


def _pair(home: list[_BatchEngine], draw: int) -> tuple[_BatchEngine, ...]:
    """Two engines, drawn."""
    if len(home) == 1:
        return (home[0],)
    first = draw % len(home)
    second = (first + 1 + draw // len(home) % (len(home) - 1)) % len(home)
    return home[first], home[second]


def _merit(fit: tuple[_BatchEngine, Demand]) -> tuple[float, int]:
    """Orders engines for a pick; of equals the first drawn is taken, so that each is taken as
    often."""
    engine, _ = fit
    return (engine.available * engine.view.health, -engine.load)


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
SWEEP_INTERVAL_S = 1.0
NO_CACHE_KEY = CacheKey("", ())
NOBODY: frozenset[str] = frozenset()
REPORT_LAG_S = 1.0
"""Seconds after which an engine's reports include a request that was sent with the ticket's last
moment."""


@dataclass(slots=True)
class _Call:
    """One Pick call: the engines as they were at its beginning, and its response."""

    batch: Batch
    response: pb.PickResponse
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

    def bill(self, output_tokens: int) -> TicketCharge | None:
        if self.session is None:
            return None
        return TicketCharge(self.session, self.priced.prompt_tokens, output_tokens)

    def leave(self, error: ServiceError) -> None:
        """None of those left is placed: whatever they were charged comes back."""
        if self.session:
            status, entered = errors.http_status(error), self.entered or 1
            self.session.give_back(self.entered)  # the client goes on with Generate, which counts
            self.session.settle(0, 0, status, entered)
            self.session.count_refusals(status, self.remaining - entered)


class TicketIssuer:
    """Serves Pick.

    Args:
        config: limits and the model's name.
        engines: where requests may go.
        queue: who waits before.
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
        self._ids = new_ids()
        self._task: asyncio.Task[None] | None = None
        ticket_s = (signer.ttl_s if signer else 0.0) + CLOCK_SKEW_S + REPORT_LAG_S
        self._book = OpenTickets(ticket_s, config.limits.total_timeout, clock)
        self.counts = self._book.counts
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
        """Returns the counts for /stats."""
        kinds = ("placed", "refused", "ended", "expired")
        return {"open": self.open, **{kind: self.counts[kind] for kind in kinds}}

    @property
    def open(self) -> int:
        """Picks that have neither ended nor expired."""
        return self._book.open

    def pick(self, request: pb.PickRequest, session: TenantSession | None) -> pb.PickResponse:
        """Takes the reports and places the requests, without waiting.

        Args:
            session: of the tenant; None where there are no tenants.

        Raises:
            ServiceError: Pick is off, a request is wrong, no model is known, or too many are open.
        """
        signer, model = self._enabled(), self._engines.model
        if request.requests and model is None:
            raise errors.no_engine()  # before the reports: unavailable means that none is used
        self._book.sweep()
        self._book.report(request.accepted, request.ended)
        response = pb.PickResponse(ttl_s=signer.ttl_s)
        if model is None or not request.requests:
            return response
        self._check(request)
        call = _Call(self._batch(model), response)
        for priced in request.requests:
            self._place(_PendingPick(priced, priced.count or 1, session), call)
        return call.finish()

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

    def _check(self, request: pb.PickRequest) -> None:
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
        for i, priced in enumerate(request.requests):
            _check_priced(priced, f"requests[{i}]")

    def _batch(self, model: Model) -> Batch:
        limits, slo = self._config.limits, self._config.slo
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
        share, session = call.batch.share(pick.remaining) if pick.remaining > 1 else 1, pick.session
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
            pick.entered, pick.priority = pick.remaining, priced.priority
            return
        pick.session = mine = session.new_session()
        most = min(priced.max_tokens or MAX_TOKENS, self._most(mine))
        output = min(most, self._engines.expected_output) * (priced.samples or 1)
        count = (
            mine.num_allowed(pick.remaining, priced.prompt_tokens + output)
            if pick.remaining > 1
            else 1
        )
        request = pb.GenerateRequest(priority=priced.priority)
        mine.open_request(request, self._config.model, max(1, count))
        mine.charge(priced.prompt_tokens, output)
        pick.entered, pick.priority = max(1, count), request.priority

    def _grant(self, pick: _PendingPick, share: int, call: _Call) -> None:
        """Grants one ticket, for as many requests as fit where one fits."""
        number, priced = next(self._ids), pick.priced
        run, count = self._run(pick, call, number, min(share, pick.entered))
        engine = self._engines.at(run.engine)
        size, prompt_tokens = run.demand.kv_bytes, priced.prompt_tokens
        samples = priced.samples or 1
        credits = [engine.reserve(size, prompt_tokens, run.step_limit_s) for _ in range(count)]
        bill = pick.bill(run.max_tokens * samples)
        self._book.add(number, engine, credits, bill)
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
        """Returns where some of the requests go, and how many; raises ServiceError when none runs
        now as it is."""
        priced, balancer = pick.priced, self._balancer
        has_cache_key = bool(priced.session_id or priced.prefixes)
        tenant = pick.session.name if pick.session else ""
        cache_key = (
            CacheKey(priced.session_id, tuple(priced.prefixes), tenant)
            if has_cache_key
            else NO_CACHE_KEY
        )
        preferred = balancer.preferred(cache_key) if has_cache_key else ""
        avoid = self._keys(priced.avoid) if priced.avoid else NOBODY
        limit, samples = self._most(pick.session), priced.samples or 1
        ask = Ask(priced.prompt_tokens, priced.max_tokens, samples, preferred, avoid, limit)
        decision, count = call.batch.place(ask, draw, most)
        if isinstance(decision, Refuse):
            if decision.kind == "unavailable":
                self._on_no_engine()
            raise errors.refusal(decision)
        if has_cache_key:
            balancer.on_placed(cache_key, preferred, self._engines.at(decision.engine))
        return decision, count

    def _keys(self, addresses: Iterable[str]) -> frozenset[str]:
        """Returns the keys of the engines at these addresses."""
        there = frozenset(addresses)
        return frozenset(e.key for e in self._engines.all() if e.address in there)


def _check_priced(priced: pb.PricedRequest, where: str) -> None:
    """Raises ServiceError INVALID_ARGUMENT that names the field."""
    has_more = priced.samples or priced.priority or priced.session_id or priced.avoid
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
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            message = f"{where}.{name} is {value}; possible: {low} to {high}"
            raise invalid(f"{where}.{name}", message)
