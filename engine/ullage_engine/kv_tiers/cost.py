"""Whether to load blocks or to compute them: the time of loads, and the blocks worth loading.

Of the blocks that a request lacks, the first ones are computed while the last ones are loaded. A
block is loaded if it is predicted to arrive before the computation reaches it. So a request waits
for no load whose time was predicted well, and loads that take longer than computing all blocks are
not begun.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

START_LATENCY_S = 0.01
"""Seconds until the first byte of a load, of tiers without a measured load."""
START_BYTES_PER_S = 100e6
"""Bandwidth of tiers without a measured load: that of a slow network."""
PROBE_S = 30.0
"""Seconds without a load after which the speed of a tier is measured again."""

_UNMEASURED_S = 1e9
"""Seconds of a computation whose speed is not measured. Any load is faster."""
_WEIGHT = 0.5
"""Weight of the newest load in the estimates, on a logarithmic scale. The first load replaces the
starting values."""
_MAX_RATIO = 1e4
"""Bound of the ratio between the measured and the predicted time of one load."""
_SIZES_FACTOR = 4.0
"""Least ratio between the sizes of the largest and the smallest recent load by which latency and
bandwidth are separable."""
_SIZES_FADE = 1.15
"""Factor by which both sizes move towards the newest load with each load."""


class LoadTime(NamedTuple):
    """The predicted time of loads from one tier that begin now."""

    start_s: float
    """Seconds until the first byte."""
    byte_s: float
    """Seconds a byte."""

    def seconds(self, num_bytes: int) -> float:
        """Predict the seconds from now to the end of a load."""
        return self.start_s + num_bytes * self.byte_s


class LoadSpeed:
    """Latency and bandwidth of one tier, estimated from its loads; for one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self.latency_s = START_LATENCY_S
        """Seconds until the first byte of a load."""
        self._byte_s = 1 / START_BYTES_PER_S
        self._is_measured = False
        self._smallest = math.inf
        self._largest = 0.0
        """Sizes of recent loads, bytes, which fade towards the newest."""
        self._done_at = clock()
        self._next_number = 0
        self._under_way: dict[int, tuple[int, float]] = {}
        """Bytes and beginnings of the loads that run, by number, the oldest first."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth, bytes a second."""
        return 1 / self._byte_s

    @property
    def is_to_measure(self) -> bool:
        """Whether a load should be made to measure the tier.

        A tier that is estimated to be slow is not loaded from, so without a probe the estimate
        would stay for ever.
        """
        is_known = self._is_measured and self._clock() - self._done_at < PROBE_S
        return not is_known and not self._under_way

    @property
    def is_of_one_size(self) -> bool:
        """Whether recent loads had about one size, so that only the sum of latency and transfer
        time is known.
        """
        return self._largest < _SIZES_FACTOR * self._smallest

    def predict(self) -> LoadTime:
        """Predict the time of a load that begins now, behind those that run.

        A load that is late is predicted to take as long again as it is late.
        """
        return LoadTime(self._queue_s() + self.latency_s, self._byte_s)

    def begin(self, num_bytes: int) -> int:
        """Record the beginning of a load; return its number."""
        self._next_number += 1
        self._under_way[self._next_number] = (num_bytes, self._clock())
        return self._next_number

    def finish(self, number: int, num_loaded: int) -> None:
        """Record the end of a load that has brought so many bytes."""
        now = self._clock()
        num_bytes, began_at = self._under_way.pop(number)
        # Loads follow one another, so the time before the last one ended is not this load's.
        seconds = max(0.0, now - max(began_at, self._done_at))
        self._done_at = now

        latency_s = self.latency_s
        byte_s = self._byte_s
        predicted = latency_s + num_loaded * byte_s
        # A load that fails at once, as at a busy tier, is not fast.
        least = 1 / _MAX_RATIO if num_loaded >= num_bytes else 1.0
        ratio = min(max(seconds / predicted, least), _MAX_RATIO)

        if num_loaded:
            self._smallest = min(num_loaded, self._smallest * _SIZES_FADE)
            self._largest = max(num_loaded, self._largest / _SIZES_FADE)

        weight = _WEIGHT if self._is_measured else 1.0
        # Each estimate is corrected by its share of the predicted time.
        own = latency_s / predicted
        rest = 1 - latency_s / predicted
        weight /= own**2 + rest**2
        self.latency_s = latency_s * ratio ** (weight * own)
        self._byte_s = byte_s * ratio ** (weight * rest)
        self._is_measured = True

    def _queue_s(self) -> float:
        """Predict the seconds until all loads that run have ended."""
        if not self._under_way:
            return 0.0
        _, oldest_at = next(iter(self._under_way.values()))
        elapsed = self._clock() - max(oldest_at, self._done_at)
        num_bytes = sum(num_bytes for num_bytes, _ in self._under_way.values())
        remaining = len(self._under_way) * self.latency_s + num_bytes * self._byte_s
        return abs(remaining - elapsed)


class ComputeSpeed(NamedTuple):
    """The speed of prefill, and its backlog."""

    tokens_per_s: float = 0.0
    """0: not measured yet."""
    backlog_tokens: int = 0

    def seconds(self, num_tokens: int) -> float:
        """Predict the seconds to compute tokens. Without a measured speed the prediction is longer
        than any load.
        """
        return num_tokens / self.tokens_per_s if self.tokens_per_s else _UNMEASURED_S

    @property
    def start_s(self) -> float:
        """Seconds until the computation of a prompt that arrives now can begin."""
        return self.seconds(self.backlog_tokens)


class Needed(NamedTuple):
    """One block that a request lacks, and the tier that has it."""

    tier: str = ""
    """The tier to load it from; empty: it is here, or being loaded."""
    ready_s: float = 0.0
    """Seconds until it is here, if it is being loaded."""


def seconds_to_load(
    blocks: Sequence[Needed],
    predict: Callable[[str], Callable[[int], float]],
    extra: Sequence[Needed] = (),
) -> list[float]:
    """Predict for each block the seconds until it and all behind it are here.

    Args:
        blocks: those that a request lacks, in their order.
        predict: returns for a tier the function from a number of its blocks to the seconds of
            their load. It is called once a tier.
        extra: blocks without which the others are useless.

    Returns:
        The seconds of each block, never more than those of the block before; then 0.0 for no
        block.
    """
    counts: dict[str, int] = {}
    tiers = dict[str, Callable[[int], float]]()
    latest = 0.0
    seconds = []
    for block in [*extra, *reversed(blocks)]:
        latest = max(latest, block.ready_s)
        if block.tier:
            if block.tier not in tiers:
                tiers[block.tier] = predict(block.tier)
                counts[block.tier] = 0
            counts[block.tier] += 1
            latest = max(latest, tiers[block.tier](counts[block.tier]))
        seconds.append(latest)
    return [*reversed(seconds[len(extra) :]), 0.0]


def split(load_s: Sequence[float], compute_s: float, start_s: float = 0.0) -> int:
    """Divide blocks into leading ones to compute and the rest to load; return the number of leading
    ones.

    Compute the fewest leading blocks whose computation hides the load of the rest. The request is
    never later than if it computed all blocks, and waits for no load.

    Args:
        load_s: seconds of `seconds_to_load`.
        compute_s: seconds to compute a block.
        start_s: seconds until the first one's computation can begin.
    """
    for num_computed, seconds in enumerate(load_s):
        if seconds <= start_s + num_computed * compute_s:
            return num_computed
    return len(load_s) - 1
