"""Dashboards for whole services, their routers, and the operator."""

from ullage_dashboards.model import (
    INTERVAL,
    LLMSERVICE,
    NAMESPACE,
    SERVICE,
    Dashboard,
    Panel,
    Query,
    Row,
    Variable,
    gauge,
    mean,
    quantile,
    quantiles,
    rate,
    ratio,
    summed_rate,
)

TTFT = "ullage_router_ttft_seconds"
E2E = "ullage_router_e2e_seconds"
SPEED = "ullage_router_stream_tokens_per_second"
LENGTH = "ullage_request_generation_tokens"
LENGTH_MEAN = mean("mean", LENGTH).text
LENGTH_MEAN_BEFORE = LENGTH_MEAN.replace(f"[{INTERVAL}]", f"[{INTERVAL}] offset 1d")
REQUESTS = "ullage_router_requests_total"
REFUSALS = "ullage_router_refusals_total"
DECISIONS = "ullage_router_decisions_total"
FAILED = f'{SERVICE},code=~"5.."'
READING = (4, 7, 13)
"""Tokens per second of slow, comfortable and fast reading."""
TENANTS = "tenants"
CASCADE = "a cascade"
KEPT = "answers kept by key"
LOST_ENGINE = "an engine lost in an answer"
FILES = "stored files"
OPERATOR_PODS = 'namespace=~"$namespace",pod=~"$pod"'


def of_speeds(bound: str) -> str:
    """Return the PromQL for the rate of streams up to a speed."""
    return summed_rate(f"{SPEED}_bucket", f'{SERVICE},le="{bound}"')


