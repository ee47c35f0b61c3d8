"""Stops sending requests to engines on which requests fail, with a circuit breaker per engine.

    closed ──failures in a row──► open ──pause over──► half-open, one probe ──first token──► closed
                                   ▲                        │
                                   └──── failure, twice the pause

A breaker also opens if half of the engine's latest answers failed, because an engine that fails
every second request rarely fails five in a row.

After its breaker has opened, an engine gets few requests at once, even if the pool has no other
engine to try. The limit on concurrent requests starts at one, doubles with each first token, and
returns to one after a failure. When it exceeds FULL_LIMIT, the limit ends, and the breaker closes
even if its pause is not over. Requests beyond the limit wait in the queue if the engine is
predicted to have a place in time (`forecast.place_s`). Otherwise they are refused.

Requests that were sent before the breaker last opened say nothing about the engine's current
condition, so they do not count against the limit, and their outcomes are ignored. Requests whose
first token arrived before a failure do not count against the limit that the failure resets. They
have shown that they run, and could not raise the limit again. If they fail later, that does count.

Only engine faults count as failures (`errors.is_engine_fault`). A request that is invalid,
cancelled, out of time or too large for the free memory does not. An answer that stalls after its
first token does count.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ullage_common.config.router import BreakerSection
from ullage_router.policy.facts import BreakerLimit

State = Literal["closed", "open", "half-open"]

WINDOW = 20
"""Number of latest outcomes by which the share of failures is judged."""
MAX_FAILED = WINDOW // 2
"""Number of failures in the window that opens the breaker."""
FULL_LIMIT = 64
"""Limit on concurrent requests above which an engine counts as recovered."""
LEAST_PROOF_S = 2.0
PROOF_STRETCH = 2.0
"""A first token is late after this many times its predicted time, plus LEAST_PROOF_S seconds."""


@dataclass(slots=True)
class _Trial:
    """A running request that counts against the limit."""

    due: float
    """Time from which the request's first token is late."""
    has_begun: bool = False
    """Whether the request has raised the limit, which it does with its first token."""


