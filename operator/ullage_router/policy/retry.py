"""Two rules for retries: when a client should come back, and how many retries the router may make.

Retry-After says when memory is predicted to be free. Engines report when running requests will give
memory back; requests that wait before take it first, wherever in the pool it is freed, and then one
engine must have the request's own bytes. After the last release that is known, memory is taken to
be released as fast as before. Requests that were told to come back take theirs first, too
(`deferral.py`): so a burst of refusals is spread over the releases. Jitter parts those that would
come back in one second, here and by the same forecast of other routers.

The router's own retries are bounded by a token bucket, so that failures cannot multiply load: every
request adds `share` of a token and every second adds `per_second` tokens, up to `burst`; a retry
takes one. When engines fail faster than that, clients get the errors at once.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from ullage_common.config.router import RejectSection, RetrySection
from ullage_router.policy.facts import EngineView, Release

MAX_RETRY_AFTER_S = 30
UNKNOWN_RETRY_AFTER_S = 5
JITTER = 0.2
"""Share of a forecast by which a client may be told to come back later than that."""
LEAST_SPAN_S = 0.1
"""Shortest time over which releases make a rate."""

_AFTER = operator.attrgetter("after_s")


def free_s(engines: Sequence[EngineView], needed: int, ahead: int) -> float | None:
    """Return seconds until a request may fit; never less for a larger `needed` or `ahead`.

    Args:
        engines: of one pool, at least one.
        needed: bytes of the request.
        ahead: bytes that others wait for before it.

    Returns:
        None where no release is known.
    """
    alone = min(_alone_s(engine, needed) for engine in engines)
    available = sum(max(0, engine.available) for engine in engines)
    releases = [release for engine in engines for release in engine.releases]
    seconds = max(alone, release_s(available, releases, needed + ahead))
    return None if seconds == math.inf else seconds


def _alone_s(engine: EngineView, needed: int) -> float:
    """Not before the prompts that wait on the engine have been computed, either."""
    return max(release_s(engine.available, engine.releases, needed), engine.backlog_s)


def release_s(available: int, releases: Iterable[Release], needed: int) -> float:
    """Return seconds until `needed` bytes are predicted to be available; infinity where no release
    is known."""
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
    """Return the seconds in which engines release this many bytes; 0 where no release is known."""
    rate = sum(map(_release_rate, engines))
    return size / rate if rate else 0.0


def _release_rate(engine: EngineView) -> float:
    """Return the release rate in bytes per second."""
    if not engine.releases:
        return 0.0
    last_s = max(release.after_s for release in engine.releases)
    return sum(release.size for release in engine.releases) / max(last_s, LEAST_SPAN_S)


def retry_after(
    seconds: float | None, returns: Mapping[int, int], draw: int, bounds: RejectSection
) -> int:
    """Return Retry-After for a forecast: a whole second, not much later, at which few others come
    back.

    Args:
        seconds: of the forecast; None: unknown.
        returns: bytes of others that come back then, by whole seconds from now.
        draw: a random number, which decides between seconds that are alike.

    Returns:
        Up to JITTER of the forecast later, and up to twice as late where it is unknown. Beyond the
        upper bound, where nobody will fit in time, clients are spread over its second half.
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
    """Return whole seconds with jitter for a wait that nobody can predict, such as for a first
    engine."""
    return retry_after(None, {}, draw, RejectSection())


def earliest_s(available: int, releases: Iterable[Release], needed: int) -> float:
    """Return the seconds before which `needed` bytes are not available, by the predicted
    releases."""
    releases = tuple(releases)
    last_s = max((release.after_s for release in releases), default=0.0)
    return min(last_s, release_s(available, releases, needed))


class RetryBudget:
    """The bucket. Times are of any steady clock."""

    def __init__(self, section: RetrySection, now: float) -> None:
        self._section = section
        self._tokens = float(section.burst)
        self._filled_at = now
        self.spent = 0
        """Retries made."""
        self.refused = 0
        """Retries not made because the bucket was empty."""

    @property
    def tokens(self) -> float:
        """Retries that were left when it was last used."""
        return self._tokens

    def on_request(self) -> None:
        """A request arrived."""
        self._tokens = min(self._section.burst, self._tokens + self._section.share)

    def take(self, now: float) -> bool:
        """Whether one more retry may be made; it is then taken out."""
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
