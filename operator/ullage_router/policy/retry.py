"""Two rules for retries: when a client should come back, and how many retries the router may make.

Retry-After says when memory is predicted to be free. Engines report when running requests will give
memory back; requests that wait before take it first, wherever in the pool it is freed, and then one
engine must have the request's own bytes.

The router's own retries are bounded by a token bucket, so that failures cannot multiply load: every
request adds `share` of a token and every second adds `per_second` tokens, up to `burst`; a retry
takes one. When engines fail faster than that, clients get the errors at once.
"""

import math
import operator
from collections.abc import Iterable, Sequence

from ullage_common.config.router import RejectSection, RetrySection
from ullage_router.policy.decision import EngineView, Release

MAX_RETRY_AFTER_S = 30
UNKNOWN_RETRY_AFTER_S = 5


_AFTER = operator.attrgetter("after_s")


def retry_after(
    engines: Sequence[EngineView], needed: int, ahead: int, bounds: RejectSection
) -> int:
    """Returns whole seconds until a request may fit; never less for a larger `needed` or `ahead`.

    Args:
        engines: of one pool, at least one.
        needed: bytes of the request.
        ahead: bytes that others wait for before it.
    """
    alone = min(_alone_s(engine, needed) for engine in engines)
    available = sum(max(0, engine.available) for engine in engines)
    releases = [release for engine in engines for release in engine.releases]
    seconds = max(alone, release_s(available, releases, needed + ahead))
    return math.ceil(max(bounds.min_retry_after, min(bounds.max_retry_after, seconds)))


def _alone_s(engine: EngineView, needed: int) -> float:
    """Not before the prompts that wait on the engine have been computed, either."""
    return max(release_s(engine.available, engine.releases, needed), engine.backlog_s)


def release_s(available: int, releases: Iterable[Release], needed: int) -> float:
    """Seconds until `needed` bytes are predicted to be available."""
    if available >= needed:
        return 0.0
    is_known = False
    for release in sorted(releases, key=_AFTER):
        is_known = True
        available += release.size
        if available >= needed:
            return release.after_s
    return MAX_RETRY_AFTER_S if is_known else UNKNOWN_RETRY_AFTER_S


def earliest_s(available: int, releases: Iterable[Release], needed: int) -> float:
    """Seconds before which `needed` bytes are not available, as far as releases are predicted."""
    if available >= needed:
        return 0.0
    last_s = max((release.after_s for release in releases), default=0.0)
    return min(last_s, release_s(available, releases, needed)) if last_s else 0.0


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
