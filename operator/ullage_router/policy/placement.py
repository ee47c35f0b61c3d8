"""Chooses a pool for each request, and an engine that has room for the request.

A request's home is the first pool that can ever hold it, or the large pool if the request is large.
Among the engines with room, the one that has the prompt's prefix cached is preferred. It is passed
over if it is far busier than the better of two engines drawn at random (power of two choices:
Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
"""

from collections.abc import Sequence

from ullage_common.request_cost import Demand, predict
from ullage_router.policy.facts import WELL, EngineView, RequestFacts, RoutingPolicy


def home_of(
    facts: RequestFacts, able: Sequence[EngineView], policy: RoutingPolicy
) -> tuple[str, str]:
    """Return the request's home pool, and the reason for the choice.

    Args:
        able: the engines that can hold the request when they are empty, at least one.
    """
    present = {engine.pool for engine in able}
    if policy.large_pool in present and is_large(facts, able[0], policy):
        return policy.large_pool, "LARGE_REQUEST"
    first = next(pool for pool in policy.pools if pool in present)
    return first, "FITS" if first == policy.pools[0] else "CAPACITY"


def is_large(facts: RequestFacts, engine: EngineView, policy: RoutingPolicy) -> bool:
    """Return whether the request is large by its prompt tokens or its KV bytes on this engine."""
    return (
        facts.prompt_tokens > policy.large_request_tokens
        or demand_on(facts, engine).kv_bytes > policy.large_request_kv
    )


def room_of(facts: RequestFacts, engine: EngineView) -> int:
    """Return the number of output tokens that would fit on the engine if it were empty."""
    room = facts.rooms.get(engine.kind)
    if room is None:
        longest = engine.longest(facts.prompt_tokens, facts.samples, has_session=facts.has_session)
        room = facts.rooms[engine.kind] = longest - facts.prompt_tokens
    return room


def demand_on(facts: RequestFacts, engine: EngineView) -> Demand:
    """Return the request's predicted bytes on this engine.

    The prediction is cached for all engines of the same kind.
    """
    demand = facts.prices.get(engine.kind)
    if demand is None:
        max_tokens = min(facts.max_tokens, max(1, room_of(facts, engine)))
        demand = facts.prices[engine.kind] = price_on(facts, engine, max_tokens)
    return demand


def price_on(facts: RequestFacts, engine: EngineView, max_tokens: int) -> Demand:
    """Return the request's predicted bytes on this engine with the given output limit."""
    return predict(
        engine.profile, facts.prompt_tokens, max_tokens, engine.expected_output, facts.samples
    )


def pick(fits: Sequence[EngineView], facts: RequestFacts, policy: RoutingPolicy) -> EngineView:
    """Pick the engine with the cached prefix, unless a random engine has far fewer requests.

    Args:
        fits: engines that have room for the request, at least one.
    """
    if len(fits) == 1:
        return fits[0]

    idle = [e for e in fits if not e.backlog_tokens and e.health >= WELL]
    drawn = _better_of_two(idle or fits, facts.draw, policy.prefill.mlp_products)
    if not facts.preferred:
        return drawn

    preferred = next((e for e in fits if e.id == facts.preferred), drawn)
    return preferred if preferred.load <= drawn.load + policy.max_extra_load else drawn


def _better_of_two(fits: Sequence[EngineView], draw: int, mlp_products: int) -> EngineView:
    """Draw two engines and return the better one.

    Choosing between two random engines spreads a burst of requests over the pool, although all
    decisions in the burst use the same reports.
    """
    if len(fits) == 1:
        return fits[0]

    # Views arrive in no order, but a draw must name the same engine for the same input.
    ordered = sorted(fits, key=lambda e: e.id)
    first = draw % len(ordered)
    second = (first + 1 + draw // len(ordered) % (len(ordered) - 1)) % len(ordered)
    one = ordered[first]
    other = ordered[second]
    return other if _rank(other, mlp_products) > _rank(one, mlp_products) else one


def _rank(engine: EngineView, mlp_products: int) -> tuple[bool, int, float, int]:
    """Return a sort key that prefers healthy engines with little prefill work and much memory."""
    is_well = engine.health >= WELL
    memory = engine.available * engine.health
    return is_well, -engine.prefill_work(mlp_products), memory, -engine.load
