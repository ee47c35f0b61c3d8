"""Estimates output lengths and step times, for scheduling and admission."""

import bisect

_GROWTH = 1.125
"""Ratio of adjacent histogram bucket bounds. Estimates are at most one eighth too high."""
_RESCALE_AT = 1e12
"""Observation weight at which all weights are scaled down, so that floats do not overflow."""

_SPEED_WEIGHT = 0.2
"""Weight of the latest measurement in the moving average of the decode speed."""
_DEFAULT_DECODE_SPEED = 20.0
"""Decode speed in tokens per second to assume for a sequence until the speed has been measured. It
only affects Retry-After."""
_STEP_WEIGHT = 0.05
"""Weight of the latest step in the moving average of the step time for its batch size.

The weight is small so that occasional steps with prompts, which take much longer, do not dominate
the average.
"""
_PREFILL_HALF_LIFE = 4096
"""Number of prompt tokens over which a step's weight in the prefill speed estimate halves."""
_LEAST_PROMPT_SHARE = 0.1
"""Minimum fraction of a mixed step's time to attribute to its prompt tokens.

A mixed step has both decodes and prompts. Without this minimum, prompts would appear to be free
after a step that happened to be fast.
"""


class OutputLengthEstimator:
    """Estimates the output length as a quantile of recent lengths, with exponential decay.

    A histogram with geometric buckets bounds memory use. Each observation weighs `2 ** (1 /
    half_life)` times as much as the previous one, which is equivalent to decaying all older
    observations but only takes one addition. The initial value counts as an ordinary observation
    and also decays, so the estimate can fall as fast as it can rise.
    """

    def __init__(
        self, max_tokens: int, quantile: float = 0.9, start: int = 256, half_life: int = 64
    ) -> None:
        assert 0 < quantile < 1
        assert max_tokens > 0
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
        """Record the output length of one finished request, in tokens."""
        self._weight *= self._gain
        self._add(num_tokens, self._weight)
        if self._weight > _RESCALE_AT:
            self._rescale()

    @property
    def estimate(self) -> int:
        """Return the `quantile` of recent output lengths, in tokens."""
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


class ThroughputEstimator:
    """Moving averages of decode and prefill speed in tokens per second, 0 until measured.

    The prefill speed is a least-squares fit to step times, in which each step is weighted by the
    square of its number of prompt tokens. Large chunks therefore dominate the fit. This is
    intended: a chunk of a few tokens takes almost as long as a chunk of a few hundred, so it says
    little about long prompts. If a step also has decodes, the time attributed to its prompt tokens
    is the step time minus the time that the decodes alone would take.
    """

    def __init__(self) -> None:
        self.decode_tokens_per_second = 0.0
        """Decode speed of one running sequence, in tokens per second."""
        self.prefill_tokens_per_second = 0.0
        self._steps = _SecondsBySize()
        """Average time of steps with decodes, whether or not they also computed prompts."""
        self._decode_steps = _SecondsBySize()
        """Average time of steps that only decoded."""

        # Decayed sums over the steps with prompts, which give the least-squares speed.
        self._tokens_squared = 0.0
        """Decayed sum over steps of the squared number of prompt tokens."""
        self._token_seconds = 0.0
        """Decayed sum over steps of the number of prompt tokens times the seconds spent on them."""

    def observe(
        self, seconds: float, *, num_decodes: int, num_prompt_tokens: int, num_accepted: int = 0
    ) -> None:
        """Record the measurements of one step.

        Args:
            seconds: duration of the step.
            num_decodes: number of sequences that decoded one token each.
            num_prompt_tokens: number of prompt tokens that the step computed.
            num_accepted: total number of draft tokens that were accepted, in addition to one token
                per decode.
        """
        if seconds <= 0:
            return

        # A step with a prompt takes many times as long as most, so it is no first measurement.
        is_first = self.decode_tokens_per_second == 0.0
        if num_decodes and not (is_first and num_prompt_tokens):
            speed = (1.0 + num_accepted / num_decodes) / seconds
            self.decode_tokens_per_second = _average(self.decode_tokens_per_second, speed)
            if not num_prompt_tokens or self._steps.has(num_decodes):
                self._steps.observe(num_decodes, seconds)

        if num_prompt_tokens:
            if num_decodes:
                least = _LEAST_PROMPT_SHARE * seconds
                seconds = max(least, seconds - self._decode_steps.predict(num_decodes))
            self._observe_prompts(seconds, num_prompt_tokens)
        elif num_decodes:
            self._decode_steps.observe(num_decodes, seconds)

    @property
    def step_seconds(self) -> list[float]:
        """Return the average step time in seconds for 1 decode, 2 to 3 decodes, 4 to 7 and so on.

        The list ends at the largest batch size observed so far, and its values never decrease.
        Batch sizes that were not observed are assigned the time of the next larger observed size.
        """
        return self._steps.all()

    def _observe_prompts(self, seconds: float, num_tokens: int) -> None:
        rest = 2.0 ** (-num_tokens / _PREFILL_HALF_LIFE)
        self._tokens_squared = rest * self._tokens_squared + num_tokens * num_tokens
        self._token_seconds = rest * self._token_seconds + num_tokens * seconds
        self.prefill_tokens_per_second = self._tokens_squared / self._token_seconds

    def seconds_until(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Estimate how many seconds it takes to compute a prompt and then generate an output."""
        decode = self.decode_tokens_per_second or _DEFAULT_DECODE_SPEED
        prefill = self.prefill_tokens_per_second or _DEFAULT_DECODE_SPEED * 16
        return num_prompt_tokens / prefill + num_output_tokens / decode


class _SecondsBySize:
    """Average step times in seconds, grouped by number of decodes: 1, 2 to 3, 4 to 7 and so on."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        """Average seconds per group, indexed by the bit length of the number of decodes minus one.

        The value is 0 for groups without observations.
        """

    def has(self, num_decodes: int) -> bool:
        """Return whether any step in the group for this number of decodes has been observed."""
        bucket = num_decodes.bit_length() - 1
        return bucket < len(self._seconds) and self._seconds[bucket] > 0.0

    def observe(self, num_decodes: int, seconds: float) -> None:
        """Record the duration of one step."""
        bucket = num_decodes.bit_length() - 1
        steps = self._seconds
        steps.extend([0.0] * (bucket + 1 - len(steps)))
        old = steps[bucket]
        steps[bucket] = seconds if old == 0.0 else old + _STEP_WEIGHT * (seconds - old)

    def predict(self, num_decodes: int) -> float:
        """Predict the duration in seconds of a step with this many decodes, or 0 if unknown.

        A step larger than any observed step is predicted to take as long as the largest one.
        """
        steps = self.all()
        return steps[min(num_decodes.bit_length(), len(steps)) - 1] if steps else 0.0

    def all(self) -> list[float]:
        """Return the average seconds for each group, up to the largest observed one.

        The values never decrease. Groups without observations use the value of the next larger
        observed group.
        """
        steps: list[float] = []
        bound = float("inf")
        for seconds in reversed(self._seconds):
            bound = min(bound, seconds or bound)
            steps.append(bound)
        return steps[::-1]


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SPEED_WEIGHT * (new - old)