OBJECTIVES = Row(
    "Objectives",
    [
        Panel(
            "Budget spent, last hour",
            "Burn rate of each objective: error ratio divided by error budget. 1 spends the budget "
            "exactly, and 14.4 spends 2 % of a month's budget in the hour.",
            "none",
            [Query("{{objective}}", f"max by (objective) (ullage:slo_burn:rate1h{{{SERVICE}}})")],
            kind="stat",
            width=16,
            lines=(1, 6, 14.4),
        ),
        Panel(
            "Alerts that fire",
            "Number of Ullage's alerts by severity. Each alert has a runbook.",
            "none",
            [
                Query(
                    "{{severity}}",
                    'count by (severity) (ALERTS{alertname=~"Ullage.+",alertstate="firing"})',
                )
            ],
            kind="stat",
        ),
        Panel(
            "Budget spent, last five minutes",
            "Burn rate over a short window, which shows whether the problem persists. Above 1 for "
            "five minutes an alert names the objective.",
            "none",
            [Query("{{objective}}", f"max by (objective) (ullage:slo_burn:rate5m{{{SERVICE}}})")],
            lines=(1, 6, 14.4),
            width=16,
        ),
        Panel(
            "Failed and refused",
            "Share of requests that ended in a server error, which slo.errorPercent bounds, and "
            "share of requests refused for lack of memory (429).",
            "percentunit",
            [
                Query(
                    "5xx",
                    f"({summed_rate(REQUESTS, FAILED)} or vector(0)) / {summed_rate(REQUESTS)}",
                ),
                ratio("429", summed_rate(REQUESTS, SERVICE + ',code="429"'), summed_rate(REQUESTS)),
            ],
        ),
    ],
)
TRAFFIC = Row(
    "Traffic and latency",
    [
        Panel(
            "Requests by answer",
            "HTTP status (of gRPC the corresponding one). 499 means that the client left.",
            "reqps",
            [rate(REQUESTS, "code")],
            kind="stack",
        ),
        Panel(
            "In flight",
            "Requests being served, and requests that wait for memory.",
            "none",
            [gauge("ullage_router_inflight_requests"), gauge("ullage_router_queue_requests")],
        ),
        Panel(
            "Tokens",
            "Output tokens of ended answers. Divide by the number of GPUs to compare services.",
            "none",
            [rate("ullage_router_output_tokens_total")],
        ),
        Panel(
            "Time to first token",
            "Time from arrival at the router. The dashboards Router and Engine separate waiting "
            "and prefill.",
            "s",
            quantiles(TTFT),
        ),
        Panel(
            "Whole requests",
            "Time from arrival to the last token of answered requests.",
            "s",
            quantiles(E2E),
        ),
        Panel(
            "Latency over load",
            "Each point is a moment: requests a second, and the 95th percentile of the TTFT. To "
            "the right of the knee latency grows without more throughput.",
            "s",
            [rate(REQUESTS), quantile("ttft p95", 0.95, TTFT)],
            kind="xy",
        ),
    ],
)
READERS = Row(
    "Readers",
    [
        Panel(
            "Speed of streams",
            "Tokens a second after the first one. People read 4 to 7, and 13 at most. Below the "
            "first line text trickles. Above the last line more speed goes unnoticed.",
            "none",
            [
                quantile("slowest 1 %", 0.01, SPEED),
                quantile("slowest 5 %", 0.05, SPEED),
                quantile("median", 0.5, SPEED),
            ],
            lines=READING,
        ),
        Panel(
            "Streams by reading speed",
            "Shares of streams that are slower than people read, as fast, and faster. The faster "
            "ones could give way to others (streaming.tokensPerSecond).",
            "percentunit",
            [
                ratio("below 4", of_speeds("4.0"), of_speeds("+Inf")),
                ratio(
                    "4 to 13",
                    f"({of_speeds('13.0')} - {of_speeds('4.0')})",
                    of_speeds("+Inf"),
                ),
                Query("above 13", f"1 - {of_speeds('13.0')} / {of_speeds('+Inf')}"),
            ],
            most=1,
        ),
        Panel(
            "Clients that leave",
            "Requests whose client left before the end, by whether it had a token. Without a token "
            "the answer was late. With tokens it was slow, or the client had enough.",
            "reqps",
            [rate("ullage_router_early_stops_total", "had_tokens")],
        ),
        Panel(
            "Where clients stop",
            "Output tokens that clients had when they left. Nobody reads the rest of longer "
            "answers.",
            "none",
            [
                quantile("p50", 0.5, "ullage_router_early_stop_tokens"),
                quantile("p95", 0.95, "ullage_router_early_stop_tokens"),
            ],
        ),
        Panel(
            "Lengths of answers",
            "Tokens of answers that ended by themselves or at their limit.",
            "none",
            [mean("mean", LENGTH), *quantiles(LENGTH)],
        ),
        Panel(
            "Lengths against the day before",
            "Mean length of answers divided by that of the same time of the day before. Memory and "
            "time of a request grow with its answer. Beyond the lines an alert fires.",
            "none",
            [
                Query(
                    "times as long",
                    f"({LENGTH_MEAN}) / ({LENGTH_MEAN_BEFORE})",
                    needs="data of the day before",
                )
            ],
            lines=(0.67, 1.5),
        ),
    ],
)
CAPACITY = Row(
    "Capacity",
    [
        Panel(
            "Engines",
            "Engines that take requests, engines held back by the circuit breaker, and engines "
            "with outdated reports.",
            "none",
            [
                gauge("ullage_router_engines_ready", how="min"),
                gauge("ullage_router_ejected_engines", how="max"),
                gauge("ullage_router_stale_engines", how="max"),
            ],
        ),
        Panel(
            "Headroom",
            "KV that new requests may take: the smallest of all engines, and the sum. At zero "
            "requests wait and are then refused, but nothing breaks.",
            "bytes",
            [
                Query("least", f"min(ullage_memory_headroom_bytes{{{SERVICE}}})"),
                Query("all", f"sum(ullage_memory_headroom_bytes{{{SERVICE}}})"),
            ],
        ),
        Panel(
            "Trouble",
            "Replaced workers, steps out of memory, lost groups of ranks, and NaN. Each should "
            "stay at zero.",
            "none",
            [
                rate("ullage_worker_restarts_total"),
                rate("ullage_oom_events_total"),
                rate("ullage_collective_errors_total"),
                rate("ullage_nonfinite_logits_total"),
            ],
        ),
        Panel(
            "Tenants' tokens",
            "Tokens served by tenant. Tenants that the configuration does not name share one "
            "series.",
            "none",
            [rate("ullage_router_tenant_tokens_total", "tenant", needs=TENANTS)],
            kind="stack",
            width=12,
        ),
        Panel(
            "Tenants at their limits",
            "Refused requests by tenant and by the limit that it reached.",
            "reqps",
            [rate("ullage_router_tenant_limited_total", "tenant, limit", needs=TENANTS)],
            width=12,
        ),
    ],
)
FLEET = Dashboard(
    "ullage-fleet",
    "Ullage / Fleet and SLO",
    "Whether services meet their objectives, and how well readers are served.",
    [NAMESPACE, LLMSERVICE],
    [OBJECTIVES, TRAFFIC, READERS, CAPACITY],
)

