"""Builds a service's PodMonitors and PrometheusRule.

With these objects, a Prometheus operator scrapes the service, records burn rates and fires alerts.
docs/runbooks/service.md explains how to resolve each alert.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ullage_common.process.metrics import SECONDS
from ullage_operator.api import naming
from ullage_operator.api.naming import MONITORING_API
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.builder import Builder

Manifest = dict[str, Any]

Rule = dict[str, Any]

BURN = "ullage:slo_burn:rate"
"""Prefix of the names of recorded burn rates (error ratio divided by error budget)."""
WINDOWS = ("5m", "30m", "1h", "6h", "3d")
TAILS = (("e2e_p99", 2, 0.01), ("e2e_p999", 3, 0.001))
"""Tail-latency objectives: name, multiple of e2eP95, fraction of requests that may be slower."""
NAME_SERVICE = {
    "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"],
    "targetLabel": "llmservice",
}
"""Relabeling that adds the name of the service to every series, for dashboards."""
PAGE = ((14.4, "1h", "5m"), (6, "6h", "30m"))
"""Burn rates that spend 2 % of a month's error budget in an hour, and 5 % in six hours."""
PAGE_REQUESTS = 100
TICKET_REQUESTS = 500
TAIL_REQUESTS = 1000
"""Number of requests in its window that a page, ticket or tail-latency alert needs to fire."""
SHORT_OF_CAPACITY = "KV_HEADROOM|QUEUE_FULL|QUEUE_TIMEOUT|DEADLINE"
"""Reasons for refusing requests that more memory or more engines could have served."""
REFUSED_RATE = 0.1
REFUSED_SHARE = 0.05
"""Fraction of refused requests above which an alert fires, if `REFUSED_RATE` is exceeded, too."""
QUEUE_SHARE = 0.8
FILES_SHARE = 0.9
"""Fraction of the queue's limits above which the queue counts as nearly full."""
READING_SPEED = 4.0
SLOW_STREAMS = 0.05
"""Fraction of streams that may be slower than people read (`READING_SPEED` tokens per second)."""
CERTIFICATE_S = 3 * 86400
"""Seconds before expiry by which a certificate should have been renewed."""
UNEVEN_SHARE = 0.5
"""Fraction of the most loaded engine's load below which the least loaded engine has too little."""
UNEVEN_REQUESTS = 4
"""Number of running requests that the most loaded engine needs for engines to be compared."""
UNEVEN_KV = 0.5
"""Fraction of KV in use that the most loaded engine needs for engines to be compared."""
ROUTER_CORES = 0.9
"""CPU cores above which a router counts as saturated, because it runs on one core."""
CPU_WAITING = 0.5
"""Fraction of time in which threads wait for a core above which an alert fires."""
LENGTH_CHANGE = 1.5
LENGTH_ANSWERS = 100
"""Factor by which the mean length of answers changes within a day before an alert fires.

Both hours that are compared need more than `LENGTH_ANSWERS` answers.
"""
RESTARTS = 3
"""Number of worker restarts within 15 minutes above which an alert fires."""
TIER_FAILURES = 100
"""Number of blocks that failed in a KV tier within 15 minutes above which an alert fires."""
BUSY_TOKENS = 500
HIT_RATIO = 0.6
"""Minimum prefix cache hit ratio, checked above `BUSY_TOKENS` prompt tokens per second."""


def monitoring_objects(
    service: Service, serves: Collection[str], settings: Settings
) -> list[Manifest]:
    """Return a service's PodMonitors and PrometheusRule, if they are enabled.

    Kinds whose CRDs are not installed are skipped.
    """
    wanted = service.spec.observability
    objects = []
    if wanted.pod_monitor.enabled and "PodMonitor" in serves:
        objects.append(pod_monitor(service, naming.ROUTER, naming.router_name(service.name)))
        objects.append(pod_monitor(service, naming.ENGINE, naming.engine_name(service.name)))
    if wanted.prometheus_rule.enabled and "PrometheusRule" in serves:
        objects.append(prometheus_rule(service, settings))
    return objects


def duration(seconds: float) -> str:
    """Format a duration for Prometheus, which does not support fractional durations."""
    return f"{seconds:.0f}s" if seconds.is_integer() else f"{1000 * seconds:.0f}ms"


