"""Limits a server's concurrent RPCs and incoming requests, and divides them fairly among owners.

An RPC or a request occupies one slot. Its owner is a tenant, or a peer's address if the tenant is
unknown. Keeping an RPC idle costs the client nothing, so no owner may hold a slot for long while
other owners are waiting.
"""

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Place:
    """A slot for one RPC or request, which may be revoked in favour of another owner."""

    owner: str
    timeout: asyncio.Timeout
    """Timeout of the holder, which expires immediately when the slot is lost."""
    since: float
    """Time on the event loop's clock at which the slot was taken."""
    is_lost: bool = False

    def lose(self) -> None:
        """Revoke the slot, and expire its holder's timeout immediately."""
        self.is_lost = True
        if not self.timeout.expired():
            self.timeout.reschedule(self.since)


class _Held:
    """Keeps the occupied slots that may be revoked, grouped by owner, with the oldest first."""

    def __init__(self) -> None:
        self._by_owner: dict[str, dict[Place, None]] = {}

    def add(self, owner: str, timeout: asyncio.Timeout) -> Place:
        place = Place(owner, timeout, asyncio.get_running_loop().time())
        self._by_owner.setdefault(owner, {})[place] = None
        return place

    def remove(self, place: Place) -> bool:
        """Remove a slot, and return whether it was present."""
        of_owner = self._by_owner.get(place.owner, {})
        if place not in of_owner:
            return False
        del of_owner[place]
        if not of_owner:
            del self._by_owner[place.owner]
        return True

    def oldest_of_greediest(self) -> Place | None:
        """Return the oldest slot of the owner with the most slots, or None if there are none."""
        most = max(self._by_owner.values(), key=len, default=None)
        return next(iter(most)) if most else None


class OpenPlaces:
    """Slots for public methods, such as health checks. A new RPC or request always gets a slot.

    If more than `count` slots are occupied, the owner that holds the most slots loses the oldest of
    them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held = _Held()
        self._num_held = 0

    @contextlib.contextmanager
    def place(self, owner: str, timeout: asyncio.Timeout) -> Iterator[Place]:
        """Hold a slot while the block runs. The block times out if the slot is lost."""
        place = self._held.add(owner, timeout)
        self._num_held += 1
        if self._num_held > self._count and (oldest := self._held.oldest_of_greediest()):
            self._remove(oldest)
            oldest.lose()
        try:
            yield place
        finally:
            self._remove(place)

    def _remove(self, place: Place) -> None:
        if self._held.remove(place):
            self._num_held -= 1


class CallCount:
    """Counts a server's open RPCs. One owner may have at most half of the server's limit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._by_owner = Counter[str]()

    def add(self, owner: str) -> bool:
        """Count an RPC and return True, or return False if the owner or the server has too many."""
        if self._total >= self._most or self._by_owner[owner] >= self._most // 2:
            return False
        self._total += 1
        self._by_owner[owner] += 1
        return True

    def remove(self, owner: str) -> None:
        """Remove an ended RPC from the count."""
        self._total -= 1
        self._by_owner[owner] -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class ReceiveRoom:
    """Slots for requests that are being received or parsed. One owner gets at most half of them.

    Waiting owners take turns. To make room for a waiting owner, an owner with more slots loses its
    oldest slot whose request has not arrived within `grace_s`.

    Args:
        count: number of slots.
        grace_s: how long a slot is safe from being revoked, in seconds.
        wait_s: maximum seconds to wait for a slot.
    """

    def __init__(self, count: int, grace_s: float, wait_s: float) -> None:
        self._count = count
        self._grace_s = grace_s
        self._wait_s = wait_s
        self._num_held = Counter[str]()
        self._total = 0
        self._arriving = _Held()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting requests by owner, in the order in which the owners take turns."""
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold the slot while the block runs.

        Raises:
            TimeoutError: no slot became free in time.
        """
        await self._take(owner)
        try:
            yield
        finally:
            self._give_back(owner)

    @contextlib.contextmanager
    def arriving(self, owner: str, timeout: asyncio.Timeout) -> Iterator[Place]:
        """Mark a slot's request as still arriving while the block runs.

        Only such a slot can be revoked in favour of another owner.
        """
        place = self._arriving.add(owner, timeout)
        self._make_room()
        try:
            yield place
        finally:
            self._arriving.remove(place)

    async def _take(self, owner: str) -> None:
        if not self._waiting and self._may_take(owner):
            self._add(owner)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._give_turns()
        try:
            async with asyncio.timeout(self._wait_s):
                await asyncio.shield(turn)
        except BaseException:
            if turn.cancel():
                self._give_turns()  # nobody must lose a place to a request that has gone
            else:  # the place was given at this very moment
                self._give_back(owner)
            raise

    def _may_take(self, owner: str) -> bool:
        return self._total < self._count and self._num_held[owner] < self._count // 2

    def _add(self, owner: str) -> None:
        self._total += 1
        self._num_held[owner] += 1

    def _give_back(self, owner: str) -> None:
        self._total -= 1
        self._num_held[owner] -= 1
        if not self._num_held[owner]:
            del self._num_held[owner]
        if self._waiting:
            self._give_turns()

    def _give_turns(self) -> None:
        for owner in list(self._waiting):
            queue = self._waiting[owner]
            while queue and queue[0].cancelled():
                queue.popleft()
            if queue and self._may_take(owner):
                queue.popleft().set_result(None)
                self._add(owner)
                self._waiting.move_to_end(owner)
            if not queue:
                del self._waiting[owner]
        self._make_room()

    def _make_room(self) -> None:
        """Revoke a slot of the owner that holds the most, if an owner with fewer slots is waiting.

        If the slot is still in its grace period, try again when the period ends.
        """
        if self._timer:
            self._timer.cancel()
            self._timer = None
        half = self._count // 2
        waiting = next((name for name in self._waiting if self._num_held[name] < half), None)
        place = self._arriving.oldest_of_greediest() if waiting is not None else None
        if place is None or self._num_held[place.owner] <= self._num_held[waiting or ""]:
            return

        loop = asyncio.get_running_loop()
        if (due := place.since + self._grace_s) > loop.time():
            self._timer = loop.call_at(due, self._make_room)
        else:
            self._arriving.remove(place)
            place.lose()
