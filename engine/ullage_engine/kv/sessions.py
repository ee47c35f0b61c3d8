"""Conversations whose KV is kept between their turns."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ullage_engine.kv.radix import RadixTree

_MAX_SESSIONS = 1024


@dataclass(frozen=True, slots=True)
class _Session:
    path: list[int]
    """Pinned blocks, from the beginning of the conversation on."""
    used_at: float


class Sessions:
    """Pins the cached prefix of each session until it is idle for long or memory is needed.

    Both end the session used longest ago first. Pinned blocks are only kept from being evicted
    before others; they can be had by ending their sessions.
    """

    def __init__(
        self, tree: RadixTree, max_blocks: int, idle_s: float, clock: Callable[[], float]
    ) -> None:
        self._tree = tree
        self._max_blocks = max_blocks
        self._idle_s = idle_s
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, session_id: str, path: list[int]) -> None:
        """Pins the first blocks of a cached path instead of those pinned for the session before."""
        path = path[: self._max_blocks]
        for block in path:
            self._tree.pin(block)
        self._end(session_id)
        if path:
            self._sessions[session_id] = _Session(path, self._clock())
        while len(self._sessions) > _MAX_SESSIONS:
            self.end_oldest()

    def use(self, session_id: str) -> None:
        """Counts as a use: the session's next turn has come."""
        session = self._sessions.pop(session_id, None)
        if session:
            self._sessions[session_id] = _Session(session.path, self._clock())

    def end_idle(self) -> None:
        """Ends sessions not used for the idle time."""
        latest = self._clock() - self._idle_s
        while self._sessions and next(iter(self._sessions.values())).used_at <= latest:
            self.end_oldest()

    def end_oldest(self) -> bool:
        """Ends the session used longest ago; False: there is none."""
        if not self._sessions:
            return False
        self._end(next(iter(self._sessions)))
        return True

    def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        # The deepest first: whatever becomes evictable keeps the order leaf before parent.
        for block in reversed(session.path if session else []):
            self._tree.unpin(block)
