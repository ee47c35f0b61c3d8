"""The interface for tiers below host memory, and the counters and circuit breaker they use."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ullage_kv.results import Result, Status

MAX_FAILURES = 3
"""Number of consecutive failures after which a tier's or peer's circuit breaker opens."""
PAUSE_S = 1.0
"""Initial time in seconds for which an open circuit breaker rejects all calls."""
MAX_PAUSE_S = 60.0
"""Maximum time in seconds for which an open circuit breaker rejects all calls."""


class Transfer(NamedTuple):
    """One block to copy between a tier and memory."""

    key: bytes
    memory: memoryview
    """Writable memory of the block's size, valid until the transfer has its result."""
    parent: bytes | None = None
    """Key of the previous block in the chain, or None if unknown."""


class LowerTier(Protocol):
    """The interface of a tier below host memory.

    Calls return immediately, and the tier's own threads do the work. Tiers are thread-safe. Errors
    are returned as results and never raised. Loaded blocks are verified.
    """

    @property
    def name(self) -> str: ...

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        """Find out which of the blocks this tier stores, so that `holds` can answer.

        If the answer is already known, the returned future is complete. Otherwise it completes
        within a fraction of a load's deadline. It never fails.
        """

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Return, without blocking, which of the blocks this tier is known to store."""

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Return, without blocking, which of the blocks should be saved to this tier."""

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        """Copy blocks to memory.

        Returns:
            A future with one result per block, which completes within `deadline_s` seconds. Unless
            the result is HIT, the contents of the memory are undefined. The tier does not write to
            a block's memory after its result is set.
        """

    def save(self, transfers: Sequence[Transfer]) -> "Future[list[Result]]":
        """Store copies of blocks. A block's result is BUSY if too many are already waiting."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop this tier's copies of these blocks, which must never be read again."""

    def remove_chains(self, chains: Collection[bytes] | None) -> None:
        """Drop all blocks of the given chains, or all blocks if `chains` is None.

        A chain is identified by the first `CHAIN_BYTES` bytes of its keys.
        """

    def stats(self) -> "TierStats": ...

    def close(self) -> None:
        """Stop all transfers and join the threads. Later calls return UNAVAILABLE."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier's current usage, and its counters since it was opened."""

    name: str
    backend: str
    """How the tier transfers data, such as `threads, O_DIRECT`."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    num_blocks: int = 0
    hits: int = 0
    """Number of blocks that were read from this tier."""
    misses: int = 0
    """Number of blocks that were requested from this tier but not read, for any reason."""
    evictions: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    """Total seconds during which at least one block was being read."""
    written_bytes: int = 0
    written_seconds: float = 0.0
    queued: int = 0
    """Number of transfers that are waiting or running."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of failures by status. Hits, misses and stored blocks are not failures."""


class BusyTime:
    """Measures the time during which at least one transfer is in progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_active = 0
        self._since = 0.0
        self._seconds = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_active:
                self._since = time.perf_counter()
            self._num_active += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_active -= 1
            if not self._num_active:
                self._seconds += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        with self._lock:
            running = time.perf_counter() - self._since if self._num_active else 0.0
            return self._seconds + running


class TierCounter:
    """Counts one tier's results and transferred bytes. Thread-safe."""

    def __init__(self) -> None:
        self.reading = BusyTime()
        self.writing = BusyTime()
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0
        self._read_bytes = 0
        self._written_bytes = 0
        self._failures = Counter[str]()

    def loaded(self, results: Sequence[Result]) -> None:
        """Add the results of reads to the counters."""
        with self._lock:
            for result in results:
                is_hit = result.status is Status.HIT
                self._hits += is_hit
                self._misses += not is_hit
                self._read_bytes += result.num_bytes
                if not is_hit and result.status is not Status.MISS:
                    self._failures[result.status] += 1

    def saved(self, results: Sequence[Result]) -> None:
        """Add the results of writes to the counters."""
        with self._lock:
            for result in results:
                self._written_bytes += result.num_bytes
                if not result.is_usable:
                    self._failures[result.status] += 1

    def stats(
        self,
        name: str,
        backend: str,
        *,
        capacity_bytes: int = 0,
        used_bytes: int = 0,
        num_blocks: int = 0,
        evictions: int = 0,
        queued: int = 0,
    ) -> TierStats:
        """Return the tier's statistics, combining its counters with the values passed in."""
        with self._lock:
            return TierStats(
                name=name,
                backend=backend,
                capacity_bytes=capacity_bytes,
                used_bytes=used_bytes,
                num_blocks=num_blocks,
                hits=self._hits,
                misses=self._misses,
                evictions=evictions,
                read_bytes=self._read_bytes,
                read_seconds=self.reading.seconds,
                written_bytes=self._written_bytes,
                written_seconds=self.writing.seconds,
                queued=queued,
                failures=dict(self._failures),
            )


class CircuitBreaker:
    """Stops all calls, except occasional probes, to a tier or peer that keeps failing.

        closed ──failures in a row──► open ──pause over──► half-open, one probe ──success──► closed
                                       ▲                        │
                                       └──── failure, twice the pause

    A call to an unresponsive file system or peer blocks until its deadline. With a breaker, only
    the first few callers wait that long, and after that only one caller per pause. Thread-safe.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_failures: int = MAX_FAILURES,
        pause_s: float = PAUSE_S,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        """Create a closed breaker.

        Args:
            clock: returns the time in seconds.
            max_failures: number of consecutive failures that open the breaker.
            pause_s: initial pause in seconds. Every failed probe doubles the pause.
            max_pause_s: longest pause in seconds.
        """
        self._clock = clock
        self._max_failures = max_failures
        self._first_pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = pause_s
        self._until: float | None = None
        """Time at which the pause ends, or None while the breaker is closed."""
        self._is_probing = False
        self.openings = 0
        """Number of times the breaker has opened."""

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open or half-open, so that at most one probe is allowed."""
        return self._until is not None

    @property
    def is_paused(self) -> bool:
        """Whether calls are currently rejected. Unlike `allows`, this never starts a probe."""
        until = self._until
        return until is not None and self._clock() < until

    def allows(self) -> bool:
        """Return whether the caller may make a call now.

        After a pause, only one caller is let through as a probe. If it reports neither success nor
        failure within another pause, the next caller may probe.
        """
        with self._lock:
            if self._until is None:
                return True
            now = self._clock()
            if now < self._until:
                return False
            self._is_probing = True
            self._until = now + self._pause_s
            return True

    def succeeded(self) -> None:
        """Record a successful call, which closes the breaker."""
        with self._lock:
            self._failures = 0
            self._pause_s = self._first_pause_s
            self._until = None
            self._is_probing = False

    def failed(self) -> bool:
        """Record a failed call, and return whether it opened the breaker.

        While the breaker is open, only a failed probe counts. Failures of calls that started before
        it opened are ignored.
        """
        with self._lock:
            if self._until is not None and not self._is_probing:
                return False
            self._failures += 1
            if self._until is None and self._failures < self._max_failures:
                return False
            if self._is_probing:
                self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            self._until = self._clock() + self._pause_s
            self._is_probing = False
            self.openings += 1
            return True
