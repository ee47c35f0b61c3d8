"""When memory is predicted to come back: what Retry-After says.

Engines report when running requests will give memory back. Those that wait before take it first,
wherever in the pool it comes; then one engine must have the request's own bytes.
"""

import math
from collections.abc import Iterable, Sequence

from ullage_router.config import RejectSection
from ullage_router.views import EngineView, Release

MAX_RETRY_AFTER_S = 30
UNKNOWN_RETRY_AFTER_S = 5


def retry_after(
    engines: Sequence[EngineView], needed: int, ahead: int, bounds: RejectSection
) -> int:
    """Whole seconds until a request may fit; never less for a larger `needed` or `ahead`.

    Args:
        engines: of one pool, at least one.
        needed: bytes of the request.
        ahead: bytes that others wait for before it.
    """
    alone = min(_alone_s(engine, needed) for engine in engines)
    available = sum(max(0, engine.available) for engine in engines)
    releases = [release for engine in engines for release in engine.releases]
    seconds = max(alone, release_s(available, releases, needed + ahead))
    return max(bounds.min_retry_after, min(bounds.max_retry_after, math.ceil(seconds)))


def _alone_s(engine: EngineView, needed: int) -> float:
    """Not before the prompts that wait on the engine have been computed, either."""
    return max(release_s(engine.available, engine.releases, needed), engine.backlog_s)


def release_s(available: int, releases: Iterable[Release], needed: int) -> float:
    """Seconds until `needed` bytes are predicted to be available."""
    if available >= needed:
        return 0.0
    is_known = False
    for release in sorted(releases, key=lambda r: r.after_s):
        is_known = True
        available += release.size
        if available >= needed:
            return release.after_s
    return MAX_RETRY_AFTER_S if is_known else UNKNOWN_RETRY_AFTER_S
