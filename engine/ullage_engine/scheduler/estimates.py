"""Estimates that scheduling and admission rest on: how long outputs are and how fast steps are."""

import bisect

_GROWTH = 1.125
"""Ratio of neighbouring bucket bounds: an estimate is at most an eighth too high."""
_RESCALE_AT = 1e12


class OutputLengthEstimator:
    """Estimates output length as a decaying quantile of the lengths produced.

    A histogram over geometric buckets, so memory is bounded whatever happens. Each observation
    weighs `2 ** (1 / half_life)` times the one before, which is the same as decaying all older ones
    and costs one addition. The start value is an observation like any other and fades with them, so
    the estimate falls as readily as it rises.
    """

    def __init__(
        self, max_tokens: int, quantile: float = 0.9, start: int = 256, half_life: int = 64
    ) -> None:
        assert 0 < quantile < 1 and max_tokens > 0
        self._quantile = quantile
        self._bounds = _bucket_bounds(max_tokens)
        self._weights = [0.0] * len(self._bounds)
        self._gain = 2.0 ** (1.0 / half_life)
        self._weight = 1.0
        # The start value counts as much as a quarter of a half-life of observations.
        self._add(min(start, max_tokens), max(1.0, half_life / 4))

    @property
    def num_buckets(self) -> int:
        return len(self._bounds)

    def observe(self, num_tokens: int) -> None:
        """Counts the output length of one finished request, in tokens."""
        self._weight *= self._gain
        self._add(num_tokens, self._weight)
        if self._weight > _RESCALE_AT:
            self._rescale()

    @property
    def estimate(self) -> int:
        """Output length in tokens that `quantile` of recent requests stay within."""
        target = self._quantile * sum(self._weights)
        cumulative = 0.0
        for bound, weight in zip(self._bounds, self._weights, strict=True):
            cumulative += weight
            if cumulative >= target:
                return bound
        return self._bounds[-1]

    def _add(self, num_tokens: int, weight: float) -> None:
        bucket = bisect.bisect_left(self._bounds, num_tokens)
        self._weights[min(bucket, len(self._bounds) - 1)] += weight

    def _rescale(self) -> None:
        self._weights = [weight / self._weight for weight in self._weights]
        self._weight = 1.0


def _bucket_bounds(max_tokens: int) -> list[int]:
    bounds = [1]
    while bounds[-1] < max_tokens:
        bounds.append(min(max_tokens, max(bounds[-1] + 1, int(bounds[-1] * _GROWTH))))
    return bounds


_WEIGHT = 0.2
"""Share of the newest measurement in the average."""
_DEFAULT_DECODE_SPEED = 20.0
"""Decode tokens a second of one sequence before any was measured; only shapes a Retry-After."""


_STEP_WEIGHT = 0.05
"""Share of the newest step in the average of its batch size: steps with prompts are far longer."""


class ThroughputEstimator:
    """Moving averages of decode and prefill speed, tokens a second; 0 until measured."""

    def __init__(self) -> None:
        self.decode_tokens_per_second = 0.0
        """Decode speed of one running sequence."""
        self.prefill_tokens_per_second = 0.0
        self._step_seconds: list[float] = []
        """Average seconds of a step by the bits of its number of decodes; 0 where none was."""

    def observe(self, seconds: float, *, num_decodes: int, num_prompt_tokens: int) -> None:
        """Counts one step that took `seconds`."""
        if seconds <= 0:
            return
        # Beside a prompt a step takes many times as long as most do: that is no first measurement.
        is_first = self.decode_tokens_per_second == 0.0
        if num_decodes and not (is_first and num_prompt_tokens):
            self.decode_tokens_per_second = _average(self.decode_tokens_per_second, 1.0 / seconds)
            self._observe_step(num_decodes.bit_length() - 1, seconds, num_prompt_tokens > 0)
        if num_prompt_tokens:
            self.prefill_tokens_per_second = _average(
                self.prefill_tokens_per_second, num_prompt_tokens / seconds
            )

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of a step that decodes 1 sequence, 2 to 3, 4 to 7 and so on, up to the largest
        batch so far; never fewer for a larger batch. A size that never ran is taken to be as slow
        as the next larger one that did."""
        steps: list[float] = []
        bound = float("inf")
        for seconds in reversed(self._step_seconds):
            bound = min(bound, seconds or bound)
            steps.append(bound)
        return steps[::-1]

    def _observe_step(self, bucket: int, seconds: float, has_prompts: bool) -> None:
        steps = self._step_seconds
        old = steps[bucket] if bucket < len(steps) else 0.0
        if old == 0.0 and has_prompts:
            return
        steps.extend([0.0] * (bucket + 1 - len(steps)))
        steps[bucket] = seconds if old == 0.0 else old + _STEP_WEIGHT * (seconds - old)

    def seconds_until(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Predicts the seconds to compute a prompt and produce an output."""
        decode = self.decode_tokens_per_second or _DEFAULT_DECODE_SPEED
        prefill = self.prefill_tokens_per_second or _DEFAULT_DECODE_SPEED * 16
        return num_prompt_tokens / prefill + num_output_tokens / decode


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