ADMISSION = Row(
    "Admission",
    [
        Panel(
            "Decisions by action",
            "Decisions of the ladder: accept, shrink, queue, another route, or reject.",
            "reqps",
            [rate(DECISIONS, "action")],
            kind="stack",
        ),
        Panel(
            "Decisions by route",
            "Pools that requests were sent to.",
            "reqps",
            [rate(DECISIONS, "route")],
            kind="stack",
        ),
        Panel(
            "Refusals by reason",
            "KV_HEADROOM, QUEUE_FULL and QUEUE_TIMEOUT mean too little memory, DEADLINE too little "
            "time. More engines help against all four.",
            "reqps",
            [rate(REFUSALS, "reason")],
            kind="stack",
        ),
        Panel(
            "Queue",
            "Requests that wait for memory. A queue that stays full for minutes only delays "
            "refusals.",
            "none",
            [gauge("ullage_router_queue_requests"), gauge("ullage_router_held_requests")],
        ),
        Panel(
            "Queue in bytes",
            "Predicted KV of waiting requests, router memory of their prompts, and KV reserved for "
            "requests that no report includes yet.",
            "bytes",
            [
                gauge("ullage_router_queue_bytes"),
                gauge("ullage_router_queue_prompt_bytes"),
                gauge("ullage_router_credit_bytes"),
            ],
        ),
        Panel(
            "Wait in the queue",
            "Queue time of requests that waited.",
            "s",
            quantiles("ullage_router_queue_wait_seconds"),
        ),
        Panel(
            "Passed in the queue",
            "Requests that overtook the head of the queue by backfill (routing.queue.backfill).",
            "reqps",
            [rate("ullage_router_queue_passed_total")],
        ),
        Panel(
            "Prefill window",
            "Requests in the prefill window, requests that waited for it, and requests that it "
            "moved to another engine.",
            "none",
            [
                gauge("ullage_router_prefill_requests"),
                rate("ullage_router_prefill_waited_total"),
                rate("ullage_router_prefill_balanced_total"),
            ],
        ),
        Panel(
            "First tokens while waiting counts",
            "Mean TTFT, and the mean queue time that it includes.",
            "s",
            [
                mean("to the first token", TTFT),
                mean("of which in the queue", "ullage_router_queue_wait_seconds"),
            ],
        ),
    ],
)
PLACEMENT = Row(
    "Placement and caches",
    [
        Panel(
            "Affinity",
            "Requests sent to the engine with their caches, and requests sent elsewhere for "
            "balance.",
            "reqps",
            [
                rate("ullage_router_affinity_kept_total"),
                rate("ullage_router_affinity_yielded_total"),
            ],
        ),
        Panel(
            "Cached tokens by tier",
            "Prompt tokens that need not be computed, by tier: device, host memory, peers or "
            "files.",
            "none",
            [rate("ullage_router_cached_tokens_total", "tier")],
            kind="stack",
        ),
        Panel(
            "Work spared",
            "Requests that shared another's generation, got an earlier answer by their key, or "
            "were replaced by a later request.",
            "reqps",
            [
                rate("ullage_router_coalesced_requests_total"),
                rate("ullage_router_repeated_total", needs=KEPT),
                rate("ullage_router_replaced_requests_total"),
            ],
        ),
    ],
)
CONNECTIONS = Row(
    "Engines and failures",
    [
        Panel(
            "Engines as routers see them",
            "Engines that are ready, held back by the circuit breaker, or silent.",
            "none",
            [
                gauge("ullage_router_engines_ready", how="min"),
                gauge("ullage_router_ejected_engines", how="max"),
                gauge("ullage_router_stale_engines", how="max"),
            ],
        ),
        Panel(
            "Limit after failures",
            "Requests at once that an engine may get since requests failed on it, by pool. Each "
            "first token doubles the limit. 0 means no limit.",
            "none",
            [gauge("ullage_router_breaker_limit", "pool", how="max")],
        ),
        Panel(
            "Age of reports",
            "Age of the oldest last report of an engine. Reports arrive ten times a second while "
            "memory changes, and otherwise once a second.",
            "s",
            [gauge("ullage_router_headroom_age_seconds", how="max")],
        ),
        Panel(
            "Reports missed",
            "Headroom reports that did not arrive, because an engine's server or the network is "
            "overloaded.",
            "none",
            [rate("ullage_router_reports_missed_total")],
        ),
        Panel(
            "Retries",
            "Requests sent to another engine, retries that the budget prevented, and circuit "
            "breakers that opened.",
            "reqps",
            [
                rate("ullage_router_retries_total"),
                rate("ullage_router_retries_refused_total"),
                rate("ullage_router_ejections_total"),
            ],
        ),
        Panel(
            "Resumptions",
            "Answers that lost their engine after the first token, by cause and outcome.",
            "reqps",
            [rate("ullage_router_resumptions_total", "cause, outcome", needs=LOST_ENGINE)],
        ),
        Panel(
            "Tickets",
            "Requests that Pick placed or refused, and tickets that expired without a report.",
            "reqps",
            [
                rate("ullage_router_picks_placed_total"),
                rate("ullage_router_picks_refused_total"),
                rate("ullage_router_picks_expired_total"),
            ],
        ),
        Panel(
            "Certificates end in",
            "Time to the first expiry by router. Issuers renew long before. An alert fires at "
            "three days.",
            "s",
            [
                Query(
                    "{{pod}}",
                    "min by (pod) (ullage_router_certificate_expiry_timestamp_seconds"
                    f"{{{SERVICE}}} > 0) - time()",
                    needs="TLS",
                )
            ],
        ),
        Panel(
            "Files that cannot be read",
            "Certificates and tenants' keys whose latest files are unusable. The previous ones "
            "stay in use.",
            "none",
            [
                gauge("ullage_router_certificate_problems", how="max"),
                gauge("ullage_router_key_problems", how="max"),
            ],
        ),
        Panel(
            "Keys refused",
            "Requests refused because of their key, by reason.",
            "reqps",
            [rate("ullage_router_auth_failures_total", "reason", needs=TENANTS)],
        ),
    ],
)
OPTIONS = Row(
    "Canaries, cascade, compression",
    [
        Panel(
            "Requests by side of a rollout",
            "HTTP statuses of the stable side and of the canary.",
            "reqps",
            [rate("ullage_router_revision_requests_total", "side, code")],
        ),
        Panel(
            "Cascade",
            "Attempted steps of the cascade, by outcome.",
            "reqps",
            [rate("ullage_router_cascade_attempts_total", "step, outcome", needs=CASCADE)],
        ),
        Panel(
            "Long conversations",
            "Conversations whose oldest turns were summarised, and the prompt tokens that this "
            "saved.",
            "none",
            [
                rate("ullage_router_compressions_total", "method", needs="long conversations"),
                rate("ullage_router_compression_saved_tokens_total"),
            ],
        ),
    ],
)
FILES_AND_BATCHES = Row(
    "Files and batches",
    [
        Panel(
            "Room for files",
            "Share of the store that is used, by bytes and by number of files. When it is full, "
            "uploads get 507 and batches wait. Above the line an alert fires.",
            "percentunit",
            [
                ratio(
                    "bytes",
                    f"max(ullage_router_file_bytes{{{SERVICE}}})",
                    f"max(ullage_router_file_bytes_limit{{{SERVICE}}})",
                    needs=FILES,
                ),
                ratio(
                    "files",
                    f"max(ullage_router_files{{{SERVICE}}})",
                    f"max(ullage_router_files_limit{{{SERVICE}}})",
                    needs=FILES,
                ),
            ],
            lines=(0.9,),
            most=1,
        ),
        Panel(
            "Batches",
            "Batches that are known, by status.",
            "none",
            [gauge("ullage_router_batches", "status", needs=FILES)],
        ),
        Panel(
            "Requests of batches",
            "Requests that wait for their answer, or are being answered.",
            "none",
            [gauge("ullage_router_batch_requests", "state", needs=FILES)],
        ),
        Panel(
            "Speed of batches",
            "Requests that got an answer (completed) or an error (failed), and requests sent. Many "
            "more are sent than ended if the service refuses them.",
            "reqps",
            [
                rate("ullage_router_batch_requests_ended_total", "state", needs=FILES),
                rate("ullage_router_batch_requests_sent_total", needs=FILES),
            ],
        ),
    ],
)
PROCESS = Row(
    "Process",
    [
        Panel(
            "CPU of routers",
            "Processor time a second. A router uses at most one core, so add replicas before it "
            "reaches that. Above the line an alert fires.",
            "none",
            [
                Query(
                    "{{pod}}",
                    f"sum by (pod) (rate(process_cpu_seconds_total{{{SERVICE}}}[{INTERVAL}]) "
                    f"and on (pod) ullage_router_engines_ready{{{SERVICE}}})",
                )
            ],
        ),
        Panel(
            "Memory of routers",
            "Resident memory, and the part of it for answers kept by key.",
            "bytes",
            [
                Query(
                    "{{pod}}",
                    f"sum by (pod) (process_resident_memory_bytes{{{SERVICE}}} "
                    f"and on (pod) ullage_router_engines_ready{{{SERVICE}}})",
                ),
                gauge("ullage_router_kept_answer_bytes", needs=KEPT),
            ],
        ),
        Panel(
            "Routers that wait for a core",
            "Share of time in which some thread of the router waited for a core. Without cgroup v2 "
            "the threads are those of the whole node. Above the line an alert fires.",
            "percentunit",
            [rate("ullage_router_cpu_waiting_seconds_total", "pod")],
            lines=(0.5,),
            most=1,
        ),
    ],
)
ROUTER = Dashboard(
    "ullage-router",
    "Ullage / Router",
    "What routers decide and why, where requests wait, and how they see their engines.",
    [NAMESPACE, LLMSERVICE],
    [ADMISSION, PLACEMENT, CONNECTIONS, OPTIONS, FILES_AND_BATCHES, PROCESS],
)

