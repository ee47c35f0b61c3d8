"""Write docs/reference/metrics.md, which lists all metrics, from the processes' declarations.

usage: python scripts/metrics_reference.py [--check]

With --check, only compare the page with the declarations.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from ullage_common.process.metrics import HistogramName, MetricName, metric_names
from ullage_engine import metric_names as engine
from ullage_operator import metric_names as operator
from ullage_router import metric_names as router

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "metrics.md"

HEAD = """# Metrics

Scrape router, engine and operator at `/metrics`. If your cluster has the Prometheus operator's API,
each service gets PodMonitors and alerts by itself. `ullage up` writes the addresses of its
processes to a file that you name:

    ullage up -f examples/smollm2.yaml --state-file state.json
    jq -r '.metrics_url, .engines[].metrics_url' state.json
    curl -s "$(jq -r .metrics_url state.json)" | grep tokens_per_second

## Scraping

Without the Prometheus operator, you name these addresses yourself:

```yaml
# prometheus.yml
scrape_configs:
  - job_name: ullage
    scrape_interval: 15s
    static_configs:
      - targets: ["127.0.0.1:41234", "127.0.0.1:41235"]   # from state.json
```

To set labels and interval of the PodMonitors that the operator makes, use
`spec.observability.podMonitor` ([llmservice.md](llmservice.md)). To choose the pods that may
scrape, see [operator.md](../guide/operator.md). If an alert fires, see
[runbooks/service.md](../runbooks/service.md).

## Reading

Times are seconds, sizes bytes, shares 0 to 1. Use the names below in your queries. A histogram has
`_bucket`, `_sum` and `_count`. Every label has few values: no request, prompt or key is one, and
only tenants that your configuration names have a value of their own.

Every process exports `process_resident_memory_bytes`, `process_cpu_seconds_total` and the other
metrics of a process that Prometheus' client reads. A worker's counters continue when the engine
replaces the worker, so you see no rate fall for that reason.

People read 4 to 13 tokens a second. This query gives you the share of streams that are slower:

```promql
sum(rate(ullage_router_stream_tokens_per_second_bucket{le="4.0"}[5m]))
  / sum(rate(ullage_router_stream_tokens_per_second_count[5m]))
```

[What they cost](../reasons/benchmarks.md#metrics) is far below 1 % of a request, a token or a step.

`python scripts/metrics_reference.py` writes this page from the modules named below, from which the
code registers its metrics, too.
"""

VLLM = """## vLLM's names

An engine also exports vLLM's metrics under vLLM's names, with its labels and buckets. You can
therefore use vLLM's dashboards, and the endpoint picker of the Gateway API's inference extension.
Both names are made of the same samples at each scrape.

| name | of |
| --- | --- |"""


def main() -> int:
    page = "\n".join(lines())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date; run python scripts/metrics_reference.py")
    return 1


def lines() -> Iterator[str]:
    """Yield the page's paragraphs."""
    yield HEAD
    yield from chapter("Router", "operator/ullage_router/metric_names.py", metric_names(router))

    common = ", ".join(f"`{label}`" for label in engine.ENGINE)
    own = [each for each in metric_names(engine) if not each.name.startswith("vllm:")]
    yield from chapter("Engine", "engine/ullage_engine/metric_names.py", own, engine.ENGINE)
    yield f"Every one has the labels {common}, too.\n"

    yield VLLM
    for name, alias in engine.VLLM_NAMES.items():
        yield f"| `{alias}{name.exposed.removeprefix(name.name)}` | `{name.exposed}` |"

    ends = "stop and length; timeout and cancelled are abort"
    success = engine.VLLM_SUCCESS
    cache = engine.VLLM_CACHE
    yield f"| `{success.exposed}`, label `finished_reason` | `{engine.REQUESTS.exposed}`: {ends} |"
    sizes = f"`{engine.BLOCK_TOKENS.name}` and `{engine.BLOCKS.name}`"
    yield f"| `{cache.name}{{{','.join(cache.labels)}}}` | {sizes}, as labels |"

    yield ""
    yield from chapter(
        "Operator", "operator/ullage_operator/metric_names.py", metric_names(operator)
    )


def chapter(
    title: str, module: str, names: list[MetricName], common: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield the heading and the table of metrics for one process."""
    yield f"## {title}\n\n`{module}`\n"
    yield "| name | kind | labels | meaning |\n| --- | --- | --- | --- |"
    for name in names:
        labels = ", ".join(f"`{each}`" for each in name.labels if each not in common)
        yield f"| `{name.exposed}` | {name.kind} | {labels} | {name.text}{bounds(name)} |"
    yield ""


def bounds(name: MetricName) -> str:
    """Describe the first and the last bucket of a histogram."""
    if not isinstance(name, HistogramName):
        return ""
    return f"; buckets {name.buckets[0]:g} to {name.buckets[-1]:g}"


if __name__ == "__main__":
    sys.exit(main())
