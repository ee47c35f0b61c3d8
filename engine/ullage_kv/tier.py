"""What the store asks of a tier below host memory, what every tier counts, and when it is left
alone."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ullage_kv.results import Result, Status

MAX_FAILURES = 3
"""Failures in a row after which a tier, or a peer, is left alone."""
PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Seconds for which it is left alone at first, and at most."""


class Transfer(NamedTuple):
    """One block to copy between a tier and memory."""

    key: bytes
    memory: memoryview
    """Memory of the block's size, writable; it stays valid until the transfer's result is there."""
    parent: bytes | None = None
    """Key of the block that this one continues, if it is known."""


class LowerTier(Protocol):
    """A tier below host memory. Calls return at once; threads of its own do the work.

    Several threads call it. Every error is a result; what it loads is verified.
    """

    @property
    def name(self) -> str: ...

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        """Find out which blocks are stored here, for `holds` to say so; done at once where that is
        known. It takes a part of a deadline at most, and never fails."""

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Says of each block whether it is stored here, as far as is known without waiting."""

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        """Says of each block whether a copy of it should be stored here, by the same knowledge."""

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        """Copy blocks to memory: HIT, or anything else, after which the memory holds anything.

        Every result is there when `deadline_s` seconds have passed, and nobody writes to the memory
        afterwards.
        """

    def save(self, transfers: Sequence[Transfer]) -> "Future[list[Result]]":
        """Store copies of blocks; BUSY where too many wait already."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop blocks that must not be read again."""

    def remove_chains(self, chains: Collection[bytes] | None) -> None:
        """Drop all blocks of chains, by the first `CHAIN_BYTES` of their keys; None: of all."""

    def stats(self) -> "TierStats": ...

    def close(self) -> None:
        """End what is under way and wait for it; later calls have the result UNAVAILABLE."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds and has done since it was opened."""

    name: str
    backend: str
    """How bytes are really moved, such as `threads, O_DIRECT`."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    num_blocks: int = 0
    hits: int = 0
    """Blocks that were read here."""
    misses: int = 0
    """Blocks that were looked for and not read here, for whatever reason."""
    evictions: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    """Seconds in which something was read; what is read at the same time counts once."""
    written_bytes: int = 0
    written_seconds: float = 0.0
    queued: int = 0
    """Transfers that wait or are under way."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of results that were neither hits, misses nor stored, by status."""


class BusyTime:
    """The seconds in which at least one transfer is under way."""

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
    """Counts results and bytes of one tier; safe to use from several threads."""

    def __init__(self) -> None:
        self.reading = BusyTime()
        self.writing = BusyTime()
        self._lock = threading.Lock()
        self._hits = self._misses = self._read_bytes = self._written_bytes = 0
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
        """Return what was counted beside what the tier holds."""
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


class Breaker:
    """A circuit breaker: leaves alone what fails again and again, and tries it now and then.

        closed ──failures in a row──► open ──pause over──► half-open, one probe ──success──► closed
                                       ▲                        │
                                       └──── failure, twice the pause

    A file system or a peer that does not answer costs every caller its deadline. Behind a breaker
    it costs that a few times, and later one caller once a pause. Safe to use from several threads.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_failures: int = MAX_FAILURES,
        pause_s: float = PAUSE_S,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        """`max_failures`: that many in a row open it. `pause_s`: the first pause in seconds; every
        failed probe doubles it, up to `max_pause_s`."""
        self._clock = clock
        self._max_failures = max_failures
        self._first_pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = pause_s
        self._until: float | None = None
        """Time at which the pause ends; None while closed."""
        self._is_probing = False
        self.openings = 0
        """Times that it opened."""

    @property
    def is_open(self) -> bool:
        """Whether it failed so often that it is left alone, or tried by a single probe."""
        return self._until is not None

    @property
    def is_paused(self) -> bool:
        """Whether nobody may try now; asking does not make the caller the probe."""
        until = self._until
        return until is not None and self._clock() < until

    def allows(self) -> bool:
        """Say whether to try now.

        After a pause one caller is told so, who is the probe. A probe that reports neither a
        failure nor a success for another pause gives way to the next one.
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
        """Close it: what answers is tried again, whoever saw it."""
        with self._lock:
            self._failures = 0
            self._pause_s = self._first_pause_s
            self._until = None
            self._is_probing = False

    def failed(self) -> bool:
        """Count a failure; True: this one has opened it.

        What was begun before it opened changes nothing when it fails, too; only a probe does.
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
