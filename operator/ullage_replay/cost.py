"""The cost model of steps: predicts a step's duration from what the step computes.

    seconds = decodes(d) + prompts(p) + a * decode context + b * prompt context

`decodes` and `prompts` are piecewise linear in the number of decodes and of prompt tokens, since a
batch gets cheaper by the row up to the width of a matrix product. The decode context is the number
of KV tokens that the decodes read. The prompt context is the number of query-key pairs of the
prompt tokens. All parts are fitted to measured steps and are never negative.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

DECODE_KNOTS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0, 256.0, 512.0)
PROMPT_KNOTS = (1.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
_ROUNDS = 4000
"""Rounds of coordinate descent. The fits of tests and of measured steps settle within hundreds."""
_SETTLED = 1e-10
"""Relative change of the coefficients in one round, below which they have settled."""
MIN_STEPS = 30
"""Fewest steps to which a model can be fitted."""


class FitError(Exception):
    """The measured steps do not determine a cost model. The message says what to measure."""


class StepSize(NamedTuple):
    """What one step computes, as far as its duration depends on it."""

    decodes: int
    prompt_tokens: int
    decode_context: float
    """KV tokens that all decodes read."""
    prompt_context: float
    """Query-key pairs of all prompt tokens: for each token, the tokens before it."""


class MeasuredStep(NamedTuple):
    """One step of a running engine."""

    size: StepSize
    seconds: float


class Curve(msgspec.Struct, frozen=True):
    """A piecewise linear function, which continues beyond its last point with the last slope."""

    points: tuple[tuple[float, float], ...]
    """Points (x, y) in order of x, at least one."""

    def at(self, x: float) -> float:
        """Return the function's value. Before the first point, it is the first point's."""
        points = self.points
        if x <= points[0][0] or len(points) == 1:
            return points[0][1]
        index = min(bisect.bisect_left(points, (x,)), len(points) - 1)
        x_left, y_left = points[index - 1]
        x_right, y_right = points[index]
        return y_left + (y_right - y_left) * (x - x_left) / (x_right - x_left)


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted cost model of an engine's steps, in seconds."""

    decodes: Curve
    """Seconds by number of decodes, without context."""
    prompts: Curve
    """Seconds by number of prompt tokens, without context, in a step that also decodes."""
    prompt_step: float
    """Seconds that a step without decodes takes in addition to `prompts`."""
    per_decode_context: float
    per_prompt_context: float
    error: float = 0.0
    """Mean relative error of the fit: |predicted - measured| over measured, summed over steps."""
    num_steps: int = 0
    """Number of measured steps."""

    def seconds(self, size: StepSize) -> float:
        """Return the predicted duration of a step."""
        seconds = self.decodes.at(size.decodes) if size.decodes else self.prompt_step
        if size.prompt_tokens:
            seconds += self.prompts.at(size.prompt_tokens)
        return (
            seconds
            + self.per_decode_context * size.decode_context
            + self.per_prompt_context * size.prompt_context
        )


def fit(steps: Sequence[MeasuredStep]) -> StepCost:
    """Fit a cost model to measured steps.

    Squared errors are weighted such that the sum of predicted seconds matches small and large steps
    alike: each step counts by the inverse of its duration.

    Raises:
        FitError: there are too few steps, or none that decodes.
    """
    steps = _without_stalls([step for step in steps if step.seconds > 0])
    if len(steps) < MIN_STEPS:
        raise FitError(f"{len(steps)} steps are too few; measure at least {MIN_STEPS}")
    if not any(step.size.decodes for step in steps):
        raise FitError("no step decodes; measure answers of at least two tokens")

    decode_knots = _knots(DECODE_KNOTS, [step.size.decodes for step in steps])
    prompt_knots = _knots(PROMPT_KNOTS, [step.size.prompt_tokens for step in steps])
    rows = [_features(step.size, decode_knots, prompt_knots) for step in steps]
    solution = _least_squares(
        rows, [step.seconds for step in steps], [1.0 / step.seconds for step in steps]
    )

    num_decodes = len(decode_knots)
    end = num_decodes + len(prompt_knots)
    cost = StepCost(
        decodes=Curve(_rising(decode_knots, solution[:num_decodes])),
        prompts=Curve(_rising(prompt_knots, solution[num_decodes:end]) or ((1.0, 0.0),)),
        prompt_step=solution[end],
        per_decode_context=solution[end + 1],
        per_prompt_context=solution[end + 2],
    )
    return msgspec.structs.replace(cost, error=error_of(cost, steps), num_steps=len(steps))


