"""Whether a canary is worse than the stable engines: a pure function of what routers counted.

All limits are relative to the stable engines over the same time, so that what troubles both does
not fail a canary. Chance is allowed for: a limit counts as passed when so bad a count would come
about with a probability below `SIGNIFICANCE` in a canary that is just within it. That holds for one
look; a canary is looked at again and again, so the probability is small.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

SIGNIFICANCE = 0.002
Z = 1.645
"""Of the stable engines' own error rate, the upper end of its one-sided 95 % interval is taken."""
UNKNOWN_RATE = 0.5
"""Taken as the error rate of stable engines that served nothing: no canary may exceed it."""
PERCENTILE = 0.95
LEAST_TIMES = 20
"""Answers on each side below which times are not compared."""


@dataclass(frozen=True, slots=True)
class Side:
    """What became of the requests on one side."""

    succeeded: int = 0
    failed: int = 0
    declined: int = 0
    """Found no room on the canary at once."""
    restarts: int = 0
    """Workers and pods that ended by themselves, of memory or otherwise."""
    ttft: Mapping[float, int] = field(default_factory=dict)
    """Counts by upper end of the bucket, seconds, the last one infinite."""
    e2e: Mapping[float, int] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed

    @property
    def error_rate(self) -> float:
        return self.failed / self.ended if self.ended else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much worse a canary may be."""

    min_requests: int
    error_rate: float
    """Added to the stable engines' share of failures."""
    ttft_ratio: float
    e2e_ratio: float
    restarts: int
    """More than the stable engines had."""


class Outcome(StrEnum):
    PASS = "Pass"
    FAIL = "Fail"
    WAIT = "Wait"
    """Too few requests to tell."""


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    reason: str
    message: str


def judge(canary: Side, stable: Side, limits: Limits, is_last: bool = False) -> Verdict:
    """What the counts of one step say.

    Args:
        is_last: there is no more time: what is known must do.
    """
    failed = [
        found
        for found in (
            restarts(canary, stable, limits),
            errors(canary, stable, limits, is_last),
            slowness("TTFT", canary.ttft, stable.ttft, limits.ttft_ratio),
            slowness("E2E", canary.e2e, stable.e2e, limits.e2e_ratio),
        )
        if found
    ]
    if failed:
        return Verdict(Outcome.FAIL, failed[0].reason, "; ".join(f.message for f in failed))
    measured = summary(canary, stable)
    is_enough = canary.ended >= limits.min_requests
    if is_enough and canary.error_rate <= stable.error_rate + limits.error_rate:
        return Verdict(Outcome.PASS, "Healthy", measured)
    if is_last and not canary.succeeded and canary.declined >= limits.min_requests:
        message = f"the canary took none of {canary.declined} requests"
        return Verdict(Outcome.FAIL, "TakesNothing", message)
    if is_last:
        return Verdict(Outcome.PASS, "LittleTraffic", f"{measured}; judged by readiness")
    return Verdict(Outcome.WAIT, "LittleTraffic", measured)


@dataclass(frozen=True, slots=True)
class _Fault:
    reason: str
    message: str


def restarts(canary: Side, stable: Side, limits: Limits) -> _Fault | None:
    if canary.restarts <= stable.restarts + limits.restarts:
        return None
    message = f"{canary.restarts} restarts, the stable engines {stable.restarts}"
    return _Fault("Restarts", message)


def errors(canary: Side, stable: Side, limits: Limits, is_last: bool) -> _Fault | None:
    upper = upper_rate(stable.failed, stable.ended) if stable.ended else UNKNOWN_RATE
    allowed = min(1.0, upper + limits.error_rate)
    is_sure = at_least(canary.failed, canary.ended, allowed) < SIGNIFICANCE
    is_above = canary.error_rate > stable.error_rate + limits.error_rate
    if not is_sure and not (is_last and is_above):
        return None
    message = (
        f"{canary.failed} of {canary.ended} requests failed, "
        f"{stable.failed} of {stable.ended} on stable engines"
    )
    return _Fault("Errors", message)


def slowness(
    name: str, canary: Mapping[float, int], stable: Mapping[float, int], ratio: float
) -> _Fault | None:
    """Whether more than 5 % of the canary's times are above `ratio` times the stable p95."""
    total = sum(canary.values())
    if min(total, sum(stable.values())) < LEAST_TIMES:
        return None
    above = num_above(canary, percentile(stable) * ratio)
    if at_least(above, total, 1 - PERCENTILE) >= SIGNIFICANCE:
        return None
    message = (
        f"{name} p95 {percentile(canary):.3g} s, stable {percentile(stable):.3g} s: "
        f"above {ratio:g} times as long"
    )
    return _Fault(name, message)


def summary(canary: Side, stable: Side) -> str:
    """What was measured, in one line."""
    parts = [
        f"{canary.failed} of {canary.ended} requests failed (stable {stable.failed} of "
        f"{stable.ended})"
    ]
    for name, own, other in (("TTFT", canary.ttft, stable.ttft), ("E2E", canary.e2e, stable.e2e)):
        if sum(own.values()) and sum(other.values()):
            parts.append(f"{name} p95 {percentile(own):.3g} s (stable {percentile(other):.3g} s)")
    parts.append(f"{canary.restarts} restarts (stable {stable.restarts})")
    return ", ".join(parts)


def percentile(counts: Mapping[float, int], share: float = PERCENTILE) -> float:
    """Where it lies if times are spread evenly within a bucket, seconds."""
    left = share * sum(counts.values())
    for low, end, count in buckets(counts):
        if count and left <= count:
            return low + (end - low) * left / count
        left -= count
    return 0.0


def num_above(counts: Mapping[float, int], limit_s: float) -> int:
    """Times above a limit if they are spread evenly within a bucket; rounded down."""
    found = 0.0
    for low, end, count in buckets(counts):
        if end > limit_s:
            found += count if low >= limit_s else count * (end - limit_s) / (end - low)
    return int(found)


def buckets(counts: Mapping[float, int]) -> Iterable[tuple[float, float, int]]:
    """(lower end, upper end, count); the last one is taken as a point."""
    low = 0.0
    for end in sorted(counts):
        yield low, (low if math.isinf(end) else end), counts[end]
        low = end


def upper_rate(failed: int, total: int, z: float = Z) -> float:
    """Upper end of Wilson's score interval of a share (Wilson 1927)."""
    share, square = failed / total, z * z
    middle = share + square / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    return (middle + spread) / (1 + square / total)


def at_least(count: int, total: int, share: float) -> float:
    """Probability of `count` or more of `total` independent events of that probability."""
    if count <= 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    logs = (
        math.lgamma(total + 1)
        - math.lgamma(k + 1)
        - math.lgamma(total - k + 1)
        + k * math.log(share)
        + (total - k) * math.log1p(-share)
        for k in range(count, total + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def add(sides: Iterable[Side]) -> Side:
    """What several routers counted, together; each sees the restarts of all engines."""
    total = Side()
    for side in sides:
        total = Side(
            total.succeeded + side.succeeded,
            total.failed + side.failed,
            total.declined + side.declined,
            max(total.restarts, side.restarts),
            _summed(total.ttft, side.ttft),
            _summed(total.e2e, side.e2e),
        )
    return total


def _summed(one: Mapping[float, int], other: Mapping[float, int]) -> dict[float, int]:
    return {end: one.get(end, 0) + other.get(end, 0) for end in {*one, *other}}
