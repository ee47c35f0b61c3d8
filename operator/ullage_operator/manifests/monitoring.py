"""The objects by which a Prometheus operator scrapes a service and raises alerts: pure builders."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ullage_operator.api import naming
from ullage_operator.api.naming import MONITORING_API
from ullage_operator.api.spec import Service
from ullage_operator.manifests.manifests import Builder

Manifest = dict[str, Any]

WINDOW = "5m"
"""Window over which rates and quantiles are taken."""
RESTARTS = 3
"""Number of worker restarts in a quarter of an hour above which somebody should look."""
TIER_FAILURES = 100
"""Number of blocks that a tier of KV failed in that time."""
BUSY_TOKENS, HIT_RATIO = 500, 0.6
"""Prompt tokens a second from which on cache hits count, and the share that is little then."""


def monitoring_objects(service: Service, serves: Collection[str]) -> list[Manifest]:
    """The objects of those kinds that the cluster serves."""
    settings = service.spec.observability
    objects = []
    if settings.pod_monitor.enabled and "PodMonitor" in serves:
        objects.append(pod_monitor(service, naming.ROUTER, naming.router_name(service.name)))
        objects.append(pod_monitor(service, naming.ENGINE, naming.engine_name(service.name)))
    if settings.prometheus_rule.enabled and "PrometheusRule" in serves:
        objects.append(prometheus_rule(service))
    return objects


def pod_monitor(service: Service, component: str, name: str) -> Manifest:
    settings = service.spec.observability.pod_monitor
    spec = {
        "selector": {"matchLabels": naming.selector(service.name, component)},
        "podMetricsEndpoints": [{"port": "metrics", "interval": settings.interval}],
    }
    manifest = Builder(service, component).object(MONITORING_API, "PodMonitor", name, spec)
    return labelled(manifest, settings.labels)


def labelled(manifest: Manifest, labels: Mapping[str, str]) -> Manifest:
    """Returns the manifest with people's labels under the operator's."""
    meta = manifest["metadata"]
    return manifest | {"metadata": meta | {"labels": {**labels, **meta["labels"]}}}


def prometheus_rule(service: Service) -> Manifest:
    """Alerts of one service."""
    group = {"name": f"ullage-{service.namespace}-{service.name}", "rules": alerts(service)}
    name = naming.router_name(service.name)
    build = Builder(service, naming.ROUTER)
    manifest = build.object(MONITORING_API, "PrometheusRule", name, {"groups": [group]})
    return labelled(manifest, service.spec.observability.prometheus_rule.labels)


class Alert(NamedTuple):
    """What people are told of."""

    name: str
    expression: str
    severity: str
    summary: str


def alerts(service: Service) -> list[Manifest]:
    """The rules of a service; docs/runbooks/service.md says what to do about each."""
    description = f"kubectl --namespace {service.namespace} describe llms {service.name}"
    return [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": "5m",
            "labels": {"severity": alert.severity, "llmservice": service.name},
            "annotations": {
                "summary": f"{service.namespace}/{service.name}: {alert.summary}",
                "description": description,
                "runbook": f"service.md#{alert.name.lower()}",
            },
        }
        for alert in (*router_alerts(service), *engine_alerts(service))
    ]


def router_alerts(service: Service) -> list[Alert]:
    """Alerts on what clients see."""
    slo = service.spec.slo
    routers = pods(service, f"{naming.router_name(service.name)}-[a-z0-9]+-?[a-z0-9]{{5}}")
    failed = f'sum(rate(ullage_router_requests_total{{{routers},code=~"5.."}}[{WINDOW}]))'
    every = f"sum(rate(ullage_router_requests_total{{{routers}}}[{WINDOW}]))"
    return [
        Alert(
            "UllageServiceAbsent",
            f"absent(ullage_router_inflight_requests{{{routers}}})",
            "critical",
            "No router of the service reports metrics.",
        ),
        Alert(
            "UllageServiceErrors",
            f"{failed} / {every} > {slo.error_rate:g}",
            "critical",
            f"More than {slo.error_rate:.2%} of requests end in a server error.",
        ),
        Alert(
            "UllageServiceFirstTokenLate",
            f"{p95('ullage_router_ttft_seconds', routers)} > {slo.ttft_p95:g}",
            "warning",
            f"The 95th percentile of the time to the first token is above {slo.ttft_p95:g} s.",
        ),
        Alert(
            "UllageServiceLate",
            f"{p95('ullage_router_e2e_seconds', routers)} > {slo.e2e_p95:g}",
            "warning",
            f"The 95th percentile of whole requests is above {slo.e2e_p95:g} s.",
        ),
        Alert(
            "UllageEnginesSilent",
            f"sum(rate(ullage_router_reports_missed_total{{{routers}}}[{WINDOW}])) > 0",
            "warning",
            "Routers miss reports of engines, and give them less than they could do.",
        ),
    ]


def engine_alerts(service: Service) -> list[Alert]:
    """Alerts on what keeps engines from their work."""
    of_engines = engines(service)

    def grows(counter: str, by: str = "") -> str:
        return f"sum{by}(increase({counter}{{{of_engines}}}[15m]))"

    hits = f"sum(rate(ullage_prefix_cache_hits_tokens_total{{{of_engines}}}[15m]))"
    queries = f"sum(rate(ullage_prefix_cache_queries_tokens_total{{{of_engines}}}[15m]))"
    return [
        Alert(
            "UllageWorkersRestart",
            f"{grows('ullage_worker_restarts_total')} > {RESTARTS}",
            "warning",
            f"More than {RESTARTS} workers were started anew in a quarter of an hour.",
        ),
        Alert(
            "UllageEngineOutOfMemory",
            f"{grows('ullage_oom_events_total')} > 0",
            "critical",
            "A step ran out of memory, which the engines' ledger is there to prevent.",
        ),
        Alert(
            "UllageNonFiniteLogits",
            f"{grows('ullage_nonfinite_logits_total')} > 0",
            "warning",
            "Requests failed because their logits were NaN or infinite.",
        ),
        Alert(
            "UllageKVTierFails",
            f"{grows('ullage_kv_tier_failures_total', ' by (tier, status) ')} > {TIER_FAILURES}",
            "warning",
            "A tier of KV fails again and again; what it has is computed anew.",
        ),
        Alert(
            "UllagePrefixCacheMisses",
            f"{hits} / ({queries} > {BUSY_TOKENS}) < {HIT_RATIO}",
            "info",
            f"Less than {HIT_RATIO:.0%} of prompt tokens are found in the prefix cache.",
        ),
    ]


def engines(service: Service) -> str:
    """The label matchers of a service's engines, and not of another's whose name begins so."""
    pools = (each for pool in service.spec.pools for each in (pool, naming.canary_pool(pool)))
    names = "|".join(naming.pool_name(service.name, pool) for pool in pools)
    return pods(service, f"({names})-[0-9]+")


def pods(service: Service, names: str) -> str:
    """The label matchers of pods whose names match, as a PodMonitor labels them."""
    return f'namespace="{service.namespace}",pod=~"{names}"'


def p95(histogram: str, matchers: str) -> str:
    rates = f"sum by (le) (rate({histogram}_bucket{{{matchers}}}[{WINDOW}]))"
    return f"histogram_quantile(0.95, {rates})"
