"""The router's Prometheus metrics; every label has few values."""

from collections.abc import Callable, Collection, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from ullage_router.config import OTHER_TENANTS
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
        self._coalesced = self._counter("coalesced", "Requests that shared another's generation")
        self._replaced = self._counter("replaced", "Requests that a later one replaced")
        self._ttft = self._histogram("ttft", "From arrival to the first token")
        self._e2e = self._histogram("e2e", "From arrival to the last token")
        self._queue_wait = self._histogram("queue_wait", "In the queue, of requests that waited")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"ullage_router_{name}_requests", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        full = f"ullage_router_{name}_seconds"
        return Histogram(full, text, buckets=SECONDS, registry=self.registry)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(f"ullage_router_{name}", text, registry=self.registry).set_function(read)

    def count(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A counter that its owner keeps and that is read when it is scraped."""
        self.registry.register(_OwnedCounter(f"ullage_router_{name}", text, read))

    def ended(self, record: Record) -> None:
        """A request got its last word."""
        if record.action:
            self._decisions.labels(record.action, record.route).inc()
        self._requests.labels(str(record.status)).inc()
        if record.coalesced_with:
            self._coalesced.inc()
        if record.error == "REPLACED":
            self._replaced.inc()
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
        if record.status == 200:
            self._e2e.observe(record.duration_s)
        if record.queued_s:
            self._queue_wait.observe(record.queued_s)


class TenantMetrics:
    """Counts by tenant.

    Args:
        named: tenants that have a label of their own; the others share one.
    """

    def __init__(self, registry: CollectorRegistry, named: Collection[str]) -> None:
        self._named = frozenset(named)
        self._requests = Counter(
            "ullage_router_tenant_requests",
            "Requests by tenant and HTTP status",
            ["tenant", "code"],
            registry=registry,
        )
        self._tokens = Counter(
            "ullage_router_tenant_tokens",
            "Tokens served by tenant",
            ["tenant", "kind"],
            registry=registry,
        )
        self._limited = Counter(
            "ullage_router_tenant_limited",
            "Requests refused by tenant and the limit that was reached",
            ["tenant", "limit"],
            registry=registry,
        )
        self._refused = Counter(
            "ullage_router_auth_failures",
            "Requests refused for their key, by what was wrong",
            ["reason"],
            registry=registry,
        )

    def ended(self, tenant: str, status: int, prompt_tokens: int, output_tokens: int) -> None:
        label = self._label(tenant)
        self._requests.labels(label, str(status)).inc()
        self._tokens.labels(label, "prompt").inc(prompt_tokens)
        self._tokens.labels(label, "output").inc(output_tokens)

    def limited(self, tenant: str, limit: str) -> None:
        self._limited.labels(self._label(tenant), limit).inc()

    def refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._named else OTHER_TENANTS


class _OwnedCounter(Collector):
    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())

    def describe(self) -> list[CounterMetricFamily]:
        return [CounterMetricFamily(self._name, self._text)]


def largest(values: Iterable[float]) -> float:
    """0 when there is none."""
    return max(values, default=0.0)
