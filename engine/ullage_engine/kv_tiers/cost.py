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
PROBE_S = 30.0
"""Seconds after which the speed of a tier that nothing was loaded from is measured again."""

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


class LoadTime(NamedTuple):
    """What loads of one tier are predicted to take that begin now."""

    start_s: float
    """Seconds until the first byte."""
    byte_s: float
    """Seconds a byte."""

    def seconds(self, num_bytes: int) -> float:
        """Predicts the seconds from now to the end of a load."""
        return self.start_s + num_bytes * self.byte_s


class LoadSpeed:
    """Latency and bandwidth of one tier's loads, estimated from those that were done; for one
    thread."""

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
        """Bytes of the loads under way and when they began, by number, the oldest first."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth, bytes a second."""
        return 1 / self._byte_s

    @property
    def is_to_measure(self) -> bool:
        """Whether nothing was loaded for so long, or ever, that what is known may be wrong: what is
        said to be slow is loaded by nobody, and would be said to be slow for ever."""
        is_known = self._is_measured and self._clock() - self._done_at < PROBE_S
        return not is_known and not self._under_way

    @property
    def is_of_one_size(self) -> bool:
        """Whether recent loads were much of one size, so that only their sum of latency and
        transfer is known."""
        return self._largest < _SIZES_FACTOR * self._smallest

    def predict(self) -> LoadTime:
        """Predicts what a load takes that begins now, behind those that are under way. Of one that
        is late it predicts that it takes as long again as it is late."""
        return LoadTime(self._queue_s() + self.latency_s, self._byte_s)

    def begin(self, num_bytes: int) -> int:
        """Notes that a load begins; returns its number."""
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
        latency_s = self.latency_s
        byte_s = self._byte_s
        predicted = latency_s + num_loaded * byte_s
        # What fails at once, such as at a tier that is busy, is not quick.
        least = 1 / _MAX_RATIO if num_loaded >= num_bytes else 1.0
        ratio = min(max(seconds / predicted, least), _MAX_RATIO)
        if num_loaded:
            self._smallest = min(num_loaded, self._smallest * _SIZES_FADE)
            self._largest = max(num_loaded, self._largest / _SIZES_FADE)
        weight = _WEIGHT if self._is_measured else 1.0
        # Each estimate answers for the error by its share of what was predicted.
        own = latency_s / predicted
        rest = 1 - latency_s / predicted
        weight /= own**2 + rest**2
        self.latency_s = latency_s * ratio ** (weight * own)
        self._byte_s = byte_s * ratio ** (weight * rest)
        self._is_measured = True

    def _queue_s(self) -> float:
        """Predicts the seconds until all loads under way have ended."""
        if not self._under_way:
            return 0.0
        _, oldest_at = next(iter(self._under_way.values()))
        elapsed = self._clock() - max(oldest_at, self._done_at)
        num_bytes = sum(num_bytes for num_bytes, _ in self._under_way.values())
        remaining = len(self._under_way) * self.latency_s + num_bytes * self._byte_s
        return abs(remaining - elapsed)


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
    blocks: Sequence[Needed],
    predict: Callable[[str], Callable[[int], float]],
    extra: Sequence[Needed] = (),
) -> list[float]:
    """Predicts for each block the seconds until it and all behind it are here.

    Args:
        blocks: those that a request lacks, in their order.
        predict: gives for a tier what gives the seconds that so many of its blocks take to load;
            it is called once a tier.
        extra: blocks without which the others are of no use.

    Returns:
        The seconds of each block, never more than those of the one before; then 0.0, of none.
    """
    counts: dict[str, int] = {}
    tiers = dict[str, Callable[[int], float]]()
    latest = 0.0
    seconds = []
    for block in [*extra, *reversed(blocks)]:
        latest = max(latest, block.ready_s)
        if block.tier:
            if block.tier not in tiers:
                tiers[block.tier], counts[block.tier] = predict(block.tier), 0
            counts[block.tier] += 1
            latest = max(latest, tiers[block.tier](counts[block.tier]))
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
