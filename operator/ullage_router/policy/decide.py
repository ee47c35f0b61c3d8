"""Decides where a request may run, what must be changed for that, or why it may not: a pure
function.

    decide(facts, engines, policy) -> Run | ShrinkContext | Wait | Refuse

A request has a home pool: the first one, or the large pool when the request is large. At home it
runs on the engine whose caches have its beginning, or on the one with more headroom of two drawn
ones. When it does not fit, the rungs of the ladder are tried in their order; a request that others
wait before may only wait, go to another pool or be refused, unless it fits beside the first of them
and ends before the memory for that one is predicted to be there (backfill). A clear answer comes
first: what can never fit is invalid at once, and a service without a ready engine is unavailable.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec.structs import replace

from ullage_common.config.router import Rung, ShrinkOutputSection
from ullage_common.request_cost import Demand, most_tokens, predict
from ullage_router.policy.decision import (
    WELL,
    EngineState,
    EngineView,
    QueueState,
    RequestFacts,
    RoutingPolicy,
)
from ullage_router.policy.forecast import end_s, is_on_time, longest_wait_s, step_limit_s, turn_s
from ullage_router.policy.retry import (
    drain_s,
    earliest_s,
    free_s,
    retry_after,
    unknown_retry_after,
)

Step = Literal["accept", "shrinkOutput", "route"]
Action = Literal["accept", "shrink", "queue", "route4", "reject"]


class Run(msgspec.Struct, frozen=True):
    """The decision to send the request to this engine."""

    action: Action
    reason: str
    pool: str
    engine: str
    max_tokens: int
    demand: Demand
    step: Step
    """The step that made the request fit: room at home, a shorter output, or another pool."""
    step_limit_s: float = math.inf
    """Longest seconds of a step with which the request would still end in time there."""
    choices: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Bytes on every engine that may serve the request instead; empty where it need not wait to
    know."""


class ShrinkContext(msgspec.Struct, frozen=True):
    """The decision to drop turns until the prompt has at most this many tokens, then decide again.

    With the reason CONTEXT_TOO_LONG a prompt that gets closer is better than nothing.
    """

    reason: str
    prompt_tokens: int
    fewest: int
    """Fewest tokens that the prompt may keep: with less it would have lost too much."""


class Wait(msgspec.Struct, frozen=True):
    """The decision to wait for this pool."""

    reason: str
    pool: str
    demand: Demand
    longest_s: float = math.inf
    """Seconds for which the request may wait: after that it would be late whatever is free."""
    available: int = 0
    """Most bytes that a usable engine of the pool has."""


class Refuse(msgspec.Struct, frozen=True):
    """The decision to refuse the request, with the error for its client."""

    kind: Literal["invalid", "busy", "unavailable"]
    reason: str
    message: str
    demand: Demand | None = None
    available: int = 0
    retry_after_s: int | None = None
    pool: str = ""
    """The pool that would have served the request; empty when there is none."""


NextStep = Run | ShrinkContext | Wait | Refuse

_WAITED = {
    QueueState.FULL: "QUEUE_FULL",
    QueueState.SPENT: "QUEUE_TIMEOUT",
    QueueState.LATE: "DEADLINE",
}


def min_output(asked: int | None, max_tokens: int, rung: ShrinkOutputSection) -> int:
    """Return the number of tokens down to which the output may be shrunk."""
    return min(max_tokens, max(rung.min_tokens, int((asked or 0) * rung.min_share)))


def decide(facts: RequestFacts, engines: Sequence[EngineView], policy: RoutingPolicy) -> NextStep:
    """Make one decision; the caller acts on it and asks again after ShrinkContext and Wait."""
    able = [e for e in engines if room_of(facts, e) >= facts.min_tokens]
    if not engines:
        return Refuse(
            "unavailable",
            "NO_ENGINE",
            "no engine is known yet; retry when one has started",
            retry_after_s=unknown_retry_after(facts.draw),
        )
    if not able:
        return _never_fits(facts, engines, policy)
    home, reason = home_of(facts, able, policy)
    return _LadderRun(facts, able, policy, home, reason).first_that_fits()


