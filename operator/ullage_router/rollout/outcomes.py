"""Outcomes of the requests of a trial, by side.

A trial is one canary at one step. Both sides are counted over the same time and start from zero
with the trial, so that their counts can be compared. Memory is bounded: durations are counted in
buckets.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ullage_common.wire.errors import ServiceError
from ullage_router.call import EngineStream, Event
from ullage_router.errors import LEAVING, is_failure
from ullage_router.metric_names import TRIAL
from ullage_router.policy.facts import Side

BOUNDS_S = tuple(round(0.01 * 2 ** (n / 2), 4) for n in range(28))
"""Upper ends of the buckets, 10 ms to 116 s, two for every doubling."""


@dataclass(slots=True)
class DurationHistogram:
    """Counts of durations by bucket. The last bucket has no upper end."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


@dataclass(slots=True)
class SideCounts:
    """Counts of one side of a trial."""

    succeeded: int = 0
    failed: int = 0
    """Requests that failed because of the engine, and requests that the canary refused but stable
    engines served."""
    declined: int = 0
    """Requests drawn for the canary while it had no immediate room."""
    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    """Times from sending to the first token. The earlier wait depends on the pool, not on the
    revision."""
    e2e: DurationHistogram = field(default_factory=DurationHistogram)
    """Times from sending to the last token."""


class Observation:
    """One request on an engine, which counts for the trial in which it was sent."""

    def __init__(self, tally: SideCounts) -> None:
        self._tally = tally
        self._sent = time.monotonic()

    def on_first_token(self) -> None:
        """Count the time to the first token."""
        self._tally.ttft.add(time.monotonic() - self._sent)

    def on_success(self) -> None:
        self._tally.succeeded += 1
        self._tally.e2e.add(time.monotonic() - self._sent)

    def on_failure(self, error: ServiceError) -> None:
        """Count the request as failed if the engine is at fault."""
        self._tally.failed += is_failure(error)

    def on_timeout(self) -> None:
        """Count the request as failed, since no token arrived for too long."""
        self._tally.failed += 1


class Outcomes:
    """The counts of both sides of the current trial.

    Args:
        falls: returns how often engines of a side lost their worker or process.
        falls_before: returns the same for engines that have left or are about to leave.
    """

    def __init__(self, falls: Callable[[Side], int], falls_before: Callable[[Side], int]) -> None:
        self._falls = falls
        self._falls_of_gone = falls_before
        self._falls_before = dict.fromkeys(Side, 0)
        self._tallies = {side: SideCounts() for side in Side}
        self._canary = self.trial = ""

    def follow(self, trial: str, canary: str) -> None:
        """Reset the counts if the trial has changed.

        Falls are counted from the canary's beginning, over all its steps. A router learns of a step
        up to a minute late, and the falls of that minute would belong to no step.

        Args:
            trial: a step of a canary, or empty while the canary gets no requests.
            canary: the canary's revision, or empty without a canary.
        """
        if canary != self._canary:
            self._canary = canary
            # All canaries of a service have the same name in DNS. A router that reads its file
            # late already follows this canary's engines, and may have seen one of them fall.
            self._falls_before = {
                Side.STABLE: self._falls(Side.STABLE),
                Side.CANARY: self._falls_of_gone(Side.CANARY),
            }
        if trial != self.trial:
            self.trial = trial
            self._tallies = {side: SideCounts() for side in Side}

    def observe(self, side: Side) -> "Observation":
        """Begin observing a request that is sent now."""
        return Observation(self._tallies[side])

    def on_declined(self) -> None:
        """Count a request for which the canary had no immediate room."""
        self._tallies[Side.CANARY].declined += 1

    def on_contradicted(self, error: ServiceError) -> None:
        """Count a request that the canary answered with an error, and stable engines served.

        Failures of the canary's engines are already counted.
        """
        tally = self._tallies[Side.CANARY]
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            tally.declined += 1
        elif not is_failure(error) and error.reason not in LEAVING:
            tally.failed += 1

    def falls(self, side: Side) -> int:
        """Return how often engines of a side have fallen since the canary's beginning."""
        return max(0, self._falls(side) - self._falls_before[side])

    def as_json(self) -> dict[str, object]:
        """Return the counts for /stats."""
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
        """Yield (side, name of the count, upper end of the bucket, count)."""
        for side, tally in self._tallies.items():
            yield side, "succeeded", "", tally.succeeded
            yield side, "failed", "", tally.failed
            yield side, "declined", "", tally.declined
            yield side, "restarts", "", self.falls(side)
            ends = [*map(str, BOUNDS_S), "+Inf"]
            for name, times in (("ttft", tally.ttft), ("e2e", tally.e2e)):
                for end, count in zip(ends, times.counts, strict=True):
                    yield side, name, end, count


class TrialCollector(Collector):
    """Exports the current trial to Prometheus, where the operator reads it."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if not self._outcomes.trial:
            return
        family = TRIAL.family()
        for side, name, end, count in self._outcomes.samples():
            family.add_metric([self._outcomes.trial, side.value, name, end], count)
        yield family

    def describe(self) -> list[GaugeMetricFamily]:
        return []


class ObservedStream:
    """The part of an answer that one engine generates. Its end is counted."""

    def __init__(self, stream: EngineStream, observation: Observation) -> None:
        self.accepted = stream.accepted
        self._stream = stream
        self._observation = observation

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    @property
    def has_stalled(self) -> bool:
        return self._stream.has_stalled

    async def read(self) -> Event:
        try:
            event = await self._stream.read()
        except ServiceError as error:
            self._observation.on_failure(error)
            raise
        if self.has_stalled:
            self._observation.on_timeout()
        elif self.is_over:
            self._observation.on_success()
        return event

    def close(self) -> None:
        self._stream.close()
