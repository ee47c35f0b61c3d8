"""Which engine has a request's beginning in its caches: two tables of fixed size, oldest use out.

A session goes to the engine of its last turn. Any other request goes to the engine that computed
the longest known part of its beginning: prompts are hashed block by block, each block's hash with
all before it, as the engines' prefix caches do. A wrong guess costs time and nothing else, so
hashes need not be safe against collisions; what is too long is compared by its first blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PREFIX_BLOCK_TOKENS = 64
MAX_PREFIX_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class AffinityPolicy:
    max_sessions: int
    """Sessions remembered; 0: none."""
    max_prefixes: int
    """Blocks of prompts remembered; 0: none."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What tells where a request's beginning may be cached; hashed once a request."""

    session: str
    prefixes: tuple[int, ...]
    """Hashes of its leading blocks, shortest first."""


class Table:
    """Names by key, at most `size`; the one used longest ago makes room."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._engines: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, key: int) -> str | None:
        engine = self._engines.get(key)
        if engine is not None:
            self._engines.move_to_end(key)
        return engine

    def put(self, key: int, engine: str) -> None:
        self._engines[key] = engine
        self._engines.move_to_end(key)
        if len(self._engines) > self._size:
            self._engines.popitem(last=False)

    def forget(self, engine: str) -> None:
        """Drops an engine that is gone, with its caches."""
        for key in [key for key, at in self._engines.items() if at == engine]:
            del self._engines[key]


class Affinity:
    """Remembers where requests ran."""

    def __init__(self, policy: AffinityPolicy) -> None:
        self._policy = policy
        self._sessions = Table(policy.max_sessions)
        self._prefixes = Table(policy.max_prefixes)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def prefixes(self) -> int:
        return len(self._prefixes)

    def origin(self, session: str, token_ids: Sequence[int]) -> Origin:
        """What is remembered of a request."""
        prefixes = prefix_hashes(token_ids) if self._policy.max_prefixes else ()
        return Origin(session if self._policy.max_sessions else "", prefixes)

    def find(self, origin: Origin, is_usable: Callable[[str], bool]) -> str:
        """The engine that has most of the request's beginning; empty when none is known.

        Args:
            is_usable: whether an engine takes requests; one that does not is passed over, and its
                shorter matches elsewhere count.
        """
        if origin.session:
            engine = self._sessions.get(hash(origin.session))
            if engine and is_usable(engine):
                return engine
        for prefix in reversed(origin.prefixes):
            engine = self._prefixes.get(prefix)
            if engine and is_usable(engine):
                return engine
        return ""

    def ran(self, origin: Origin, engine: str) -> None:
        """The request's beginning is now in that engine's caches."""
        if origin.session:
            self._sessions.put(hash(origin.session), engine)
        for prefix in reversed(origin.prefixes):  # the shortest is shared by most: newest
            self._prefixes.put(prefix, engine)

    def forget(self, engine: str) -> None:
        """The engine lost its caches."""
        self._sessions.forget(engine)
        self._prefixes.forget(engine)

    def check_integrity(self) -> None:
        assert self.sessions <= self._policy.max_sessions
        assert self.prefixes <= self._policy.max_prefixes


def prefix_hashes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """A hash of every leading run of whole blocks, shortest first."""
    hashes, last = [], 0
    whole = min(len(token_ids) // PREFIX_BLOCK_TOKENS, MAX_PREFIX_BLOCKS)
    for start in range(0, whole * PREFIX_BLOCK_TOKENS, PREFIX_BLOCK_TOKENS):
        last = hash((last, *token_ids[start : start + PREFIX_BLOCK_TOKENS]))
        hashes.append(last)
    return tuple(hashes)
