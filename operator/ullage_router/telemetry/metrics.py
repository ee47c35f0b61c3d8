"""The router's Prometheus metrics. Each of their labels has only a few possible values."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.process_collector import ProcessCollector

from ullage_common.config.router import OTHER_TENANTS
from ullage_common.process.cpu_pressure import waiting_seconds
from ullage_common.process.metrics import AtScrape, CounterName, GaugeName
from ullage_router import metric_names as names
from ullage_router.errors import CLIENT_CLOSED, REPLACED, STOPPED
from ullage_router.policy.decision import Attempt
from ullage_router.telemetry.record import RequestRecord


class Metrics:
    """Creates and updates all of the router's metrics, in a registry of their own.

    Args:
        named: tenants that have labels of their own. All other tenants share one label.
    """

    def __init__(self, named: Collection[str] = ("",)) -> None:
        self._named = frozenset(named)
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(AtScrape(_cpu_waiting))
        self._decisions = names.DECISIONS.counts(registry)
        self._requests = names.REQUESTS.counts(registry)
        self._refusals = names.REFUSALS.counts(registry)
        self._ttft = names.TTFT.tallies(registry)
        self._e2e = names.E2E.tallies(registry)
        self._queue_wait = names.QUEUE_WAIT.tallies(registry)
        self._stream_speed = names.STREAM_SPEED.tallies(registry)
        self._early_stops = names.EARLY_STOPS.counts(registry)
        self._early_stop_tokens = names.EARLY_STOP_TOKENS.register(registry)
        self._resumptions = names.RESUMPTIONS.register(registry)
        self._coalesced = names.COALESCED.register(registry)
        self._replaced = names.REPLACED.register(registry)
        self._cached_tokens = names.CACHED_TOKENS.counts(registry)
        self._compressions = names.COMPRESSIONS.register(registry)
        self._saved_tokens = names.SAVED_TOKENS.register(registry)
        self._attempts = names.CASCADE_ATTEMPTS.register(registry)
        self._confidence = names.CASCADE_CONFIDENCE.register(registry)
        self._discarded = names.CASCADE_DISCARDED.register(registry)
        self._sides = names.REVISION_REQUESTS.counts(registry)

    def watch_each(
        self, name: GaugeName, values: Iterable[str], read: Callable[[str], float]
    ) -> None:
        """Export a gauge with one label.

        Args:
            name: the gauge.
            values: the values of the label.
            read: returns the gauge's value for a value of the label. It is called at each scrape.
        """
        gauge = name.register(self.registry)
        for value in values:
            gauge.labels(value).set_function(functools.partial(read, value))

    def watch(self, name: GaugeName, read: Callable[[], float]) -> None:
        """Export a gauge whose value is obtained by calling `read` at each scrape."""
        name.register(self.registry).set_function(read)

    def count(self, name: CounterName, read: Callable[[], float]) -> None:
        """Export a counter that is kept elsewhere, calling `read` for its value at each scrape."""
        self._count_all(name, lambda: {(): read()})

    def count_each(self, name: CounterName, read: Callable[[], Mapping[str, float]]) -> None:
        """Export a counter with one label that is kept elsewhere, as `count` does.

        Args:
            name: the counter.
            read: returns the counts by the values of the label.
        """
        self._count_all(name, lambda: {(value,): count for value, count in read().items()})

    def _count_all(
        self, name: CounterName, read: Callable[[], Mapping[tuple[str, ...], float]]
    ) -> None:
        def families() -> Iterable[CounterMetricFamily]:
            family = name.family()
            for labels, count in read().items():
                family.add_metric(labels, count)
            return [family]

        self.registry.register(AtScrape(families))

    def on_attempt(self, attempt: Attempt) -> None:
        """Record the outcome of an attempted cascade step."""
        self._attempts.labels(attempt.step, attempt.outcome).inc()
        if attempt.confidence is not None:
            self._confidence.labels(attempt.step).observe(attempt.confidence)
        self._discarded.labels(attempt.step).inc(attempt.discarded_tokens)

    def on_resumption(self, cause: str, outcome: str) -> None:
        """Count an answer whose engine was lost while it was being generated.

        Args:
            cause: why the engine was lost.
            outcome: whether the answer was `resumed` or `lost`.
        """
        self._resumptions.labels(cause, outcome).inc()

    def on_summary(self, method: str, saved_tokens: int) -> None:
        """Count a long conversation for which a summary was made or rejected."""
        self._compressions.labels(method).inc()
        self._saved_tokens.inc(saved_tokens)

    def on_end(self, record: RequestRecord) -> None:
        """Update the metrics for a request that has ended.

        A request that was refused because the service is stopped is left out of the status and
        latency metrics, so that it does not count against the service's objectives.
        """
        status = str(record.status)
        decision = record.decision
        if decision.action:
            self._decisions[decision.action, decision.route] += 1
        if record.error == STOPPED:  # the service was stopped on purpose, so no objective is missed
            self._refusals[STOPPED] += 1
            return

        self._requests[status] += 1
        if record.status == CLIENT_CLOSED and record.error == "CANCELLED":
            self._early_stops["no" if record.ttft_s is None else "yes"] += 1
            self._early_stop_tokens.observe(record.output_tokens)
        if decision.side:
            self._sides[decision.side, status] += 1
        if decision.coalesced_with:
            self._coalesced.inc()
        else:
            for each in record.cached:
                self._cached_tokens[each.tier] += each.num_tokens
        if record.error == REPLACED:
            self._replaced.inc()

        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
            if speed := record.tokens_per_second:
                self._stream_speed.observe(speed)
        if record.status == 200:
            self._e2e.observe(record.duration_s)

        if decision.queued_s:
            tenant = record.tenant if record.tenant in self._named else OTHER_TENANTS
            self._queue_wait.observe(decision.queued_s, tenant, _band(record.priority))
        if decision.action == "reject":
            self._refusals[decision.reason] += 1


class TenantMetrics:
    """Counts requests, tokens and refusals by tenant.

    Args:
        named: tenants that have labels of their own. All other tenants share one label.
    """

    def __init__(self, registry: CollectorRegistry, named: Collection[str]) -> None:
        self._named = frozenset(named)
        self._requests = names.TENANT_REQUESTS.counts(registry)
        self._tokens = names.TENANT_TOKENS.counts(registry)
        self._limited = names.TENANT_LIMITED.register(registry)
        self._refused = names.AUTH_FAILURES.register(registry)

    def on_end(
        self, tenant: str, status: int, prompt_tokens: int, output_tokens: int, count: int = 1
    ) -> None:
        """Count one tenant's requests that have ended, all with the same status.

        Args:
            prompt_tokens: total prompt tokens of these requests.
            output_tokens: total output tokens of these requests.
            count: number of requests.
        """
        label = self._label(tenant)
        self._requests[label, str(status)] += count
        self._tokens[label, "prompt"] += prompt_tokens
        self._tokens[label, "output"] += output_tokens

    def on_limit(self, tenant: str, limit: str) -> None:
        self._limited.labels(self._label(tenant), limit).inc()

    def on_auth_failure(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._named else OTHER_TENANTS


def _cpu_waiting() -> Iterable[CounterMetricFamily]:
    family = names.CPU_WAITING.family()
    if (seconds := waiting_seconds()) is not None:
        family.add_metric((), seconds)
    return [family]


def _band(priority: int) -> str:
    """Map a priority to low, normal or high, so that the metric label has only a few values."""
    return "normal" if not priority else "high" if priority > 0 else "low"


def largest(values: Iterable[float]) -> float:
    """Return the largest value, or 0 if there are no values."""
    return max(values, default=0.0)
