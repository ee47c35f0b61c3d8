"""The bounded queue in which requests wait for memory.

The queue is divided into subqueues. Each pool has one subqueue, and an additional one for each
adapter that only some of its engines have. Normally, only the first request (the head) of a
subqueue is woken when memory becomes free. Requests are therefore served in order
(`policy/fair_queue.py`), and a burst of headroom reports triggers only one decision per subqueue.
While the head is blocked, requests behind it may run first (backfill) if they fit and will finish
before the head could start (`policy/decide.py`). At most `backfill` requests may overtake each
head. A full queue is also shared fairly between tenants (`queue_bounds.py`).

The heads of a pool's subqueues are ordered by priority and arrival. For example, if the head of an
adapter's subqueue comes before a request that can use any engine, that request avoids the engines
with the adapter, unless it may overtake the head there. Conversely, a request for an adapter waits
behind an earlier head that can use any engine.
"""

import asyncio
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ullage_common.config.router import QueueSection
from ullage_router.admission.queue_bounds import QueueBounds
from ullage_router.policy.fair_queue import RESUMED, FairEntry, FairQueue

LOOKED_AHEAD = 16
"""Maximum number of requests at the front of a subqueue that are considered for backfill."""

LineKey = tuple[str, str]
"""A subqueue's key: (pool, adapter).

The adapter is empty for requests that can use any engine in the pool.
"""


@dataclass(frozen=True, slots=True)
class Waiter:
    """The properties of a waiting request, with times in seconds on the monotonic clock."""

    size: int
    """Predicted size of the request's KV cache, in bytes."""
    arrival: float
    deadline: float
    """Time by which the request's first token must arrive."""
    prompt_bytes: int = 0
    """Router memory that the request holds while it waits, in bytes."""
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    is_charged: bool = False
    """Whether an engine has already refused or lost the request.

    If so, the request was already charged to its tenant's fair share of the queue, and is not
    charged again.
    """
    adapter: str = ""
    """The adapter that the request needs if some engines lack it (empty otherwise)."""


class QueueEntry:
    """A request's place in the queue. Call `leave` once the request is served or abandoned."""

    def __init__(self, queue: "RequestQueue", pool: str, waiter: Waiter, place: FairEntry) -> None:
        self.pool = pool
        self.waiter = waiter
        self.place = place
        self.is_evicted = False
        """Whether the entry was evicted to make room for another request."""
        self.num_passed = 0
        """Number of requests that overtook this entry while it was at the head of its subqueue."""
        self._queue = queue
        self._event = asyncio.Event()

    async def wait_turn(self, timeout_s: float) -> bool:
        """Wait until the entry is woken, and return False on timeout.

        An entry is woken in three cases: it is at the head of its subqueue and memory may be
        available, it may be able to overtake the head, or it was evicted.
        """
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def wake(self) -> None:
        """Wake the task that waits in `wait_turn`."""
        self._event.set()

    @property
    def line(self) -> LineKey:
        """The key of the subqueue in which the entry waits."""
        return self.pool, self.waiter.adapter

    @property
    def is_head(self) -> bool:
        """Whether the entry is the head of its subqueue."""
        return self._queue.head(self.line) is self

    def serve(self) -> None:
        """Leave the queue, because an engine in the entry's pool is about to serve the request."""
        self._queue.remove(self, served=True)

    def leave(self) -> None:
        """Leave the queue. Repeated calls have no effect."""
        self._queue.remove(self)