def pod_monitor(service: Service, component: str, name: str) -> Manifest:
    settings = service.spec.observability.pod_monitor
    endpoint = {
        "port": "metrics",
        "interval": duration(settings.interval),
        "relabelings": [NAME_SERVICE],
    }
    spec = {
        "selector": {"matchLabels": naming.selector(service.name, component)},
        "podMetricsEndpoints": [endpoint],
    }
    manifest = Builder(service, component).object(MONITORING_API, "PodMonitor", name, spec)
    return labelled(manifest, settings.labels)


def labelled(manifest: Manifest, labels: Mapping[str, str]) -> Manifest:
    """Return a manifest with the spec's labels. The operator's own labels take precedence."""
    meta = manifest["metadata"]
    return manifest | {"metadata": meta | {"labels": {**labels, **meta["labels"]}}}


def prometheus_rule(service: Service, settings: Settings) -> Manifest:
    """Return a service's PrometheusRule, which contains recording rules and alerts."""
    spec = {"groups": rule_groups(service, settings)}
    name = naming.router_name(service.name)
    manifest = Builder(service, naming.ROUTER).object(MONITORING_API, "PrometheusRule", name, spec)
    return labelled(manifest, service.spec.observability.prometheus_rule.labels)


class Alert(NamedTuple):
    """A Prometheus alert for a service."""

    name: str
    expression: str
    severity: str
    summary: str
    description: str
    hold: str = "5m"
    """Time for which the expression must be true before the alert fires."""


def rule_groups(service: Service, settings: Settings) -> list[Rule]:
    """Return the groups of the PrometheusRule: recording rules and alerts."""
    name = f"ullage-{service.namespace}-{service.name}"
    parts = (
        *(slo_alerts, budget_alerts, router_alerts),
        *(connection_alerts, file_alerts, load_alerts, engine_alerts, device_alerts),
    )
    rules = [alert_rule(alert, service, settings) for part in parts for alert in part(service)]
    return [
        # Windows of days are expensive for Prometheus, so the rules run once a minute.
        {"name": f"{name}-slo", "interval": "1m", "rules": burn_rates(service)},
        {"name": name, "rules": rules},
    ]


def alert_rule(alert: Alert, service: Service, settings: Settings) -> Rule:
    describe = f"kubectl --namespace {service.namespace} describe llms {service.name}"
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.hold,
        "labels": {"severity": alert.severity, "llmservice": service.name},
        "annotations": {
            "summary": f"{service.namespace}/{service.name}: {alert.summary}",
            "description": f"{alert.description} See {describe}.",
            "runbook_url": f"{settings.runbooks}/service.md#{alert.name.lower()}",
        },
    }


def burn_rates(service: Service) -> list[Rule]:
    """Return the recording rules for burn rates.

    At a burn rate of 1, the error budget is used up exactly. At 0, none of it is used.
    """
    slo = service.spec.slo
    of_routers = routers(service)
    late = {"ttft_p95": ("ttft", slo.ttft_p95, 0.05), "e2e_p95": ("e2e", slo.e2e_p95, 0.05)}
    late |= {name: ("e2e", slo.e2e_p95 * factor, share) for name, factor, share in TAILS}
    # An objective above the last bucket cannot be measured.
    late = {name: each for name, each in late.items() if each[1] <= SECONDS[-1]}
    rules = []
    for window in WINDOWS:
        missed = {"errors": f"{failed_share(of_routers, window)} / {slo.error_rate:g}"}
        for name, (histogram, objective, budget) in late.items():
            share = late_share(f"ullage_router_{histogram}_seconds", of_routers, objective, window)
            missed[name] = f"{share} / {budget:g}"
        for objective_name, expression in missed.items():
            labels = {"namespace": service.namespace, "llmservice": service.name}
            labels["objective"] = objective_name
            rules.append({"record": f"{BURN}{window}", "expr": expression, "labels": labels})
    return rules