def passes(facts: RequestFacts, engines: Sequence[EngineView], policy: RoutingPolicy) -> bool:
    """Whether a request that waits behind others may run now; to say what becomes of it otherwise
    is much more work."""
    able = [e for e in engines if room_of(facts, e) >= facts.min_tokens]
    if not able:
        return False
    home, reason = home_of(facts, able, policy)
    return _LadderRun(facts, able, policy, home, reason).runs_before_waiting()


def decide_among(
    facts: RequestFacts, sample: Sequence[EngineView], policy: RoutingPolicy
) -> Run | None:
    """Make the decision for a request that fits at home as it is on one of a few engines; None
    where only `decide` can tell.

    Args:
        sample: usable engines of the first pool, and of the large pool if there is one; any engine
            of it where none is usable.
    """
    able = [e for e in sample if room_of(facts, e) >= facts.min_tokens]
    if not able:
        return None
    home, reason = home_of(facts, able, policy)
    if reason == "CAPACITY":  # another engine of the first pool may be able
        return None
    return _LadderRun(facts, able, policy, home, reason).on_one_of_two()


@dataclass(slots=True)
class _LadderRun:
    """One run down the ladder: a request, the engines that can ever hold it, and its home pool."""

    facts: RequestFacts
    engines: Sequence[EngineView]
    policy: RoutingPolicy
    home: str
    home_reason: str

    def first_that_fits(self) -> NextStep:
        if not any(e.standing is not EngineState.UNUSABLE for e in self.engines):
            return self._unavailable()
        if run := self.at_home():
            return run
        if (
            not self._usable(self.home)
            and "route" in self.policy.ladder
            and (run := self._overflow())
        ):
            return run  # memory may come back in a moment, a lost engine may not
        for rung in self.policy.ladder:
            if decision := self._try(rung):
                return decision
        return self._reject()

    def at_home(self) -> Run | None:
        """Return where the request runs as it is; None where it does not fit at home now."""
        return self._full(self.home, self.home_reason)

    def on_one_of_two(self) -> Run | None:
        """As `at_home`, over the first two engines that fit and the preferred one: engines are in
        no order."""
        facts = self.facts
        pool = self.home
        fits = list[EngineView]()
        if pool in facts.ahead:
            return self.at_home()
        for engine in self.engines:
            is_wanted = len(fits) < 2 or engine.id == facts.preferred
            if is_wanted and engine.pool == pool and self._fits_now(engine):
                fits.append(engine)
        return self._on_one_of(fits, self.home_reason) if fits else None

    def _fits_now(self, engine: EngineView) -> bool:
        return (
            self._demand(engine).kv_bytes <= engine.available
            and engine.standing is EngineState.USABLE
            and engine.id not in self.facts.refused_by
            and engine.id not in self.facts.claimed
            and self._is_in_time(engine)
        )

    def runs_before_waiting(self) -> bool:
        """Whether the request runs at home, or in another pool where that comes before waiting."""
        if self.at_home():
            return True
        ladder = self.policy.ladder
        before = ladder[: ladder.index("queue")] if "queue" in ladder else ladder
        leaves = "route" in (before if self._usable(self.home) else ladder)
        return leaves and self._overflow() is not None

    def _try(self, rung: Rung) -> NextStep | None:
        match rung:
            case "shrinkContext":
                return self._shrink_context()
            case "shrinkOutput":
                return self._shrunk(self.home)
            case "queue":
                return self._wait()
            case "route":
                return self._overflow()
            case "reject":
                return self._reject()

    def _full(self, pool: str, reason: str) -> Run | None:
        fits = [e for e in self._free(pool) if self._demand(e).kv_bytes <= e.available]
        if not fits and pool == self.home:
            fits = self._free_beside_heads()
        return self._on_one_of(fits, reason) if fits else None

    def _on_one_of(self, fits: Sequence[EngineView], reason: str) -> Run:
        engine = _pick(fits, self.facts, self.policy)
        max_tokens = min(self.facts.max_tokens, room_of(self.facts, engine))
        return self._run(engine, max_tokens, reason, self._choices(engine, max_tokens))

    def _choices(self, engine: EngineView, max_tokens: int) -> Mapping[str, int]:
        """Return engines that could run the request as well, if its prompt is neither computed
        soon nor cached."""
        is_soon = not 0 < self.policy.prefill.window <= engine.backlog_s
        if is_soon or engine.id == self.facts.preferred or engine.id in self.facts.claimed:
            return {}
        return {
            e.id: self._demand(e).kv_bytes
            for e in self._free(engine.pool)
            if room_of(self.facts, e) >= max_tokens
        }

    def _shrink_context(self) -> ShrinkContext | None:
        """Shorten the prompt until it fits the freest engine, if any turn may go and any room is
        left."""
        free = self._free(self.home)
        if not (self.facts.droppable and free):
            return None
        engine = max(free, key=lambda e: e.available)
        output = min(self.facts.max_tokens, max(1, engine.expected_output))
        target = self._most_tokens(engine) - output
        fewest = _fewest(self.facts, self.policy)
        return ShrinkContext("KV_HEADROOM", target, fewest) if target >= fewest else None

    def _shrunk(self, pool: str) -> Run | None:
        """Run with the longest output that fits the freest engine and is not too short."""
        free = self._free(pool)
        if not free:
            return None
        engine = max(free, key=lambda e: (e.available, e.id))
        output = self._most_tokens(engine) - self.facts.prompt_tokens
        output = min(output, self.facts.max_tokens, room_of(self.facts, engine))
        if output < self._least_output(engine):
            return None
        return self._run(engine, output, "KV_HEADROOM")

    def _least_output(self, engine: EngineView) -> int:
        """Return the output down to which a request may be shrunk on this engine."""
        least = self.facts.min_tokens
        if self.policy.rungs.shrink_output.below_expected:
            return least
        most = min(self.facts.max_tokens, room_of(self.facts, engine))
        return max(least, min(engine.expected_output, most))

    def _wait(self) -> Wait | None:
        if self.facts.queue is not QueueState.OPEN:
            return None
        recoverable = [e for e in self._pool(self.home) if e.standing is not EngineState.UNUSABLE]
        if not recoverable:
            return None
        usable = self._usable(self.home)
        if usable and self._turn_s(usable) == math.inf:
            return None  # it would be late after the wait
        reason = self._shortage_reason() if usable else "NOT_READY"
        facts = self.facts
        longest_s = max(
            longest_wait_s(e, facts.prompt_tokens, self._expected_output(e), facts.limits)
            for e in recoverable
        )
        available = max((e.available for e in usable), default=0)
        return Wait(reason, self.home, self._least(recoverable), longest_s, available)

    def _turn_s(
        self, engines: Sequence[EngineView], *, comes_back: bool = False, is_first: bool = False
    ) -> float | None:
        """Return the seconds until the request could run in its home pool and keep its limits.

        Args:
            is_first: as if nobody waited before it.
        """
        facts = self.facts
        limits = replace(facts.limits, waited_s=0.0) if comes_back else facts.limits
        demand = self._least(engines)
        ahead = facts.ahead.get(self.home, 0), facts.waiting.get(self.home, 0)
        if is_first:
            ahead = 0, 0
        output = max(1, demand.tokens - facts.prompt_tokens)
        return turn_s(
            engines,
            facts.prompt_tokens,
            output,
            demand.kv_bytes,
            ahead,
            limits,
            comes_back=comes_back,
        )

    def _expected_output(self, engine: EngineView) -> int:
        return max(1, self._demand(engine).tokens - self.facts.prompt_tokens)

    def _overflow(self) -> Run | None:
        """Run in another pool that has room now, with a shrunk output only where that rung comes
        first."""
        ladder = self.policy.ladder
        shrink = "shrinkOutput" in ladder[: ladder.index("route")]
        for pool in self._others():
            if run := self._full(pool, "SPILL") or (self._shrunk(pool) if shrink else None):
                return run
        return None

    def _others(self) -> list[str]:
        """Yield pools that the request may leave its home for, preferred first."""
        return [
            pool
            for pool in self.policy.rungs.route.pools or self.policy.pools
            if pool != self.home and self._pool(pool)
        ]

    def _reject(self) -> Refuse:
        engines = self._usable(self.home)
        if not engines:
            return self._unavailable()
        demand = self._least(engines)
        available = max(e.available for e in engines)
        retry = self._retry_after(engines, demand.kv_bytes)
        queue = self.facts.queue if "queue" in self.policy.ladder else QueueState.OPEN
        reason = _WAITED.get(queue, self._shortage_reason())
        message = _busy(reason, demand, available, retry)
        return Refuse("busy", reason, message, demand, available, retry, self.home)

    def _retry_after(self, engines: Sequence[EngineView], needed: int) -> int:
        """Return Retry-After: a second by which there is memory, the limits can be kept, and those
        who were refused before had their turn."""
        facts = self.facts
        ahead = facts.ahead.get(self.home, 0)
        seconds = free_s(engines, needed, ahead)

        later_s = self._turn_s(engines, comes_back=True)
        if later_s == math.inf and ahead:  # the known releases are for those ahead
            first_s = self._turn_s(engines, comes_back=True, is_first=True)
            later_s = None if first_s is None else first_s + drain_s(engines, ahead)
        if later_s is not None:
            seconds = max(seconds or 0.0, later_s)

        if seconds is not None:
            seconds += drain_s(engines, facts.deferrals.ahead(self.home))
        returns = facts.deferrals.returns(self.home)
        return retry_after(seconds, returns, facts.draw, self.policy.rungs.reject)

    def _unavailable(self) -> Refuse:
        return Refuse(
            "unavailable",
            "NO_ENGINE",
            f"no engine of pool {self.home} is ready; retry when one is",
            retry_after_s=unknown_retry_after(self.facts.draw),
            pool=self.home,
        )

    def _run(
        self,
        engine: EngineView,
        max_tokens: int,
        reason: str,
        choices: Mapping[str, int] = MappingProxyType({}),
    ) -> Run:
        is_short = max_tokens < min(self.facts.max_tokens, room_of(self.facts, engine))
        action: Action = "shrink" if is_short else "accept"
        if engine.pool != self.policy.pools[0]:
            action = "route4"
        step: Step = "shrinkOutput" if is_short else "accept"
        if engine.pool != self.home:
            step = "route"
        demand = self._demand(engine)
        if is_short:
            demand = _price(self.facts, engine, max_tokens)
        prompt = self.facts.prompt_tokens
        limit_s = step_limit_s(engine, prompt, max(1, demand.tokens - prompt), self.facts.limits)
        return Run(
            action, reason, engine.pool, engine.id, max_tokens, demand, step, limit_s, choices
        )

    def _most_tokens(self, engine: EngineView) -> int:
        """Return the length of the longest sequence that fits the engine now."""
        facts = self.facts
        available = min(engine.available, engine.most_bytes(has_session=facts.has_session))
        return most_tokens(engine.profile, available, facts.prompt_tokens, facts.samples)

    def _demand(self, engine: EngineView) -> Demand:
        return _demand(self.facts, engine)

    def _least(self, engines: Sequence[EngineView]) -> Demand:
        return min((self._demand(e) for e in engines), key=lambda d: d.kv_bytes)

    def _pool(self, pool: str) -> list[EngineView]:
        return [e for e in self.engines if e.pool == pool]

    def _usable(self, pool: str) -> list[EngineView]:
        usable = EngineState.USABLE
        return [e for e in self.engines if e.pool == pool and e.standing is usable]

    def _free(self, pool: str) -> list[EngineView]:
        """Return engines that may take this request now, before whom nobody waits."""
        if pool in self.facts.ahead:
            return []
        taken = self.facts.refused_by.union(self.facts.claimed)
        return [e for e in self._usable(pool) if e.id not in taken and self._is_in_time(e)]

    def _free_beside_heads(self) -> list[EngineView]:
        """Return engines of the home pool that have room for the request and on which it would end
        before the first of those that wait for them could begin."""
        facts = self.facts
        head_bytes = facts.passable.get(self.home)
        if head_bytes is None and self.home in facts.ahead:
            return []
        return [
            e
            for e in self._usable(self.home)
            if e.id not in facts.refused_by
            and self._demand(e).kv_bytes <= e.available
            and self._ends_before(e, head_bytes)
            and self._ends_before(e, facts.claimed.get(e.id))
            and self._is_in_time(e)
        ]

    def _ends_before(self, engine: EngineView, head_bytes: int | None) -> bool:
        """Whether the request would end there before one that waits for so many bytes could begin;
        None: nobody waits."""
        if head_bytes is None:
            return True
        end = end_s(engine, self.facts.prompt_tokens, self._expected_output(engine))
        return end <= earliest_s(engine.available, engine.releases, head_bytes)

    def _is_in_time(self, engine: EngineView) -> bool:
        if not (engine.load or engine.backlog_tokens):
            return True  # as `is_on_time` says of any request
        facts = self.facts
        return is_on_time(engine, facts.prompt_tokens, self._expected_output(engine), facts.limits)

    def _shortage_reason(self) -> str:
        """Return what the home pool is short of: time where no engine is in time, or memory."""
        is_late = not any(self._is_in_time(e) for e in self._usable(self.home))
        return "DEADLINE" if is_late else "KV_HEADROOM"


