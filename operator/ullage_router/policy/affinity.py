"""Remembers which engine has a request's prefix cached.

A session goes to the engine that served its last turn. Any other request goes to the engine that
computed the longest known prefix of its prompt. Prompts are hashed block by block, each block
together with all blocks before it, as in the engines' prefix caches. Sessions and prefixes are kept
in LRU tables of fixed size. A wrong guess costs only time, so hashes need not resist collisions,
and only the first MAX_PREFIX_BLOCKS blocks of a long prompt are compared.

A router process does not remember requests that other processes placed. All processes therefore
choose the same two engines for a session, or for a prompt's first block, by consistent hashing
(Karger et al., "Consistent Hashing and Random Trees", 1997). A session thus finds its caches no
matter which process receives its next turn.

A tenant's entries are invisible to other tenants. When a table is full, an entry is evicted from a
tenant that uses more than an equal share of the table. A tenant within its share keeps its entries,
no matter how many requests other tenants send, or how many they announce with `Pick` without
sending them.
"""

import functools
import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ullage_common.config.router import AffinitySection

RING_POINTS = 40
"""Number of points per engine on the hash ring. More points spread requests more evenly."""
PREFIX_BLOCK_TOKENS = 64
"""Number of tokens per hashed block."""
MAX_PREFIX_BLOCKS = 64
"""Maximum number of hashed blocks per prompt."""


class CacheKey(msgspec.Struct, frozen=True):
    """A request's lookup key for the session and prefix tables, computed once per request."""

    session: str
    prefixes: tuple[int, ...]
    """Hashes of the prompt's prefixes that consist of whole blocks, shortest prefix first."""
    tenant: str = ""

    @property
    def session_hashes(self) -> tuple[int, ...]:
        """The hash of the session in a one-element tuple (empty if the request has no session)."""
        return (hash(self.session),) if self.session else ()

    @property
    def point(self) -> int | None:
        """The request's position on the hash ring.

        None if the request has no session and its prompt is shorter than one block.
        """
        if self.session:
            return _point(f"{self.tenant}\0session\0{self.session}")
        return _point(f"{self.tenant}\0block\0{self.prefixes[0]}") if self.prefixes else None


class HashRing:
    """A consistent hash ring, on which each engine owns several points.

    If an engine joins or leaves, only the requests that map to that engine move.

    Args:
        engines: keys of the engines.
    """

    def __init__(self, engines: Iterable[str]) -> None:
        ring = sorted(point for engine in engines for point in _engine_points(engine))
        self._points = [point for point, _ in ring]
        self._nearest: list[tuple[str, ...]] = [()] * len(ring)
        """For each point on the ring, its engine and the next different engine, if any."""

        # Go around twice: the last points' next engines are at the ring's beginning.
        nearest: tuple[str, ...] = ()
        for i in reversed(range(2 * len(ring))):
            engine = ring[i % len(ring)][1]
            if engine not in nearest[:1]:
                nearest = (engine, *nearest[:1])
            self._nearest[i % len(ring)] = nearest

    def nearest_two(self, point: int) -> tuple[str, ...]:
        """Return the first two distinct engines at or after a point on the ring, if they exist."""
        if not self._points:
            return ()
        return self._nearest[bisect_left(self._points, point) % len(self._points)]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@functools.lru_cache(maxsize=1024)
def _engine_points(engine: str) -> tuple[tuple[int, str], ...]:
    return tuple((_point(f"{engine}\0{i}"), engine) for i in range(RING_POINTS))