def failed_share(matchers: str, window: str) -> str:
    """Return the PromQL expression for the fraction of requests that ended in a server error."""
    failed = f'sum(rate(ullage_router_requests_total{{{matchers},code=~"5.."}}[{window}]))'
    every = f"sum(rate(ullage_router_requests_total{{{matchers}}}[{window}]))"
    return f"({failed} or vector(0)) / {every}"


def late_share(histogram: str, matchers: str, objective_s: float, window: str) -> str:
    """Return the PromQL expression for the fraction of requests slower than the objective.

    The expression interpolates linearly between two buckets, as Prometheus does for quantiles.
    """
    above = SECONDS[bisect_left(SECONDS, objective_s)]
    below = max((bound for bound in SECONDS if bound < objective_s), default=0.0)
    part = (objective_s - below) / (above - below)

    def within(bound: float) -> str:
        return f'sum(rate({histogram}_bucket{{{matchers},le="{bound}"}}[{window}]))'

    in_time = within(above)
    if part < 1:
        in_time = f"({part:.4g} * {in_time} + {1 - part:.4g} * {within(below)})"
    return f"(1 - {in_time} / sum(rate({histogram}_count{{{matchers}}}[{window}])))"


def slo_alerts(service: Service) -> list[Alert]:
    """Return the alerts for objectives that are currently being missed."""
    slo = service.spec.slo
    tail = burn(service, "30m", "e2e_p99|e2e_p999")
    return [
        Alert(
            "UllageServiceErrors",
            f"{burn(service, '5m', 'errors')} > 1",
            "critical",
            f"More than {slo.error_rate:.2%} of requests end in a server error.",
            "Clients get 5xx; slo.errorPercent is the bound.",
        ),
        Alert(
            "UllageServiceFirstTokenLate",
            f"{burn(service, '5m', 'ttft_p95')} > 1",
            "warning",
            f"The 95th percentile of the time to the first token is above {slo.ttft_p95:g} s.",
            "Requests wait in the router's queue or for prefill; slo.ttftP95 is the bound.",
        ),
        Alert(
            "UllageServiceLate",
            f"{burn(service, '5m', 'e2e_p95')} > 1",
            "warning",
            f"The 95th percentile of whole requests is above {slo.e2e_p95:g} s.",
            "Answers begin late or their tokens come slowly; slo.e2eP95 is the bound.",
        ),
        Alert(
            "UllageServiceTailLate",
            f"{tail} > 1 {and_several(service, TAIL_REQUESTS, '30m')}",
            "warning",
            "The slowest requests are much slower than the others.",
            "Objective e2e_p99: more than 1 % take twice slo.e2eP95; e2e_p999: more than 0.1 % "
            "three times as long.",
        ),
    ]


def budget_alerts(service: Service) -> list[Alert]:
    """Return the alerts for error budgets that burn too fast in both a long and a short window."""
    most = "errors|ttft_p95|e2e_p95|e2e_p99"
    pages = [
        f"({burn(service, long, most)} > {rate} and {burn(service, short, most)} > {rate})"
        for rate, long, short in PAGE
    ]
    lasting = f"{burn(service, '3d', '.+')} > 1 and {burn(service, '6h', '.+')} > 1"
    return [
        Alert(
            "UllageBudgetBurnsFast",
            f"({' or '.join(pages)}) {and_several(service, PAGE_REQUESTS, '1h')}",
            "critical",
            "An objective is missed so often that a month's budget is gone within days.",
            "The label objective names it. Both the last minutes and the last hours are bad.",
            "2m",
        ),
        Alert(
            "UllageBudgetBurnsSlowly",
            f"{lasting} {and_several(service, TICKET_REQUESTS, '6h')}",
            "warning",
            "Over three days an objective was missed more often than its budget allows.",
            "The label objective names it. The problem does not go away by itself.",
            "15m",
        ),
    ]


def burn(service: Service, window: str, objectives: str) -> str:
    """Return the PromQL selector for burn rates of objectives that match a regular expression."""
    of_service = f'namespace="{service.namespace}",llmservice="{service.name}"'
    return f'{BURN}{window}{{{of_service},objective=~"{objectives}"}}'


