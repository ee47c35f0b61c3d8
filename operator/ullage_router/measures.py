"""What the operator scales pools by: the memory that they have and lack, and how late they are.

One report of this process; whoever has those of all processes and routers adds them up. What
engines tell every router alike is marked: of that the largest number counts.
"""

import time
from collections.abc import Callable

from ullage_router.config import RouterConfig
from ullage_router.engine import Engine
from ullage_router.engines import Engines
from ullage_router.queue import WaitingRoom
from ullage_router.stats import Record, route_of
from ullage_router.wake.wakes import Wakes
from ullage_rpc.measures import PoolReport

WINDOW_S = 60
"""Over which first tokens are counted."""
_SLOT_S = 10


class _FirstTokens:
    """Of one pool, lately."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, int]] = {}

    def count(self, is_late: bool, now: float) -> None:
        slot = int(now // _SLOT_S)
        answered, late = self._slots.get(slot, (0, 0))
        self._slots[slot] = (answered + 1, late + is_late)
        self._forget(slot)

    def sums(self, now: float) -> tuple[int, int]:
        """(answered, late)"""
        self._forget(int(now // _SLOT_S))
        return sum(a for a, _ in self._slots.values()), sum(
            late for _, late in self._slots.values()
        )

    def _forget(self, slot: int) -> None:
        for old in [s for s in self._slots if s <= slot - WINDOW_S // _SLOT_S]:
            del self._slots[old]


class Measures:
    """Counts first tokens by pool, and reports.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        room: WaitingRoom,
        wakes: Wakes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objective_s = config.slo.ttft_p95
        self._engines, self._room, self._wakes, self._clock = engines, room, wakes, clock
        self._pools = [pool.name for pool in config.pools]
        self._by_route = {route_of(name): name for name in self._pools}
        self._tokens = {name: _FirstTokens() for name in self._pools}
        self._used = dict.fromkeys(self._pools, clock())

    def ended(self, record: Record) -> None:
        """A request got its last word."""
        pool = self._by_route.get(record.route)
        if pool is None:
            return
        now = self._used[pool] = self._clock()
        # What was held says how long a pool takes to wake, not that it has too few engines.
        if record.ttft_s is not None and not record.patience.held_s:
            self._tokens[pool].count(record.ttft_s > self._objective_s, now)

    def report(self) -> dict[str, PoolReport]:
        waits = self._room.waits()
        return {pool: self._pool(pool, *waits.get(pool, (0, 0, 0.0))) for pool in self._pools}

    async def wanted(self, within_s: float) -> None:
        """Returns when a pool that sleeps is wanted, or the time is over."""
        await self._wakes.holding.news(self._wakes.sleepy, within_s)

    def _pool(self, pool: str, queued: int, size: int, oldest: float) -> PoolReport:
        now = self._clock()
        engines = [e for e in self._engines.all() if e.pool == pool]
        ready = [e for e in engines if e.state == "ready"]
        requests = sum(map(_requests, ready))
        holding = self._wakes.holding
        if requests or queued or holding.wanted(pool) or any(e.inflight for e in engines):
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
            held=holding.held(pool),
            wanted=holding.wanted(pool),
            idle_s=round(now - self._used[pool], 3),
        )


def _requests(engine: Engine) -> int:
    told = engine.headroom
    return told.requests_running + told.requests_waiting if told else 0
