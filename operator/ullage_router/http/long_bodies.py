"""Limits the memory that long request bodies use in a process, by making them take turns.

A long body needs two turns, one after the other:

 * A turn for receiving. Only a few bodies are received at a time. The router stops reading the
   other bodies until their turn comes. A client that is slow while others wait loses its turn.
 * A turn for conversion to a prompt. Even fewer bodies are parsed at a time, since parsing takes
   up to six times a body's size in memory. No client can hold up this turn, because a request
   gives it back when it waits for anything outside this router.
"""

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

LONG_BODY_BYTES = 1 << 20
"""Size in bytes above which a body must take turns."""
MAX_LONG_BYTES = 16 << 20
"""Maximum total declared bytes of long bodies that are being received or held in memory.

One tenant gets at most half of this.
"""
MAX_HANDLED_BYTES = 8 << 20
"""Maximum bytes of long bodies being converted to prompts, enough for one maximum-size body."""
TURN_TIMEOUT_S = 20.0
"""Maximum number of seconds that a body waits for its turn."""
IDLE_TIMEOUT_S = 2.0
"""Maximum seconds for which a body may arrive too slowly in its turn while other bodies wait."""
MIN_BYTES_PER_S = 512 << 10
"""Rate in bytes per second below which a body is too slow."""


@dataclass(slots=True, eq=False)
class BodyTurn:
    """A grant of memory for receiving a long body or for converting it to a prompt."""

    size: int
    """Maximum size of the body in bytes."""
    tenant: str
    idle_s: float = 0.0
    """Seconds spent waiting for the client so far, minus a credit for each byte received."""
    idle_since: float | None = None
    """Start of the current wait for the client, on the event loop's clock. None if not waiting."""
    timeout: asyncio.Timeout | None = None
    is_lost: bool = False

    def lost_at(self) -> float:
        """Return the time at which this body may lose the turn if no more of its bytes arrive."""
        if self.idle_since is None or self.is_lost:
            return float("inf")
        return self.idle_since + max(0.0, IDLE_TIMEOUT_S - self.idle_s)

    def add(self, num_bytes: int) -> None:
        """Reduce the recorded waiting time in proportion to the bytes received.

        The waiting time never becomes negative, so a fast start does not excuse later delays.
        """
        self.idle_s = max(0.0, self.idle_s - num_bytes / MIN_BYTES_PER_S)

    def lose(self) -> None:
        """Revoke the turn, and make the code that waits for the body raise TimeoutError."""
        self.is_lost = True
        if self.timeout and not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time())


class LongBodies:
    """Grants long bodies their turns, round-robin among tenants and in order within a tenant.

    Args:
        limit: Maximum total bytes of all granted turns.
        tenant_limit: Maximum total bytes of one tenant's granted turns.
    """

    def __init__(
        self, limit: int = MAX_LONG_BYTES, tenant_limit: int = MAX_LONG_BYTES // 2
    ) -> None:
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._taken = Counter[str]()
        """Number of bytes in granted turns, by tenant."""
        self._turns: dict[BodyTurn, None] = {}
        self._waiting: OrderedDict[str, deque[tuple[BodyTurn, asyncio.Future[None]]]] = (
            OrderedDict()
        )
        """Queued turns by tenant. Tenants are served in this order, and then move to the end."""
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, size: int, tenant: str) -> BodyTurn:
        """Wait for a turn of `size` bytes, and take it.

        Raises:
            TimeoutError: No turn was free within TURN_TIMEOUT_S.
        """
        turn = BodyTurn(size, tenant)
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, came))
        self._give_turns()

        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await asyncio.shield(came)
        except BaseException:
            if came.cancel():
                self._give_turns()
            else:  # the turn was granted at this moment
                self.give_back(turn)
            raise

        return turn

    def shrink(self, turn: BodyTurn, size: int) -> None:
        """Shrink a turn to the complete body's actual size, and release the remaining bytes."""
        self._taken[turn.tenant] -= turn.size - size
        turn.size = size
        self._give_turns()

    @contextlib.contextmanager
    def awaited(self, turn: BodyTurn, timeout: asyncio.Timeout) -> Iterator[None]:
        """Record the time spent in the `with` block as time spent waiting for the client.

        Args:
            turn: The body's turn.
            timeout: The timeout that ends the block if the turn is lost.
        """
        loop = asyncio.get_running_loop()
        turn.timeout = timeout
        turn.is_lost = False  # a part may have come at the moment at which the turn was lost
        turn.idle_since = loop.time()
        if self._waiting:
            self._make_room()

        try:
            yield
        finally:
            turn.idle_s += loop.time() - turn.idle_since
            turn.idle_since = None

    def give_back(self, turn: BodyTurn) -> None:
        """End a turn, so that a waiting body may get one."""
        del self._turns[turn]
        self._taken[turn.tenant] -= turn.size
        if not self._taken[turn.tenant]:
            del self._taken[turn.tenant]
        self._give_turns()

    def _give_turns(self) -> None:
        # A large body may leave room for several, for which tenants take turns.
        while sum(map(self._give_turn, list(self._waiting))):
            continue
        self._make_room()

    def _give_turn(self, tenant: str) -> bool:
        """Give a tenant's next body its turn if there is room, and return whether there was."""
        queue = self._waiting[tenant]
        while queue and queue[0][1].cancelled():
            queue.popleft()

        has_room = bool(queue) and self._may_take(queue[0][0].size, tenant)
        if has_room:
            turn, came = queue.popleft()
            came.set_result(None)
            self._turns[turn] = None
            self._taken[tenant] += turn.size
            self._waiting.move_to_end(tenant)

        if not queue:
            del self._waiting[tenant]
        return has_room

    def _may_take(self, size: int, tenant: str) -> bool:
        # Bodies without a tenant come from many clients, so no tenant limit applies.
        most = self._tenant_limit if tenant else self._limit
        total = self._taken.total() + size
        return total <= self._limit and self._taken[tenant] + size <= most

    def _make_room(self) -> None:
        """Revoke the turn of the slowest body that blocks others, once its time has run out."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

        slow = min(self._in_the_way(), key=BodyTurn.lost_at, default=None)
        if slow is None or (due := slow.lost_at()) == float("inf"):
            return

        loop = asyncio.get_running_loop()
        if due > loop.time():
            self._timer = loop.call_at(due, self._make_room)
        else:
            slow.lose()

    def _in_the_way(self) -> Iterator[BodyTurn]:
        """Yield the turns that keep waiting bodies from getting a turn.

        If a waiting body does not fit in the total limit, these are all turns. Otherwise, they are
        the turns of tenants that also have waiting bodies.
        """
        waiting = {tenant: queue[0][0].size for tenant, queue in self._waiting.items()}
        is_full = any(self._taken.total() + size > self._limit for size in waiting.values())
        for turn in self._turns:
            if is_full or turn.tenant in waiting:
                yield turn