def home_of(
    facts: RequestFacts, able: Sequence[EngineView], policy: RoutingPolicy
) -> tuple[str, str]:
    """Return (pool, reason): the first pool that can ever hold the request, or the large one for
    large requests."""
    present = {engine.pool for engine in able}
    if policy.large_pool in present and is_large(facts, able[0], policy):
        return policy.large_pool, "LARGE_REQUEST"
    first = next(pool for pool in policy.pools if pool in present)
    return first, "FITS" if first == policy.pools[0] else "CAPACITY"


def is_large(facts: RequestFacts, engine: EngineView, policy: RoutingPolicy) -> bool:
    """Whether the request is for the large pool, priced as on this engine."""
    return (
        facts.prompt_tokens > policy.large_request_tokens
        or _demand(facts, engine).kv_bytes > policy.large_request_kv
    )


def _demand(facts: RequestFacts, engine: EngineView) -> Demand:
    demand = facts.prices.get(engine.kind)
    if demand is None:
        max_tokens = min(facts.max_tokens, max(1, room_of(facts, engine)))
        demand = facts.prices[engine.kind] = _price(facts, engine, max_tokens)
    return demand


def _price(facts: RequestFacts, engine: EngineView, max_tokens: int) -> Demand:
    return predict(
        engine.profile, facts.prompt_tokens, max_tokens, engine.expected_output, facts.samples
    )