class RequestQueue:
    """The subqueues of all pools, which share the same size limits.

    Args:
        section: the size limits, the rate at which a waiting request gains priority, and the number
            of requests that may overtake each head.
    """

    def __init__(self, section: QueueSection) -> None:
        self._section = section
        self._bounds = QueueBounds(section)
        self._lines: dict[LineKey, FairQueue] = {}
        self._entries: dict[int, QueueEntry] = {}
        """Queue entries by their sequence number."""
        self._numbers: Iterator[int] = itertools.count()
        self.passed = 0
        """Number of requests that have overtaken the head of a subqueue so far."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Total predicted KV bytes of all queue entries."""
        return self._bounds.total.size

    @property
    def prompt_bytes(self) -> int:
        """Router memory in use by the prompts of all queue entries, in bytes."""
        return self._bounds.total.prompt_bytes

    def join(self, pool: str, waiter: Waiter) -> QueueEntry:
        """Add a request to its pool's subqueue, and wake it immediately if it is first in line.

        Raises:
            QueueFull: the queue is full, and no queued request may be evicted instead.
        """
        for evicted in self._bounds.make_room(waiter):
            evicted.is_evicted = True
            self._leave_line(evicted)
            evicted.wake()

        entry = QueueEntry(self, pool, waiter, _place(waiter, next(self._numbers)))
        line = self._lines.setdefault(entry.line, FairQueue(self._section.aging))
        line.add(entry.place)
        self._entries[entry.place.number] = entry
        self._bounds.add(entry)
        if line.head is entry.place:
            entry.wake()
        return entry

    def remove(self, entry: QueueEntry, served: bool = False) -> None:
        """Remove an entry if it is still queued. If it was a head, wake all heads of its pool."""
        if entry.place.number in self._entries:
            self._bounds.remove(entry)
            self._leave_line(entry, served)

    def _leave_line(self, entry: QueueEntry, served: bool = False) -> None:
        del self._entries[entry.place.number]
        line = self._lines[entry.line]
        was_head = line.head is entry.place
        (line.serve if served else line.remove)(entry.place)
        if entry.waiter.adapter and not len(line):  # the adapter may never be used again
            del self._lines[entry.line]
        if was_head:
            for (pool, _), other in self._lines.items():
                if pool == entry.pool:
                    self._wake_head(other)

    def wake(self) -> None:
        """Wake the head of every subqueue, because memory or an engine may now be available."""
        for line in self._lines.values():
            self._wake_head(line)

    def ahead(
        self, priority: int, entry: QueueEntry | None = None, adapter: str = ""
    ) -> Mapping[str, int]:
        """Return the total KV bytes that earlier requests are waiting for, by pool.

        A subqueue counts only if its requests can run on every engine that this request could use.
        Pools in which this request is next are omitted. Requests with the same priority all count
        as earlier, because each arrival may change their order. An answer that lost its engine
        (priority RESUMED) has only others of its kind ahead.

        Args:
            priority: the request's priority.
            entry: the request's place, or None if the request is not in the queue.
            adapter: the adapter that the request needs if some engines lack it (empty otherwise).
        """
        result: dict[str, int] = {}
        for head in self._heads_before(priority, entry, adapter):
            is_here = entry is not None and entry.line == head.line and not entry.is_evicted
            own = entry.place.size if entry and is_here else 0
            size = self._lines[head.line].size_from(priority) - own
            result[head.pool] = result.get(head.pool, 0) + size
        return result

    def head(self, key: LineKey) -> QueueEntry | None:
        """Return the first entry of a subqueue, or None if the subqueue is empty."""
        line = self._lines.get(key)
        place = line.head if line else None
        return self._entries[place.number] if place else None

    def claims(
        self, entry: QueueEntry | None = None, adapter: str = "", priority: int = 0
    ) -> Mapping[LineKey, int]:
        """Return the bytes to leave free for earlier requests with other adapters, by subqueue.

        Only the first request (the head) of each subqueue counts, and only if it comes before this
        request. Its memory should be left free on the engines that have its adapter. A value of 0
        means that the head must not be overtaken again.
        """
        keys = [key for key in self._lines if key[1] not in ("", adapter)]
        return {
            head.line: 0 if self._is_full(head) else head.place.size
            for head in self._heads(priority, entry, keys)
        }

    def passable(
        self, entry: QueueEntry | None = None, adapter: str = "", priority: int = 0
    ) -> Mapping[str, int]:
        """Return the size of the smallest head that the request may overtake, in KV bytes by pool.

        Overtaking the head of a subqueue is called backfill. The pools are the same as in `ahead`,
        except that a pool is omitted if one of its heads must not be overtaken again.
        """
        sizes: dict[str, int] = {}
        full = set()
        for head in self._heads_before(priority, entry, adapter):
            sizes[head.pool] = min(head.place.size, sizes.get(head.pool, head.place.size))
            if self._is_full(head):
                full.add(head.pool)
        return {pool: size for pool, size in sizes.items() if pool not in full}

    def on_passed(
        self,
        pool: str,
        entry: QueueEntry | None,
        adapters: Collection[str] = (),
        priority: int = 0,
    ) -> None:
        """Record which subqueue heads are overtaken when a request gets memory on an engine.

        Args:
            pool: the engine's pool.
            entry: the request's place, or None if the request never waited.
            adapters: the engine's adapters.
            priority: the request's priority.
        """
        names = ("", *adapters)
        keys = [key for key in self._lines if key[0] == pool and key[1] in names]
        passed = list(self._heads(priority, entry, keys))
        for head in passed:
            head.num_passed += 1
        self.passed += bool(passed)

    def _is_full(self, head: QueueEntry) -> bool:
        """Return whether a head has been overtaken so often that it must not be overtaken again."""
        return head.num_passed >= self._section.backfill

    def _heads_before(
        self, priority: int, entry: QueueEntry | None, adapter: str
    ) -> Iterator[QueueEntry]:
        """Yield the heads that come before a request and compete with it for every engine.

        Such a head can run on every engine that the request could use.
        """
        keys = [key for key in self._lines if key[1] in ("", adapter)]
        return self._heads(priority, entry, keys)

    def _heads(
        self, priority: int, entry: QueueEntry | None, keys: Iterable[LineKey]
    ) -> Iterator[QueueEntry]:
        """Yield the heads of the given subqueues that precede a request.

        Heads are ordered only within a pool. A head in another pool therefore always counts as
        preceding the request, unless that is an answer that lost its engine.

        Args:
            priority: the request's priority.
            entry: the request's entry, or None if the request is not queued and therefore comes
                after all requests that are, or after all of its priority if that is RESUMED.
            keys: the keys of the subqueues.
        """
        for key in keys:
            if (head := self.head(key)) is None:
                continue
            if priority >= RESUMED > head.place.priority:
                continue
            if entry is None or head.pool != entry.pool or key == entry.line:
                is_before = head is not entry
            else:
                line = self._lines[key]
                is_before = line.claim(head.place) > line.claim(entry.place)
            if is_before:
                yield head

    def wake_followers(self, head: QueueEntry, available: int) -> None:
        """Wake requests behind a blocked head that fit in `available` bytes and might overtake it.

        Args:
            available: free bytes on the engine that has the most free memory in the pool.
        """
        if not self._is_full(head) and available > 0:
            for place in self._lines[head.line].first(LOOKED_AHEAD):
                if place is not head.place and place.size <= available:
                    self._entries[place.number].wake()

    def lengths(self, priority: int | None = None) -> Mapping[str, int]:
        """Return the number of waiting requests by pool, or of those of at least a priority."""
        result: dict[str, int] = {}
        for (pool, _), line in self._lines.items():
            length = len(line) if priority is None else line.len_from(priority)
            result[pool] = result.get(pool, 0) + length
        return result

    def waits(self) -> Mapping[str, tuple[int, int, float]]:
        """Return (request count, KV bytes, first arrival time) by pool, for pools with requests."""
        result: dict[str, tuple[int, int, float]] = {}
        for entry in self._entries.values():
            number, size, oldest = result.get(entry.pool, (0, 0, math.inf))
            waiter = entry.waiter
            result[entry.pool] = (number + 1, size + waiter.size, min(oldest, waiter.arrival))
        return result

    def sizes(self) -> Mapping[str, int]:
        """Return the predicted KV bytes of each tenant's queued requests."""
        return self._bounds.sizes()

    def _wake_head(self, line: FairQueue) -> None:
        if line.head is not None:
            self._entries[line.head.number].wake()

    def check_integrity(self) -> None:
        """Assert that the subqueues and the resource totals are consistent with the entries."""
        assert len(self) == sum(map(len, self._lines.values()))
        assert len(self) == self._bounds.total.requests
        self._bounds.check_integrity()
        for line in self._lines.values():
            line.check_integrity()


def _place(waiter: Waiter, number: int) -> FairEntry:
    return FairEntry(
        number=number,
        tenant=waiter.tenant,
        weight=waiter.weight,
        priority=waiter.priority,
        arrival=waiter.arrival,
        deadline=waiter.deadline,
        size=waiter.size,
        cost=0 if waiter.is_charged else waiter.size,
    )
