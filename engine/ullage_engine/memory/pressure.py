"""Monitors free device memory and derives the pressure level of the KV pool.

Levels have hysteresis (see docs/guide/kv-cache.md). The worker tracks the level, because it is the
only process that sees every scheduler step. Depending on the level, the server limits new requests
(`ullage_engine.server.request`) and the scheduler limits the batch size.
"""

from collections.abc import Callable

import msgspec

from ullage_common.config.engine import DegradeLevel, DegradeSection
from ullage_engine.protocol.worker_state import WorkerState

_MEASURE_INTERVAL_S = 1.0


def headroom_share(state: WorkerState) -> float:
    """Return the fraction of the KV pool that new requests may use, or 1.0 if there is no pool."""
    return state.headroom_bytes / state.kv_pool_bytes if state.kv_pool_bytes else 1.0


def ordered_levels(section: DegradeSection) -> tuple[DegradeLevel, ...]:
    """Return the configured levels ordered by severity, starting with the mildest (level 1)."""
    return tuple(sorted(section.pressure_levels, key=lambda level: level.below, reverse=True))


def level_at(section: DegradeSection, number: int) -> DegradeLevel | None:
    """Return the level with this number, or None for level 0, which has no limits."""
    return ordered_levels(section)[number - 1] if number else None


class FreeMemoryMonitor:
    """Monitors the free memory of a device that other processes may also use.

    The safety reserve is free when serving starts. If part of it is missing later, other processes
    have taken it. The same amount of the KV pool is then withheld from new requests, because using
    it could make this process or the others run out of memory.
    """

    def __init__(
        self,
        measure: Callable[[], int],
        safety_reserve: int,
        clock: Callable[[], float],
        own: Callable[[], int] = lambda: 0,
    ) -> None:
        """Take the first measurement, and start monitoring the device.

        Args:
            measure: returns the free bytes. It is called now, and at most once a second from then
                on.
            safety_reserve: bytes that should be free.
            clock: returns the time in seconds.
            own: returns the bytes that this process's allocator holds. If the allocator itself
                grows into the reserve, that memory does not count as missing.
        """
        self._measure = measure
        self._own = own
        self._clock = clock
        self._measured_at = clock()
        self._own_at_start = own()
        # A device with less free memory when serving started stays usable.
        self._expected = min(safety_reserve, measure())
        self._missing = 0

    def missing_bytes(self) -> int:
        """Return how many of the bytes that should be free were missing at the last measurement."""
        if self._clock() - self._measured_at >= _MEASURE_INTERVAL_S:
            self._measured_at = self._clock()
            own_growth = self._own() - self._own_at_start
            # Not below 0, since anybody may take the bytes that this process freed.
            free = self._measure() + max(0, own_growth)
            self._missing = max(0, self._expected - free)
        return self._missing


class PressureController:
    """Derives the pressure level from the headroom of one KV pool.

    The headroom is the fraction of the pool that new requests may use. A level is entered as soon
    as the headroom drops below the level's `below` setting. It is left once the headroom reaches
    `below` + `hysteresis`, capped at 1.
    """

    def __init__(self, section: DegradeSection) -> None:
        self._levels = ordered_levels(section)
        self._hysteresis = section.hysteresis
        self._number = 0
        self._batch_limit = 1.0

    @property
    def batch_share(self) -> float:
        """Fraction of the maximum batch size that the scheduler may use.

        This is the lower of the limits set by the pressure level and by the server.
        """
        level = self._levels[self._number - 1] if self._number else None
        share = 1.0 if level is None or level.batch_share is None else level.batch_share
        return min(share, self._batch_limit)

    def limit_batch(self, share: float) -> None:
        """Cap the batch size at a fraction of its maximum, regardless of the pressure level.

        A fraction of 1 removes the cap.
        """
        self._batch_limit = share

    def judge(self, state: WorkerState) -> WorkerState:
        """Update the pressure level from the headroom that `state` reports.

        Return a copy of `state` with the new level and the resulting limits of the batch size.
        """
        level = self.update(headroom_share(state))
        return msgspec.structs.replace(
            state,
            pressure_level=level,
            batch_share=self.batch_share,
            batch_limit=self._batch_limit,
        )

    def update(self, headroom_share: float) -> int:
        """Update the level for a new headroom, given as a fraction of the KV pool.

        Returns:
            The level: 0 if there is no pressure, 1 for the mildest level.
        """
        entered = sum(headroom_share < level.below for level in self._levels)
        kept = sum(
            headroom_share < min(1.0, level.below + self._hysteresis) for level in self._levels
        )
        self._number = max(entered, min(self._number, kept))
        return self._number
