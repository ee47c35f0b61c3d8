"""What the operator tells Prometheus about itself."""

from prometheus_client import CollectorRegistry, Counter, Histogram

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