def room_of(facts: RequestFacts, engine: EngineView) -> int:
    """Return the output tokens that an empty engine would have room for."""
    room = facts.rooms.get(engine.kind)
    if room is None:
        longest = engine.longest(facts.prompt_tokens, facts.samples, has_session=facts.has_session)
        room = facts.rooms[engine.kind] = longest - facts.prompt_tokens
    return room


def _pick(fits: Sequence[EngineView], facts: RequestFacts, policy: RoutingPolicy) -> EngineView:
    """Pick the preferred engine, unless another one has far less to do."""
    if len(fits) == 1:
        return fits[0]
    idle = [e for e in fits if not e.backlog_tokens and e.health >= WELL]
    drawn = _draw(idle or fits, facts.draw, policy.prefill.mlp_products)
    if not facts.preferred:
        return drawn
    preferred = next((e for e in fits if e.id == facts.preferred), drawn)
    return preferred if preferred.load <= drawn.load + policy.max_extra_load else drawn


def _draw(fits: Sequence[EngineView], draw: int, mlp_products: int) -> EngineView:
    """Power of two choices: a burst that sees the same reports spreads over several engines.

    Of the two the one whose prompts are computed sooner, then the one with more memory.
    """
    if len(fits) == 1:
        return fits[0]
    ordered = sorted(fits, key=lambda e: e.id)
    first = draw % len(ordered)
    second = (first + 1 + draw // len(ordered) % (len(ordered) - 1)) % len(ordered)
    one = ordered[first]
    other = ordered[second]
    return other if _rank(other, mlp_products) > _rank(one, mlp_products) else one


def _rank(engine: EngineView, mlp_products: int) -> tuple[bool, int, float, int]:
    """Orders engines by health, then soonest start, then most memory, then fewest requests."""
    is_well = engine.health >= WELL
    memory = engine.available * engine.health
    return is_well, -engine.prefill_work(mlp_products), memory, -engine.load


def _never_fits(
    facts: RequestFacts, engines: Sequence[EngineView], policy: RoutingPolicy
) -> NextStep:
    longest = facts.prompt_tokens + max(room_of(facts, e) for e in engines)
    if facts.droppable and "shrinkContext" in policy.ladder and longest > facts.min_tokens:
        wanted_output = max(facts.min_tokens, min(facts.max_tokens, engines[0].expected_output))
        target = max(1, longest - wanted_output)
        fewest = _fewest(facts, policy)
        if target >= fewest:
            return ShrinkContext("CONTEXT_TOO_LONG", target, fewest)
    context = max(e.max_model_len for e in engines)
    if facts.prompt_tokens + facts.min_tokens > context:
        size = f"has {facts.prompt_tokens} tokens"
        but = f"but the context is {context} tokens"
        message = (
            f"the prompt {size} and the answer needs {facts.min_tokens}, {but}; shorten the prompt "
            "or lower max_tokens"
            if facts.min_tokens
            else f"the input {size}, {but}; shorten it"
        )
        return Refuse("invalid", "CONTEXT_TOO_LONG", message)
    engine = max(engines, key=lambda e: room_of(facts, e))
    least = facts.min_tokens
    demand = predict(engine.profile, facts.prompt_tokens, least, least, facts.samples)
    capacity = engine.most_bytes(has_session=facts.has_session)
    is_session_short = capacity < engine.capacity
    holder = "one session may hold" if is_session_short else "the largest pool has"
    message = (
        f"the request needs {demand.kv_bytes} bytes of KV "
        f"and {holder} {capacity}; "
        f"shorten the prompt to at most {max(0, longest - facts.min_tokens)} tokens"
        + (" or ask for fewer answers" if facts.samples > 1 else "")
        + (", send no session, or raise memory.sessionKVLimit" if is_session_short else "")
    )
    return Refuse("invalid", "KV_NEVER_FITS", message, demand, capacity)


def _fewest(facts: RequestFacts, policy: RoutingPolicy) -> int:
    """Return the tokens that dropping turns must leave of a prompt."""
    kept = 1 - policy.rungs.shrink_context.max_dropped_share
    return max(1, math.ceil(facts.prompt_tokens * kept))


def _busy(reason: str, demand: Demand, available: int, retry_s: int) -> str:
    why = {
        "QUEUE_FULL": ", and the queue is full",
        "QUEUE_TIMEOUT": " after the longest wait",
        "DEADLINE": ", but the answer could not end in time",
    }.get(reason, "")
    return (
        f"the request needs {demand.kv_bytes} bytes of KV "
        f"and {max(0, available)} are available{why}; retry in {retry_s} s"
    )
