"""Which engine has a request's beginning in its caches: two tables of fixed size, and a hash where
they know nothing.

A session goes to the engine of its last turn. Any other request goes to the engine that computed
the longest known part of its beginning: prompts are hashed block by block, each block's hash with
all before it, as the engines' prefix caches do. A wrong guess costs time and nothing else, so
hashes need not be safe against collisions; what is too long is compared by its first blocks.

What this process does not remember another one may have placed. All of them draw the same two
engines for a session, or for a prompt's first block, by a consistent hash (Karger et al., 1997): so
a session meets its caches whichever process or router its next turn comes to.

Tenants see nothing of one another's entries, and who has more than an equal share of a full table
makes room in it: what others send, or say with `Pick` that they send, costs nobody his share.
"""

import functools
import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ullage_common.config.router import AffinitySection

RING_POINTS = 40
"""Points of each engine on the ring: with more of them shares differ less."""
PREFIX_BLOCK_TOKENS = 64
MAX_PREFIX_BLOCKS = 64


class CacheKey(msgspec.Struct, frozen=True):
    """The key by which a request's beginning is found in the tables; hashed once a request."""

    session: str
    prefixes: tuple[int, ...]
    """Hashes of its leading blocks, shortest first."""
    tenant: str = ""

    @property
    def session_hashes(self) -> tuple[int, ...]:
        return (hash(self.session),) if self.session else ()

    @property
    def point(self) -> int | None:
        """Where the request is on the ring; None where it has neither a session nor a block."""
        if self.session:
            return _point(f"{self.tenant}\0session\0{self.session}")
        return _point(f"{self.tenant}\0block\0{self.prefixes[0]}") if self.prefixes else None


class HashRing:
    """Engines on a ring, each at many points, so that one that comes or goes moves only its own
    share of the requests."""

    def __init__(self, engines: Iterable[str]) -> None:
        ring = sorted(point for engine in engines for point in _engine_points(engine))
        self._points = [point for point, _ in ring]
        self._nearest: list[tuple[str, ...]] = [()] * len(ring)
        """The engine at each point, and the next other one if there is one."""
        nearest: tuple[str, ...] = ()
        for i in reversed(range(2 * len(ring))):  # once around to know the next one at the end
            engine = ring[i % len(ring)][1]
            if engine not in nearest[:1]:
                nearest = (engine, *nearest[:1])
            self._nearest[i % len(ring)] = nearest

    def nearest_two(self, point: int) -> tuple[str, ...]:
        """Return the first engine from the point on, and the next other one if there is one."""
        if not self._points:
            return ()
        return self._nearest[bisect_left(self._points, point) % len(self._points)]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@functools.lru_cache(maxsize=1024)
def _engine_points(engine: str) -> tuple[tuple[int, str], ...]:
    return tuple((_point(f"{engine}\0{i}"), engine) for i in range(RING_POINTS))


class Table:
    """Names by tenant and key, at most `size`; of the tenant that makes room, the one used longest
    ago goes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._len = 0
        self._tenants: OrderedDict[str, OrderedDict[int, str]] = OrderedDict()

    def __len__(self) -> int:
        return self._len

    def first(self, tenant: str, keys: Iterable[int], is_usable: Callable[[str], bool]) -> str:
        """Return the engine of the first key that has a usable one; empty where none has."""
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
        """Give the keys this engine; the last of them is the one used last."""
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
        """Of too many entries, one tenant has more than an equal share of those that fit.

        The search goes on from where it ended last: who has too much stays in front.
        """
        share = self._size // len(self._tenants)
        while len(self._tenants[tenant := next(iter(self._tenants))]) <= share:
            self._tenants.move_to_end(tenant)
        self._tenants[tenant].popitem(last=False)
        self._len -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def forget(self, engine: str) -> None:
        """Drop an engine that is gone, with its caches."""
        for tenant, engines in list(self._tenants.items()):
            for key in [key for key, at in engines.items() if at == engine]:
                del engines[key]
                self._len -= 1
            if not engines:
                del self._tenants[tenant]

    def check_integrity(self) -> None:
        assert self._len == sum(map(len, self._tenants.values())) <= self._size
        assert all(self._tenants.values())


class Affinity:
    """Remembers where requests ran."""

    def __init__(self, section: AffinitySection) -> None:
        self._section = section
        self._sessions = Table(section.max_sessions)
        self._prefixes = Table(section.max_prefixes)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def prefixes(self) -> int:
        return len(self._prefixes)

    def cache_key(
        self, session: str, token_ids: Sequence[int], tenant: str = "", adapter: str = ""
    ) -> CacheKey:
        """What is remembered of a request; with another adapter the same tokens have other KV."""
        if session and adapter:
            session = f"{adapter}\0{session}"
        prefixes = prefix_hashes(token_ids, adapter) if self._section.max_prefixes else ()
        return CacheKey(session if self._section.max_sessions else "", prefixes, tenant)

    def find(self, cache_key: CacheKey, is_usable: Callable[[str], bool]) -> str:
        """The engine that has most of the request's beginning; empty when none is known.

        Args:
            is_usable: whether an engine takes requests; one that does not is passed over, and its
                shorter matches elsewhere count.
        """
        tenant = cache_key.tenant
        sessions = cache_key.session_hashes
        engine = self._sessions.first(tenant, sessions, is_usable) if sessions else ""
        return engine or self._prefixes.first(tenant, reversed(cache_key.prefixes), is_usable)

    def on_placed(self, cache_key: CacheKey, engine: str) -> None:
        """The request's beginning is now in that engine's caches."""
        self._sessions.put(cache_key.tenant, cache_key.session_hashes, engine)
        # The shortest is shared by most: newest.
        self._prefixes.put(cache_key.tenant, cache_key.prefixes[::-1], engine)

    def forget(self, engine: str) -> None:
        """The engine lost its caches."""
        self._sessions.forget(engine)
        self._prefixes.forget(engine)

    def check_integrity(self) -> None:
        self._sessions.check_integrity()
        self._prefixes.check_integrity()


def prefix_hashes(token_ids: Sequence[int], adapter: str = "") -> tuple[int, ...]:
    """A hash of every leading run of whole blocks, shortest first; the same in all processes."""
    hashes = []
    last = _point(adapter) if adapter else 0
    whole = min(len(token_ids) // PREFIX_BLOCK_TOKENS, MAX_PREFIX_BLOCKS)
    for start in range(0, whole * PREFIX_BLOCK_TOKENS, PREFIX_BLOCK_TOKENS):
        last = hash((last, *token_ids[start : start + PREFIX_BLOCK_TOKENS]))
        hashes.append(last)
    return tuple(hashes)
