"""Pick: places requests, keeps their credit until they end or their tickets do."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_router import errors
from ullage_router.admission import Admission
from ullage_router.affinity import Origin
from ullage_router.config import RouterConfig
from ullage_router.decide import Refuse, Run
from ullage_router.engine import Engine
from ullage_router.engines import Engines
from ullage_router.pick.batch import Ask, Batch
from ullage_router.pick.book import Bill, Book
from ullage_router.pick.tickets import TicketOffice, new_ids
from ullage_router.queue import WaitingRoom
from ullage_router.stats import Record
from ullage_router.tenants import Visit
from ullage_router.tokenize import Model
from ullage_rpc.errors import ServiceError, invalid
from ullage_rpc.limits import MAX_PRIORITY, MAX_SAMPLES, MAX_SESSION_ID_BYTES
from ullage_rpc.tickets import CLOCK_SKEW_S

MAX_BATCH = 1024
MAX_OPEN = 200_000
MAX_TOKENS = (1 << 31) - 1
MAX_AVOIDED = 8
MAX_PREFIXES = 64
SWEEP_INTERVAL_S = 1.0
NOWHERE = Origin("", ())
NOBODY: frozenset[str] = frozenset()
REPORT_LAG_S = 1.0
"""After it an engine's reports include a request that was sent with the ticket's last moment."""


@dataclass(slots=True)
class _Call:
    """One call: the engines as it found them, and what it is answered."""

    batch: Batch
    engines: Mapping[str, Engine]
    """By address."""
    response: pb.PickResponse
    addresses: dict[str, int] = field(default_factory=dict)
    """Where each engine stands in the response's list."""

    def place(self, number: int, address: str, ticket: str, run: Run, count: int) -> None:
        self.response.placed.add(
            id=number,
            engine=self.addresses.setdefault(address, len(self.addresses)),
            ticket=ticket,
            max_tokens=run.max_tokens,
            predicted_bytes=run.demand.total,
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
class _Wish:
    """Like requests on their way through one call."""

    priced: pb.PricedRequest
    left: int
    """Neither placed nor refused."""
    visit: Visit | None
    """Of their tenant, for those that it let in; None: there are no tenants."""
    entered: int = 0
    """Of those left."""
    priority: int = 0

    def bill(self, output_tokens: int) -> Bill | None:
        if self.visit is None:
            return None
        return Bill(self.visit, self.priced.prompt_tokens, output_tokens)

    def leave(self, error: ServiceError) -> None:
        """None of those left is placed: whatever they were charged comes back."""
        if self.visit:
            status, entered = errors.http_status(error), self.entered or 1
            self.visit.settle(0, 0, status, entered)
            self.visit.turn_away(status, self.left - entered)


class Picker:
    """Serves Pick.

    Args:
        config: limits and the model's name.
        engines: where requests may go.
        room: who waits before.
        admission: the policy.
        office: None: Pick is off.
        on_no_engine: called when a request finds no engine at all.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        room: WaitingRoom,
        admission: Admission,
        office: TicketOffice | None,
        on_no_engine: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._engines = engines
        self._room = room
        self._admission = admission
        self._office = office
        self._on_no_engine = on_no_engine
        self._ids = new_ids()
        self._task: asyncio.Task[None] | None = None
        ticket_s = (office.ttl_s if office else 0.0) + CLOCK_SKEW_S + REPORT_LAG_S
        self._book = Book(ticket_s, config.limits.request_timeout, clock)
        self.counts = self._book.counts
        """placed, refused, ended, expired."""

    def start(self) -> None:
        if self._office:
            self._office.keys.start()
            self._task = asyncio.create_task(self._keep_sweeping(), name="sweep picks")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._office:
            await self._office.keys.close()

    def as_json(self) -> dict[str, object]:
        """For /stats."""
        kinds = ("placed", "refused", "ended", "expired")
        return {"open": self.open, **{kind: self.counts[kind] for kind in kinds}}

    @property
    def open(self) -> int:
        """Picks that have neither ended nor expired."""
        return self._book.open

    def pick(self, request: pb.PickRequest, visit: Visit | None) -> pb.PickResponse:
        """Takes the reports and places the requests, without waiting.

        Args:
            visit: of the tenant; None where there are no tenants.

        Raises:
            ServiceError: Pick is off, a request is wrong, no model is known, or too many are open.
        """
        office, model = self._on(), self._engines.model
        if request.requests and model is None:
            raise errors.no_engine()  # before the reports: unavailable means that none were heard
        self._book.sweep()
        self._book.report(request.accepted, request.ended)
        response = pb.PickResponse(ttl_s=office.ttl_s)
        if model is None or not request.requests:
            return response
        self._check(request)
        call = _Call(
            self._batch(model), {e.address: e for e in reversed(self._engines.all())}, response
        )
        for priced in request.requests:
            self._place(_Wish(priced, priced.count or 1, visit), call)
        return call.finish()

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._book.sweep()

    def _on(self) -> TicketOffice:
        if self._office is None:
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED,
                "PICK_OFF",
                "this service gives no tickets (spec.tickets); use Generate",
            )
        return self._office

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
        limits = self._config.limits
        return Batch(
            self._engines.views(model),
            self._admission.policy,
            self._room.ahead(0),
            limits.max_output_tokens,
            limits.request_timeout,
        )

    def _place(self, wish: _Wish, call: _Call) -> None:
        """Places what its tenant may have and what fits; the rest is refused."""
        share, visit = call.batch.share(wish.left) if wish.left > 1 else 1, wish.visit
        try:
            while wish.left:
                if not wish.entered:
                    self._enter(wish, visit)
                self._grant(wish, share, call)
        except ServiceError as error:
            wish.leave(error)
            call.refuse(error, wish.left)
            self.counts["refused"] += wish.left

    def _enter(self, wish: _Wish, visit: Visit | None) -> None:
        """Takes as many as the tenant may have now from its quota.

        Raises:
            ServiceError: it may have none.
        """
        priced = wish.priced
        if visit is None:
            wish.entered, wish.priority = wish.left, priced.priority
            return
        wish.visit = mine = visit.another()
        most = min(priced.max_tokens or MAX_TOKENS, self._most(mine))
        output = min(most, self._engines.expected_output) * (priced.samples or 1)
        count = mine.room(wish.left, priced.prompt_tokens + output) if wish.left > 1 else 1
        request = pb.GenerateRequest(priority=priced.priority)
        record = Record("", tenant=mine.tenant)
        mine.begin(request, self._config.model, record, max(1, count))
        mine.charge(priced.prompt_tokens, output, record)
        wish.entered, wish.priority = max(1, count), request.priority

    def _grant(self, wish: _Wish, share: int, call: _Call) -> None:
        """One ticket, for as many as fit where one fits."""
        number, priced = next(self._ids), wish.priced
        run, count = self._run(wish, call, number, min(share, wish.entered))
        engine = call.engines[run.engine]
        size, prompt_tokens = run.demand.total, priced.prompt_tokens
        samples = priced.samples or 1
        credits = [engine.reserve(size, prompt_tokens) for _ in range(count)]
        bill = wish.bill(run.max_tokens * samples)
        self._book.add(number, engine, credits, bill)
        wish.left -= count
        wish.entered -= count
        ticket = self._on().sign(
            number,
            engine.id,
            prompt_tokens,
            run.max_tokens,
            samples=samples,
            priority=wish.priority,
            count=count,
            is_sessionless=wish.visit is not None,
        )
        call.place(number, engine.address, ticket, run, count)

    def _most(self, visit: Visit | None) -> int:
        """Output tokens that the service and the tenant's rules allow."""
        most = self._config.limits.max_output_tokens
        return min(most, visit.rules.max_tokens or most) if visit else most

    def _run(self, wish: _Wish, call: _Call, draw: int, most: int) -> tuple[Run, int]:
        """Where some of them go, and how many; raises ServiceError when none runs now as it is."""
        priced, placement = wish.priced, self._admission.placement
        has_origin = bool(priced.session_id or priced.prefixes)
        tenant = wish.visit.tenant if wish.visit else ""
        origin = (
            Origin(priced.session_id, tuple(priced.prefixes), tenant) if has_origin else NOWHERE
        )
        preferred = placement.preferred(origin) if has_origin else ""
        avoid = frozenset(priced.avoid) if priced.avoid else NOBODY
        limit, samples = self._most(wish.visit), priced.samples or 1
        ask = Ask(priced.prompt_tokens, priced.max_tokens, samples, preferred, avoid, limit)
        decision, count = call.batch.place(ask, draw, most)
        if isinstance(decision, Refuse):
            if decision.kind == "unavailable":
                self._on_no_engine()
            raise errors.refusal(decision)
        if has_origin:
            placement.placed(origin, preferred, call.engines[decision.engine])
        return decision, count


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
