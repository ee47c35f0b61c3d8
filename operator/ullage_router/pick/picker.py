"""Pick: places requests, keeps their credit until they end or their tickets do."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_router import errors
from ullage_router.admission import Admission
from ullage_router.affinity import Origin
from ullage_router.config import RouterConfig
from ullage_router.credit import Credit
from ullage_router.decide import Refuse, Run
from ullage_router.engine import Engine
from ullage_router.engines import Engines
from ullage_router.pick.batch import Ask, Batch
from ullage_router.pick.tickets import TicketOffice, new_ids
from ullage_router.queue import WaitingRoom
from ullage_router.stats import Record
from ullage_router.tenants import Visit
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

NewVisit = Callable[[], Visit | None]
"""A tenant's visit for one request; None where there are no tenants."""


@dataclass(slots=True)
class _Open:
    """One pick whose request may come, run or have ended unheard."""

    engine: Engine
    credit: Credit
    until: float
    """Monotonic time of forgetting it."""
    bill: "_Bill | None"


@dataclass(slots=True)
class _Bill:
    """What a tenant pays for one pick."""

    visit: Visit
    record: Record

    def enter(self, priced: pb.PricedRequest, model: str, output_tokens: int) -> int:
        """Takes it from the tenant's quota and returns its priority there.

        Raises:
            ServiceError: the tenant may not, or not now.
        """
        request = pb.GenerateRequest(priority=priced.priority)
        self.visit.begin(request, model, self.record)
        self.visit.charge(priced.prompt_tokens, output_tokens, self.record)
        return request.priority

    def owe(self, prompt_tokens: int, output_tokens: int) -> None:
        self.record.prompt_tokens, self.record.output_tokens = prompt_tokens, output_tokens

    def used(self) -> None:
        """Its ticket was used, or nobody says that it was not."""
        self.record.ttft_s = 0.0

    def end(self) -> None:
        self.visit.end(self.record)


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
        self._clock = clock
        self._ids = new_ids()
        self._task: asyncio.Task[None] | None = None
        self._open: dict[int, _Open] = {}
        self.counts: Counter[str] = Counter()
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
        return len(self._open)

    def pick(self, request: pb.PickRequest, new_visit: NewVisit) -> pb.PickResponse:
        """Takes the reports and places the requests, without waiting.

        Raises:
            ServiceError: Pick is off, a request is wrong, no model is known, or too many are open.
        """
        office = self._on()
        self.sweep()
        self._report(request)
        if not request.requests:
            return pb.PickResponse(ttl_s=office.ttl_s)
        self._check(request)
        batch = self._batch()
        response = pb.PickResponse(ttl_s=office.ttl_s)
        addresses: dict[str, int] = {}
        for priced in request.requests:
            self._place(priced, batch, new_visit(), response.placed.add(), addresses)
        response.engines.extend(addresses)
        return response

    def sweep(self) -> None:
        """Frees what expired: by now the engine counts the request, or never will."""
        now = self._clock()
        while self._open:
            number = next(iter(self._open))
            if self._open[number].until > now:
                return
            self._close(number, "expired")

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.sweep()

    def _on(self) -> TicketOffice:
        if self._office is None:
            raise ServiceError(
                grpc.StatusCode.UNIMPLEMENTED,
                "PICK_OFF",
                "this service gives no tickets (spec.tickets); use Generate",
            )
        return self._office

    def _check(self, request: pb.PickRequest) -> None:
        count = len(request.requests)
        if count > MAX_BATCH:
            message = f"requests has {count} entries; send at most {MAX_BATCH} at once"
            raise invalid("requests", message)
        if len(self._open) + count > MAX_OPEN:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_PICKS",
                f"{len(self._open)} picks are open; report those that ended, and come back",
                retry_after_s=1.0,
            )
        for i, priced in enumerate(request.requests):
            _check_priced(priced, f"requests[{i}]")

    def _batch(self) -> Batch:
        model = self._engines.model
        if model is None:
            raise errors.no_engine()
        limits = self._config.limits
        return Batch(
            self._engines.views(model),
            self._admission.policy,
            self._room.ahead(0),
            limits.max_output_tokens,
            limits.request_timeout,
        )

    def _place(
        self,
        priced: pb.PricedRequest,
        batch: Batch,
        visit: Visit | None,
        placed: pb.Placed,
        addresses: dict[str, int],
    ) -> None:
        number = next(self._ids)
        bill = _Bill(visit, Record(f"{number:016x}", tenant=visit.tenant)) if visit else None
        try:
            priority = self._enter(priced, bill)
            run = self._run(priced, bill, batch, number)
        except ServiceError as error:
            if bill:
                bill.end()
            self._refuse(placed, error)
            return
        engine = self._grant(number, priced, run, bill)
        placed.id, placed.max_tokens = number, run.max_tokens
        placed.predicted_bytes = run.demand.total
        placed.engine = addresses.setdefault(engine.address, len(addresses))
        placed.ticket = self._on().sign(
            number,
            engine.id,
            priced.prompt_tokens,
            run.max_tokens,
            samples=priced.samples or 1,
            priority=priority,
        )

    def _enter(self, priced: pb.PricedRequest, bill: _Bill | None) -> int:
        if bill is None:
            return priced.priority
        limit = min(priced.max_tokens or MAX_TOKENS, self._most(bill))
        output = min(limit, self._engines.expected_output) * (priced.samples or 1)
        return bill.enter(priced, self._config.model, output)

    def _most(self, bill: _Bill | None) -> int:
        """Output tokens that the service and the tenant's rules allow."""
        most = self._config.limits.max_output_tokens
        return min(most, bill.visit.rules.max_tokens or most) if bill else most

    def _run(self, priced: pb.PricedRequest, bill: _Bill | None, batch: Batch, draw: int) -> Run:
        """Where it goes; raises ServiceError when it does not run now as it is."""
        placement = self._admission.placement
        has_origin = bool(priced.session_id or priced.prefixes)
        origin = Origin(priced.session_id, tuple(priced.prefixes)) if has_origin else NOWHERE
        preferred = placement.preferred(origin) if has_origin else ""
        avoid = frozenset(priced.avoid) if priced.avoid else NOBODY
        limit = self._most(bill)
        ask = Ask(
            priced.prompt_tokens, priced.max_tokens, priced.samples or 1, preferred, avoid, limit
        )
        decision = batch.decide(ask, draw)
        if isinstance(decision, Refuse):
            if decision.kind == "unavailable":
                self._on_no_engine()
            raise errors.refusal(decision)
        if has_origin:
            placement.placed(origin, preferred, self._engines.at(decision.engine))
        return decision

    def _grant(self, number: int, priced: pb.PricedRequest, run: Run, bill: _Bill | None) -> Engine:
        engine = self._engines.at(run.engine)
        credit = engine.reserve(run.demand.total, priced.prompt_tokens)
        if bill:
            bill.owe(priced.prompt_tokens, run.max_tokens * (priced.samples or 1))
        ttl_s = self._on().ttl_s + CLOCK_SKEW_S + REPORT_LAG_S
        self._open[number] = _Open(engine, credit, self._clock() + ttl_s, bill)
        self.counts["placed"] += 1
        return engine

    def _refuse(self, placed: pb.Placed, error: ServiceError) -> None:
        self.counts["refused"] += 1
        placed.refusal.code = error.code.value[0]
        placed.refusal.reason, placed.refusal.message = error.reason, error.message
        placed.refusal.retry_after_s = errors.retry_after_s(error) or 0

    def _report(self, request: pb.PickRequest) -> None:
        for number in request.accepted:
            if found := self._open.get(number):
                found.engine.accepted(found.credit)
                found.engine.began(found.credit)
                if found.bill:
                    found.bill.used()
        for number in request.ended:
            if number in self._open:
                self._close(number, "ended")

    def _close(self, number: int, how: str) -> None:
        """Gives back its credit. A tenant pays the whole ticket, unless it was never used."""
        found = self._open.pop(number)
        found.engine.release(found.credit)
        if found.bill and how == "expired":
            found.bill.used()
        if found.bill:
            found.bill.end()
        self.counts[how] += 1


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
