"""Turns of long bodies, of which a process has few bytes at a time.

Few arrive at a time: those that find others before them wait on their clients' side, and nothing
more of them is received. Of those that are there fewer still become prompts at a time, since what
is made of a body takes up to six times its bytes on the way; how long that takes is in no client's
hands.
"""

import asyncio
from collections import Counter, OrderedDict, deque

LONG_BODY_BYTES = 1 << 20
"""Bytes that every body may have without waiting for its turn."""
MAX_LONG_BYTES = 16 << 20
"""Bytes of long bodies that arrive or are there at one time, by the lengths that they declare; half
of them for one tenant."""
MAX_HANDLED_BYTES = 8 << 20
"""Bytes of long bodies that become prompts at one time: the longest alone."""
TURN_TIMEOUT_S = 20.0
"""Seconds that a body waits for its turn, fewer than it has to arrive."""

_Waiting = tuple[int, "asyncio.Future[None]"]
"""A size in bytes, and the turn."""


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
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By tenant; the first one that may have a turn is next."""

    async def take(self, size: int, tenant: str) -> None:
        """Wait for a turn of so many bytes and take it.

        Raises:
            TimeoutError: there was none in time.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((size, turn))
        self._give_turns()
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await asyncio.shield(turn)
        except BaseException:
            if not turn.cancel():  # it came at this moment
                self.give_back(size, tenant)
            raise

    def give_back(self, size: int, tenant: str) -> None:
        """End a turn."""
        self._taken[tenant] -= size
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._give_turns()

    def _give_turns(self) -> None:
        for tenant in list(self._waiting):
            queue = self._waiting[tenant]
            while queue and queue[0][1].cancelled():
                queue.popleft()
            if queue and self._may_take(queue[0][0], tenant):
                size, turn = queue.popleft()
                turn.set_result(None)
                self._taken[tenant] += size
                self._waiting.move_to_end(tenant)
            if not queue:
                del self._waiting[tenant]

    def _may_take(self, size: int, tenant: str) -> bool:
        # Those without a name are many clients.
        most = self._tenant_limit if tenant else self._limit
        total = self._taken.total() + size
        return total <= self._limit and self._taken[tenant] + size <= most
