"""A circuit breaker: leaves alone what fails again and again, and tries it now and then.

    closed ──failures in a row──► open ──pause over──► half-open, one probe ──success──► closed
                                   ▲                        │
                                   └──── failure, twice the pause

A file system or a peer that does not answer costs every caller its deadline. Behind a breaker it
costs that a few times, and later one caller once a pause.
"""

import threading
import time
from collections.abc import Callable

MAX_FAILURES = 3
PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class Breaker:
    """Failures in a row of one thing, and whether it is tried; safe to use from several threads."""

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
        """Says whether to try now.

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
        """Closes it: what answers is tried again, whoever saw it."""
        with self._lock:
            self._failures = 0
            self._pause_s = self._first_pause_s
            self._until = None
            self._is_probing = False

    def failed(self) -> bool:
        """Counts a failure; True: this one has opened it.

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