def and_several(service: Service, count: int, window: str) -> str:
    """Return a PromQL clause that keeps an alert from firing on only a few requests.

    Append it to the alert's expression. It holds only if there were more than `count` requests in
    the window.
    """
    requests = f"sum(increase(ullage_router_requests_total{{{routers(service)}}}[{window}]))"
    return f"and on() {requests} > {count}"


def router_alerts(service: Service) -> list[Alert]:
    """Return the alerts for routers, including their queues and the requests that they reject."""
    of_routers = routers(service)
    queue = service.spec.routing.queue
    refusals = f'ullage_router_refusals_total{{{of_routers},reason=~"{SHORT_OF_CAPACITY}"}}'
    every = f"sum(rate(ullage_router_requests_total{{{of_routers}}}[1m]))"
    waiting = f"max(ullage_router_queue_requests{{{of_routers}}})"
    speeds = f'ullage_router_stream_tokens_per_second_bucket{{{of_routers},le="%s"}}'
    slow, streams = (f"sum(rate({speeds % bound}[5m]))" for bound in (READING_SPEED, "+Inf"))
    waiting_bytes = f"max(ullage_router_queue_bytes{{{of_routers}}})"
    return [
        Alert(
            "UllageServiceAbsent",
            f"absent(ullage_router_inflight_requests{{{of_routers}}})",
            "critical",
            "No router of the service reports metrics.",
            "None runs, or Prometheus may not read them.",
        ),
        Alert(
            "UllageHeadroomExhausted",
            f"(sum(rate({refusals}[1m])) > {REFUSED_RATE}) / {every} > {REFUSED_SHARE}",
            "warning",
            f"Engines have no room: more than {REFUSED_SHARE:.0%} of requests are refused for it.",
            "Requests need more memory or time than engines have left. Clients get 429.",
            "15s",
        ),
        Alert(
            "UllageQueueSaturated",
            f"{waiting} > {QUEUE_SHARE * queue.max_requests:g} "
            f"or {waiting_bytes} > {QUEUE_SHARE * queue.max_bytes:g}",
            "warning",
            f"A router's queue is more than {QUEUE_SHARE:.0%} full.",
            "Soon requests are refused that could have waited. routing.queue has the bounds.",
            "2m",
        ),
        Alert(
            "UllageStreamsSlow",
            f"{slow} / {streams} > {SLOW_STREAMS} {and_several(service, PAGE_REQUESTS, '1h')}",
            "warning",
            f"More than {SLOW_STREAMS:.0%} of streams are slower than people read.",
            f"They get less than {READING_SPEED:g} tokens a second after the first one.",
        ),
    ]


def connection_alerts(service: Service) -> list[Alert]:
    """Return the alerts for the connections between routers and engines."""
    of_routers = routers(service)
    of_engines = engines(service)
    expiry = "certificate_expiry_timestamp_seconds"
    ends = f"(ullage_router_{expiry}{{{of_routers}}} or ullage_{expiry}{{{of_engines}}})"
    return [
        Alert(
            "UllageEnginesSilent",
            f"sum(rate(ullage_router_reports_missed_total{{{of_routers}}}[5m])) > 0",
            "warning",
            "Routers miss reports of engines, and send them fewer requests than they could serve.",
            "An engine's server or the network is overloaded.",
        ),
        Alert(
            "UllageEnginesStale",
            f"max(ullage_router_stale_engines{{{of_routers}}}) > 0",
            "warning",
            "An engine has not reported its memory for too long, and gets no requests.",
            "It hangs, or the network to it is broken.",
            "2m",
        ),
        Alert(
            "UllageEnginesDiffer",
            f"max by (pool) (ullage_router_fingerprints{{{of_routers}}}) > 1",
            "warning",
            "Engines of a pool compute differently, so their answers may differ.",
            "They share no KV. The condition EnginesConsistent names the differences.",
            "30m",
        ),
        Alert(
            "UllageCertificateExpires",
            f"min by (pod) ({ends} > 0) - time() < {CERTIFICATE_S}",
            "warning",
            f"A certificate expires within {CERTIFICATE_S // 86400} days.",
            "It was not renewed. After it expires nobody can connect.",
        ),
        Alert(
            "UllageCertificateUnusable",
            f"max by (pod) (ullage_router_certificate_problems{{{of_routers}}} "
            f"or ullage_certificate_problems{{{of_engines}}}) > 0",
            "critical",
            "A certificate has expired, or its newest files cannot be used.",
            "The previous certificate stays in use until it expires.",
        ),
    ]


