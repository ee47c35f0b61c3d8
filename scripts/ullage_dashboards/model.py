"""Classes for dashboards as plain data, and functions that make their panels' queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

INTERVAL = "$__rate_interval"
"""Grafana's rate window, computed from the scrape interval and the screen's width."""
SERVICE = 'namespace=~"$namespace",llmservice=~"$llmservice"'
"""Label matchers for a service's routers. "All" is .*, which also matches an absent label."""
ENGINES = f'{SERVICE},pod=~"$pod"'
"""Label matchers for a service's engines."""
SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999))
"""Name and value of each quantile that is shown for durations."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query in a panel."""

    legend: str
    """Legend of the query's series, with {{label}} for label values."""
    text: str
    """The PromQL expression."""
    needs: str = ""
    """Feature that the query needs to have data (empty if a plain service on CPUs has data)."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard."""

    title: str
    description: str
    """What the panel shows and how to interpret it, in sentences."""
    unit: str
    """Grafana's name for the unit."""
    queries: Sequence[Query]
    kind: Literal["lines", "stack", "stat", "xy"] = "lines"
    """`xy` draws the second query against the first."""
    width: int = 8
    """Width in 24ths of the page's width."""
    lines: Sequence[float] = ()
    """Thresholds to draw, in ascending order."""
    most: float | None = None
    """Maximum of the axis, or None for an automatic maximum."""


@dataclass(frozen=True, slots=True)
class Row:
    """A group of panels below one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable at the top of a dashboard."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]

    def queries(self) -> list[tuple[str, Query]]:
        """Return all queries with the titles of their panels."""
        panels = [panel for row in self.rows for panel in row.panels]
        return [(panel.title, query) for panel in panels for query in panel.queries]


NAMESPACE = Variable(
    "namespace", "Namespace", "label_values(ullage_router_inflight_requests, namespace)"
)
LLMSERVICE = Variable(
    "llmservice",
    "LLMService",
    'label_values(ullage_router_inflight_requests{namespace=~"$namespace"}, llmservice)',
)
POD = Variable("pod", "Engine", f"label_values(ullage_requests_running{{{SERVICE}}}, pod)")


def rate(counter: str, by: str = "", where: str = SERVICE, needs: str = "") -> Query:
    """Return the query for a counter's rate, summed by labels that also form the legend."""
    legend = (
        " ".join(f"{{{{{label}}}}}" for label in by.split(", ")) if by else counter_word(counter)
    )
    return Query(legend, summed_rate(counter, where, by), needs)


def counter_word(counter: str) -> str:
    """Return a counter's name in words, without the process's prefix."""
    name = counter.removeprefix("ullage_").removeprefix("router_").removesuffix("_total")
    return name.replace("_", " ")


def summed_rate(counter: str, where: str = SERVICE, by: str = "") -> str:
    """Return the PromQL for a counter's rate, summed by labels."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping}(rate({counter}{{{where}}}[{INTERVAL}]))"


def ratio(legend: str, part: str, whole: str, needs: str = "") -> Query:
    """Return the query for the ratio of two expressions with the same grouping."""
    return Query(legend, f"{part} / {whole}", needs)


def gauge(
    name: str, by: str = "", where: str = SERVICE, how: str = "sum", needs: str = ""
) -> Query:
    """Return the query for a gauge, aggregated with `how` by labels that also form the legend."""
    grouping = f" by ({by})" if by else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", ")) if by else counter_word(name)
    return Query(legend, f"{how}{grouping}({name}{{{where}}})", needs)


def quantile(
    legend: str, share: float, histogram: str, where: str = SERVICE, needs: str = ""
) -> Query:
    """Return the query for a histogram's quantile over all its series."""
    buckets = summed_rate(f"{histogram}_bucket", where, "le")
    return Query(legend, f"histogram_quantile({share}, {buckets})", needs)


def quantiles(histogram: str, where: str = SERVICE, needs: str = "") -> list[Query]:
    """Return the queries for a histogram's quantiles in SHARES."""
    return [quantile(name, share, histogram, where, needs) for name, share in SHARES]


def mean(legend: str, histogram: str, where: str = SERVICE, by: str = "") -> Query:
    """Return the query for a histogram's mean."""
    total, count = (summed_rate(f"{histogram}_{end}", where, by) for end in ("sum", "count"))
    return ratio(legend, total, count)
