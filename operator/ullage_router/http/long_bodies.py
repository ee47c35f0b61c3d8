"""Turns of long bodies, of which a process has few bytes at a time.

Few arrive at a time: those that find others before them wait on their clients' side, and nothing
more of them is received. A client that lets others wait for it loses its turn. Of those that are
there fewer still become prompts at a time, since what is made of a body takes up to six times its
bytes on the way. How long that takes is in no client's hands: a request that waits for anything
else than this router lets others come.
"""

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

LONG_BODY_BYTES = 1 << 20
"""Bytes that every body may have without waiting for its turn."""
MAX_LONG_BYTES = 16 << 20
"""Bytes of long bodies that arrive or are there at one time, by the lengths that they declare; half
of them for one tenant."""
MAX_HANDLED_BYTES = 8 << 20
"""Bytes of long bodies that become prompts at one time: the longest alone."""
TURN_TIMEOUT_S = 20.0
"""Seconds that a body waits for its turn."""
IDLE_TIMEOUT_S = 2.0
"""Seconds for which a body that has its turn may bring too little while others wait for theirs."""
MIN_BYTES_PER_S = 512 << 10
"""Rate from which on a body brings enough."""


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of one body, part of which has not arrived.

    size
        bytes that the body may have
    idle_s
        seconds of earlier waits for its bytes, less those that arrived bytes made up for
    idle_since
        start of the present wait for its bytes, on the event loop's clock; None: nobody waits
    """

    size: int
    tenant: str
    idle_s: float = 0.0
    idle_since: float | None = None
    timeout: asyncio.Timeout | None = None
    is_lost: bool = False

    def lost_at(self) -> float:
        """Return the time at which a waiting body takes the turn, if no more bytes arrive until
        then."""
        if self.idle_since is None or self.is_lost:
            return float("inf")
        return self.idle_since + max(0.0, IDLE_TIMEOUT_S - self.idle_s)

    def add(self, num_bytes: int) -> None:
        """Count arrived bytes: they make up for time that has passed, and for none to come."""
        self.idle_s = max(0.0, self.idle_s - num_bytes / MIN_BYTES_PER_S)

    def lose(self) -> None:
        """End the wait of the body's reader."""
        self.is_lost = True
        if self.timeout and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time())


class LongBodies:
    """Gives tenants their turns, one after the other, and each tenant's bodies in their order.

    Args:
        limit: bytes at one time.
        tenant_limit: bytes of one tenant at one time.
    """

    def __init__(
        self, limit: int = MAX_LONG_BYTES, tenant_limit: int = MAX_LONG_BYTES // 2
    ) -> None:
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._taken = Counter[str]()
        """Bytes by tenant."""
        self._turns: dict[Turn, None] = {}
        self._waiting: OrderedDict[str, deque[tuple[Turn, asyncio.Future[None]]]] = OrderedDict()
        """By tenant; the first one that may have a turn is next."""
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, size: int, tenant: str) -> Turn:
        """Wait for a turn of this many bytes and take it.

        Raises:
            TimeoutError: there was none in time.
        """
        turn = Turn(size, tenant)
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, came))
        self._give_turns()
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await asyncio.shield(came)
        except BaseException:
            if came.cancel():
                self._give_turns()
            else:  # the turn came at this moment
                self.give_back(turn)
            raise
        return turn

    def shrink(self, turn: Turn, size: int) -> None:
        """Give back the part of its turn that a complete body did not need."""
        self._taken[turn.tenant] -= turn.size - size
        turn.size = size
        self._give_turns()

    @contextlib.contextmanager
    def awaited(self, turn: Turn, timeout: asyncio.Timeout) -> Iterator[None]:
        """Count the time of the block as time in which the client is to send more of the body.

        Args:
            timeout: ends the block when the turn is lost.
        """
        loop = asyncio.get_running_loop()
        turn.timeout = timeout
        turn.idle_since = loop.time()
        if self._waiting:
            self._make_room()
        try:
            yield
        finally:
            turn.idle_s += loop.time() - turn.idle_since
            turn.idle_since = None

    def give_back(self, turn: Turn) -> None:
        """End a turn."""
        del self._turns[turn]
        self._taken[turn.tenant] -= turn.size
        if not self._taken[turn.tenant]:
            del self._taken[turn.tenant]
        self._give_turns()

    def _give_turns(self) -> None:
        for tenant in list(self._waiting):
            queue = self._waiting[tenant]
            while queue and queue[0][1].cancelled():
                queue.popleft()
            if queue and self._may_take(queue[0][0].size, tenant):
                turn, came = queue.popleft()
                came.set_result(None)
                self._turns[turn] = None
                self._taken[tenant] += turn.size
                self._waiting.move_to_end(tenant)
            if not queue:
                del self._waiting[tenant]
        self._make_room()

    def _may_take(self, size: int, tenant: str) -> bool:
        # Those without a name are many clients.
        most = self._tenant_limit if tenant else self._limit
        total = self._taken.total() + size
        return total <= self._limit and self._taken[tenant] + size <= most

    def _make_room(self) -> None:
        """Take the turn of a slow body that others wait for, or schedule that for the time when it
        is due."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        slow = min(self._in_the_way(), key=Turn.lost_at, default=None)
        if slow is None or (due := slow.lost_at()) == float("inf"):
            return
        loop = asyncio.get_running_loop()
        if due > loop.time():
            self._timer = loop.call_at(due, self._make_room)
        else:
            slow.lose()

    def _in_the_way(self) -> Iterator[Turn]:
        """Yield the turns that block others: those of the same tenant, or all."""
        waiting = {tenant: queue[0][0].size for tenant, queue in self._waiting.items()}
        is_full = any(self._taken.total() + size > self._limit for size in waiting.values())
        for turn in self._turns:
            if is_full or turn.tenant in waiting:
                yield turn
