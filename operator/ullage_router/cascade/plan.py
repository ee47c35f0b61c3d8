"""Which steps are tried and whether they are judged: a pure function, and the judgement itself."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ullage_router.cascade.config import CascadeSection, FallbackSection, HeuristicsSection
from ullage_router.cascade.traits import Traits

HELD_SHARE = 0.5
"""Share of the time left that one step may hold a request; the next needs time as well."""

Reason = Literal["FIRST", "HARD", "SEVERAL_ANSWERS", "OWN_TOKENS", "PEAK"]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy this service's own engines are."""

    pressure_level: int = 0
    """The mildest of any engine that is ready; 0 when none is."""
    queued: int = 0
    """Requests that wait in this router."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The way of one request."""

    steps: tuple[int, ...]
    """Tried in this order."""
    is_judged: bool
    """All but the last hold their first tokens back until their confidence is known."""
    is_parallel: bool
    reason: Reason


def plan(traits: Traits, load: Load, policy: CascadeSection) -> Plan:
    """Chooses the first step; the later ones are there to hand over to."""
    last = len(policy.steps) - 1
    if traits.is_bound:
        return Plan((policy.own,), False, False, "OWN_TOKENS")
    if policy.fallback and is_peak(traits.priority, load, policy.fallback):
        return Plan(tuple(range(last + 1)), False, False, "PEAK")
    if traits.has_several_answers:
        return Plan((last,), False, False, "SEVERAL_ANSWERS")
    points = difficulty(traits, policy.heuristics)
    steps = tuple(range(min(points, last), last + 1))
    return Plan(steps, len(steps) > 1, policy.parallel, "HARD" if points else "FIRST")


def difficulty(traits: Traits, policy: HeuristicsSection) -> int:
    """How many signs of a hard prompt it shows; each starts it a step higher."""
    signs = (
        0 < policy.prompt_characters < traits.characters,
        0 < policy.turns < traits.turns,
        policy.code and traits.has_code,
        policy.maths and traits.has_maths,
        policy.tools and traits.has_tools,
    )
    return sum(signs)


def is_peak(priority: int, load: Load, policy: FallbackSection) -> bool:
    """Whether a request of this priority makes room for others now."""
    if priority > policy.max_priority:
        return False
    return (
        0 < policy.pressure_level <= load.pressure_level
        or 0 < policy.queued_requests <= load.queued
    )


class Confidence:
    """The geometric mean probability of an answer's first tokens, as they come.

    Args:
        wanted: tokens that are judged; an answer that ends before has fewer.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._tokens = 0
        self._logprobs: list[float] = []

    def add(self, tokens: int, logprobs: Iterable[float]) -> None:
        """Takes what came next.

        Args:
            tokens: how many, with or without their log-probabilities.
            logprobs: natural, one a token.
        """
        self._tokens += tokens
        room = self._wanted - len(self._logprobs)
        self._logprobs.extend(value for value, _ in zip(logprobs, range(room), strict=False))

    @property
    def tokens(self) -> int:
        """How many came."""
        return self._tokens

    @property
    def is_complete(self) -> bool:
        return self._tokens >= self._wanted

    @property
    def value(self) -> float | None:
        """exp(mean log-probability), 0 to 1; None when no token told its own, or told no number."""
        mean = sum(self._logprobs) / len(self._logprobs) if self._logprobs else math.nan
        if math.isnan(mean):
            return None
        return math.exp(0.0 if mean > 0 else mean)

    def reaches(self, threshold: float) -> bool:
        """False when nothing is known."""
        return self.value is not None and self.value >= threshold
