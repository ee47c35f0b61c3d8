"""The reference of metrics is that of the code, and names follow Prometheus' conventions."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from ullage_common.process.metrics import (
    AtScrape,
    CounterName,
    GaugeName,
    HistogramName,
    MetricName,
    Tally,
    exposition,
    metric_names,
)
from ullage_engine import metric_names as engine
from ullage_operator import metric_names as operator
from ullage_router import metric_names as router

ROOT = Path(__file__).parents[1]
BOUNDED = (
    {"model_name", "engine", "action", "route", "code", "reason", "had_tokens", "cause", "outcome"}
    | {"tier", "method", "step", "side", "trial", "what", "le", "tenant", "kind", "limit", "pool"}
    | {"priority", "direction", "rank", "stage", "tensor_rank", "device", "first_layer", "status"}
    | {"backend", "result", "finished_reason", "block_size", "num_gpu_blocks"}
    | {"gpu", "uuid", "xid", "error", "state"}
)
"""Labels whose values are few, whoever asks what."""


def test_the_page_is_of_this_code() -> None:
    script = ROOT / "scripts" / "metrics_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_names_say_their_process_and_labels_are_bounded() -> None:
    for prefix, module in (
        ("ullage_router_", router),
        ("ullage_operator_", operator),
        ("(ullage_|vllm:)", engine),
    ):
        names = metric_names(module)
        assert len({each.name for each in names}) == len(names)
        wrong = [each.name for each in names if not re.match(prefix, each.name)]
        wrong += [each.name for each in names if each.text.endswith(".")]
        wrong += [each.name for each in names if set(each.labels) - BOUNDED]
        assert not wrong


def sample_of(name: MetricName) -> Metric:
    """A family with one sample."""
    values = ("x",) * len(name.labels)
    if isinstance(name, HistogramName):
        return name.family({values: Tally()})
    assert isinstance(name, CounterName | GaugeName)
    family = name.family()
    family.add_metric(values, 1)
    return family


def test_promtool_objects_to_no_name_but_that_of_trials(
    promtool: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Also of those that need a GPU, tiers or tenants; operators of another version read trials."""
    registry = CollectorRegistry()

    def families() -> Iterable[Metric]:
        for module in (engine, router, operator):
            names = [each for each in metric_names(module) if not each.name.startswith("vllm:")]
            yield from map(sample_of, names)

    registry.register(AtScrape(families))
    done = promtool("check", "metrics", stdin=exposition(registry).decode())
    told = (done.stdout + done.stderr).splitlines()
    assert told == ['ullage_router_trial non-histogram metrics should not have "le" label']
