"""A circuit breaker for one engine, and which engines of a pool are held back: pure, no clock.

    closed ──failures in a row──► open ──pause over──► half-open, one probe ──first token──► closed
                                   ▲                        │
                                   └──── failure, twice the pause

Only what an engine did wrong counts (`errors.is_engine_fault`): a request that is invalid,
cancelled, out of time or too large for the memory that is free says nothing about its engine. An
answer that has begun and gets no further token for as long as it may be without one does.
"""

from collections.abc import Iterable
from typing import Literal

from ullage_common.config.router import BreakerSection

State = Literal["closed", "open", "half-open"]


class Breaker:
    """One engine's failures in a row and what follows from them. Times are of any steady clock."""

    def __init__(self, section: BreakerSection) -> None:
        self._section = section
        self._failures = 0
        self._pause_s = section.pause
        self._until: float | None = None
        """Time at which the pause ends; None while closed."""
        self._probe: object | None = None
        self.openings = 0
        """Times it opened since the start."""

    @property
    def failures(self) -> int:
        """Number of failures in a row, as far as they count."""
        return self._failures

    @property
    def is_closed(self) -> bool:
        """Nothing is held back, whatever the time."""
        return self._until is None

    def state(self, now: float) -> State:
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half-open"

    def admits(self, now: float) -> bool:
        """Whether a request may be sent: half-open admits one at a time."""
        return self.state(now) == "closed" or (self.state(now) == "half-open" and not self._probe)

    @property
    def until(self) -> float:
        """Time at which the pause ends or ended; minus infinity while closed."""
        return float("-inf") if self._until is None else self._until

    def on_sent(self, request: object, now: float) -> None:
        """A request goes to the engine; while half-open the first is the probe."""
        if self.state(now) == "half-open" and self._probe is None:
            self._probe = request

    def on_first_token(self, request: object) -> None:
        """A request got its first token; after the probe's, one failure opens the breaker again."""
        if request is self._probe:
            self._until = None
            self._failures = self._section.failures - 1

    def on_success(self, request: object) -> None:
        """A request was answered to its end."""
        if self._until is None or request is self._probe:
            self._failures = 0
            self._until = None
            self._pause_s = self._section.pause

    def on_failure(self, request: object, now: float) -> bool:
        """The engine failed a request. True when that opened the breaker.

        Requests that were under way when it opened change nothing any more; only the probe does.
        """
        if self._until is not None and request is not self._probe:
            return False
        self._failures = min(self._failures + 1, self._section.failures)
        if self._until is None and self._failures < self._section.failures:
            return False
        self._open(now)
        return True

    def on_end(self, request: object) -> None:
        """A request is over, whatever came of it: another may be the probe."""
        if request is self._probe:
            self._probe = None

    def _open(self, now: float) -> None:
        self._until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._section.max_pause)
        self._probe = None
        self.openings += 1

    def check_integrity(self, now: float) -> None:
        assert 0 <= self._failures <= self._section.failures
        assert self._section.pause <= self._pause_s <= self._section.max_pause
        assert self._until is None or self._until <= now + self._section.max_pause
        assert self._probe is None or self.state(now) != "open"


def held_back(breakers: Iterable[tuple[str, Breaker]], most: int, now: float) -> frozenset[str]:
    """The names of a pool's ready engines that get nothing now.

    Args:
        breakers: of the pool's ready engines, at least those that are not closed.
        most: when all fail, most engines go on being tried: never more are held back, those first
            whose pause is the longest.
    """
    refusing = [(breaker.until, name) for name, breaker in breakers if not breaker.admits(now)]
    return frozenset(name for _, name in sorted(refusing, reverse=True)[:most])