def file_alerts(service: Service) -> list[Alert]:
    """Return the alerts for the store of files, which have no series where files are off."""
    of_routers = routers(service)
    shares = [
        f"max(ullage_router_{used}{{{of_routers}}}) / max(ullage_router_{limit}{{{of_routers}}})"
        for used, limit in (("file_bytes", "file_bytes_limit"), ("files", "files_limit"))
    ]
    return [
        Alert(
            "UllageFileStoreFull",
            " or ".join(f"{share} > {FILES_SHARE}" for share in shares),
            "warning",
            f"The store of files is more than {FILES_SHARE:.0%} full.",
            "Soon uploads get 507, and batches wait for room. router.files has the limits.",
            "10m",
        ),
        Alert(
            "UllageFileStoreClosed",
            f"max(ullage_router_file_store_open{{{of_routers}}}) < 1",
            "critical",
            "The folder of files cannot be used.",
            "Files and batches get 503. The disk fails, or another router has the folder.",
        ),
    ]


def load_alerts(service: Service) -> list[Alert]:
    """Return the alerts for uneven load, for short CPU, and for answers of another length."""
    of_routers = routers(service)
    of_engines = engines(service)
    waiting = (
        f"rate(ullage_router_cpu_waiting_seconds_total{{{of_routers}}}[5m]) "
        f"or rate(ullage_cpu_waiting_seconds_total{{{of_engines}}}[5m])"
    )
    change = f"{mean_length(of_engines)} / ({mean_length(of_engines, ' offset 1d')})"
    # Up to maxExtraLoad, caches are worth a difference.
    wanted = service.spec.routing.placement.affinity.max_extra_load
    requests = max(UNEVEN_REQUESTS, wanted / UNEVEN_SHARE)
    uneven = (
        uneven_load(service, "ullage_requests_running", requests, "requests"),
        uneven_load(service, "ullage_kv_used_ratio", UNEVEN_KV, "kv"),
    )
    return [
        Alert(
            "UllageEnginesUneven",
            " or ".join(uneven),
            "warning",
            "One engine of a pool has less than half of the load of another.",
            "Requests wait or are refused although an engine has room. The label measure says "
            "whether requests or KV differ.",
            "10m",
        ),
        Alert(
            "UllageRouterSaturated",
            f"max by (pod) (rate(process_cpu_seconds_total{{{of_routers}}}[5m])) > {ROUTER_CORES}",
            "warning",
            f"A router uses more than {ROUTER_CORES:.0%} of the one core that it can use.",
            "Every request and token that passes it is delayed. Add routers.",
        ),
        Alert(
            "UllageCPUShort",
            f"max by (pod) ({waiting}) > {CPU_WAITING}",
            "warning",
            f"Threads of a pod wait for a core for more than {CPU_WAITING:.0%} of the time.",
            "Its CPU limit is too low, or its node has too many other processes.",
            "10m",
        ),
        Alert(
            "UllageOutputLengthsDrift",
            f"{change} > {LENGTH_CHANGE} or {change} < {1 / LENGTH_CHANGE:.2f}",
            "info",
            f"Answers are {LENGTH_CHANGE} times as long or as short as a day before.",
            "Each needs that much more or less memory and time. Clients, prompts or the model "
            "have changed.",
            "15m",
        ),
    ]


def uneven_load(service: Service, gauge: str, floor: float, measure: str) -> str:
    """Return the PromQL expression for pools whose engines differ too much in a gauge.

    Args:
        floor: value that the most loaded engine must exceed.
        measure: value of the label `measure` of the result.
    """
    load = f"avg_over_time({gauge}{{{engines(service)}}}[5m])"
    by_pool = f'label_replace({load}, "pool", "$1", "pod", "{service.name}-(.+)-[0-9]+")'
    most, least = (f"{function} by (pool) ({by_pool})" for function in ("max", "min"))
    uneven = f"({most} > {floor:g}) and {least} < {UNEVEN_SHARE} * {most}"
    return f'label_replace({uneven}, "measure", "{measure}", "", "")'