def error_of(cost: StepCost, steps: Iterable[MeasuredStep]) -> float:
    """Return the sum of absolute errors over the sum of measured seconds."""
    steps = list(steps)
    wrong = sum(abs(cost.seconds(step.size) - step.seconds) for step in steps)
    return wrong / sum(step.seconds for step in steps)


def _without_stalls(steps: list[MeasuredStep]) -> list[MeasuredStep]:
    """Drop the longest thousandth of the steps: the machine did something else meanwhile."""
    limit = sorted(step.seconds for step in steps)[-1 - len(steps) // 1000] if steps else 0.0
    return [step for step in steps if step.seconds <= limit]


def _knots(knots: Sequence[float], values: Iterable[int]) -> list[float]:
    """Return the knots between which values lie, with the largest value as the last knot."""
    seen = sorted({float(value) for value in values if value})
    if not seen:
        return []
    inner = [knot for knot in knots if seen[0] < knot < seen[-1]]
    # A segment without a value in it would have no slope.
    used = [seen[0]]
    for knot in [*inner, seen[-1]]:
        if knot > used[-1] and any(used[-1] < value <= knot for value in seen):
            used.append(knot)
    return used


def _features(
    size: StepSize, decode_knots: Sequence[float], prompt_knots: Sequence[float]
) -> list[float]:
    row = [0.0] * (len(decode_knots) + len(prompt_knots) + 3)
    if size.decodes:
        _set_hats(row, 0, decode_knots, size.decodes)
    if size.prompt_tokens:
        _set_hats(row, len(decode_knots), prompt_knots, size.prompt_tokens)
    row[-3] = float(not size.decodes)
    row[-2] = size.decode_context
    row[-1] = size.prompt_context
    return row


def _set_hats(row: list[float], first: int, knots: Sequence[float], value: float) -> None:
    """Write the weights of the two knots around a value. They add up to 1."""
    index = bisect.bisect_left(knots, value)
    if index < len(knots) and knots[index] == value:
        row[first + index] = 1.0
        return
    share = (value - knots[index - 1]) / (knots[index] - knots[index - 1])
    row[first + index - 1] = 1.0 - share
    row[first + index] = share


def _least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the coefficients >= 0 with the least weighted squared error, by coordinate descent.

    A coefficient on which no row depends is 0.
    """
    count = len(rows[0])
    # Columns differ by six orders of magnitude, and equal ones converge soonest.
    scales = [max(abs(row[i]) for row in rows) or 1.0 for i in range(count)]
    gram = [[0.0] * count for _ in range(count)]
    goal = [0.0] * count
    for row, target, weight in zip(rows, targets, weights, strict=True):
        used = [(i, value / scales[i]) for i, value in enumerate(row) if value]
        for i, value in used:
            goal[i] += weight * value * target
            line = gram[i]
            for j, other in used:
                line[j] += weight * value * other

    solution = [0.0] * count
    for _ in range(_ROUNDS):
        largest = 0.0
        for i in range(count):
            if not gram[i][i]:
                continue
            line = gram[i]
            rest = goal[i] - sum(map(float.__mul__, line, solution)) + line[i] * solution[i]
            value = max(0.0, rest / line[i])
            largest = max(largest, abs(value - solution[i]))
            solution[i] = value
        if largest <= _SETTLED * max(solution):
            break
    return [value / scale for value, scale in zip(solution, scales, strict=True)]


def _rising(knots: Sequence[float], values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return the points, each at least as high as the one before: more work takes no less time."""
    points: list[tuple[float, float]] = []
    for knot, value in zip(knots, values, strict=True):
        points.append((knot, max(value, points[-1][1] if points else 0.0)))
    return tuple(points)
