"""Metrics derived from worker reports. Counters keep their totals across workers."""

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ullage_common.process.metrics import CounterName, GaugeName, HistogramName, Tally
from ullage_engine import metric_names as names
from ullage_engine.protocol.worker_state import WorkerState

_Owner = TypeVar("_Owner")

_Sums = tuple[dict[CounterName, float], dict[HistogramName, Tally], tuple[int, int]]
_Seen = tuple[
    WorkerState | None, dict[CounterName, float], dict[HistogramName, Tally], tuple[int, int]
]


def families(
    table: Iterable[tuple[CounterName | GaugeName, Callable[[_Owner], float | None]]],
    owners: Collection[tuple[tuple[str, ...], _Owner]],
) -> Iterable[Metric]:
    """Yield one Prometheus metric family per row of `table`, with one sample per owner.

    Owners are the objects that the metrics describe. An owner whose value is None gets no sample.

    Args:
        table: pairs of a metric's name and a function that reads its value from an owner.
        owners: pairs of an owner's label values and the owner itself.
    """
    for name, read in table:
        family = name.family()
        for labels, owner in owners:
            if (value := read(owner)) is not None:
                family.add_metric(labels, value)
        yield family


class WorkerCollector(Collector):
    """Collects metrics from worker reports. Counters keep their totals across workers."""

    def __init__(self, values: tuple[str, ...]) -> None:
        self._values = values
        # The state of the present worker (None before the first is ready), and the sums of former
        # workers. The tuple is replaced as a whole, since a scrape runs in another thread.
        self._seen: _Seen = (
            None,
            dict.fromkeys(names.WORKER_COUNTERS, 0.0),
            {name: Tally() for name in names.WORKER_HISTOGRAMS},
            (0, 0),
        )

    @property
    def state(self) -> WorkerState | None:
        """The current worker's state, or None before the first worker is ready."""
        return self._seen[0]

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._seen = (state, *self._seen[1:])

    def count(self, name: CounterName, count: int) -> None:
        """Add `count` to a counter, for events that no worker has reported."""
        state, counts, tallies, changes = self._seen
        self._seen = (state, {**counts, name: counts[name] + count}, tallies, changes)

    def replace(self) -> None:
        """Carry over the exited worker's counts, because the next worker counts from zero."""
        self._seen = (None, *_sums(self._seen))

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        seen = self._seen
        if seen[0] is not None:
            yield from families(names.WORKER_GAUGES.items(), [(self._values, seen[0])])
        counts, tallies, changes = _sums(seen)
        for counter_name, count in counts.items():
            counter = counter_name.family()
            counter.add_metric(self._values, count)
            yield counter
        for histogram_name, tally in tallies.items():
            yield histogram_name.family({self._values: tally})
        directions = names.BATCH_SIZE_CHANGES.family()
        for direction, count in zip(("grow", "shrink"), changes, strict=True):
            directions.add_metric((*self._values, direction), count)
        yield directions


def _sums(seen: _Seen) -> _Sums:
    """Return the totals of all counters and histograms over the current and earlier workers."""
    state, counts, tallies, (grown, shrunk) = seen
    if state is None:
        return counts, tallies, (grown, shrunk)
    return (
        {name: counts[name] + read(state) for name, read in names.WORKER_COUNTERS.items()},
        {name: tallies[name] + read(state) for name, read in names.WORKER_HISTOGRAMS.items()},
        (grown + state.figures.num_grown, shrunk + state.figures.num_shrunk),
    )
