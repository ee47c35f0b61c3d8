"""What a metric is before anything is measured: name, kind, meaning, labels and buckets.

Each process keeps its metrics' in one module, `metric_names.py`; its code registers metrics from
them, and `scripts/metrics_reference.py` writes docs/metrics.md from them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics import MetricWrapperBase

SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.0, 10.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0),
)
"""Bounds of the routers' histograms of time, which rules about objectives read, too."""

# Gauges beside all counters and histograms that say when they began, which Prometheus ignores.
disable_created_metrics()

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


class Series(dict[str | tuple[str, ...], _Metric], Generic[_Metric]):
    """The series of a metric by the values of its labels, made when they are first asked for.

    Prometheus' client takes longer to look one up than to count.
    """

    def __init__(self, metric: _Metric, first: tuple[str, ...] = ()) -> None:
        """`first`: values of the first labels, the same for all series."""
        super().__init__()
        self._metric = metric
        self._first = first

    def __missing__(self, values: str | tuple[str, ...]) -> _Metric:
        others = (values,) if isinstance(values, str) else values
        series = self[values] = self._metric.labels(*self._first, *others)
        return series


@dataclass(frozen=True, slots=True)
class MetricName:
    """The base class of all kinds."""

    kind: ClassVar[str]
    name: str
    """Full name, without what Prometheus appends for the kind."""
    text: str
    """Meaning in one sentence without its full stop."""
    labels: tuple[str, ...] = ()

    @property
    def exposed(self) -> str:
        """The name that queries use."""
        return self.name


class CounterName(MetricName):
    kind = "counter"

    @property
    def exposed(self) -> str:
        """The name that queries use."""
        return f"{self.name}_total"

    def register(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.text, self.labels, registry=registry)

    def family(self) -> CounterMetricFamily:
        """Returns a family without samples, for a collector that adds them at a scrape."""
        return CounterMetricFamily(self.name, self.text, labels=self.labels)


class GaugeName(MetricName):
    kind = "gauge"

    def register(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.text, self.labels, registry=registry)

    def family(self) -> GaugeMetricFamily:
        """Returns a family without samples, for a collector that adds them at a scrape."""
        return GaugeMetricFamily(self.name, self.text, labels=self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramName(MetricName):
    kind = "histogram"
    buckets: tuple[float, ...]
    """Upper bounds, ascending, without infinity."""

    def register(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self.name, self.text, self.labels, buckets=self.buckets, registry=registry)

    def family(self) -> HistogramMetricFamily:
        """Returns a family without samples, for a collector that adds them at a scrape."""
        return HistogramMetricFamily(self.name, self.text, labels=self.labels)


def metric_names(module: object) -> list[MetricName]:
    """Lists all metrics that a module names, those in its tables too, by name."""
    found: set[MetricName] = set()
    for value in vars(module).values():
        values: Iterable[object] = value if isinstance(value, dict | tuple) else (value,)
        found.update(each for each in values if isinstance(each, MetricName))
    return sorted(found, key=lambda each: each.name)
