"""What the router remembers to place requests well: caches by engine, and retries left."""

import time
from collections import Counter
from collections.abc import Sequence

from ullage_router.affinity import Affinity, AffinityPolicy, Origin
from ullage_router.budget import BudgetPolicy, RetryBudget
from ullage_router.canary import Side
from ullage_router.config import PlacementSection
from ullage_router.engine import Engine
from ullage_router.engines import Engines


class Placement:
    """Owns affinity and the retry budget; engines own their breakers.

    Args:
        section: the settings.
        engines: where requests may go.
    """

    def __init__(self, section: PlacementSection, engines: Engines) -> None:
        affinity, retries = section.affinity, section.retries
        self._affinity = Affinity(AffinityPolicy(affinity.max_sessions, affinity.max_prefixes))
        policy = BudgetPolicy(retries.share, retries.per_second, retries.burst)
        self.budget = RetryBudget(policy, time.monotonic())
        self._engines = engines
        self.choices: Counter[str] = Counter()
        """Requests by what became of affinity: kept, yielded or none."""
        engines.on_forgotten = self._affinity.forget

    def origin(self, session: str, token_ids: Sequence[int], tenant: str) -> Origin:
        """What tells where a request's beginning may be cached."""
        return self._affinity.origin(session, token_ids, tenant)

    def preferred(self, origin: Origin, side: Side = Side.STABLE) -> str:
        """The address of the engine that has most of it; empty when none of that side is known."""
        if not (origin.session or origin.prefixes):
            return ""
        usable = {e.address for e in self._engines.all() if e.state == "ready" and e.side is side}
        return self._affinity.find(origin, usable.__contains__)

    def placed(self, origin: Origin, preferred: str, engine: Engine) -> None:
        """A request goes to this engine."""
        choice = ("kept" if preferred == engine.address else "yielded") if preferred else "none"
        self.choices[choice] += 1
        self._affinity.ran(origin, engine.address)

    def may_retry(self) -> bool:
        """Whether a request that failed before its first token goes to another engine."""
        return self.budget.take(time.monotonic())

    def as_json(self) -> dict[str, object]:
        """For /stats."""
        return {
            "sessions": self._affinity.sessions,
            "prefixes": self._affinity.prefixes,
            "affinity": {name: self.choices[name] for name in ("kept", "yielded", "none")},
            "retries": self.budget.spent,
            "retries_refused": self.budget.refused,
            "retries_left": int(self.budget.tokens),
        }
