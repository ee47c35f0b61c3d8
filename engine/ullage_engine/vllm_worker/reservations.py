"""Who may take which blocks of vLLM's pool, so that vLLM never has to preempt.

Every request that vLLM has reserves the blocks of its prompt and expected output. vLLM allocates
them as it computes. At every moment, in blocks,

    sum over requests of (reserved - held) <= free

so a request within its reservation always finds a block. What idle sessions hold is given back as
soon as somebody reserves it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ullage_engine.vllm_worker.interface import Blocks, Prefix

_ROUNDING = 1e-6
"""More than sums of shares of blocks are wrong by."""


@dataclass(slots=True)
class _Reservation:
    num_blocks: int
    prefix: Prefix | None = None
    """Cached blocks held for a request that vLLM has not started."""


@dataclass(slots=True)
class _Session:
    prefix: Prefix
    used_at: float


class Reservations:
    """The reservations of all requests that vLLM has, and the blocks that sessions keep."""

    def __init__(
        self,
        blocks: Blocks,
        *,
        session_blocks: int,
        session_idle_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`session_blocks`: most blocks that one session keeps, 0: none; `clock` in seconds."""
        self._blocks = blocks
        self._session_blocks = session_blocks
        self._session_idle_s = session_idle_s
        self._clock = clock
        self._by_id: dict[str, _Reservation] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """Sessions by key, the longest unused first."""
        self.num_withheld = 0
        """Blocks that new requests may not take, because others took memory of the device."""

    # what there is -------------------------------------------------------------------------------

    @property
    def num_committed(self) -> int:
        """Blocks that are reserved and not yet held."""
        return math.ceil(self._committed - _ROUNDING)

    @property
    def num_reclaimable(self) -> int:
        """Blocks that only idle sessions hold."""
        return math.floor(self._reclaimable + _ROUNDING)

    @property
    def num_unreserved(self) -> int:
        """Blocks that a reservation may still take; negative while frees are under way."""
        # Shares of blocks make whole ones together, so that only their sum is rounded.
        unreserved = self._blocks.num_free + self._reclaimable - self._committed
        return math.floor(unreserved + _ROUNDING)

    @property
    def _committed(self) -> float:
        return sum(
            max(0.0, each.num_blocks - self._held(request_id, each))
            for request_id, each in self._by_id.items()
        )

    @property
    def _reclaimable(self) -> float:
        sessions = self._sessions.values()
        return self._blocks.num_reclaimable([each.prefix for each in sessions]) if sessions else 0.0

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_session_blocks(self) -> int:
        return sum(each.prefix.num_blocks for each in self._sessions.values())

    def reserved(self, request_id: str) -> int:
        """Returns the blocks of a reservation, held ones included."""
        return self._by_id[request_id].num_blocks

    # changes -------------------------------------------------------------------------------------

    def reserve(self, request_id: str, num_blocks: int, spared: int = 0) -> bool:
        """Reserves blocks for a request; False where they do not fit beside `spared` ones."""
        assert request_id not in self._by_id, "reserved already"
        if num_blocks + spared > self.num_unreserved:
            return False
        self._by_id[request_id] = _Reservation(num_blocks)
        self._make_free()
        return True

    def reserve_with_prefix(self, request_id: str, num_blocks: int, spared: int = 0) -> bool:
        """Reserves blocks for a request that vLLM has, less those that the prefix cache has of it,
        which are held from then on; False where they do not fit beside `spared` ones."""
        assert request_id not in self._by_id, "reserved already"
        prefix = self._blocks.hold_prefix(request_id)
        self._by_id[request_id] = _Reservation(num_blocks, prefix)
        if self.num_unreserved < spared:
            self.release(request_id)
            return False
        self._make_free()
        return True

    def extend(self, request_id: str, num_blocks: int) -> bool:
        """Raises a reservation to so many blocks, if it has fewer; False where they do not fit."""
        reservation = self._by_id[request_id]
        missing = num_blocks - reservation.num_blocks
        if missing > 0:
            if missing > self.num_unreserved:
                return False
            reservation.num_blocks = num_blocks
        self._make_free()
        return True

    def shrink(self, request_id: str, num_blocks: int) -> bool:
        """Lowers a reservation to so many blocks; False while the request uses more."""
        # Shared ones count as a whole: they become its own when the others slide past them.
        if self._blocks.num_in_tables(request_id) > num_blocks:
            return False
        reservation = self._by_id[request_id]
        reservation.num_blocks = min(num_blocks, reservation.num_blocks)
        return True

    def release(self, request_id: str) -> None:
        """Ends a reservation; what the request holds is vLLM's to free. One without is no error."""
        reservation = self._by_id.pop(request_id, None)
        if reservation is not None and reservation.prefix is not None:
            self._blocks.release(reservation.prefix)

    def on_step(self) -> None:
        """Lets go of prefixes whose requests have started and hold the blocks themselves."""
        for request_id, each in self._by_id.items():
            if each.prefix is not None and self._blocks.num_held(request_id):
                self._blocks.release(each.prefix)
                each.prefix = None
        # A request that slid past a block which a session holds needs another one.
        self._make_free()

    # sessions ------------------------------------------------------------------------------------

    def keep_session(self, key: str, request_id: str) -> None:
        """Holds the cached blocks of a request that has just ended, for the session's next."""
        if not self._session_blocks:
            return
        prefix = self._blocks.hold_prefix(request_id)
        self._drop_session(key)
        if not 0 < prefix.num_blocks <= self._session_blocks or self._session_idle_s <= 0:
            self._blocks.release(prefix)
            return
        self._sessions[key] = _Session(prefix, self._clock())
        self._make_free()

    def use_session(self, key: str) -> bool:
        """Notes that a request of the session has come; returns whether blocks are kept for it."""
        session = self._sessions.get(key)
        if session is None:
            return False
        session.used_at = self._clock()
        self._sessions.move_to_end(key)
        return True

    def end_idle_sessions(self) -> None:
        """Ends sessions that were not used for their idle time."""
        oldest = self._clock() - self._session_idle_s
        for key in [key for key, each in self._sessions.items() if each.used_at <= oldest]:
            self._drop_session(key)

    def end_all_sessions(self) -> None:
        """Ends all sessions."""
        for key in list(self._sessions):
            self._drop_session(key)

    def check_integrity(self) -> None:
        """Asserts that every reserved block can be had."""
        assert self._blocks.num_free >= self.num_committed, (
            f"{self.num_committed} reserved, {self._blocks.num_free} free"
        )

    # --------------------------------------------------------------------------------------------

    def _held(self, request_id: str, reservation: _Reservation) -> float:
        held = self._blocks.num_held(request_id)
        return held or (reservation.prefix.num_held if reservation.prefix else 0)

    def _make_free(self) -> None:
        """Ends the longest unused sessions until reserved blocks are free and not only
        reclaimable."""
        while self._sessions and self._blocks.num_free < self.num_committed:
            self._drop_session(next(iter(self._sessions)))

    def _drop_session(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._blocks.release(session.prefix)
