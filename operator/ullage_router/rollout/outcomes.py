"""Counts the outcomes of requests on both sides of a rollout trial.

A trial is one canary at one rollout step. Counting starts from zero on both sides when the trial
starts, so the counts cover the same period and are comparable. Durations are counted in buckets to
limit memory use.
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
"""Upper bounds of the duration buckets, from 10 ms to 116 s, with two buckets per doubling."""


@dataclass(slots=True)
class DurationHistogram:
    """How many durations fell into each bucket. The last bucket has no upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


@dataclass(slots=True)
class SideCounts:
    """The outcome counts for one side of a trial."""

    succeeded: int = 0
    failed: int = 0
    """Number of failed requests.

    These are requests that failed because of the engine, and requests that the canary rejected but
    the stable engines served.
    """
    declined: int = 0
    """Number of requests that were assigned to the canary while it had no free memory."""
    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    """Times from sending a request to its first token.

    Waiting before the request is sent is excluded, because it depends on the pool rather than on
    the revision.
    """
    e2e: DurationHistogram = field(default_factory=DurationHistogram)
    """Times from sending a request to its last token."""


class Observation:
    """Records one request's outcome in the trial during which it was sent."""

    def __init__(self, tally: SideCounts) -> None:
        self._tally = tally
        self._sent = time.monotonic()

    def on_first_token(self) -> None:
        """Record the time from sending the request to its first token."""
        self._tally.ttft.add(time.monotonic() - self._sent)

    def on_success(self) -> None:
        self._tally.succeeded += 1
        self._tally.e2e.add(time.monotonic() - self._sent)

    def on_failure(self, error: ServiceError) -> None:
        """Count the request as failed, unless the error cannot be blamed on the revision."""
        self._tally.failed += is_failure(error)

    def on_timeout(self) -> None:
        """Count the request as failed because no token arrived in time."""
        self._tally.failed += 1


class Outcomes:
    """Counts the outcomes of both sides in the current trial.

    Args:
        falls: returns how often workers or servers of one side's engines have crashed.
        falls_before: returns the same count, limited to engines that are gone or draining.
    """

    def __init__(self, falls: Callable[[Side], int], falls_before: Callable[[Side], int]) -> None:
        self._falls = falls
        self._falls_of_gone = falls_before
        self._falls_before = dict.fromkeys(Side, 0)
        self._tallies = {side: SideCounts() for side in Side}
        self._canary = self.trial = ""

    def follow(self, trial: str, canary: str) -> None:
        """Reset the counts if the trial has changed.

        In contrast, engine crashes (falls) are counted across all steps since the canary was
        created. Routers learn of a new step up to a minute late, and crashes during that minute
        would otherwise be missed.

        Args:
            trial: name of the trial (empty while the canary gets no requests).
            canary: revision of the canary (empty without a canary).
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
        """Return an object that records the outcome of a request that is about to be sent."""
        return Observation(self._tallies[side])

    def on_declined(self) -> None:
        """Count a request that was assigned to the canary while the canary had no free memory."""
        self._tallies[Side.CANARY].declined += 1

    def on_contradicted(self, error: ServiceError) -> None:
        """Count a request that the canary rejected with an error but stable engines served.

        If the error was the fault of the canary's engine, it has already been counted.
        """
        tally = self._tallies[Side.CANARY]
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            tally.declined += 1
        elif not is_failure(error) and error.reason not in LEAVING:
            tally.failed += 1

    def falls(self, side: Side) -> int:
        """Return how many engine crashes one side has had since the canary was created."""
        return max(0, self._falls(side) - self._falls_before[side])

    def as_json(self) -> dict[str, object]:
        """Return the trial's counts for /stats."""
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
        """Yield (side, name, bucket's upper bound, count) for each of the trial's counts.

        The bound is empty for counts that are not in buckets.
        """
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
    """Exports the current trial's counts as a Prometheus metric, which the operator reads."""

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
    """Wraps an engine's stream, and records the outcome when the stream ends."""

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
