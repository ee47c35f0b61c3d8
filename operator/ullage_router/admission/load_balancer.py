"""Prefers engines that already have a request's prefix cached, and caps the number of retries."""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

from ullage_common.config.router import PlacementSection
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.policy.affinity import Affinity, CacheKey
from ullage_router.policy.facts import Side
from ullage_router.policy.retry import RetryBudget


class Preferred(NamedTuple):
    """The engine on which to run a request, because the request's prefix may be cached there."""

    engine: str = ""
    """Key of the engine (empty if unknown)."""
    is_remembered: bool = False
    """Whether this router placed a request with the same prefix on the engine."""


NO_PREFERENCE = Preferred()


class LoadBalancer:
    """Tracks which engines cache which prefixes (affinity), and limits retries by a shared budget.

    Each engine tracks its own circuit breaker.

    Args:
        section: the placement settings.
        engines: the engines that may serve requests.
    """

    def __init__(self, section: PlacementSection, engines: Engines) -> None:
        self._affinity = Affinity(section.affinity)
        self._max_extra_load = section.affinity.max_extra_load
        self.budget = RetryBudget(section.retries, time.monotonic())
        self._engines = engines
        self.choices: Counter[str] = Counter()
        """Number of requests by affinity outcome: `kept`, `yielded` or `none`.

        `kept` means that the request ran on the engine that had its prefix, and `yielded` that it
        ran on another engine. For `none`, this router had not seen the prefix before.
        """
        engines.on_forgotten = self._affinity.remove_engine

    def cache_key(
        self, session: str, token_ids: Sequence[int], tenant: str, adapter: str = ""
    ) -> CacheKey:
        """Return the key for looking up a request's prefix in the affinity tables."""
        return self._affinity.cache_key(session, token_ids, tenant, adapter)

    def preferred(self, cache_key: CacheKey, side: Side = Side.STABLE) -> Preferred:
        """Return the engine that is known or expected to cache the longest prefix of the request.

        If this router has not seen the prefix yet, another router may already have sent it to an
        engine. All routers therefore choose between the same two engines, which are found by
        consistent hashing. A session uses the first engine, unless that engine is much busier than
        the second. A prompt without a session uses the less busy engine, but only if that engine
        has no prefill backlog.
        """
        if not (cache_key.session or cache_key.prefixes):
            return NO_PREFERENCE
        remembered = self._affinity.find(cache_key, partial(self._is_usable, side))
        if remembered:
            return Preferred(remembered, is_remembered=True)
        return Preferred(self._nearest(cache_key, side))

    def alike(
        self,
        preferred: Preferred,
        fingerprints: Collection[str],
        side: Side,
        refusing: Collection[str],
        adapter: str = "",
    ) -> Preferred:
        """Return an engine that can continue an answer with bit-identical results.

        If there is no such engine, return the preferred engine. If there are several, return the
        preferred engine if it is one of them, or else the engine with the fewest requests.

        Args:
            fingerprints: numerics fingerprints of the engines that generated the answer so far.
            refusing: keys of engines that refuse the request.
            adapter: the answer's adapter (empty if it has none).
        """
        able = {
            engine.key: engine
            for engine in self._engines.all()
            if engine.numerics_of(adapter) in fingerprints
            and engine.key not in refusing
            and self._is_usable(side, engine.key)
        }
        if preferred.engine in able or not able:
            return preferred
        return Preferred(min(able, key=lambda key: able[key].load))

    def _nearest(self, cache_key: CacheKey, side: Side) -> str:
        """Return the key of the engine that the hash ring assigns to a request (empty if none)."""
        point = cache_key.point
        engines = self._engines.nearest_two(side, point) if point is not None else []
        if not engines:
            return ""
        first = engines[0]
        second = engines[-1]
        most = second.load + (self._max_extra_load if cache_key.session else 0)
        nearest = first if first.load <= most else second
        return nearest.key if cache_key.session or not nearest.backlog_tokens else ""

    def _is_usable(self, side: Side, key: str) -> bool:
        engine = self._engines.get(key)
        return engine is not None and engine.side is side and engine.state == "ready"

    def on_placed(self, cache_key: CacheKey, preferred: Preferred, engine: Engine) -> None:
        """Record that a request was placed on an engine, and whether that engine was preferred."""
        choice = "kept" if preferred.engine == engine.key else "yielded"
        self.choices[choice if preferred.is_remembered else "none"] += 1
        self._affinity.on_placed(cache_key, engine.key)

    def may_retry(self) -> bool:
        """Take one retry from the shared budget and return True, or return False if none is left.

        A request that failed before its first token uses a retry to try another engine.
        """
        return self.budget.take(time.monotonic())

    def as_json(self) -> dict[str, object]:
        """Return the affinity and retry counts for /stats."""
        return {
            "sessions": self._affinity.sessions,
            "prefixes": self._affinity.prefixes,
            "affinity": {name: self.choices[name] for name in ("kept", "yielded", "none")},
            "retries": self.budget.spent,
            "retries_refused": self.budget.refused,
            "retries_left": int(self.budget.tokens),
        }
