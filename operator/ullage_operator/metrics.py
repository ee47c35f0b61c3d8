"""What the operator tells Prometheus about itself."""

import functools
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class ReconcileMetrics:
    """Reconciliations by result, and how long they take."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.total = Counter(
            "ullage_operator_reconcile",
            "Reconciliations of an LLMService: ok, invalid, gone, temporary, permanent or bug.",
            ["result"],
            registry=registry,
        )
        self.seconds = Histogram(
            "ullage_operator_reconcile_seconds",
            "Time of one reconciliation.",
            buckets=_BUCKETS_S,
            registry=registry,
        )


class WatchMetrics:
    """How the watches fare, and how much they hold."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.restarts = Counter(
            "ullage_operator_watch_restarts",
            "Watches begun again, by reason: ended, forgotten, absent, denied, unavailable, "
            "refused or bug.",
            ["kind", "reason"],
            registry=registry,
        )
        self._objects = Gauge(
            "ullage_operator_objects",
            "Objects that the operator watches.",
            ["kind"],
            registry=registry,
        )

    def count(self, kinds: Iterable[str], counts: Callable[[], Mapping[str, int]]) -> None:
        """Exports how many objects of each kind are known whenever somebody asks."""
        for kind in kinds:
            self._objects.labels(kind=kind).set_function(functools.partial(_of, counts, kind))


def _of(counts: Callable[[], Mapping[str, int]], kind: str) -> float:
    return counts()[kind]


class LeadMetrics:
    """Whether this operator is the one that acts."""

    def __init__(self, registry: CollectorRegistry, left_s: Callable[[], float]) -> None:
        leader = Gauge(
            "ullage_operator_leader",
            "1 for the operator that acts, 0 for one that stands by.",
            registry=registry,
        )
        leader.set_function(lambda: float(left_s() > 0))
