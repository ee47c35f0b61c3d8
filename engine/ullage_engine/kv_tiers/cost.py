"""Decides which missing blocks to load and which to compute, based on predicted load times.

A request's missing blocks are split at one point: the blocks before it are computed while those
after it are loaded. A block is loaded if it is predicted to arrive before the computation would
reach it. If predictions are accurate, a request never waits for a load. A load is not started if it
would take longer than computing all blocks.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

START_LATENCY_S = 0.01
"""Assumed time in seconds to the first byte of a load, until the tier has been measured."""
START_BYTES_PER_S = 100e6
"""Assumed bandwidth until the tier has been measured, which is typical of a slow network."""
PROBE_S = 30.0
"""Seconds without a load after which a tier's speed is measured again."""

_UNMEASURED_S = 1e9
"""Compute time in seconds to assume while the speed is unknown. It exceeds any load time."""
_WEIGHT = 0.5
"""Weight of the newest load when estimates are updated, on a logarithmic scale.

The first load replaces the assumed initial values entirely.
"""
_MAX_RATIO = 1e4
"""Cap on the ratio between the measured and the predicted time of a load, in either direction."""
_SIZES_FACTOR = 4.0
"""Minimum ratio of the largest to the smallest load that tells latency from bandwidth.

If all recent loads are of similar size, a slow load may be due to either high latency or low
bandwidth.
"""
_SIZES_FADE = 1.15
"""Factor by which each load moves the recorded largest and smallest sizes closer together."""


class LoadTime(NamedTuple):
    """The predicted duration of a load from one tier, if the load started now."""

    start_s: float
    """Seconds until the first byte arrives."""
    byte_s: float
    """Seconds that each byte takes to transfer."""

    def seconds(self, num_bytes: int) -> float:
        """Predict how many seconds a load of `num_bytes` takes to complete."""
        return self.start_s + num_bytes * self.byte_s


class LoadSpeed:
    """One tier's latency and bandwidth, estimated from past loads. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with the latency and bandwidth assumed for an unmeasured tier.

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
        """Size of the largest recent load in bytes. It decays, so that old loads are forgotten."""
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
        """Whether the tier's speed should be measured with a probe load.

        Blocks are never loaded from a tier that is estimated to be slow. Without probes, the
        estimate would therefore never recover.
        """
        is_known = self._is_measured and self._clock() - self._done_at < PROBE_S
        return not is_known and not self._under_way

    @property
    def is_of_one_size(self) -> bool:
        """Whether recent loads are too similar in size to tell latency from bandwidth."""
        return self._largest < _SIZES_FACTOR * self._smallest

    def predict(self) -> LoadTime:
        """Predict the duration of a load that starts now and waits for the running loads.

        If the running loads are overdue, they are expected to need that much time again. For
        example, loads that are 2 s late are expected to finish in another 2 s.
        """
        return LoadTime(self._queue_s() + self.latency_s, self._byte_s)

    def begin(self, num_bytes: int) -> int:
        """Record the start of a load, and return the number that identifies it."""
        self._next_number += 1
        self._under_way[self._next_number] = (num_bytes, self._clock())
        return self._next_number

    def finish(self, number: int, num_loaded: int) -> None:
        """Record the end of a load of `num_loaded` bytes, and update the estimates."""
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
        """Predict the seconds until all running loads have completed."""
        if not self._under_way:
            return 0.0
        _, oldest_at = next(iter(self._under_way.values()))
        elapsed = self._clock() - max(oldest_at, self._done_at)
        num_bytes = sum(num_bytes for num_bytes, _ in self._under_way.values())
        remaining = len(self._under_way) * self.latency_s + num_bytes * self._byte_s
        return abs(remaining - elapsed)


class ComputeSpeed(NamedTuple):
    """The prefill speed and backlog, from which the time for computing tokens is predicted."""

    tokens_per_s: float = 0.0
    """Tokens per second, or 0 before the first measurement."""
    backlog_tokens: int = 0

    def seconds(self, num_tokens: int) -> float:
        """Predict the seconds needed to compute `num_tokens` tokens.

        If the speed is unknown, the result exceeds any load time.
        """
        return num_tokens / self.tokens_per_s if self.tokens_per_s else _UNMEASURED_S

    @property
    def start_s(self) -> float:
        """Seconds until prefill could start for a prompt that arrives now."""
        return self.seconds(self.backlog_tokens)


class Needed(NamedTuple):
    """A block that a request needs but does not have yet, and where to load it from."""

    tier: str = ""
    """Tier to load the block from, or "" if it is in host memory or already being loaded."""
    ready_s: float = 0.0
    """Seconds until the block arrives if it is already being loaded, or 0 otherwise."""


def seconds_to_load(
    blocks: Sequence[Needed],
    predict: Callable[[str], Callable[[int], float]],
    extra: Sequence[Needed] = (),
) -> list[float]:
    """Predict, for each block, how long it takes to load that block and all later blocks.

    Args:
        blocks: the request's missing blocks, in order.
        predict: called once per tier. Returns a function that predicts the seconds to load a given
            number of the tier's blocks.
        extra: additional blocks that must arrive before any of the others can be used.

    Returns:
        One entry per block, in the order of the blocks, followed by 0.0 for loading nothing. The
        entries never increase.
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

    This is the smallest number of blocks whose computation takes at least as long as loading the
    rest. The request therefore never waits for a load, and is never slower than if it computed all
    blocks.

    Args:
        load_s: the result of `seconds_to_load`.
        compute_s: seconds to compute one block.
        start_s: seconds until the computation of the first block can begin.
    """
    for num_computed, seconds in enumerate(load_s):
        if seconds <= start_s + num_computed * compute_s:
            return num_computed
    return len(load_s) - 1
