"""Many decisions over one look at the engines: pure, and quick where a request simply fits.

A request that fits the first pool as it is gets what `decide` would say, without its ladder; for
every other one `decide` is asked. What a batch has placed already counts for the rest of it. Like
requests are placed several at once, each of which the same decisions, one by one, could have
placed there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ullage_router.config import LARGE_POOL
from ullage_router.decide import Refuse, Run, ShrinkContext, decide, min_output
from ullage_router.predict import Demand, Profile, predict
from ullage_router.views import EngineView, Facts, Policy, Standing

WAIT_RETRY_S = 1
MAX_SHARES = 16
"""Decisions that like requests are spread by, where all fit."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as its client priced it."""

    prompt_tokens: int
    max_tokens: int
    """Most output tokens of each answer; 0: the service's limit."""
    samples: int = 1
    preferred: str = ""
    """Address of the engine that has its beginning in its caches."""
    refused_by: frozenset[str] = frozenset()
    limit: int = 0
    """Most output tokens that its tenant may have; 0: no other than the service's."""


@dataclass(slots=True)
class _Seat:
    """One engine, with what the batch put on it."""

    view: EngineView
    longest: int
    """Tokens of the longest sequence it can ever hold."""
    available: int
    load: int
    backlog_tokens: int
    kind: int
    """Seats of one kind price alike."""

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
        patience_s: time that each whole answer has.
    """

    def __init__(
        self,
        views: Sequence[EngineView],
        policy: Policy,
        ahead: Mapping[str, int],
        max_output_tokens: int,
        patience_s: float,
    ) -> None:
        self._policy = policy
        self._ahead = ahead
        self._max_output_tokens = max_output_tokens
        self._patience_s = patience_s
        kinds: dict[tuple[Profile, int], int] = {}
        self._seats = {view.id: _seat(view, kinds) for view in views}
        self._prices: dict[tuple[int, int, int], Demand] = {}
        """By kind of seat, prompt and most output tokens: both of a pair are mostly one kind."""
        self._has_large = any(view.pool == LARGE_POOL for view in views)
        self._home = self._find_home()

    def share(self, count: int) -> int:
        """How many of so many like requests are placed at once, that they spread over engines."""
        usable = sum(s.view.standing is Standing.USABLE for s in self._seats.values())
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
        seat = self._seats[run.engine]
        count = self._fitting(seat, ask.prompt_tokens, run.demand.total, most)
        seat.available -= count * run.demand.total
        seat.load += count
        seat.backlog_tokens += count * ask.prompt_tokens
        return run, count

    def _fitting(self, seat: _Seat, prompt: int, size: int, most: int) -> int:
        """How many of such requests, the first of which fits, fit one after another."""
        count = min(most, seat.available // size) if size else most
        if not seat.view.prefill_speed:
            return count
        while count > 1:
            before = replace(seat.now(), backlog_tokens=seat.backlog_tokens + (count - 1) * prompt)
            if before.is_in_time(prompt, self._patience_s):
                break
            count //= 2
        return count

    def _find_home(self) -> list[_Seat]:
        """Engines that a request which simply fits may take, by name."""
        first = self._policy.pools[0]
        if first in self._ahead:
            return []
        usable = (
            seat
            for seat in self._seats.values()
            if seat.view.pool == first and seat.view.standing is Standing.USABLE
        )
        return sorted(usable, key=lambda seat: seat.view.id)

    def _quick(self, ask: Ask, most: int, draw: int) -> Run | None:
        home = self._home
        if not home or ask.refused_by or ask.samples != 1:
            return None
        fits = [(s, d) for s in _pair(home, draw) if (d := self._demand(s, ask, most))]
        if not fits:
            return None
        drawn, demand = fits[0] if len(fits) == 1 else max(fits, key=_merit)
        if ask.preferred and (seat := self._seats.get(ask.preferred)) in home:
            is_idle = seat.load <= drawn.load + self._policy.max_extra_load
            if is_idle and (there := self._demand(seat, ask, most)):
                drawn, demand = seat, there
        view = drawn.view
        return Run("accept", "FITS", view.pool, view.id, most, demand, "accept")

    def _demand(self, seat: _Seat, ask: Ask, most: int) -> Demand | None:
        """Its bytes there; None where it does not simply fit."""
        view, prompt = seat.view, ask.prompt_tokens
        if prompt + most > seat.longest:
            return None
        key = (seat.kind, prompt, most)
        demand = self._prices.get(key)
        if demand is None:
            demand = predict(view.profile, prompt, most, view.expected_output)
            self._prices[key] = demand
        size = demand.total
        if self._has_large and (
            prompt > self._policy.large_request_tokens or size > self._policy.large_request_kv
        ):
            return None
        if size > seat.available:
            return None
        has_backlog = seat.backlog_tokens and view.prefill_speed
        is_late = has_backlog and not seat.now().is_in_time(prompt, self._patience_s)
        return None if is_late else demand

    def _slow(self, ask: Ask, most: int, draw: int) -> Run | Refuse:
        asked = most if ask.max_tokens else None
        facts = Facts(
            prompt_tokens=ask.prompt_tokens,
            max_tokens=most,
            min_tokens=min_output(asked, most, self._policy.rungs.shrink_output),
            samples=ask.samples,
            ahead=self._ahead,
            refused_by=ask.refused_by,
            patience_s=self._patience_s,
            preferred=ask.preferred,
            draw=draw,
        )
        decision = decide(facts, [seat.now() for seat in self._seats.values()], self._policy)
        match decision:
            case Run(action="shrink"):
                return _left_to_generate(decision.reason, "a shorter answer")
            case Run() | Refuse():
                return decision
            case ShrinkContext():
                return _left_to_generate(decision.reason, "a shorter prompt")
            case _:
                return _left_to_generate(decision.reason, "waiting for memory")


def _seat(view: EngineView, kinds: dict[tuple[Profile, int], int]) -> _Seat:
    kind = kinds.setdefault((view.profile, view.expected_output), len(kinds))
    return _Seat(view, view.longest(0, 1), view.available, view.load, view.backlog_tokens, kind)


def _pair(home: list[_Seat], draw: int) -> tuple[_Seat, ...]:
    """Two engines, drawn."""
    if len(home) == 1:
        return (home[0],)
    first = draw % len(home)
    second = (first + 1 + draw // len(home) % (len(home) - 1)) % len(home)
    return home[first], home[second]


def _merit(fit: tuple[_Seat, Demand]) -> tuple[float, int]:
    """Of equals the first drawn is taken, so that each is as often."""
    seat, _ = fit
    return (seat.available * seat.view.health, -seat.load)


def _left_to_generate(reason: str, what: str) -> Refuse:
    return Refuse(
        "busy",
        reason,
        f"the request needs {what}; send it to the router with Generate, which does that",
        retry_after_s=WAIT_RETRY_S,
    )
