"""The section `cascade` of the router's configuration."""

from typing import Annotated

import msgspec

from ullage_rpc.config import Strict

MAX_STEPS = 4

Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]


class StepSection(Strict, frozen=True, kw_only=True):
    name: Text
    """In headers, metrics and logs."""
    target: str = ""
    """`host:port` of another service's router, gRPC; empty: this service's own engines."""


class ConfidenceSection(Strict, frozen=True, kw_only=True):
    tokens: Annotated[int, msgspec.Meta(ge=1, le=128)] = 16
    """How many are held back and judged."""
    threshold: Probability = 0.6
    """Least geometric mean of their probabilities."""


class HeuristicsSection(Strict, frozen=True, kw_only=True):
    """What makes a prompt start a step higher, each by one; 0 and false turn one off."""

    prompt_characters: Count = 6000
    turns: Count = 10
    code: bool = True
    maths: bool = True
    tools: bool = True


class FallbackSection(Strict, frozen=True, kw_only=True):
    """When requests of low priority take the first step's answer, whatever its confidence."""

    pressure_level: Count = 1
    """Of every own engine that is ready; 0 turns this sign off."""
    queued_requests: Count = 8
    """Waiting in this router; 0 turns this sign off."""
    max_priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = -1
    """Requests up to this priority are low."""


class CascadeSection(Strict, frozen=True, kw_only=True):
    name: Text
    """Of this service, unlike any other's: a request that comes back is known by it."""
    steps: Annotated[tuple[StepSection, ...], msgspec.Meta(min_length=2, max_length=MAX_STEPS)]
    """Cheapest first."""
    confidence: ConfidenceSection = ConfidenceSection()
    heuristics: HeuristicsSection = HeuristicsSection()
    parallel: bool = False
    """The next step begins together with the one that is judged."""
    fallback: FallbackSection | None = None

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if len(set(names)) != len(names):
            raise ValueError(f"cascade.steps {names} share a name; give each its own")
        own = [step.name for step in self.steps if not step.target]
        if len(own) != 1:
            raise ValueError(
                f"cascade.steps: {len(own)} have no target; exactly one is this service's own"
            )
        if self.fallback and not self.steps[0].target:
            raise ValueError(
                "cascade.fallback: the first step is this service itself; put another before it"
            )

    @property
    def own(self) -> int:
        """Which step is this service's own engines."""
        return next(i for i, step in enumerate(self.steps) if not step.target)
