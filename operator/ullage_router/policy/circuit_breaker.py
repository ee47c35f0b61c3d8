"""Holds back engines on which requests fail: a circuit breaker for each engine.

    closed ──failures in a row──► open ──pause over──► half-open, one probe ──first token──► closed
                                   ▲                        │
                                   └──── failure, twice the pause

Only faults of the engine count (`errors.is_engine_fault`). A request that is invalid, cancelled,
out of time or too large for the free memory says nothing about its engine. An answer that stalls
after its first token does count.
"""

from collections.abc import Iterable
from typing import Literal

from ullage_common.config.router import BreakerSection

State = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """The breaker of one engine. Times are seconds of any steady clock.

    Args:
        section: failures that open the breaker, and the bounds of the pause.
    """

    def __init__(self, section: BreakerSection) -> None:
        self._section = section
        self._failures = 0
        self._pause_s = section.pause
        self._until: float | None = None
        """Time at which the pause ends, or None while closed."""
        self._probe: object | None = None
        self.openings = 0
        """Number of times that the breaker opened."""

    @property
    def failures(self) -> int:
        """Number of consecutive failures, at most the number that opens the breaker."""
        return self._failures

    @property
    def is_closed(self) -> bool:
        """Whether all requests pass."""
        return self._until is None

    def state(self, now: float) -> State:
        """Return the state at a time: an open breaker is half-open when its pause is over."""
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half-open"

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent. A half-open breaker admits one at a time."""
        return self.state(now) == "closed" or (self.state(now) == "half-open" and not self._probe)

    @property
    def until(self) -> float:
        """Time at which the pause ends or ended, or minus infinity while closed."""
        return float("-inf") if self._until is None else self._until

    def on_sent(self, request: object, now: float) -> None:
        """Record a request to the engine. While half-open, the first one is the probe."""
        if self.state(now) == "half-open" and self._probe is None:
            self._probe = request

    def on_first_token(self, request: object) -> None:
        """Close the breaker if the probe got its first token."""
        if request is self._probe:
            self._until = None
            # One more failure opens the breaker again, because the probe's answer has only begun.
            self._failures = self._section.failures - 1

    def on_success(self, request: object) -> None:
        """Clear the record after a request that was answered to its end."""
        if self._until is None or request is self._probe:
            self._failures = 0
            self._until = None
            self._pause_s = self._section.pause

    def on_failure(self, request: object, now: float) -> bool:
        """Count a failure of the engine, and return whether it opened the breaker.

        While the breaker is not closed, only the probe's failure counts: other requests were sent
        before it opened.
        """
        if self._until is not None and request is not self._probe:
            return False
        self._failures = min(self._failures + 1, self._section.failures)
        if self._until is None and self._failures < self._section.failures:
            return False
        self._open(now)
        return True

    def on_end(self, request: object) -> None:
        """Record the end of a request. After the probe ends, another request may be the probe."""
        if request is self._probe:
            self._probe = None

    def _open(self, now: float) -> None:
        self._until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._section.max_pause)
        self._probe = None
        self.openings += 1

    def check_integrity(self, now: float) -> None:
        """Assert that failures, pause and probe are within their bounds."""
        assert 0 <= self._failures <= self._section.failures
        assert self._section.pause <= self._pause_s <= self._section.max_pause
        assert self._until is None or self._until <= now + self._section.max_pause
        assert self._probe is None or self.state(now) != "open"


def held_back(
    breakers: Iterable[tuple[str, CircuitBreaker]], most: int, now: float
) -> frozenset[str]:
    """Return the keys of a pool's ready engines that get no requests now.

    Args:
        breakers: breakers of the pool's ready engines by key. Closed ones may be left out.
        most: maximum number of engines to hold back, so that some are tried even if all fail.
            Engines whose pause ends last are held back first.
    """
    refusing = [(breaker.until, name) for name, breaker in breakers if not breaker.admits(now)]
    return frozenset(name for _, name in sorted(refusing, reverse=True)[:most])
