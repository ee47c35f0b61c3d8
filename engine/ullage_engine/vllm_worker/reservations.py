"""Block reservations in vLLM's KV pool, so that vLLM never has to preempt.

Every request in vLLM has reserved blocks for its prompt and expected output. vLLM allocates these
blocks as it computes. At all times, in blocks,

    sum over requests of (reserved - held) <= free

so a request that stays within its reservation always finds a free block. Idle sessions release
their blocks as soon as a request needs to reserve them.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ullage_engine.kv_cache.prefix_cache import MAX_SESSIONS
from ullage_engine.vllm_worker.interface import Blocks, Prefix

_ROUNDING = 1e-6
"""Upper bound on the rounding error in sums of fractional blocks."""


@dataclass(slots=True)
class _Session:
    prefix: Prefix
    used_at: float


class Reservations:
    """Tracks the KV blocks reserved for each request in vLLM, and the blocks kept for sessions."""

    def __init__(
        self,
        blocks: Blocks,
        *,
        session_blocks: int,
        session_idle_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Create an empty set of reservations.

        Args:
            blocks: vLLM's KV blocks.
            session_blocks: maximum number of blocks that one session keeps. 0 if sessions keep
                none.
            session_idle_s: seconds after which an idle session ends.
            clock: returns the time in seconds.
        """
        self._blocks = blocks
        self._session_blocks = session_blocks
        self._session_idle_s = session_idle_s
        self._clock = clock
        self._reserved: dict[str, int] = {}
        """Number of blocks reserved for each request."""
        self._prefixes: dict[str, Prefix] = {}
        """Cached blocks pinned for requests that vLLM has not started yet."""
        self._known_committed: float | None = None
        self._known_reclaimable: float | None = None
        """Cached value of `_reclaimable`, or None if it is out of date."""
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """Sessions by key, least recently used first."""
        self.num_withheld = 0
        """Number of blocks withheld from new requests because other processes took the memory."""

    # what there is -------------------------------------------------------------------------------

    @property
    def num_committed(self) -> int:
        """Number of blocks that requests have reserved but do not hold yet."""
        return math.ceil(self._committed - _ROUNDING)

    @property
    def num_reclaimable(self) -> int:
        """Number of blocks that are held only by idle sessions."""
        return math.floor(self._reclaimable + _ROUNDING)

    @property
    def num_unreserved(self) -> int:
        """Number of blocks that can still be reserved.

        The number is negative while more blocks are committed than are free or reclaimable.
        """
        # Shares of blocks add up to whole blocks, so only their sum is rounded.
        unreserved = self._blocks.num_free + self._reclaimable - self._committed
        return math.floor(unreserved + _ROUNDING)

    @property
    def _committed(self) -> float:
        if self._known_committed is None:
            self._known_committed = sum(self._due(*each) for each in self._reserved.items())
        return self._known_committed

    @property
    def _reclaimable(self) -> float:
        if self._known_reclaimable is None:
            self._known_reclaimable = self._blocks.num_reclaimable
        return self._known_reclaimable

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_session_blocks(self) -> int:
        return sum(each.prefix.num_blocks for each in self._sessions.values())

    def reserved(self, request_id: str) -> int:
        """Return the number of blocks reserved for a request, including those it already holds."""
        return self._reserved[request_id]

    # changes -------------------------------------------------------------------------------------

    def reserve(self, request_id: str, num_blocks: int, spared: int = 0) -> bool:
        """Reserve blocks for a request, provided that at least `spared` blocks stay unreserved.

        Returns:
            True, or False if the blocks do not fit, in which case nothing is reserved.
        """
        assert request_id not in self._reserved, "reserved already"
        if num_blocks + spared > self.num_unreserved:
            return False
        self._resize(request_id, num_blocks)
        self._make_free()
        return True

    def reserve_with_prefix(self, request_id: str, num_blocks: int, spared: int = 0) -> bool:
        """Reserve blocks for a request in vLLM, and pin its cached prefix.

        The prefix's blocks count towards the reservation.

        Returns:
            False if fewer than `spared` blocks would stay unreserved. Nothing is reserved then.
        """
        assert request_id not in self._reserved, "reserved already"
        self._prefixes[request_id] = self._hold_prefix(request_id)
        self._resize(request_id, num_blocks)
        if self.num_unreserved < spared:
            self.release(request_id)
            return False
        self._make_free()
        return True

    def extend(self, request_id: str, num_blocks: int) -> bool:
        """Grow a reservation to at least `num_blocks`. Return False if the blocks do not fit."""
        missing = num_blocks - self._reserved[request_id]
        if missing > 0:
            if missing > self.num_unreserved:
                return False
            self._resize(request_id, num_blocks)
        self._make_free()
        return True

    def shrink(self, request_id: str, num_blocks: int) -> bool:
        """Shrink a reservation to `num_blocks`. Return False if the request still uses more."""
        # A shared block counts in full: the request owns it alone once all other windows have left
        # it.
        if self._blocks.num_in_tables(request_id) > num_blocks:
            return False
        self._resize(request_id, min(num_blocks, self._reserved[request_id]))
        return True

    def release(self, request_id: str) -> None:
        """End a request's reservation, if it has one. vLLM frees the blocks that it holds."""
        # The request may just have ended, which gave blocks back.
        self._forget_sums()
        self._reserved.pop(request_id, None)
        self._let_go(request_id)

    def on_step(self) -> None:
        """Unpin the prefixes of requests that have started and now hold those blocks themselves."""
        self._forget_sums()
        for request_id in [each for each in self._prefixes if self._blocks.num_held(each)]:
            self._let_go(request_id)
        # A request whose window left a session's block needs another block.
        self._make_free()

    # sessions ------------------------------------------------------------------------------------

    def keep_session(self, key: str, request_id: str) -> None:
        """Pin a finished request's cached blocks for the next request of its session.

        Of more than `MAX_SESSIONS` sessions, the least recently used one ends.
        """
        if not self._session_blocks:
            return
        prefix = self._hold_prefix(request_id)
        self._drop_session(key)
        if not 0 < prefix.num_blocks <= self._session_blocks or self._session_idle_s <= 0:
            self._release(prefix)
            return
        self._sessions[key] = _Session(prefix, self._clock())
        self._blocks.on_session(prefix)
        while len(self._sessions) > MAX_SESSIONS:
            self._drop_oldest_session()
        self._forget_sums()
        self._make_free()

    def use_session(self, key: str) -> bool:
        """Mark a session as recently used. Return whether it keeps any blocks."""
        session = self._sessions.get(key)
        if session is None:
            return False
        session.used_at = self._clock()
        self._sessions.move_to_end(key)
        return True

    def end_idle_sessions(self) -> None:
        """End all sessions that have been idle for longer than the idle limit."""
        oldest = self._clock() - self._session_idle_s
        for key in [key for key, each in self._sessions.items() if each.used_at <= oldest]:
            self._drop_session(key)

    def end_all_sessions(self) -> None:
        """End all sessions and unpin their blocks."""
        for key in list(self._sessions):
            self._drop_session(key)

    def check_integrity(self) -> None:
        """Assert that free blocks cover all reservations, and that cached totals are correct."""
        cached = self._committed, self._reclaimable
        self._forget_sums()
        sums = self._committed, self._reclaimable
        assert all(abs(one - other) < _ROUNDING for one, other in zip(cached, sums, strict=True)), (
            f"{cached} were cached, {sums} are right"
        )
        assert self._blocks.num_free >= self.num_committed, (
            f"{self.num_committed} reserved, {self._blocks.num_free} free"
        )

    # --------------------------------------------------------------------------------------------

    def _forget_sums(self) -> None:
        """Discard the cached values of `num_committed` and `num_reclaimable`.

        They change after each step, when a request ends, and when a prefix is pinned or
        released.
        """
        self._known_committed = self._known_reclaimable = None

    def _due(self, request_id: str, num_blocks: int) -> float:
        """Return how many of its `num_blocks` reserved blocks a request does not hold yet."""
        held = self._blocks.num_held(request_id)
        if not held and (prefix := self._prefixes.get(request_id)):
            held = prefix.num_held
        return max(0.0, num_blocks - held)

    def _resize(self, request_id: str, num_blocks: int) -> None:
        """Set a reservation to `num_blocks`, and update the cached number of committed blocks."""
        if self._known_committed is not None:
            before = self._due(request_id, self._reserved.get(request_id, 0))
            self._known_committed += self._due(request_id, num_blocks) - before
        self._reserved[request_id] = num_blocks

    def _hold_prefix(self, request_id: str) -> Prefix:
        self._forget_sums()
        return self._blocks.hold_prefix(request_id)

    def _let_go(self, request_id: str) -> None:
        """Unpin a request's prefix, if it has one."""
        if prefix := self._prefixes.pop(request_id, None):
            self._release(prefix)

    def _release(self, prefix: Prefix) -> None:
        self._forget_sums()
        self._blocks.release(prefix)

    def _make_free(self) -> None:
        """End the least recently used sessions until all reserved blocks are free."""
        while self._sessions and self._blocks.num_free < self.num_committed:
            self._drop_oldest_session()

    def _drop_oldest_session(self) -> None:
        self._drop_session(next(iter(self._sessions)))

    def _drop_session(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._blocks.on_session_end(session.prefix)
            self._release(session.prefix)