class Table:
    """An LRU table that maps each tenant's keys to engines.

    Args:
        size: maximum number of entries. When it is exceeded, the least recently used entry of a
            tenant with more than an equal share is evicted.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._len = 0
        self._tenants: OrderedDict[str, OrderedDict[int, str]] = OrderedDict()

    def __len__(self) -> int:
        return self._len

    def first(self, tenant: str, keys: Iterable[int], is_usable: Callable[[str], bool]) -> str:
        """Return the first usable engine that one of the keys maps to (empty if there is none)."""
        engines = self._tenants.get(tenant)
        if engines:
            for key in keys:
                engine = engines.get(key)
                if engine is not None:
                    engines.move_to_end(key)
                    if is_usable(engine):
                        return engine
        return ""

    def put(self, tenant: str, keys: Sequence[int], engine: str) -> None:
        """Map the keys to the engine. The last key becomes the most recently used."""
        if not keys:
            return
        engines = self._tenants.get(tenant)
        if engines is None:
            engines = self._tenants[tenant] = OrderedDict()
        for key in keys:
            if key in engines:
                engines.move_to_end(key)
            else:
                self._len += 1
            engines[key] = engine

        while self._len > self._size:
            self._make_room()

    def _make_room(self) -> None:
        """Evict the least recently used entry of a tenant that uses more than an equal share.

        There is always such a tenant, because the table exceeds its maximum size. Tenants within
        their share are moved to the end of the order, so that the next search does not begin with
        them again.
        """
        share = self._size // len(self._tenants)
        while len(self._tenants[tenant := next(iter(self._tenants))]) <= share:
            self._tenants.move_to_end(tenant)
        self._tenants[tenant].popitem(last=False)
        self._len -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def remove_engine(self, engine: str) -> None:
        """Remove all entries that map to the engine."""
        for tenant, engines in list(self._tenants.items()):
            for key in [key for key, at in engines.items() if at == engine]:
                del engines[key]
                self._len -= 1
            if not engines:
                del self._tenants[tenant]

    def check_integrity(self) -> None:
        """Assert that the entry count is correct and that every listed tenant has entries."""
        assert self._len == sum(map(len, self._tenants.values())) <= self._size
        assert all(self._tenants.values())


class Affinity:
    """The tables that map sessions and prompt prefixes to engines."""

    def __init__(self, section: AffinitySection) -> None:
        self._section = section
        self._sessions = Table(section.max_sessions)
        self._prefixes = Table(section.max_prefixes)

    @property
    def sessions(self) -> int:
        """Number of sessions in the table."""
        return len(self._sessions)

    @property
    def prefixes(self) -> int:
        """Number of prefixes in the table."""
        return len(self._prefixes)

    def cache_key(
        self, session: str, token_ids: Sequence[int], tenant: str = "", adapter: str = ""
    ) -> CacheKey:
        """Return the key under which the tables look up a request.

        The adapter is part of the key, because the KV of the same tokens differs between adapters.
        """
        if session and adapter:
            session = f"{adapter}\0{session}"
        prefixes = prefix_hashes(token_ids, adapter) if self._section.max_prefixes else ()
        return CacheKey(session if self._section.max_sessions else "", prefixes, tenant)

    def find(self, cache_key: CacheKey, is_usable: Callable[[str], bool]) -> str:
        """Return the engine with the longest cached prefix of the request (empty if none is known).

        Args:
            is_usable: returns whether an engine accepts requests. Unusable engines are skipped, so
                the result may be an engine with a shorter match.
        """
        tenant = cache_key.tenant
        sessions = cache_key.session_hashes
        engine = self._sessions.first(tenant, sessions, is_usable) if sessions else ""
        return engine or self._prefixes.first(tenant, reversed(cache_key.prefixes), is_usable)

    def on_placed(self, cache_key: CacheKey, engine: str) -> None:
        """Record that a request runs on the engine, so its prefix will be cached there."""
        self._sessions.put(cache_key.tenant, cache_key.session_hashes, engine)
        # The shortest prefix is put last and so evicted last, because most requests share it.
        self._prefixes.put(cache_key.tenant, cache_key.prefixes[::-1], engine)

    def remove_engine(self, engine: str) -> None:
        """Remove all entries of an engine that has lost its caches."""
        self._sessions.remove_engine(engine)
        self._prefixes.remove_engine(engine)

    def check_integrity(self) -> None:
        """Assert that both tables are consistent."""
        self._sessions.check_integrity()
        self._prefixes.check_integrity()


def prefix_hashes(token_ids: Sequence[int], adapter: str = "") -> tuple[int, ...]:
    """Return a hash of each prefix that consists of whole blocks, shortest prefix first.

    All router processes compute the same hashes.
    """
    hashes = []
    last = _point(adapter) if adapter else 0
    whole = min(len(token_ids) // PREFIX_BLOCK_TOKENS, MAX_PREFIX_BLOCKS)
    for start in range(0, whole * PREFIX_BLOCK_TOKENS, PREFIX_BLOCK_TOKENS):
        last = hash((last, *token_ids[start : start + PREFIX_BLOCK_TOKENS]))
        hashes.append(last)
    return tuple(hashes)