class CircuitBreaker:
    """One engine's circuit breaker. Times are in seconds, from any monotonic clock.

    Args:
        section: the number of consecutive failures that opens the breaker, and the minimum and
            maximum pause.
    """

    def __init__(self, section: BreakerSection) -> None:
        self._section = section
        self._failures = 0
        self._pause_s = section.pause
        self._until: float | None = None
        """Time at which the pause ends, or None while the breaker is closed."""
        self._probe: object | None = None
        self.openings = 0
        """Number of times that the breaker has opened."""
        self.limit: int | None = None
        """Maximum number of concurrent trials, or None if the engine has recovered."""
        self._outcomes = deque[bool](maxlen=WINDOW)
        """For each of the latest requests, whether it failed. Oldest first."""
        self._running: dict[object, int] = {}
        """For each running request, the number of openings before it was sent."""
        self._trials: dict[object, _Trial] = {}
        """Running requests that count against `limit`, which are called trials.

        They were sent while it was in force, and had no first token at the latest failure.
        """

    @property
    def _is_limited(self) -> bool:
        """Whether the settings let the breaker hold back engines and limit their requests."""
        return self._section.max_ejection_percent > 0

    @property
    def failures(self) -> int:
        """Number of consecutive failures, capped at the number that opens the breaker."""
        return self._failures

    @property
    def is_closed(self) -> bool:
        """Whether the breaker lets all requests pass."""
        return self._until is None

    @property
    def num_trials(self) -> int:
        """Number of running requests that count against the limit."""
        return len(self._trials)

    @property
    def is_at_limit(self) -> bool:
        """Whether the engine has as many trials as the limit allows."""
        return self.limit is not None and self.num_trials >= self.limit

    def limit_facts(self, now: float) -> BreakerLimit | None:
        """Return what predicts when a place will be free, or None if the limit is not reached."""
        if self.limit is None or not self.is_at_limit:
            return None
        dues = [trial.due for trial in self._trials.values() if not trial.has_begun]
        return BreakerLimit(
            limit=self.limit,
            running=self.num_trials,
            not_begun=len(dues),
            due_s=min(dues, default=now) - now,
            pause_s=max(0.0, self.until - now),
        )

    def state(self, now: float) -> State:
        """Return the state at the given time.

        An open breaker becomes half-open when its pause is over.
        """
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half-open"

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent.

        A half-open breaker admits one request at a time.
        """
        return self.state(now) == "closed" or (self.state(now) == "half-open" and not self._probe)

    @property
    def until(self) -> float:
        """Time at which the latest pause ends, or minus infinity while the breaker is closed.

        During a pause, the breaker is open and admits no requests.
        """
        return float("-inf") if self._until is None else self._until

    def on_sent(self, request: object, now: float, first_token_s: float = 0.0) -> None:
        """Record a sent request. The first request that a half-open breaker admits is the probe.

        Args:
            first_token_s: predicted seconds until the request's first token (0 if unknown).
        """
        self._running[request] = self.openings
        if self.limit is not None:
            self._trials[request] = _Trial(now + LEAST_PROOF_S + PROOF_STRETCH * first_token_s)
        if self.state(now) == "half-open" and self._probe is None:
            self._probe = request

    def on_first_token(self, request: object) -> None:
        """Close the breaker if the request is the probe, and raise the limit if it is a trial.

        A trial is a request that counts against the limit.
        """
        self._raise_limit(request)
        if request is self._probe:
            self._close()

    def on_success(self, request: object) -> None:
        """Record that a request succeeded, and reset the count of consecutive failures.

        Unless the breaker is closed, only the probe's success resets the count. Requests that were
        sent before the breaker last opened are ignored.
        """
        if not self.counts(request):
            return
        self._outcomes.append(False)
        self._raise_limit(request)
        if self._until is None or request is self._probe:
            self._failures = 0
            self._until = None
            self._pause_s = self._section.pause

    def on_failure(self, request: object, now: float) -> bool:
        """Count a failure of the engine, and return whether it opened the breaker.

        A breaker that is already open or half-open is opened again only if the probe fails. Each
        failure resets the limit to 1, if it is in force. Requests that were sent before the breaker
        last opened are ignored.
        """
        if not self.counts(request):
            return False
        self._outcomes.append(True)
        if self.limit is not None:
            self.limit = 1
            # Requests that have begun cannot raise the limit again, so they would only block it.
            self._trials = {r: trial for r, trial in self._trials.items() if not trial.has_begun}
        if self._until is not None and request is not self._probe:
            return False
        self._failures = min(self._failures + 1, self._section.failures)
        is_spike = len(self._outcomes) == WINDOW and sum(self._outcomes) >= MAX_FAILED
        if self._until is None and self._failures < self._section.failures and not is_spike:
            return False
        self._open(now)
        return True

    def on_end(self, request: object) -> None:
        """Record the end of a request.

        After the probe ends, another request may become the probe.
        """
        self._running.pop(request, None)
        self._trials.pop(request, None)
        if request is self._probe:
            self._probe = None

    def counts(self, request: object) -> bool:
        """Return whether a request is running, and was sent after the breaker last opened.

        The outcomes of other requests say nothing about the engine's current condition.
        """
        return self._running.get(request) == self.openings

    def _raise_limit(self, request: object) -> None:
        """Double the limit if the request is a trial that has not raised it before.

        If the limit ends, the breaker closes, so that new failures can open it even if its pause is
        not over.
        """
        trial = self._trials.get(request)
        if self.limit is None or trial is None or trial.has_begun:
            return
        trial.has_begun = True
        self.limit *= 2
        if self.limit > FULL_LIMIT:
            self.limit = None
            self._trials.clear()
            if self._until is not None:
                self._close()

    def _close(self) -> None:
        self._until = None
        self._probe = None
        # One more failure opens the breaker again, because the answers have only begun.
        self._failures = self._section.failures - 1

    def _open(self, now: float) -> None:
        self._until = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._section.max_pause)
        self._probe = None
        self._outcomes.clear()
        self._trials.clear()
        self.limit = 1 if self._is_limited else None
        self.openings += 1

    def check_integrity(self, now: float) -> None:
        """Assert that the failure count, the pause and the probe are consistent."""
        assert 0 <= self._failures <= self._section.failures
        assert self._section.pause <= self._pause_s <= self._section.max_pause
        assert self._until is None or self._until <= now + self._section.max_pause
        assert self._probe is None or self.state(now) != "open"
        assert self.limit is None or 1 <= self.limit <= FULL_LIMIT
        assert self._until is None or self.openings
        assert self.limit is not None or not self._trials
        assert self._trials.keys() <= self._running.keys()
        assert self._is_limited or self.limit is None
        assert self._until is None or self.limit is not None or not self._is_limited


def held_back(
    breakers: Iterable[tuple[str, CircuitBreaker]], most: int, now: float
) -> frozenset[str]:
    """Return the keys of a pool's ready engines that should not receive requests for now.

    Args:
        breakers: breakers of the pool's ready engines by key. Closed breakers may be left out.
        most: maximum number of engines to hold back, so that some engines still get requests even
            if all are failing. Engines whose pause ends last are held back first.
    """
    refusing = [(breaker.until, name) for name, breaker in breakers if not breaker.admits(now)]
    return frozenset(name for _, name in sorted(refusing, reverse=True)[:most])
