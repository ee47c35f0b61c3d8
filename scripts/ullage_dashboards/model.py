"""Dashboards as plain data, and the queries of their panels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

INTERVAL = "$__rate_interval"
"""Grafana's rate window, computed from the scrape interval and the screen's width."""
SERVICE = 'namespace=~"$namespace",llmservice=~"$llmservice"'
"""Matchers of a service's routers. The value "All" is .*, which also matches an absent label."""
ENGINES = f'{SERVICE},pod=~"$pod"'
"""Matchers of a service's engines."""
SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999))
"""Name and share of each quantile of a time."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    legend: str
    """Name of its series, with {{label}} for values of labels."""
    text: str
    """PromQL."""
    needs: str = ""
    """Feature without which the query has no data (empty if a plain service on CPUs has data)."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel."""

    title: str
    description: str
    """Meaning and interpretation, in sentences."""
    unit: str
    """Unit by Grafana's name."""
    queries: Sequence[Query]
    kind: Literal["lines", "stack", "stat", "xy"] = "lines"
    """`xy` draws the second query against the first."""
    width: int = 8
    """Width in 24ths of the page."""
    lines: Sequence[float] = ()
    """Thresholds to draw, ascending."""
    most: float | None = None
    """Upper end of the axis."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one heading."""

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
        """List all queries with the titles of their panels."""
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
    """Return a counter's rate, summed by labels that are also its legend."""
    legend = (
        " ".join(f"{{{{{label}}}}}" for label in by.split(", ")) if by else counter_word(counter)
    )
    return Query(legend, summed_rate(counter, where, by), needs)


def counter_word(counter: str) -> str:
    """Return a counter's name in words, without the prefix of its process."""
    name = counter.removeprefix("ullage_").removeprefix("router_").removesuffix("_total")
    return name.replace("_", " ")


def summed_rate(counter: str, where: str = SERVICE, by: str = "") -> str:
    """Return PromQL of a counter's rate, summed by labels."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping}(rate({counter}{{{where}}}[{INTERVAL}]))"


def ratio(legend: str, part: str, whole: str, needs: str = "") -> Query:
    """Return the quotient of two expressions with the same grouping."""
    return Query(legend, f"{part} / {whole}", needs)


def gauge(
    name: str, by: str = "", where: str = SERVICE, how: str = "sum", needs: str = ""
) -> Query:
    """Return a gauge, summed (or `how`) by labels that are also its legend."""
    grouping = f" by ({by})" if by else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", ")) if by else counter_word(name)
    return Query(legend, f"{how}{grouping}({name}{{{where}}})", needs)


def quantile(
    legend: str, share: float, histogram: str, where: str = SERVICE, needs: str = ""
) -> Query:
    """Return a quantile of a histogram over all its series."""
    buckets = summed_rate(f"{histogram}_bucket", where, "le")
    return Query(legend, f"histogram_quantile({share}, {buckets})", needs)


def quantiles(histogram: str, where: str = SERVICE, needs: str = "") -> list[Query]:
    """Return the quantiles of SHARES for a histogram."""
    return [quantile(name, share, histogram, where, needs) for name, share in SHARES]


def mean(legend: str, histogram: str, where: str = SERVICE, by: str = "") -> Query:
    """Return the mean of a histogram."""
    total, count = (summed_rate(f"{histogram}_{end}", where, by) for end in ("sum", "count"))
    return ratio(legend, total, count)
