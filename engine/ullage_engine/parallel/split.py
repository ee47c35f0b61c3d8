"""Cuts a row of things into runs whose largest is smallest, by several measures in turn. Pure."""

from collections.abc import Callable, Sequence
from functools import cache
from math import inf

Criterion = Callable[[int, int, int], int]
"""What run `index`, from `start` to `end`, costs; never less when the run is longer."""


def split_runs(count: int, parts: int, criteria: Sequence[Criterion]) -> list[tuple[int, int]]:
    """Cuts `count` things into `parts` runs, none empty.

    The first criterion's largest cost is least; of such cuts the second's is, and so on. Of cuts
    that are alike in all of them it takes the one whose first runs are shortest.
    """
    assert 0 < parts <= count, f"{count} things cannot make {parts} runs"
    limits: list[tuple[Criterion, float]] = []
    for criterion in criteria:
        limits.append((criterion, _least_largest(count, parts, criterion, limits)))
    return _first_cut(count, parts, limits)


def _is_within(limits: Sequence[tuple[Criterion, float]], run: tuple[int, int, int]) -> bool:
    return all(criterion(*run) <= limit for criterion, limit in limits)


def _least_largest(
    count: int, parts: int, criterion: Criterion, limits: Sequence[tuple[Criterion, float]]
) -> float:
    """The smallest value that the criterion's largest cost can have within the limits."""

    @cache
    def best(index: int, start: int) -> float:
        if index == parts:
            return 0 if start == count else inf
        options = (
            max(criterion(index, start, end), best(index + 1, end))
            for end in range(start + 1, count + 1)
            if _is_within(limits, (index, start, end))
        )
        return min(options, default=inf)

    return best(0, 0)


def _first_cut(
    count: int, parts: int, limits: Sequence[tuple[Criterion, float]]
) -> list[tuple[int, int]]:
    @cache
    def is_possible(index: int, start: int) -> bool:
        if index == parts:
            return start == count
        ends = range(start + 1, count + 1)
        return any(
            _is_within(limits, (index, start, end)) and is_possible(index + 1, end) for end in ends
        )

    runs, start = [], 0
    for index in range(parts):
        end = next(
            end
            for end in range(start + 1, count + 1)
            if _is_within(limits, (index, start, end)) and is_possible(index + 1, end)
        )
        runs.append((start, end))
        start = end
    return runs