def mean_length(matchers: str, offset: str = "") -> str:
    """Return the PromQL expression for an hour's mean length of answers in tokens.

    Args:
        offset: a PromQL offset, by which the hour is earlier.
    """
    total, count = (
        f"sum(increase(ullage_request_generation_tokens_{part}{{{matchers}}}[1h]{offset}))"
        for part in ("sum", "count")
    )
    return f"{total} / ({count} > {LENGTH_ANSWERS})"


def engine_alerts(service: Service) -> list[Alert]:
    """Return the alerts for engine failures."""
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
            f"More than {RESTARTS} workers were restarted in a quarter of an hour.",
            "The engine's log has their exit status and the reason.",
        ),
        Alert(
            "UllageEngineOutOfMemory",
            f"{grows('ullage_oom_events_total')} > 0",
            "critical",
            "An engine ran out of memory, which its ledger should prevent.",
            "Requests continue. Another process took memory, the container's limit is too low, or "
            "the ledger is wrong.",
        ),
        Alert(
            "UllageCollectiveErrors",
            f"{grows('ullage_collective_errors_total')} > 0",
            "warning",
            "A group of ranks was lost in a collective of NCCL or gloo.",
            "A link between GPUs is slow or down, or one rank of the group has ended.",
            "0s",
        ),
        Alert(
            "UllageStartProofFailures",
            f"{grows('ullage_start_proof_failures_total')} > 0",
            "warning",
            "A worker computed different results than its verified start, and may not serve.",
            "The worker starts again. After three failures in a row the engine stays out.",
            "0s",
        ),
        Alert(
            "UllageNonFiniteLogits",
            f"{grows('ullage_nonfinite_logits_total')} > 0",
            "warning",
            "Requests failed because their logits were NaN or infinite.",
            "The device's memory, the weights or the number format is wrong.",
        ),
        Alert(
            "UllageKVTierFails",
            f"{grows('ullage_kv_tier_failures_total', ' by (tier, status) ')} > {TIER_FAILURES}",
            "warning",
            "A tier of KV fails again and again, so its KV is computed again.",
            "The labels tier and status name the tier and the error.",
        ),
        Alert(
            "UllagePrefixCacheMisses",
            f"{hits} / ({queries} > {BUSY_TOKENS}) < {HIT_RATIO}",
            "info",
            f"Less than {HIT_RATIO:.0%} of prompt tokens are found in the prefix cache.",
            "Prompts have no common prefixes, or the cache is too small for them.",
        ),
    ]


def device_alerts(service: Service) -> list[Alert]:
    """Return the alerts for GPUs, which use the engines' own metrics instead of an exporter's."""
    of_engines = engines(service)
    return [
        Alert(
            "UllageBoostOff",
            f"max by (pod) (ullage_engine_boost_off{{{of_engines}}}) > 0",
            "warning",
            "An engine runs smaller batches, because its GPUs are throttled.",
            "Heat or power limits lower their clocks. The engine takes less until they recover.",
            "2m",
        ),
        Alert(
            "UllageGPUDriverSilent",
            f"max by (pod) (ullage_gpu_driver_silent{{{of_engines}}}) > 0",
            "critical",
            "A GPU's driver does not answer an engine.",
            "The GPU has fallen off the bus, or the driver hangs. Check the node.",
            "2m",
        ),
    ]


def routers(service: Service) -> str:
    """Return the label matchers that select a service's routers."""
    return pods(service, f"{naming.router_name(service.name)}-[a-z0-9]+-?[a-z0-9]{{5}}")


def engines(service: Service) -> str:
    """Return the label matchers that select a service's engines.

    The matchers exclude another service whose name begins with this service's name.
    """
    pools = (each for pool in service.spec.pools for each in (pool, naming.canary_pool(pool)))
    names = "|".join(naming.pool_name(service.name, pool) for pool in pools)
    return pods(service, f"({names})-[0-9]+")


def pods(service: Service, names: str) -> str:
    """Return PromQL matchers for pods whose names match a regular expression.

    The matchers use the labels that PodMonitors set.
    """
    return f'namespace="{service.namespace}",pod=~"{names}"'
