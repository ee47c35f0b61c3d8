"""Places a batch of requests from one `Pick` RPC, based on one snapshot of the engines.

Batches follow the same rules as other requests. If a request fits unmodified in the pool where it
normally runs, only a few sampled engines are considered for it. Otherwise, all engines are
considered. Later decisions in the batch account for the requests that have already been placed.
Identical requests may be placed together, but only if placing them one by one could have had the
same result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ullage_common.request_cost import Demand
from ullage_router.engines.roster import DrawGroup
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

WAIT_RETRY_S = 1
MAX_SHARES = 16
"""Maximum number of decisions among which identical requests are divided."""
HELD = Refuse(
    "busy",
    "TICKETS_HELD",
    "tickets that are not used yet hold as much of the engines as they may; report those that were "
    "accepted or ended, or send the request to the router with Generate",
    retry_after_s=WAIT_RETRY_S,
)
Room = Callable[[EngineView, int, int], int]
"""A function that returns how many more identical requests a caller may place on an engine.

Its arguments are the engine's view, the bytes per request and the prompt tokens per request.
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be placed on an engine, described by its size instead of its prompt.

    The client has already counted the prompt's tokens.
    """

    prompt_tokens: int
    max_tokens: int
    """Maximum number of output tokens per answer, or 0 for the service's limit."""
    samples: int = 1
    preferred: str = ""
    """Key of the engine that probably has the request's prefix cached (empty if unknown)."""
    refused_by: frozenset[str] = frozenset()
    """Keys of engines on which the request must not be placed."""
    limit: int = 0
    """The tenant's maximum number of output tokens, or 0 for the service's limit."""
    comes_at_end: bool = False
    """Whether the answer arrives all at once, as with best-of sampling."""


class PickBatch:
    """Places a batch of requests one by one, using the resources that earlier ones left free.

    Args:
        views: Current views of the engines.
        policy: The routing policy, with the admission ladder.
        ahead: Bytes of memory that the router's queued requests are waiting for, by pool.
        max_output_tokens: The service's limit on output tokens.
        limits: Time limits for each request. An answer that arrives all at once has its first token
            at the end, so the limit for the whole answer also applies to the first token.
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
        """Return how many of `count` identical requests one decision may place on an engine.

        The caller places the requests in groups of at most this size, so that they are spread
        across the engines.
        """
        home = self._groups[self._policy.pools[0]].usable
        usable = sum(view.standing is EngineState.USABLE for view in self._views.values())
        return -(-count // min(len(home) or usable or 1, MAX_SHARES))

    def place(
        self, ask: Ask, draw: int, most: int = 1, room: Room | None = None
    ) -> tuple[Run | Refuse, int]:
        """Place up to `most` identical requests on one engine.

        Args:
            ask: The request to place, which stands for all of the identical requests.
            draw: A random number that determines the sample of engines.
            most: Maximum number of requests to place, at least 1.
            room: Returns how many more requests the caller may place on an engine. If None, only
                free resources limit them.

        Returns:
            The decision, and the number of requests to which it applies.
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
        """Return the few engines among which `decide_among` chooses for this request.

        These are usable engines of the first pool and of the large pool: some drawn at random, and
        the preferred one, which probably has the request's prefix cached. If no engine of the large
        pool is usable, one of them is included anyway to show that the pool exists.
        """
        sample = []
        for pool, group in self._groups.items():
            drawn = group.draw(facts.draw)
            preferred = self._views.get(facts.preferred)
            if preferred and preferred.pool == pool and preferred.id not in drawn:
                drawn += [preferred.id] if preferred.standing is EngineState.USABLE else []
            views = [self._views[name] for name in drawn]
            # The rules must see that there is a large pool, even if none of its engines is usable.
            if not views and pool == self._policy.large_pool:
                views = [next(view for view in self._views.values() if view.pool == pool)]
            sample += views
        return sample

    def _fitting(self, view: EngineView, facts: RequestFacts, demand: Demand, most: int) -> int:
        """Return how many identical requests fit on an engine, given that at least one fits.

        Dividing the free memory by the request's size gives a first estimate. Since latency does
        not grow linearly, the estimate is then halved until the last request would also meet its
        time limits.
        """
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


def _left_to_generate(reason: str, need: str) -> Refuse:
    return Refuse(
        "busy",
        reason,
        f"the request needs {need}; send it to the router with Generate, which does that",
        retry_after_s=WAIT_RETRY_S,
    )
