"""How short memory is: what other processes took of the device, and a level with hysteresis for KV
memory (docs/kv-cache.md).

The worker keeps the level, since only it sees every step; the server lowers what new requests ask
for (`ullage_engine.server.request`) and the scheduler the size of the batch.
"""

from collections.abc import Callable

import msgspec

from ullage_common.config.engine import DegradeLevel, DegradeSection
from ullage_engine.protocol.worker_state import WorkerState


def headroom_share(state: WorkerState) -> float:
    """Share of the KV pool that a new request may take, 0 to 1; 1 of a model without KV."""
    return state.headroom_bytes / state.kv_pool_bytes if state.kv_pool_bytes else 1.0


def ordered_levels(section: DegradeSection) -> tuple[DegradeLevel, ...]:
    """The configured levels, mildest first; the first one is level 1."""
    return tuple(sorted(section.pressure_levels, key=lambda level: level.below, reverse=True))


def level_at(section: DegradeSection, number: int) -> DegradeLevel | None:
    """The level of a number; None for 0, under which nothing is changed."""
    return ordered_levels(section)[number - 1] if number else None


_MEASURE_INTERVAL_S = 1.0


class FreeMemoryMonitor:
    """Follows the free memory of a device that other processes may use, too.

    The safety reserve is free when serving starts. What is missing of it later was taken by others,
    and as much of the KV pool is withheld from new requests: they would push this process or the
    others over the edge.
    """

    def __init__(
        self,
        measure: Callable[[], int],
        safety_reserve: int,
        clock: Callable[[], float],
        own: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            measure: free bytes; asked now and then at most once a second.
            safety_reserve: bytes that are to be free.
            clock: in seconds.
            own: bytes that this process's allocator has; it may grow into the reserve.
        """
        self._measure = measure
        self._own = own
        self._clock = clock
        self._measured_at = clock()
        self._own_at_start = own()
        # A device that was tighter than that when serving started stays usable.
        self._expected = min(safety_reserve, measure())
        self._missing = 0

    def missing_bytes(self) -> int:
        """Return how much less than expected was free when it was last measured."""
        if self._clock() - self._measured_at >= _MEASURE_INTERVAL_S:
            self._measured_at = self._clock()
            own_growth = self._own() - self._own_at_start
            # Not below 0: what this process gave back is free for others, and theirs if gone.
            free = self._measure() + max(0, own_growth)
            self._missing = max(0, self._expected - free)
        return self._missing


class PressureController:
    """Follows the headroom of one KV pool.

    A level is entered as soon as the headroom is less than its `below`. It is left when the
    headroom reaches `below` + `hysteresis`, or all of the pool where that is more than there is.
    """

    def __init__(self, section: DegradeSection) -> None:
        self._levels = ordered_levels(section)
        self._hysteresis = section.hysteresis
        self._number = 0
        self._batch_limit = 1.0

    @property
    def batch_share(self) -> float:
        """Share of the largest batch that may run: of the present level, or less if the server
        says so."""
        level = self._levels[self._number - 1] if self._number else None
        share = 1.0 if level is None or level.batch_share is None else level.batch_share
        return min(share, self._batch_limit)

    def limit_batch(self, share: float) -> None:
        """Bound the share of the largest batch at every level; 1 is no bound."""
        self._batch_limit = share

    def judge(self, state: WorkerState) -> WorkerState:
        """The state with the level that holds under it, and with the batch that it leaves."""
        level = self.update(headroom_share(state))
        return msgspec.structs.replace(
            state,
            pressure_level=level,
            batch_share=self.batch_share,
            batch_limit=self._batch_limit,
        )

    def update(self, headroom_share: float) -> int:
        """The level that holds from now on: 0 is none, 1 the mildest."""
        entered = sum(headroom_share < level.below for level in self._levels)
        kept = sum(
            headroom_share < min(1.0, level.below + self._hysteresis) for level in self._levels
        )
        self._number = max(entered, min(self._number, kept))
        return self._number
