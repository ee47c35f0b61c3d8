"""Decides when a client should retry, and how many retries the router itself may make.

Retry-After is the time until memory is predicted to be free. The prediction is based on the
engines' reports of when running requests will release memory. In a burst, an engine gets many
requests before its next report. Their release is predicted from the engine's speed.

Released memory goes to queued requests first, on any engine of the pool. After that, one engine
must have enough memory for the request itself. Beyond the last known release, memory is assumed to
be released at the same rate. Requests that were refused earlier and will be retried also come first
(`deferral.py`), which spreads a burst of refusals over time. Jitter separates clients that would
retry in the same second, here or at another router with the same forecast.

The router's own retries are capped by a token bucket, so that failures cannot multiply the load.
Every request adds a fraction of a token, `share`, and every second adds `per_second` tokens, up to
`burst`. A retry takes one token. If the bucket is empty, clients get the errors immediately.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from ullage_common.config.router import RejectSection, RetrySection
from ullage_router.policy.facts import EngineView, Release

MAX_RETRY_AFTER_S = 30
UNKNOWN_RETRY_AFTER_S = 5
"""Minimum Retry-After in seconds if there is no prediction."""
JITTER = 0.2
"""Maximum jitter as a fraction of the predicted wait."""
LEAST_SPAN_S = 0.1
"""Shortest period, in seconds, over which a release rate is computed."""

_AFTER = operator.attrgetter("after_s")


def free_s(engines: Sequence[EngineView], needed: int, ahead: int) -> float | None:
    """Return the predicted seconds until a request fits.

    The result never decreases if `needed` or `ahead` increases.

    Args:
        engines: engines of one pool, at least one.
        needed: bytes that the request needs.
        ahead: bytes that earlier requests are waiting for.

    Returns:
        None if no release is known.
    """
    alone = min(_alone_s(engine, needed) for engine in engines)
    available = sum(max(0, engine.available) for engine in engines)
    releases = [release for engine in engines for release in _all_releases(engine)]
    seconds = max(alone, release_s(available, releases, needed + ahead))
    return None if seconds == math.inf else seconds


def _alone_s(engine: EngineView, needed: int) -> float:
    """Return the predicted seconds until this engine has enough memory and no prefill backlog."""
    return max(release_s(engine.available, _all_releases(engine), needed), engine.backlog_s)


def _all_releases(engine: EngineView) -> tuple[Release, ...]:
    """Return the reported releases, and one of all requests that the report does not include.

    Those requests are assumed to run together: their prompts first, then outputs of the expected
    length. They are left out while the engine's speed is unknown.
    """
    step_s = engine.step_s(max(1, engine.load))
    if not (engine.unreported and step_s):
        return engine.releases
    after_s = engine.backlog_s + engine.expected_output * step_s
    return (*engine.releases, Release(after_s, engine.unreported))


def release_s(available: int, releases: Iterable[Release], needed: int) -> float:
    """Return the seconds until `needed` bytes are predicted to be available.

    Returns:
        Infinity if no release is known.
    """
    if available >= needed:
        return 0.0

    released = 0
    last_s = 0.0
    for release in sorted(releases, key=_AFTER):
        released += release.size
        last_s = release.after_s
        if available + released >= needed:
            return last_s
    if not released:
        return math.inf
    return last_s + (needed - available - released) * max(last_s, LEAST_SPAN_S) / released


def drain_s(engines: Sequence[EngineView], size: int) -> float:
    """Return how many seconds the engines take to release this many bytes (0 if unknown)."""
    rate = sum(map(_release_rate, engines))
    return size / rate if rate else 0.0


def _release_rate(engine: EngineView) -> float:
    """Return the predicted rate of memory release in bytes per second (0 if unknown)."""
    releases = _all_releases(engine)
    if not releases:
        return 0.0
    last_s = max(release.after_s for release in releases)
    return sum(release.size for release in releases) / max(last_s, LEAST_SPAN_S)


def retry_after(
    seconds: float | None, returns: Mapping[int, int], draw: int, bounds: RejectSection
) -> int:
    """Choose when a refused client should retry: soon after the request is predicted to fit.

    Among the possible seconds, the one in which other retries need the fewest bytes is chosen.

    Args:
        seconds: predicted seconds until the request fits, or None if nothing is known.
        returns: bytes that other requests will need on their retries, by whole seconds from now.
        draw: a random number that breaks ties.

    Returns:
        Retry-After in whole seconds. The value exceeds the forecast by at most the fraction JITTER.
        Without a forecast, the value is at most twice UNKNOWN_RETRY_AFTER_S. If the forecast
        exceeds the maximum delay, clients are spread over the second half of that delay.
    """
    low = bounds.min_retry_delay
    high = bounds.max_retry_delay

    if seconds is None:
        first = float(UNKNOWN_RETRY_AFTER_S)
        last = 2.0 * UNKNOWN_RETRY_AFTER_S
    elif seconds > high:
        first = high / 2
        last = high
    else:
        first = seconds
        last = seconds * (1 + JITTER)
    first, last = (math.ceil(min(high, max(low, limit))) for limit in (first, last))

    least = min(returns.get(second, 0) for second in range(first, last + 1))
    alike = [second for second in range(first, last + 1) if returns.get(second, 0) == least]
    return alike[draw % len(alike)]


def unknown_retry_after(draw: int) -> int:
    """Return the Retry-After for a wait that cannot be predicted, such as for a first engine."""
    return retry_after(None, {}, draw, RejectSection())


def earliest_s(available: int, releases: Iterable[Release], needed: int) -> float:
    """Return a lower bound on the seconds until `needed` bytes are available.

    Unlike `release_s`, this function does not extrapolate beyond the last predicted release.
    """
    releases = tuple(releases)
    last_s = max((release.after_s for release in releases), default=0.0)
    return min(last_s, release_s(available, releases, needed))


class RetryBudget:
    """The token bucket that caps the router's retries.

    Times are in seconds, from any monotonic clock.
    """

    def __init__(self, section: RetrySection, now: float) -> None:
        self._section = section
        self._tokens = float(section.burst)
        self._filled_at = now
        self.spent = 0
        """Number of retries that the router has made."""
        self.refused = 0
        """Number of retries that were prevented because the bucket was empty."""

    @property
    def tokens(self) -> float:
        """Number of retries that were left when the bucket was last used."""
        return self._tokens

    def on_request(self) -> None:
        """Add the fraction of a token that each new request contributes to the bucket."""
        self._tokens = min(self._section.burst, self._tokens + self._section.share)

    def take(self, now: float) -> bool:
        """Take a token for a retry if one is available, and return whether it was."""
        self._fill(now)
        if self._tokens < 1.0:
            self.refused += 1
            return False
        self._tokens -= 1.0
        self.spent += 1
        return True

    def _fill(self, now: float) -> None:
        elapsed_s = max(0.0, now - self._filled_at)
        gained = elapsed_s * self._section.per_second
        self._tokens = min(self._section.burst, self._tokens + gained)
        self._filled_at = max(now, self._filled_at)
