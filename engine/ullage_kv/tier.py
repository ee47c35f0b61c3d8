"""The protocol of a tier below host memory, its counters, and its circuit breaker."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ullage_kv.results import Result, Status

MAX_FAILURES = 3
"""Number of consecutive failures that open the circuit breaker of a tier or a peer."""
PAUSE_S = 1.0
"""Initial pause in seconds, during which an open circuit breaker rejects all calls."""
MAX_PAUSE_S = 60.0
"""Maximum pause in seconds, during which an open circuit breaker rejects all calls."""


class Transfer(NamedTuple):
    """One block to copy between a tier and memory."""

    key: bytes
    memory: memoryview
    """Writable memory of the block's size, valid until the transfer has its result."""
    parent: bytes | None = None
    """Key of the previous block of the chain, or None if unknown."""


class LowerTier(Protocol):
    """A tier below host memory.

    Calls return at once, and the tier's threads do the work. Several threads may call a tier.
    Errors are returned as results and never raised. Loaded blocks are verified.
    """

    @property
    def name(self) -> str: ...

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        """Find out which blocks this tier stores, so that `holds` can answer.

        The returned future is done at once if the answer is already known. The future takes at most
        a fraction of a deadline, and never fails.
        """

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether this tier is known to store each block, without waiting."""

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether this tier should store a copy of each block, without waiting."""

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        """Copy blocks to memory.

        Returns:
            A future of one result per block, done within `deadline_s` seconds. After any result
            except HIT, the content of the memory is undefined. The tier does not write to a block's
            memory after its result is set.
        """

    def save(self, transfers: Sequence[Transfer]) -> "Future[list[Result]]":
        """Store copies of blocks. The result is BUSY if too many blocks already wait."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop blocks that must not be read again."""

    def remove_chains(self, chains: Collection[bytes] | None) -> None:
        """Drop all blocks of chains, given by the `CHAIN_BYTES` prefix of keys (None for all)."""

    def stats(self) -> "TierStats": ...

    def close(self) -> None:
        """End all transfers and wait for their threads. Later calls return UNAVAILABLE."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """The contents of a tier, and its counters since it was opened."""

    name: str
    backend: str
    """How the tier transfers bytes, such as `threads, O_DIRECT`."""
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
    """Number of transfers that wait or run."""
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
    """Counts results and bytes of one tier. Thread-safe."""

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
        """Count the results of reads."""
        with self._lock:
            for result in results:
                is_hit = result.status is Status.HIT
                self._hits += is_hit
                self._misses += not is_hit
                self._read_bytes += result.num_bytes
                if not is_hit and result.status is not Status.MISS:
                    self._failures[result.status] += 1

    def saved(self, results: Sequence[Result]) -> None:
        """Count the results of writes."""
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
        """Return the counters and the contents of the tier."""
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
    """A circuit breaker, which stops all calls except probes to a tier or peer that keeps failing.

        closed ──failures in a row──► open ──pause over──► half-open, one probe ──success──► closed
                                       ▲                        │
                                       └──── failure, twice the pause

    Every call to a file system or peer that does not answer takes its full deadline. With a
    breaker, only the first few callers wait that long, and after that one caller per pause.
    Thread-safe.
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
            pause_s: first pause in seconds. Every failed probe doubles the pause.
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
        """Number of times that the breaker opened."""

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open or half-open, so that at most a single probe is allowed."""
        return self._until is not None

    @property
    def is_paused(self) -> bool:
        """Whether no call is allowed now. Reading this does not make the caller the probe."""
        until = self._until
        return until is not None and self._clock() < until

    def allows(self) -> bool:
        """Return whether the caller may make a call now.

        After a pause, one caller may make a call as the probe. If the probe reports neither success
        nor failure for another pause, another caller may become the probe.
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
        """Close the breaker after any success, of a probe or of an earlier call."""
        with self._lock:
            self._failures = 0
            self._pause_s = self._first_pause_s
            self._until = None
            self._is_probing = False

    def failed(self) -> bool:
        """Count a failure, and return whether this failure has opened the breaker.

        While the breaker is open, only a failure of its probe counts. Calls that began before the
        breaker opened may fail, too, but those failures are ignored.
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
