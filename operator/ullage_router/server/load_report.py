"""Reports each pool's load, by which the operator scales the pools.

The load consists of memory use, queues and first tokens that arrived late. Each router reports what
it has observed itself, and the operator adds up the reports of all routers. A report also contains
values that are the same for all routers, because the engines report them. For these, the operator
uses the report of the router that sees the most engines.
"""

import time
from collections.abc import Callable

from ullage_common.config.router import RouterConfig
from ullage_common.wire.load_report import PoolReport
from ullage_router.admission.queue import RequestQueue
from ullage_router.admission.scale_to_zero import ScaleToZero
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.telemetry.record import RequestRecord

WINDOW_S = 60
"""Length of the sliding window over which first tokens are counted, in seconds."""
_SLOT_S = 10
"""Length of each of the window's time slots, in seconds."""


class _FirstTokens:
    """Counts one pool's first tokens in a sliding window that is divided into time slots."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, int]] = {}

    def count(self, is_late: bool, now: float) -> None:
        slot = int(now // _SLOT_S)
        answered, late = self._slots.get(slot, (0, 0))
        self._slots[slot] = (answered + 1, late + is_late)
        self._remove_old(slot)

    def sums(self, now: float) -> tuple[int, int]:
        """Return the number of first tokens in the window, and how many of them were late."""
        self._remove_old(int(now // _SLOT_S))
        answered = sum(count for count, _ in self._slots.values())
        late = sum(count for _, count in self._slots.values())
        return answered, late

    def _remove_old(self, slot: int) -> None:
        for old in [s for s in self._slots if s <= slot - WINDOW_S // _SLOT_S]:
            del self._slots[old]


class LoadReporter:
    """Counts the first tokens of each pool, and reports each pool's load.

    Args:
        clock: returns monotonic time in seconds.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        queue: RequestQueue,
        scale_to_zero: ScaleToZero,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objective_s = config.slo.ttft_p95
        self._engines = engines
        self._queue = queue
        self._scale_to_zero = scale_to_zero
        self._clock = clock
        self._pools = [pool.name for pool in config.pools]
        self._tokens = {name: _FirstTokens() for name in self._pools}
        self._used = dict.fromkeys(self._pools, clock())

    def on_end(self, record: RequestRecord) -> None:
        """Count the first token of a request that has ended.

        A request that was held while its pool was being woken is not counted, because its delay
        does not mean that there are too few engines.
        """
        pool = record.decision.pool
        if pool not in self._tokens:
            return
        now = self._used[pool] = self._clock()
        # A held request was late because its pool had to wake, not because engines are too few.
        if record.ttft_s is not None and not record.held_s:
            self._tokens[pool].count(record.ttft_s > self._objective_s, now)

    def report(self) -> dict[str, PoolReport]:
        """Return the current load report of each pool."""
        waits = self._queue.waits()
        return {pool: self._pool(pool, *waits.get(pool, (0, 0, 0.0))) for pool in self._pools}

    async def wait_until_wanted(self, within_s: float) -> None:
        """Wait until a pool that is scaled to zero is in demand, for at most `within_s` seconds."""
        await self._scale_to_zero.queue.wait_until_wanted(self._scale_to_zero.pools, within_s)

    def _pool(self, pool: str, queued: int, size: int, oldest: float) -> PoolReport:
        now = self._clock()
        engines = [e for e in self._engines.all() if e.pool == pool]
        ready = [e for e in engines if e.state == "ready"]
        requests = sum(map(_requests, ready))
        cold_starts = self._scale_to_zero.queue
        if requests or queued or cold_starts.wanted(pool) or any(e.inflight for e in engines):
            self._used[pool] = now

        answered, late = self._tokens[pool].sums(now)
        return PoolReport(
            ready=len(ready),
            capacity_bytes=sum(e.headroom.kv_pool_bytes for e in ready if e.headroom),
            headroom_bytes=sum(e.headroom.headroom_bytes for e in ready if e.headroom),
            engine_requests=requests,
            credit_bytes=sum(e.credit_bytes for e in ready),
            queued=queued,
            queue_bytes=size,
            queue_s=round(now - oldest, 3) if queued else 0.0,
            answered=answered,
            late=late,
            held=cold_starts.held(pool),
            wanted=cold_starts.wanted(pool),
            idle_s=round(now - self._used[pool], 3),
        )


def _requests(engine: Engine) -> int:
    report = engine.headroom
    return report.requests_running + report.requests_waiting if report else 0
