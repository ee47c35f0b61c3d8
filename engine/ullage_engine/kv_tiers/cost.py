"""Decides whether to load or to compute blocks, based on predicted load times.

Of the blocks that a request lacks, the first ones are computed while the last ones are loaded. A
block is loaded if it is predicted to arrive before the computation reaches it. So if predictions
are right, a request never waits for a load. A load is not started if it would take longer than
computing all blocks.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

START_LATENCY_S = 0.01
"""Assumed latency in seconds to the first byte of a load, for a tier that is not measured yet."""
START_BYTES_PER_S = 100e6
"""Assumed bandwidth of a tier that is not measured yet, typical of a slow network."""
PROBE_S = 30.0
"""Seconds without a load after which the speed of a tier is measured again."""

_UNMEASURED_S = 1e9
"""Assumed compute time in seconds while the compute speed is unknown. Any load is faster."""
_WEIGHT = 0.5
"""Weight of the newest load in the estimates, on a logarithmic scale.

The first load replaces the initial values.
"""
_MAX_RATIO = 1e4
"""Maximum ratio between the measured and the predicted time of one load, in either direction."""
_SIZES_FACTOR = 4.0
"""Minimum ratio of load sizes from which latency and bandwidth can be told apart.

The ratio is that of the largest to the smallest recent load.
"""
_SIZES_FADE = 1.15
"""Factor by which each load moves the largest and smallest sizes towards its own size."""


class LoadTime(NamedTuple):
    """Predicted time of a load from one tier that begins now."""

    start_s: float
    """Seconds until the first byte."""
    byte_s: float
    """Seconds per byte."""

    def seconds(self, num_bytes: int) -> float:
        """Predict the seconds from now to the end of a load."""
        return self.start_s + num_bytes * self.byte_s


class LoadSpeed:
    """Latency and bandwidth of one tier, estimated from its loads. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with the assumed latency and bandwidth of a tier that is not measured yet.

        Args:
            clock: returns the time in seconds.
        """
        self._clock = clock
        self.latency_s = START_LATENCY_S
        """Seconds until the first byte of a load."""
        self._byte_s = 1 / START_BYTES_PER_S
        self._is_measured = False
        self._smallest = math.inf
        self._largest = 0.0
        """Smallest and largest size of recent loads in bytes. Both decay towards the newest."""
        self._done_at = clock()
        self._next_number = 0
        self._under_way: dict[int, tuple[int, float]] = {}
        """Size in bytes and start time of each running load, by load number, oldest first."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth in bytes per second."""
        return 1 / self._byte_s

    @property
    def is_to_measure(self) -> bool:
        """Whether a probe load should measure the tier's speed.

        No blocks are loaded from a tier that is estimated to be slow. Without a probe, the estimate
        would never change.
        """
        is_known = self._is_measured and self._clock() - self._done_at < PROBE_S
        return not is_known and not self._under_way

    @property
    def is_of_one_size(self) -> bool:
        """Whether recent loads had similar sizes, so latency and bandwidth are inseparable."""
        return self._largest < _SIZES_FACTOR * self._smallest

    def predict(self) -> LoadTime:
        """Predict the time of a load that begins now, after the running loads.

        A load that is already late is predicted to take as much longer as it is late now.
        """
        return LoadTime(self._queue_s() + self.latency_s, self._byte_s)

    def begin(self, num_bytes: int) -> int:
        """Record the start of a load, and return its number."""
        self._next_number += 1
        self._under_way[self._next_number] = (num_bytes, self._clock())
        return self._next_number

    def finish(self, number: int, num_loaded: int) -> None:
        """Record the end of a load that has transferred `num_loaded` bytes."""
        now = self._clock()
        num_bytes, began_at = self._under_way.pop(number)
        # Loads run one after another, so the time before the last one ended is not this load's.
        seconds = max(0.0, now - max(began_at, self._done_at))
        self._done_at = now

        latency_s = self.latency_s
        byte_s = self._byte_s
        predicted = latency_s + num_loaded * byte_s
        # A load that fails at once, for example at a busy tier, does not show a fast tier.
        least = 1 / _MAX_RATIO if num_loaded >= num_bytes else 1.0
        ratio = min(max(seconds / predicted, least), _MAX_RATIO)

        if num_loaded:
            self._smallest = min(num_loaded, self._smallest * _SIZES_FADE)
            self._largest = max(num_loaded, self._largest / _SIZES_FADE)

        weight = _WEIGHT if self._is_measured else 1.0
        # Each estimate is corrected in proportion to its share of the predicted time.
        own = latency_s / predicted
        rest = 1 - latency_s / predicted
        weight /= own**2 + rest**2
        self.latency_s = latency_s * ratio ** (weight * own)
        self._byte_s = byte_s * ratio ** (weight * rest)
        self._is_measured = True

    def _queue_s(self) -> float:
        """Predict the seconds until all running loads have ended."""
        if not self._under_way:
            return 0.0
        _, oldest_at = next(iter(self._under_way.values()))
        elapsed = self._clock() - max(oldest_at, self._done_at)
        num_bytes = sum(num_bytes for num_bytes, _ in self._under_way.values())
        remaining = len(self._under_way) * self.latency_s + num_bytes * self._byte_s
        return abs(remaining - elapsed)


class ComputeSpeed(NamedTuple):
    """The prefill speed and the prefill backlog."""

    tokens_per_s: float = 0.0
    """Tokens per second, 0 before the first measurement."""
    backlog_tokens: int = 0

    def seconds(self, num_tokens: int) -> float:
        """Predict the seconds to compute tokens.

        If the speed is unknown, the prediction is longer than any load.
        """
        return num_tokens / self.tokens_per_s if self.tokens_per_s else _UNMEASURED_S

    @property
    def start_s(self) -> float:
        """Seconds until the computation of a prompt that arrives now can begin."""
        return self.seconds(self.backlog_tokens)


class Needed(NamedTuple):
    """One block that a request lacks, and the tier that has it."""

    tier: str = ""
    """Tier to load the block from, or "" if the block is in host memory or being loaded."""
    ready_s: float = 0.0
    """Seconds until a block that is being loaded arrives."""


def seconds_to_load(
    blocks: Sequence[Needed],
    predict: Callable[[str], Callable[[int], float]],
    extra: Sequence[Needed] = (),
) -> list[float]:
    """Predict for each block the seconds until this block and all later blocks have arrived.

    Args:
        blocks: the blocks that a request lacks, in order.
        predict: called once per tier. Returns a function that maps a number of the tier's blocks to
            the seconds that loading them takes.
        extra: blocks that must also arrive before the others can be used.

    Returns:
        The seconds for each block, in descending order, followed by 0.0 for loading no block.
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
    """Return the number of leading blocks to compute while the rest is loaded.

    The result is the smallest number of leading blocks whose computation hides the load of the
    rest. The request never takes longer than if it computed all blocks, and never waits for a load.

    Args:
        load_s: the result of `seconds_to_load`.
        compute_s: seconds to compute a block.
        start_s: seconds until the computation of the first block can begin.
    """
    for num_computed, seconds in enumerate(load_s):
        if seconds <= start_s + num_computed * compute_s:
            return num_computed
    return len(load_s) - 1
