"""Whether to load blocks or to compute them: what a load takes, and which blocks are worth one.

Of the blocks that a request lacks the first ones are computed while the last ones are loaded, and
as many are loaded as are there when the computation comes to them. So nothing is waited for, as far
as loads take what is predicted, and what takes longer than computing everything is not loaded.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

START_LATENCY_S = 0.01
"""Seconds until the first byte of a load, of tiers that nothing was loaded from yet."""
START_BYTES_PER_S = 100e6
"""Bandwidth of tiers that nothing was loaded from yet: a slow network's."""
RECOVERY_S = 30.0
"""Seconds in which a tier that is slower than the starting values and left alone comes half-way
back to them, so that it is tried again."""

_UNMEASURED_S = 1e9
"""Seconds that computing takes whose speed is not measured: any load is quicker."""
_WEIGHT = 0.5
"""Share of the newest load in the estimates, on a scale of ratios; the first one outweighs the
starting values."""
_MAX_RATIO = 1e4
"""Bound of how much longer or shorter than predicted one load is taken to have been."""
_SIZES_FACTOR = 4.0
"""How much larger than the smallest the largest of some loads is at least whose times tell latency
and bandwidth apart."""
_SIZES_FADE = 1.15
"""How much nearer both come to the newest load with each."""


class LoadSpeed:
    """Latency and bandwidth of one tier's loads, estimated from those that were done; for one
    thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._latency_s = START_LATENCY_S
        self._byte_s = 1 / START_BYTES_PER_S
        self._is_measured = False
        self._smallest, self._largest = math.inf, 0.0
        """Sizes of recent loads, bytes, which fade towards the newest."""
        self._measured_at = clock()
        self._done_at = clock()
        self._next_number = 0
        self._under_way: dict[int, tuple[int, float]] = {}
        """Bytes of the loads under way and when they began, by number, the oldest first."""

    @property
    def latency_s(self) -> float:
        """Seconds until the first byte of a load."""
        return self._recovered(self._latency_s, START_LATENCY_S)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth, bytes a second."""
        return 1 / self._recovered(self._byte_s, 1 / START_BYTES_PER_S)

    @property
    def is_of_one_size(self) -> bool:
        """Whether recent loads were much of one size, so that only their sum of latency and
        transfer is known."""
        return self._largest < _SIZES_FACTOR * self._smallest

    def load_s(self, num_bytes: int) -> float:
        """Predicts the seconds from now to the end of a load that begins now, behind those that are
        under way. Of one that is late it predicts that it takes as long again as it is late."""
        return self._queue_s() + self._own_s(num_bytes)

    def begin(self, num_bytes: int) -> int:
        """Notes that a load begins; returns its number."""
        if not self._under_way:
            self._latency_s, self._byte_s = self.latency_s, 1 / self.bytes_per_s
            self._measured_at = self._clock()
        self._next_number += 1
        self._under_way[self._next_number] = (num_bytes, self._clock())
        return self._next_number

    def finish(self, number: int, num_loaded: int) -> None:
        """Notes that a load has ended and has brought so many bytes."""
        now = self._clock()
        num_bytes, began_at = self._under_way.pop(number)
        # Loads follow one another: what it waited for others says nothing of its own speed.
        seconds = max(0.0, now - max(began_at, self._done_at))
        self._done_at = now
        latency_s, byte_s = self._latency_s, self._byte_s
        predicted = latency_s + num_loaded * byte_s
        # What fails at once, such as at a tier that is busy, is not quick.
        least = 1 / _MAX_RATIO if num_loaded >= num_bytes else 1.0
        ratio = min(max(seconds / predicted, least), _MAX_RATIO)
        if num_loaded:
            self._smallest = min(num_loaded, self._smallest * _SIZES_FADE)
            self._largest = max(num_loaded, self._largest / _SIZES_FADE)
        weight = _WEIGHT if self._is_measured else 1.0
        # Each estimate answers for the error by its share of what was predicted.
        own, rest = latency_s / predicted, 1 - latency_s / predicted
        weight /= own**2 + rest**2
        self._latency_s = latency_s * ratio ** (weight * own)
        self._byte_s = byte_s * ratio ** (weight * rest)
        self._is_measured, self._measured_at = True, now

    def _own_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def _queue_s(self) -> float:
        """Predicts the seconds until all loads under way have ended."""
        if not self._under_way:
            return 0.0
        _, oldest_at = next(iter(self._under_way.values()))
        elapsed = self._clock() - max(oldest_at, self._done_at)
        remaining = sum(self._own_s(num_bytes) for num_bytes, _ in self._under_way.values())
        return abs(remaining - elapsed)

    def _recovered(self, measured: float, start: float) -> float:
        """Returns what an estimate has come to since the newest measurement; less is better."""
        if measured <= start or self._under_way:
            return measured
        idle_s = max(0.0, self._clock() - self._measured_at)
        return start + (measured - start) * math.exp2(-idle_s / RECOVERY_S)


class ComputeSpeed(NamedTuple):
    """How fast prompts are computed, and how many wait for that."""

    tokens_per_s: float = 0.0
    """0: not measured yet."""
    backlog_tokens: int = 0

    def seconds(self, num_tokens: int) -> float:
        """Predicts the seconds to compute tokens; of speeds that are not measured it says that
        loading is quicker."""
        return num_tokens / self.tokens_per_s if self.tokens_per_s else _UNMEASURED_S

    @property
    def start_s(self) -> float:
        """Seconds until the computation of a prompt that comes now can begin."""
        return self.seconds(self.backlog_tokens)


class Needed(NamedTuple):
    """One block that a request lacks, and how it could come."""

    tier: str = ""
    """The tier to load it from; empty: it is here, or under way."""
    ready_s: float = 0.0
    """Seconds until it is here, if it is under way."""


def seconds_to_load(
    blocks: Sequence[Needed], load_s: Callable[[str, int], float], extra: Sequence[Needed] = ()
) -> list[float]:
    """Predicts for each block the seconds until it and all behind it are here.

    Args:
        blocks: those that a request lacks, in their order.
        load_s: gives the seconds that so many blocks of a tier take to load.
        extra: blocks without which the others are of no use.

    Returns:
        The seconds of each block, never more than those of the one before; then 0.0, of none.
    """
    counts: dict[str, int] = {}
    latest = 0.0
    seconds = []
    for block in [*extra, *reversed(blocks)]:
        latest = max(latest, block.ready_s)
        if block.tier:
            counts[block.tier] = counts.get(block.tier, 0) + 1
            latest = max(latest, load_s(block.tier, counts[block.tier]))
        seconds.append(latest)
    return [*reversed(seconds[len(extra) :]), 0.0]


def split(load_s: Sequence[float], compute_s: float, start_s: float = 0.0) -> int:
    """Divides blocks into first ones to compute and last ones to load; returns the number of the
    first ones.

    As few are computed as have the others there when the last of them is computed: the request is
    never later than if it computed all, and waits for no load.

    Args:
        load_s: what `seconds_to_load` returns.
        compute_s: seconds to compute a block.
        start_s: seconds until the first one's computation can begin.
    """
    for num_computed, seconds in enumerate(load_s):
        if seconds <= start_s + num_computed * compute_s:
            return num_computed
    return len(load_s) - 1
