"""Exports an engine's metrics under vLLM's names, which dashboards expect."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ullage_common.process.metrics import GaugeName
from ullage_engine import metric_names as names

_FINISHED_REASONS = {"stop": "stop", "length": "length", "timeout": "abort", "cancelled": "abort"}
"""Maps Ullage's request outcomes to vLLM's finish reasons."""


class VllmAliases(Collector):
    """Collects a registry's metric families, and also exports some of them under vLLM's names."""

    def __init__(self, native: CollectorRegistry) -> None:
        self._native = native

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._native.collect()}
        yield from families.values()
        for name, alias in names.VLLM_NAMES.items():
            if name.name in families:
                yield _renamed(families[name.name], alias)
        yield _success(families[names.REQUESTS.name])
        yield _cache_config(families)


def _renamed(family: Metric, name: str) -> Metric:
    metric = Metric(name, family.documentation, family.type)
    metric.samples = [
        sample._replace(name=sample.name.replace(family.name, name, 1)) for sample in family.samples
    ]
    return metric


def _success(requests: Metric) -> Metric:
    """Return vLLM's counter of finished requests, by finish reason."""
    counts = dict.fromkeys(_FINISHED_REASONS.values(), 0.0)
    values: tuple[str, ...] = ()
    for sample in requests.samples:
        model, engine, outcome = (sample.labels[name] for name in names.REQUESTS.labels)
        if sample.name.endswith("_total") and (reason := _FINISHED_REASONS.get(outcome)):
            values = (model, engine)
            counts[reason] += sample.value
    metric = names.VLLM_SUCCESS.family()
    for reason, count in counts.items():
        if values:
            metric.add_metric((*values, reason), count)
    return metric


def _cache_config(families: dict[str, Metric]) -> Metric:
    """Return vLLM's cache info gauge, whose labels state the size of the KV pool."""

    def value(name: GaugeName) -> str:
        samples = families[name.name].samples
        return str(int(samples[0].value)) if samples else "0"

    metric = names.VLLM_CACHE.family()
    metric.add_metric((value(names.BLOCK_TOKENS), value(names.BLOCKS), "0"), 1)
    return metric
