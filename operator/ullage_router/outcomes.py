"""What becomes of requests on each side of a rollout: counts of one trial, bounded.

A trial is one canary at one step. Both sides are counted over the same time and start from zero
with it, so that they can be compared as they are.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ullage_router.canary import Side
from ullage_router.errors import LEAVING, is_failure
from ullage_rpc.errors import ServiceError

BOUNDS_S = tuple(round(0.01 * 2 ** (n / 2), 4) for n in range(28))
"""Upper ends of the buckets, 10 ms to 116 s, two for every doubling."""


@dataclass(slots=True)
class Times:
    """Durations by bucket; the last bucket has no upper end."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


@dataclass(slots=True)
class Tally:
    """One side of a trial."""

    succeeded: int = 0
    failed: int = 0
    """For the engine's sake, or, on the canary, refused and then served by stable engines."""
    declined: int = 0
    """Drawn for the canary, which had no room for them at once."""
    ttft: Times = field(default_factory=Times)
    """From being sent to the engine to the first token: the wait before is the pool's, not the
    revision's."""
    e2e: Times = field(default_factory=Times)
    """From being sent to the last token."""


class Observation:
    """One request on an engine; counts for the trial in which it was sent."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._sent = time.monotonic()

    def began(self) -> None:
        """Its first token came."""
        self._tally.ttft.add(time.monotonic() - self._sent)

    def succeeded(self) -> None:
        self._tally.succeeded += 1
        self._tally.e2e.add(time.monotonic() - self._sent)

    def failed(self, error: ServiceError) -> None:
        """It counts where it speaks against the engine."""
        self._tally.failed += is_failure(error)

    def timed_out(self) -> None:
        """No token came in the request's whole time."""
        self._tally.failed += 1


class Outcomes:
    """Both sides of the present trial.

    Args:
        falls: how often engines of a side lost their worker or process, since the router follows
            them.
    """

    def __init__(self, falls: Callable[[Side], int]) -> None:
        self._falls = falls
        self._falls_before = dict.fromkeys(Side, 0)
        self._tallies = {side: Tally() for side in Side}
        self._canary = self.trial = ""

    def follow(self, trial: str, canary: str) -> None:
        """Counts anew where the trial is another one.

        Falls are counted from the canary's beginning, over all its steps: a router hears of a step
        up to a minute late, and what fell meanwhile would belong to none.

        Args:
            trial: a step of a canary; empty while it gets no requests.
            canary: its revision; empty without one.
        """
        if canary != self._canary:
            self._canary = canary
            self._falls_before = {side: self._falls(side) for side in Side}
        if trial != self.trial:
            self.trial = trial
            self._tallies = {side: Tally() for side in Side}

    def observe(self, side: Side) -> "Observation":
        """Of a request that is sent now."""
        return Observation(self._tallies[side])

    def declined(self) -> None:
        """The canary had no room for a request at once."""
        self._tallies[Side.CANARY].declined += 1

    def contradicted(self, error: ServiceError) -> None:
        """Stable engines served what the canary answered so; its failures are counted already."""
        tally, code = self._tallies[Side.CANARY], error.code
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            tally.declined += 1
        elif not is_failure(error) and error.reason not in LEAVING:
            tally.failed += 1

    def falls(self, side: Side) -> int:
        return max(0, self._falls(side) - self._falls_before[side])

    def as_json(self) -> dict[str, object]:
        """For /stats."""
        return {"trial": self.trial} | {
            side.value: {
                "succeeded": tally.succeeded,
                "failed": tally.failed,
                "declined": tally.declined,
                "restarts": self.falls(side),
                "ttft_counts": list(tally.ttft.counts),
                "e2e_counts": list(tally.e2e.counts),
            }
            for side, tally in self._tallies.items()
        }

    def samples(self) -> Iterator[tuple[Side, str, str, int]]:
        """(side, what, upper end of the bucket, count)."""
        for side, tally in self._tallies.items():
            yield side, "succeeded", "", tally.succeeded
            yield side, "failed", "", tally.failed
            yield side, "declined", "", tally.declined
            yield side, "restarts", "", self.falls(side)
            ends = [*map(str, BOUNDS_S), "+Inf"]
            for what, times in (("ttft", tally.ttft), ("e2e", tally.e2e)):
                for end, count in zip(ends, times.counts, strict=True):
                    yield side, what, end, count


class TrialCollector(Collector):
    """Tells Prometheus, and so the operator, about the present trial; nothing without one."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if not self._outcomes.trial:
            return
        family = GaugeMetricFamily(
            "ullage_router_trial",
            "Requests of the canary's present trial by side: outcomes, and times by bucket",
            labels=["trial", "side", "what", "le"],
        )
        for side, what, end, count in self._outcomes.samples():
            family.add_metric([self._outcomes.trial, side.value, what, end], count)
        yield family

    def describe(self) -> list[GaugeMetricFamily]:
        return []
