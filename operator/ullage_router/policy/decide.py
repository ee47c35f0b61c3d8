"""Decides where a request runs, what must change before it can, or why it is refused.

    decide(facts, engines, policy) -> Run | ShrinkContext | Wait | Refuse

`decide` is a pure function: the same request, engines and policy always give the same answer. It
answers four questions in this order.

 1. Can the request ever run? A request that fits no engine, not even an empty one, is invalid. A
    service without a ready engine is unavailable.
 2. Which pool is its home? The first pool that can ever hold the request, or the pool for large
    requests (`placement.py`).
 3. Does it fit at home now? Then it runs on the engine that has its prefix cached, or on the better
    of two engines drawn at random.
 4. Otherwise, what makes it fit? The policy lists the fallbacks, called the rungs of a ladder, in
    the order in which they are tried: shrink the context, shrink the output, wait, go to another
    pool, refuse the request.

A request that arrives while others wait may not overtake them. It can only wait, go to another pool
or be refused. The exception is backfill: a request may start before the first request in the queue
if it ends before the memory for that first request is predicted to be free.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec.structs import replace

from ullage_common.config.router import Rung, ShrinkOutputSection
from ullage_common.request_cost import Demand, most_tokens, predict
from ullage_router.policy.context_length import too_long
from ullage_router.policy.facts import (
    EngineState,
    EngineView,
    QueueState,
    RequestFacts,
    RoutingPolicy,
)
from ullage_router.policy.forecast import (
    end_s,
    is_on_time,
    longest_wait_s,
    place_s,
    step_limit_s,
    turn_s,
)
from ullage_router.policy.next_step import (
    Action,
    NextStep,
    Refuse,
    Run,
    ShrinkContext,
    Step,
    Wait,
)
from ullage_router.policy.placement import demand_on, home_of, pick, price_on, room_of
from ullage_router.policy.retry import (
    drain_s,
    earliest_s,
    free_s,
    retry_after,
    unknown_retry_after,
)

_REASONS_AFTER_WAITING = {
    QueueState.FULL: "QUEUE_FULL",
    QueueState.SPENT: "QUEUE_TIMEOUT",
    QueueState.LATE: "DEADLINE",
}
LEAST_REVIEW_S = 0.5
"""Minimum seconds after which a request that waits for an engine's recovery is decided again."""


def decide(facts: RequestFacts, engines: Sequence[EngineView], policy: RoutingPolicy) -> NextStep:
    """Decide what to do with a request: run it, shrink its context, let it wait, or refuse it.

    The caller carries out the result, and calls `decide` again after ShrinkContext and Wait.

    Args:
        engines: every engine that has described its model, in any state.
    """
    if not engines:
        return Refuse(
            "unavailable",
            "NO_ENGINE",
            "no engine is known yet; retry when one has started",
            retry_after_s=unknown_retry_after(facts.draw),
        )
    able = _able(facts, engines)
    if not able:
        return _never_fits(facts, engines, policy)
    return _ladder(facts, able, policy).first_that_fits()


def decide_among(
    facts: RequestFacts, sample: Sequence[EngineView], policy: RoutingPolicy
) -> Run | None:
    """Decide to run a request on one of the sampled engines, or return None.

    This is a fast path for the common case in which the request fits in its home pool unchanged.

    Args:
        sample: usable engines of the first pool, and of the large pool if there is one. A pool
            without a usable engine is represented by any one of its engines.

    Returns:
        A decision to run the request, or None if the sample does not suffice for a decision. The
        caller must then call `decide` with all engines.
    """
    able = [e for e in sample if room_of(facts, e) >= facts.min_tokens]
    if not able:
        return None
    home, reason = home_of(facts, able, policy)
    if reason == "CAPACITY":
        return None  # an engine of the first pool outside the sample may be able
    return _LadderRun(facts, able, policy, home, reason).on_one_of_two()


def passes(facts: RequestFacts, engines: Sequence[EngineView], policy: RoutingPolicy) -> bool:
    """Return whether a queued request may overtake the requests ahead of it and run now.

    This check is much cheaper than `decide`, which also finds an alternative for a request that may
    not run.
    """
    able = _able(facts, engines)
    return bool(able) and _ladder(facts, able, policy).runs_before_waiting()


