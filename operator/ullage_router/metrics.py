"""The router's Prometheus metrics; every label has few values."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ullage_router.stats import Record

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.0, 10.0, 20.0, 30.0, 60.0)


class Metrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._decisions = Counter(
            "ullage_router_decisions",
            "Requests by what was decided about them",
            ["action", "route"],
            registry=self.registry,
        )
        self._requests = Counter(
            "ullage_router_requests",
            "Requests by HTTP status, of gRPC the status that says the same; 499: client gone",
            ["code"],
            registry=self.registry,
        )
        self._ttft = self._histogram("ttft", "From arrival to the first token")
        self._e2e = self._histogram("e2e", "From arrival to the last token")
        self._queue_wait = self._histogram("queue_wait", "In the queue, of requests that waited")

    def _histogram(self, name: str, text: str) -> Histogram:
        full = f"ullage_router_{name}_seconds"
        return Histogram(full, text, buckets=SECONDS, registry=self.registry)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(f"ullage_router_{name}", text, registry=self.registry).set_function(read)

    def ended(self, record: Record) -> None:
        """A request got its last word."""
        if record.action:
            self._decisions.labels(record.action, record.route).inc()
        self._requests.labels(str(record.status)).inc()
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
        if record.status == 200:
            self._e2e.observe(record.duration_s)
        if record.queued_s:
            self._queue_wait.observe(record.queued_s)


def largest(values: Iterable[float]) -> float:
    """0 when there is none."""
    return max(values, default=0.0)
