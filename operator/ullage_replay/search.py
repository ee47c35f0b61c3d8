"""Finds how many engines of the first pool meet latency objectives without refusing a request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from ullage_replay.report import Quantiles, Summary

MOST_ENGINES = 64
"""Most engines of one pool that are tried."""


@dataclass(frozen=True, slots=True)
class ReplayObjectives:
    """Objectives for the 95th percentiles, in seconds, or None for no objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def as_json(self) -> dict[str, float]:
        """Return the objectives that are set, by name."""
        pairs = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return {name: value for name, value in pairs.items() if value is not None}

    def are_met(self, summary: Summary) -> bool:
        """Return whether a replay meets the objectives, with every request served to its end."""
        if summary.refused or summary.timeouts:
            return False
        return _is_within(summary.ttft_s, self.ttft_s) and _is_within(
            summary.inter_token_s, self.tpot_s
        )


def _is_within(values: Quantiles | None, limit: float | None) -> bool:
    return limit is None or values is None or values.p95 <= limit


def find_engines(
    replay: Callable[[int], Summary],
    pools: Mapping[str, int],
    objectives: ReplayObjectives,
    planned: Summary,
) -> Summary:
    """Return the summary of the planned service, with the engines that the objectives need.

    More engines are taken to be never worse, so the search doubles their number until the
    objectives are met, and then halves the interval.

    Args:
        replay: replays the trace with this many engines in the first pool.
        pools: planned number of engines by pool. Only the first pool's number is varied.
        objectives: the objectives.
        planned: the summary of the planned service.
    """
    first = next(iter(pools))
    met: dict[int, bool] = {pools[first]: objectives.are_met(planned)}

    def is_enough(count: int) -> bool:
        if count not in met:
            met[count] = objectives.are_met(replay(count))
        return met[count]

    low = 0
    high = 1
    while not is_enough(high):
        low = high
        high *= 2
        if low >= MOST_ENGINES:
            return replace(planned, objectives=objectives.as_json)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    needed = {**pools, first: high}
    return replace(planned, objectives=objectives.as_json, engines_needed=needed)
