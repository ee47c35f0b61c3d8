"""Acts on decisions: shrinks, waits, refuses, or grants a place on an engine."""

import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ullage_router.affinity import Origin
from ullage_router.canary import Side
from ullage_router.compress import compress
from ullage_router.config import RouterConfig
from ullage_router.credit import Credit
from ullage_router.decide import Refuse, Run, ShrinkContext, Wait, decide, min_output
from ullage_router.engine import Engine
from ullage_router.engines import Engines
from ullage_router.errors import refusal
from ullage_router.placement import Placement
from ullage_router.prompts import Prompt
from ullage_router.queue import QueueFull, Ticket, Waiter, WaitingRoom
from ullage_router.stats import Record, route_of
from ullage_router.tokenize import PromptError, TokenizerThreads
from ullage_router.views import Facts, Policy, QueueState
from ullage_router.window import PrefillWindow, Seat
from ullage_rpc.errors import ServiceError
from ullage_rpc.turns import weight

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the client wants, as far as admission cares."""

    prompt: Prompt
    asked_tokens: int | None
    """max_tokens of the request; None when it names none."""
    samples: int
    """Answers to the prompt that are generated."""
    max_tokens: int | None
    """Longest output that the tenant may have; None: as the service's."""
    priority: int
    session: str
    """Empty when it belongs to none."""
    deadline: float
    """When the answer must have ended, on the monotonic clock."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share of the queue."""
    side: Side = Side.STABLE
    """Of a rollout."""
    is_trial: bool = False
    """The canary may have it at once; stable engines have it otherwise."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to send the request to an engine; its credit must be released in the end."""

    engine: Engine
    credit: Credit
    prompt: Prompt
    max_tokens: int