RECONCILE = "ullage_operator_reconcile_seconds"


def of_operator(title: str, description: str, unit: str, *queries: Query) -> Panel:
    return Panel(title, description, unit, queries)


OPERATOR = Dashboard(
    "ullage-operator",
    "Ullage / Operator",
    "Whether the operator sees and does what it should.",
    [
        Variable("namespace", "Namespace", "label_values(ullage_operator_leader, namespace)"),
        Variable(
            "pod", "Pod", 'label_values(ullage_operator_leader{namespace=~"$namespace"}, pod)'
        ),
    ],
    [
        Row(
            "Reconciliation",
            [
                of_operator(
                    "Leader",
                    "1 for the operator that acts. Without one nothing is repaired, scaled or "
                    "rolled out, but services keep serving.",
                    "none",
                    gauge("ullage_operator_leader", "pod", OPERATOR_PODS),
                ),
                of_operator(
                    "Reconciliations by result",
                    "temporary and denied are retried. permanent and invalid wait until somebody "
                    "changes the spec. bug is an error of the operator.",
                    "ops",
                    rate("ullage_operator_reconcile_total", "result", OPERATOR_PODS),
                ),
                of_operator(
                    "Time of a reconciliation",
                    "Long reconciliations mean a slow API server, or too little CPU.",
                    "s",
                    *quantiles(RECONCILE, OPERATOR_PODS),
                ),
                of_operator(
                    "Objects watched",
                    "Watched objects by kind. No LLMService although some exist means a wrong "
                    "watch.namespaces or a missing right.",
                    "none",
                    gauge("ullage_operator_objects", "kind", OPERATOR_PODS, how="max"),
                ),
                of_operator(
                    "Watches begun again",
                    "ended and forgotten are normal. denied means a missing right.",
                    "ops",
                    rate(
                        "ullage_operator_watch_restarts_total",
                        "kind, reason",
                        OPERATOR_PODS,
                    ),
                ),
                of_operator(
                    "CPU",
                    "Processor time a second.",
                    "none",
                    Query(
                        "{{pod}}",
                        f"sum by (pod) (rate(process_cpu_seconds_total{{{OPERATOR_PODS}}}"
                        f"[{INTERVAL}]) and on (pod) ullage_operator_leader{{{OPERATOR_PODS}}})",
                    ),
                ),
                of_operator(
                    "Memory",
                    "Resident memory, which grows with the number of watched objects.",
                    "bytes",
                    Query(
                        "{{pod}}",
                        f"sum by (pod) (process_resident_memory_bytes{{{OPERATOR_PODS}}} "
                        f"and on (pod) ullage_operator_leader{{{OPERATOR_PODS}}})",
                    ),
                ),
            ],
        )
    ],
)