def min_output(asked: int | None, max_tokens: int, rung: ShrinkOutputSection) -> int:
    """Return the lowest output limit, in tokens, to which an answer may be shortened.

    Args:
        asked: output tokens that the client requested, or None if the client set no limit.
        max_tokens: maximum number of output tokens of the request.
    """
    return min(max_tokens, max(rung.min_tokens, int((asked or 0) * rung.min_share)))


def _able(facts: RequestFacts, engines: Sequence[EngineView]) -> list[EngineView]:
    """Return the engines that can hold the request when they are empty."""
    return [e for e in engines if room_of(facts, e) >= facts.min_tokens]


def _ladder(facts: RequestFacts, able: Sequence[EngineView], policy: RoutingPolicy) -> "_LadderRun":
    home, reason = home_of(facts, able, policy)
    return _LadderRun(facts, able, policy, home, reason)


@dataclass(slots=True)
class _LadderRun:
    """One attempt to place a request, trying the policy's fallbacks in order.

    Only engines that could hold the request if they were empty are considered.
    """

    facts: RequestFacts
    engines: Sequence[EngineView]
    policy: RoutingPolicy
    home: str
    home_reason: str

    def first_that_fits(self) -> NextStep:
        """Decide to run the request at home if possible, or else use the first working fallback."""
        if not any(e.standing is not EngineState.UNUSABLE for e in self.engines):
            return self._unavailable()
        if run := self.at_home():
            return run

        # Memory may be released in a moment, but a lost engine may not return, so try other pools
        # first.
        is_home_down = not self._usable(self.home)
        if is_home_down and "route" in self.policy.ladder and (run := self._overflow()):
            return run

        for rung in self.policy.ladder:
            if step := self._try(rung):
                return step
        return self._reject()

    def at_home(self) -> Run | None:
        """Decide to run the request unchanged at home, or return None if it cannot run now."""
        return self._full(self.home, self.home_reason)

    def on_one_of_two(self) -> Run | None:
        """Decide like `at_home`, but consider only the preferred engine and the first two that fit.

        The engines are in random order, so taking the first two that fit is a random draw.
        """
        facts = self.facts
        pool = self.home
        if pool in facts.ahead:
            return self.at_home()

        fits = list[EngineView]()
        for engine in self.engines:
            is_wanted = len(fits) < 2 or engine.id == facts.preferred
            if is_wanted and engine.pool == pool and self._fits_now(engine):
                fits.append(engine)
        return self._on_one_of(fits, self.home_reason) if fits else None

    def runs_before_waiting(self) -> bool:
        """Return whether the request can run now, at home or in another pool, instead of waiting.

        Another pool counts only if the policy's fallbacks include `route`. As long as the home pool
        has a usable engine, `route` must also come before `queue`.
        """
        if self.at_home():
            return True
        ladder = self.policy.ladder
        before = ladder[: ladder.index("queue")] if "queue" in ladder else ladder
        may_leave = "route" in (before if self._usable(self.home) else ladder)
        return may_leave and self._overflow() is not None

    # The rungs

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

    def _shrink_context(self) -> ShrinkContext | None:
        """Decide to shorten the prompt to fit the home engine with the most free memory.

        Return None if no turn may be dropped, no home engine may take the request now, or too
        little of the prompt would be left.
        """
        free = self._free(self.home)
        if not (self.facts.droppable and free):
            return None
        engine = max(free, key=lambda e: e.available)
        output = min(self.facts.max_tokens, max(1, engine.expected_output))
        target = self._most_tokens(engine) - output
        fewest = _fewest(self.facts, self.policy)
        return ShrinkContext("KV_HEADROOM", target, fewest) if target >= fewest else None

    def _shrunk(self, pool: str) -> Run | None:
        """Decide to shorten the output to fit on the pool's engine with the most free memory.

        Return None if no engine of the pool may take the request now, or if the output would be too
        short.
        """
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
        """Return the minimum number of output tokens that must remain if the output is shrunk."""
        least = self.facts.min_tokens
        if self.policy.rungs.shrink_output.below_expected:
            return least
        most = min(self.facts.max_tokens, room_of(self.facts, engine))
        return max(least, min(engine.expected_output, most))

    def _wait(self) -> Wait | None:
        """Decide to wait for memory in the home pool, or for an engine of it to recover.

        Return None if the request may not queue or would be late, or if all of the pool's engines
        are unusable.
        """
        if self.facts.queue is not QueueState.OPEN:
            return None
        recoverable = [e for e in self._pool(self.home) if e.standing is not EngineState.UNUSABLE]
        if not recoverable:
            return None
        usable = self._usable(self.home)
        if usable and self._turn_s(usable) == math.inf:
            return None  # it would be late after the wait

        facts = self.facts
        reason = self._shortage_reason() if usable else "NOT_READY"
        longest_s = max(
            longest_wait_s(e, facts.prompt_tokens, self._expected_output(e), facts.limits)
            for e in recoverable
        )
        review_s = math.inf
        if self._at_limit():
            reason = "BREAKER_LIMIT"
            if facts.patience_s < math.inf:
                turn_s = self._place_s()
                if turn_s > min(longest_s, facts.patience_s):
                    return None  # the client should return when the engine may have recovered
                review_s = max(turn_s, LEAST_REVIEW_S)
        available = max((e.available for e in usable), default=0)
        return Wait(reason, self.home, self._least(recoverable), longest_s, available, review_s)

    def _overflow(self) -> Run | None:
        """Decide to run in another pool, or return None if none has enough memory now.

        The output may be shrunk there only if the policy lists shrinkOutput before route.
        """
        ladder = self.policy.ladder
        may_shrink = "shrinkOutput" in ladder[: ladder.index("route")]
        for pool in self._others():
            if run := self._full(pool, "SPILL") or (self._shrunk(pool) if may_shrink else None):
                return run
        return None

    def _others(self) -> list[str]:
        """Return the other pools in which the request may run, in order of preference."""
        return [
            pool
            for pool in self.policy.rungs.route.pools or self.policy.pools
            if pool != self.home and self._pool(pool)
        ]

    def _reject(self) -> Refuse:
        engines = self._usable(self.home)
        if not engines:
            return self._limited() if self._at_limit() else self._unavailable()
        demand = self._least(engines)
        available = max(e.available for e in engines)
        retry = self._retry_after(engines, demand.kv_bytes)
        queue = self.facts.queue if "queue" in self.policy.ladder else QueueState.OPEN
        reason = _REASONS_AFTER_WAITING.get(queue, self._shortage_reason())
        message = _busy(reason, demand, available, retry)
        return Refuse("busy", reason, message, demand, available, retry, self.home)

    def _limited(self) -> Refuse:
        """Refuse the request, because no engine at home may get more requests until it recovers."""
        engines = self._at_limit()
        demand = self._least(engines)
        available = max(e.available for e in engines)
        turn_s = self._place_s()
        seconds = None if turn_s == math.inf else turn_s
        returns = self.facts.deferrals.returns(self.home)
        retry = retry_after(seconds, returns, self.facts.draw, self.policy.rungs.reject)
        message = (
            f"requests failed on the engines of pool {self.home}, which get few at once until "
            f"answers succeed; retry in {retry} s"
        )
        return Refuse("busy", "BREAKER_LIMIT", message, demand, available, retry, self.home)

    def _unavailable(self) -> Refuse:
        return Refuse(
            "unavailable",
            "NO_ENGINE",
            f"no engine of pool {self.home} is ready; retry when one is",
            retry_after_s=unknown_retry_after(self.facts.draw),
            pool=self.home,
        )

    # Running on an engine

    def _full(self, pool: str, reason: str) -> Run | None:
        """Decide to run the request in the pool without shortening its output.

        Return None if no engine has room. In the home pool, the request may also start ahead of
        waiting requests by backfill.
        """
        fits = [e for e in self._free(pool) if self._demand(e).kv_bytes <= e.available]
        if not fits and pool == self.home:
            fits = self._open_to_backfill()
        return self._on_one_of(fits, reason) if fits else None

    def _on_one_of(self, fits: Sequence[EngineView], reason: str) -> Run:
        engine = pick(fits, self.facts, self.policy)
        max_tokens = min(self.facts.max_tokens, room_of(self.facts, engine))
        return self._run(engine, max_tokens, reason, self._choices(engine, max_tokens))

    def _choices(self, engine: EngineView, max_tokens: int) -> Mapping[str, int]:
        """Return the engines to which the request may still be moved, with the KV bytes for each.

        After this decision, the prefill window may move the request to one of these engines to
        balance their work. The result is empty if the prompt will be computed soon or is cached,
        because moving it would gain nothing. It is also empty if other requests are waiting for the
        chosen engine.
        """
        is_soon = not 0 < self.policy.prefill.window <= engine.backlog_s
        if is_soon or engine.id == self.facts.preferred or engine.id in self.facts.claimed:
            return {}
        return {
            e.id: self._demand(e).kv_bytes
            for e in self._free(engine.pool)
            if room_of(self.facts, e) >= max_tokens
        }

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
            demand = price_on(self.facts, engine, max_tokens)
        prompt = self.facts.prompt_tokens
        limit_s = step_limit_s(engine, prompt, max(1, demand.tokens - prompt), self.facts.limits)
        return Run(
            action,
            reason,
            engine.pool,
            engine.id,
            max_tokens,
            demand,
            step,
            limit_s,
            choices,
            is_shrunk=is_short,
        )

    # The engines of a pool

    def _pool(self, pool: str) -> list[EngineView]:
        return [e for e in self.engines if e.pool == pool]

    def _usable(self, pool: str) -> list[EngineView]:
        usable = EngineState.USABLE
        return [e for e in self.engines if e.pool == pool and e.standing is usable]

    def _free(self, pool: str) -> list[EngineView]:
        """Return the pool's engines that may take the request now if they have enough memory.

        No earlier request waits for these engines, and the request would be on time on each of
        them.
        """
        if pool in self.facts.ahead:
            return []
        taken = self.facts.refused_by.union(self.facts.claimed)
        return [e for e in self._usable(pool) if e.id not in taken and self._is_in_time(e)]

    def _fits_now(self, engine: EngineView) -> bool:
        return (
            self._demand(engine).kv_bytes <= engine.available
            and engine.standing is EngineState.USABLE
            and engine.id not in self.facts.refused_by
            and engine.id not in self.facts.claimed
            and self._is_in_time(engine)
        )

    def _open_to_backfill(self) -> list[EngineView]:
        """Return the home engines on which the request may start ahead of earlier requests.

        The request must fit there now and must not delay any other request. It must therefore end
        before the first request in the pool's queue, or the first request waiting for this engine,
        could start.
        """
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

    def _at_limit(self) -> list[EngineView]:
        """Return the home engines if each of them has reached its circuit breaker's limit.

        Unusable engines do not count. The result is empty if any other engine is left, which may
        soon take the request.
        """
        engines = [e for e in self._pool(self.home) if e.standing is not EngineState.UNUSABLE]
        return engines if all(e.breaker for e in engines) else []

    # Predictions

    def _place_s(self) -> float:
        """Return the seconds until a home engine at its circuit breaker's limit has a place.

        Returns:
            Infinity if nothing can be predicted.
        """
        engines = self._at_limit()
        is_next = self.home not in self.facts.ahead
        waiting = 0 if is_next else self.facts.waiting.get(self.home, 0)
        ahead = -(-waiting // len(engines))
        return min(place_s(engine, ahead) for engine in engines)

    def _ends_before(self, engine: EngineView, head_bytes: int | None) -> bool:
        """Return whether the request would end before the first queued request could start.

        Args:
            head_bytes: bytes that the first queued request is waiting for, or None if no
                request is queued.
        """
        if head_bytes is None:
            return True
        end = end_s(engine, self.facts.prompt_tokens, self._expected_output(engine))
        return end <= earliest_s(engine.available, engine.releases, head_bytes)

    def _is_in_time(self, engine: EngineView) -> bool:
        if not (engine.load or engine.backlog_tokens):
            return True  # the answer of `is_on_time` for an idle engine, without the call
        facts = self.facts
        return is_on_time(engine, facts.prompt_tokens, self._expected_output(engine), facts.limits)

    def _shortage_reason(self) -> str:
        """Return the reason code for why the request cannot run at home now.

        This is DEADLINE if no usable engine there is fast enough now, or else KV_HEADROOM.
        """
        is_late = not any(self._is_in_time(e) for e in self._usable(self.home))
        return "DEADLINE" if is_late else "KV_HEADROOM"

    def _turn_s(
        self, engines: Sequence[EngineView], *, comes_back: bool = False, is_first: bool = False
    ) -> float | None:
        """Return the seconds until the request could run at home within its time limits.

        Args:
            comes_back: whether the client is refused now and retries at that time, so that its time
                limits start anew, instead of waiting in the queue.
            is_first: whether to ignore the requests that are queued ahead of this one.

        Returns:
            Infinity if every predicted release of memory is too late. None if no release is
            predicted.
        """
        facts = self.facts
        limits = replace(facts.limits, waited_s=0.0) if comes_back else facts.limits
        demand = self._least(engines)
        output = max(1, demand.tokens - facts.prompt_tokens)
        ahead = facts.ahead.get(self.home, 0), facts.waiting.get(self.home, 0)
        if is_first:
            ahead = 0, 0
        return turn_s(
            engines,
            facts.prompt_tokens,
            output,
            demand.kv_bytes,
            ahead,
            limits,
            comes_back=comes_back,
        )

    def _retry_after(self, engines: Sequence[EngineView], needed: int) -> int:
        """Return the Retry-After of a refused request, in whole seconds.

        After this time, memory is predicted to be free, the time limits can be met, and clients
        that were refused earlier have had their turn.
        """
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

    # Prices

    def _demand(self, engine: EngineView) -> Demand:
        return demand_on(self.facts, engine)

    def _expected_output(self, engine: EngineView) -> int:
        return max(1, self._demand(engine).tokens - self.facts.prompt_tokens)

    def _least(self, engines: Sequence[EngineView]) -> Demand:
        return min((self._demand(e) for e in engines), key=lambda d: d.kv_bytes)

    def _most_tokens(self, engine: EngineView) -> int:
        """Return the length, in tokens, of the longest sequence that fits on the engine now."""
        facts = self.facts
        available = min(engine.available, engine.most_bytes(has_session=facts.has_session))
        return most_tokens(engine.profile, available, facts.prompt_tokens, facts.samples)


def _never_fits(
    facts: RequestFacts, engines: Sequence[EngineView], policy: RoutingPolicy
) -> NextStep:
    """Decide what to do with a request that is too large for every engine.

    Shrink the prompt if the policy allows it and enough of the prompt would be left. Otherwise
    refuse the request as invalid.
    """
    longest = facts.prompt_tokens + max(room_of(facts, e) for e in engines)
    if facts.droppable and "shrinkContext" in policy.ladder and longest > facts.min_tokens:
        wanted_output = max(facts.min_tokens, min(facts.max_tokens, engines[0].expected_output))
        target = max(1, longest - wanted_output)
        fewest = _fewest(facts, policy)
        if target >= fewest:
            return ShrinkContext("CONTEXT_TOO_LONG", target, fewest)

    context = max(e.max_model_len for e in engines)
    if facts.prompt_tokens + facts.min_tokens > context:
        return Refuse("invalid", "CONTEXT_TOO_LONG", _too_long(facts, context))

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


def _too_long(facts: RequestFacts, context: int) -> str:
    size = f"it has {facts.prompt_tokens} tokens"
    if not facts.min_tokens:  # an input to embed has no answer
        return too_long("the input", size, context, "shorten it")
    size = f"{size} and the answer needs {facts.min_tokens}"
    return too_long("the prompt", size, context, "shorten the prompt or lower max_tokens")


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


def _fewest(facts: RequestFacts, policy: RoutingPolicy) -> int:
    """Return the minimum number of prompt tokens that must remain when turns are dropped."""
    kept = 1 - policy.rungs.shrink_context.max_dropped_share
    return max(1, math.ceil(facts.prompt_tokens * kept))