class NotOnCanary(Exception):
    """The canary cannot run the request at once, or failed it; stable engines should have it.

    served_elsewhere: called when they did.
    """

    def __init__(self, served_elsewhere: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.served_elsewhere = served_elsewhere


class Admission:
    """The ladder in action.

    Args:
        config: policy and limits.
        engines: where requests may go.
        room: where they wait.
        threads: where long conversations are rendered anew.
        placement: which engine has a request's beginning.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        room: WaitingRoom,
        threads: TokenizerThreads,
        placement: Placement,
    ) -> None:
        routing = config.routing
        self._policy = Policy(
            tuple(pool.name for pool in config.pools),
            routing.large_request_tokens,
            routing.large_request_kv,
            routing.ladder,
            routing.rungs,
            routing.placement.affinity.max_extra_load,
            routing.prefill,
        )
        self.window = PrefillWindow(routing.prefill, engines)
        self._max_output_tokens = config.limits.max_output_tokens
        self._queue_timeout_s = routing.queue.timeout
        self._engines = engines
        self._room = room
        self._threads = threads
        self.placement = placement

    async def admit(self, wish: Wish, record: Record, refused: Mapping[str, int]) -> Grant:
        """Goes down the ladder until there is a place.

        Args:
            refused: engines that refused or failed the request, each with its reports until then.

        Raises:
            ServiceError: it can never fit, does not fit now, or there is no engine.
            NotOnCanary: the stable engines should have it.
        """
        climb = _Climb(self, wish, record, refused)
        try:
            return await climb.run()
        finally:
            climb.leave_queue()

    def facts(
        self,
        wish: Wish,
        ticket: Ticket | None = None,
        state: QueueState = QueueState.OPEN,
        refused: frozenset[str] = frozenset(),
        preferred: str = "",
    ) -> Facts:
        """The request as `decide` sees it at this moment."""
        rungs = self._policy.rungs
        limit = min(wish.max_tokens or self._max_output_tokens, self._max_output_tokens)
        most = min(wish.asked_tokens or limit, limit)
        return Facts(
            prompt_tokens=len(wish.prompt.token_ids),
            max_tokens=most,
            min_tokens=min_output(most if wish.asked_tokens else None, most, rungs.shrink_output),
            samples=wish.samples,
            droppable=wish.prompt.can_shrink(rungs.shrink_context.keep_turns),
            queue=state,
            ahead={} if wish.is_trial else self._room.ahead(wish.priority, ticket),
            refused_by=refused,
            patience_s=wish.deadline - time.monotonic(),
            preferred=preferred,
            draw=random.getrandbits(30),
        )

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def engines(self) -> Engines:
        return self._engines

    @property
    def queue_timeout_s(self) -> float:
        return self._queue_timeout_s

    @property
    def room(self) -> WaitingRoom:
        return self._room

    async def shrink(self, prompt: Prompt, decision: ShrinkContext, record: Record) -> Prompt:
        """The prompt shortened as decided, or the same marked as spent."""
        keep, most = self._policy.rungs.shrink_context.keep_turns, decision.prompt_tokens
        try:
            result = await self._threads.run(
                weight(prompt.turns),
                lambda: compress(prompt.turns, most, prompt.render, keep),
            )
        except PromptError:  # the template refuses the turns that are left
            return replace(prompt, is_spent=True)
        is_short = len(result.token_ids) <= most or decision.reason == "CONTEXT_TOO_LONG"
        if not is_short or len(result.token_ids) < decision.fewest:
            return replace(prompt, is_spent=True)
        record.step("shrinkContext", decision.reason)
        record.degraded.extend(result.degraded)
        turns = tuple(result.turns)
        return replace(prompt, token_ids=result.token_ids, turns=turns, is_spent=True)


class _Climb:
    """One request on the ladder."""

    def __init__(
        self,
        admission: Admission,
        wish: Wish,
        record: Record,
        refused: Mapping[str, int],
    ) -> None:
        self._admission = admission
        self._wish = wish
        self._record = record
        self._refused = refused
        self._ticket: Ticket | None = None
        self._pool = ""
        self._state = QueueState.OPEN
        self._origin = self._find_origin()
        self._preferred = ""

    def _find_origin(self) -> Origin:
        wish = self._wish
        return self._admission.placement.origin(wish.session, wish.prompt.token_ids, wish.tenant)

    def leave_queue(self) -> None:
        if self._ticket:
            self._ticket.leave()
            self._ticket = None

    async def run(self) -> Grant:
        while True:
            decision = self._decide()
            if self._wish.is_trial:
                decision = _on_canary(decision)
            match decision:
                case Run() as run:
                    return await self._grant(run)
                case ShrinkContext() as shrink:
                    await self._shrink(shrink)
                case Wait() as wait:
                    await self._wait(wait)
                case Refuse() as refuse:
                    raise self._refusal(refuse)

    def _decide(self) -> Run | ShrinkContext | Wait | Refuse:
        engines, refusers = self._admission.engines, self._refusers()
        self._preferred = self._admission.placement.preferred(self._origin, self._wish.side)
        facts = self._admission.facts(
            self._wish, self._ticket, self._state, refusers, self._preferred
        )
        views = engines.views(self._wish.prompt.model, self._wish.side)
        return decide(facts, views, self._admission.policy)

    def _refusers(self) -> frozenset[str]:
        """Engines that have said nothing new since they refused."""
        if not self._refused:
            return frozenset()
        reports = {e.address: e.reports for e in self._admission.engines.all()}
        return frozenset(a for a, seen in self._refused.items() if reports.get(a) == seen)

    async def _grant(self, run: Run) -> Grant:
        """Takes the memory, leaves the queue, and finds the best of the engines that are busy."""
        engine, prompt = self._admission.engines.at(run.engine), self._wish.prompt
        if self._ticket and run.pool == self._pool:
            self._ticket.serve()
        credit = engine.reserve(run.demand.total, len(prompt.token_ids))
        seat = Seat(engine, credit, run.choices)
        await self._admission.window.settle(seat)
        self._admission.placement.placed(self._origin, self._preferred, seat.engine)
        self._tell(run, seat)
        return Grant(seat.engine, seat.credit, prompt, run.max_tokens)

    def _tell(self, run: Run, seat: Seat) -> None:
        record, asked = self._record, self._wish.asked_tokens
        if run.action == "shrink" or (asked and run.max_tokens < asked):
            record.degraded.append(f"max_tokens={run.max_tokens}")
        record.predicted_bytes = seat.credit.size
        record.prompt_tokens = seat.credit.tokens
        record.action = self._action(run)
        record.route, record.reason = route_of(run.pool), run.reason
        record.engine = seat.engine.id
        record.step(run.step, run.reason)
        # What is decided at once is told with the answer.
        self._log(logging.INFO if record.queued_s or self._refused else logging.DEBUG)

    def _action(self, run: Run) -> str:
        """The furthest step that was taken, for the one word that headers have room for."""
        record = self._record
        if run.action == "route4":
            return "route4"
        if record.queued_s:
            return "queue"
        return "shrink" if record.degraded else "accept"

    async def _shrink(self, decision: ShrinkContext) -> None:
        self._record.action, self._record.reason = "shrink", decision.reason
        prompt = await self._admission.shrink(self._wish.prompt, decision, self._record)
        self._wish = replace(self._wish, prompt=prompt)
        self._origin = self._find_origin()
        self._log(logging.INFO)

    async def _wait(self, wait: Wait) -> None:
        """Waits for its turn, but no longer than its answer could still end in time."""
        record, started = self._record, time.monotonic()
        try:
            ticket = self._join(wait)
        except QueueFull:
            self._state = QueueState.FULL
            return
        left_s = self._admission.queue_timeout_s - record.queued_s
        useful_s = self._wish.deadline - wait.least_s - started if wait.least_s else math.inf
        try:
            if not await ticket.turn(min(left_s, useful_s)):
                self._state = QueueState.LATE if useful_s < left_s else QueueState.SPENT
            elif ticket.is_displaced:
                self._state = QueueState.FULL
        finally:
            record.queued_s += time.monotonic() - started

    def _join(self, wait: Wait) -> Ticket:
        """The place in the line of the pool, kept while the pool stays the same."""
        if self._ticket and self._pool == wait.pool:
            return self._ticket
        self.leave_queue()
        record = self._record
        ticket = self._admission.room.join(wait.pool, self._waiter(wait))
        self._ticket, self._pool = ticket, wait.pool
        record.action, record.reason, record.route = "queue", wait.reason, route_of(wait.pool)
        record.step("queue", wait.reason)
        record.predict(wait.demand)
        self._log(logging.INFO)
        return ticket

    def _waiter(self, wait: Wait) -> Waiter:
        wish, record = self._wish, self._record
        record.priority = wish.priority
        return Waiter(
            size=wait.demand.total,
            arrival=record.arrived,
            deadline=wish.deadline,
            prompt_bytes=wish.prompt.memory_bytes,
            priority=wish.priority,
            tenant=wish.tenant,
            weight=wish.weight,
            is_charged=bool(self._refused),
        )

    def _refusal(self, refuse: Refuse) -> ServiceError:
        record = self._record
        record.action, record.reason = "reject", refuse.reason
        record.step("reject", refuse.reason)
        record.route = route_of(refuse.pool)
        record.prompt_tokens = len(self._wish.prompt.token_ids)
        if refuse.demand:
            record.predict(refuse.demand)
        self._log(logging.WARNING if refuse.kind == "unavailable" else logging.INFO)
        return refusal(refuse)

    def _log(self, level: int) -> None:
        if not log.isEnabledFor(level):
            return
        record = self._record
        log.log(
            level,
            "decided",
            extra={
                "request_id": record.request_id,
                "pred_kv_mb": record.predicted_mib,
                "admission_action": record.action,
                "route": record.route,
                "reason": record.reason,
                "degraded": record.degraded,
            },
        )


def _on_canary(decision: Run | ShrinkContext | Wait | Refuse) -> Run:
    """Only what runs at home as it is.

    Raises:
        NotOnCanary: it does not.
    """
    if isinstance(decision, Run) and decision.step == "accept":
        return decision
    raise NotOnCanary
