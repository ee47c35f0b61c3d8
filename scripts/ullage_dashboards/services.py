"""Dashboards of whole services, of their routers, and of the operator."""

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
REQUESTS = "ullage_router_requests_total"
REFUSALS = "ullage_router_refusals_total"
DECISIONS = "ullage_router_decisions_total"
FAILED = f'{SERVICE},code=~"5.."'
READING = (4, 7, 13)
"""Tokens a second of slow, comfortable and fast reading."""
TENANTS = "tenants"
CASCADE = "a cascade"
KEPT = "answers kept by key"
LOST_ENGINE = "an engine lost in an answer"
OPERATOR_PODS = 'namespace=~"$namespace",pod=~"$pod"'


def of_speeds(bound: str) -> str:
    """Return the rate of streams up to a speed."""
    return summed_rate(f"{SPEED}_bucket", f'{SERVICE},le="{bound}"')


OBJECTIVES = Row(
    "Objectives",
    [
        Panel(
            "Budget spent, last hour",
            "Share of requests that missed an objective over the share that may: 1 spends the "
            "budget exactly, 14.4 spends 2 % of a month's in the hour.",
            "none",
            [Query("{{objective}}", f"max by (objective) (ullage:slo_burn:rate1h{{{SERVICE}}})")],
            kind="stat",
            width=16,
            lines=(1, 6, 14.4),
        ),
        Panel(
            "Alerts that fire",
            "Number of Ullage's alerts by severity; each has a runbook.",
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
            "The same for a short window, which says whether it goes on. Above 1 for five minutes "
            "an alert names the objective.",
            "none",
            [Query("{{objective}}", f"max by (objective) (ullage:slo_burn:rate5m{{{SERVICE}}})")],
            lines=(1, 6, 14.4),
            width=16,
        ),
        Panel(
            "Failed and refused",
            "Share of requests that ended in a server error, which slo.errorPercent bounds, and of "
            "those refused for want of room (429).",
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
            "HTTP status; of gRPC the one that says the same. 499: the client left.",
            "reqps",
            [rate(REQUESTS, "code")],
            kind="stack",
        ),
        Panel(
            "In flight",
            "Requests being served, and those that wait for memory.",
            "none",
            [gauge("ullage_router_inflight_requests"), gauge("ullage_router_queue_requests")],
        ),
        Panel(
            "Tokens",
            "Tokens of answers that ended. Divide by the number of GPUs to compare services.",
            "none",
            [rate("ullage_router_output_tokens_total")],
        ),
        Panel(
            "Time to first token",
            "From arrival at the router. Waiting and prefill are told apart on the dashboards "
            "Router and Engine.",
            "s",
            quantiles(TTFT),
        ),
        Panel(
            "Whole requests",
            "From arrival to the last token, of those that were answered.",
            "s",
            quantiles(E2E),
        ),
        Panel(
            "Latency over load",
            "Each point is a moment: requests a second, and the 95th percentile of the time to the "
            "first token. Right of the knee latency grows without more throughput.",
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
            "Tokens a second after the first one. People read 4 to 7, 13 at the most: below the "
            "first line text trickles, above the last one nobody notices.",
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
            "Shares of streams that are slower than people read, in between, and faster than "
            "anybody reads: those could give way to others (streaming.tokensPerSecond).",
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
            "Requests whose client left before the end, by whether it had a token already. Without "
            "one it was late, with some it was slow or had enough.",
            "reqps",
            [rate("ullage_router_early_stops_total", "had_tokens")],
        ),
        Panel(
            "Where clients stop",
            "Output tokens that clients had when they left: answers longer than that are "
            "generated for nobody.",
            "none",
            [
                quantile("p50", 0.5, "ullage_router_early_stop_tokens"),
                quantile("p95", 0.95, "ullage_router_early_stop_tokens"),
            ],
        ),
    ],
)
CAPACITY = Row(
    "Capacity",
    [
        Panel(
            "Engines",
            "Engines that take requests, that were set aside after failures, and whose reports are "
            "too old.",
            "none",
            [
                gauge("ullage_router_engines_ready", how="min"),
                gauge("ullage_router_ejected_engines", how="max"),
                gauge("ullage_router_stale_engines", how="max"),
            ],
        ),
        Panel(
            "Headroom",
            "KV that new requests may take, the least and all of them. At zero requests wait, then "
            "are refused; nothing breaks.",
            "bytes",
            [
                Query("least", f"min(ullage_memory_headroom_bytes{{{SERVICE}}})"),
                Query("all", f"sum(ullage_memory_headroom_bytes{{{SERVICE}}})"),
            ],
        ),
        Panel(
            "Trouble",
            "Workers replaced, steps that ran out of memory, groups of ranks lost, and NaN: each "
            "should stay at zero.",
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
            "Tokens served by tenant; those that the configuration does not name share one.",
            "none",
            [rate("ullage_router_tenant_tokens_total", "tenant", needs=TENANTS)],
            kind="stack",
            width=12,
        ),
        Panel(
            "Tenants at their limits",
            "Requests refused by tenant and the limit that was reached.",
            "reqps",
            [rate("ullage_router_tenant_limited_total", "tenant, limit", needs=TENANTS)],
            width=12,
        ),
    ],
)
FLEET = Dashboard(
    "ullage-fleet",
    "Ullage / Fleet and SLO",
    "Whether services keep their objectives, and whether their readers are content.",
    [NAMESPACE, LLMSERVICE],
    [OBJECTIVES, TRAFFIC, READERS, CAPACITY],
)

ADMISSION = Row(
    "Admission",
    [
        Panel(
            "Decisions by action",
            "What the ladder decided: accept, a degraded answer, another route, reject.",
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
            "KV_HEADROOM, QUEUE_FULL and QUEUE_TIMEOUT are memory, DEADLINE is time; more engines "
            "help against all four.",
            "reqps",
            [rate(REFUSALS, "reason")],
            kind="stack",
        ),
        Panel(
            "Queue",
            "Requests waiting for memory. Full for minutes, it only delays the refusal.",
            "none",
            [gauge("ullage_router_queue_requests"), gauge("ullage_router_held_requests")],
        ),
        Panel(
            "Queue in bytes",
            "KV that waiting requests are predicted to need, the memory of the router that their "
            "prompts hold, and what was promised to requests that no report shows yet.",
            "bytes",
            [
                gauge("ullage_router_queue_bytes"),
                gauge("ullage_router_queue_prompt_bytes"),
                gauge("ullage_router_credit_bytes"),
            ],
        ),
        Panel(
            "Wait in the queue",
            "Of requests that waited.",
            "s",
            quantiles("ullage_router_queue_wait_seconds"),
        ),
        Panel(
            "Passed in the queue",
            "Requests that passed one which waits first in line (routing.queue.backfill).",
            "reqps",
            [rate("ullage_router_queue_passed_total")],
        ),
        Panel(
            "Prefill window",
            "Requests in it, and those that waited for it or were moved to another engine.",
            "none",
            [
                gauge("ullage_router_prefill_requests"),
                rate("ullage_router_prefill_waited_total"),
                rate("ullage_router_prefill_balanced_total"),
            ],
        ),
        Panel(
            "First tokens while waiting counts",
            "Mean time to the first token, beside the mean wait in the queue that is part of it.",
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
            "Requests sent to the engine of their caches, and those sent elsewhere for balance.",
            "reqps",
            [
                rate("ullage_router_affinity_kept_total"),
                rate("ullage_router_affinity_yielded_total"),
            ],
        ),
        Panel(
            "Cached tokens by tier",
            "Prompt tokens that need not be computed: device, host memory, peers or files.",
            "none",
            [rate("ullage_router_cached_tokens_total", "tier")],
            kind="stack",
        ),
        Panel(
            "Work spared",
            "Requests that shared another's generation, got an earlier answer by their key, or "
            "were replaced by a later one.",
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
            "Ready, set aside by a breaker, or silent.",
            "none",
            [
                gauge("ullage_router_engines_ready", how="min"),
                gauge("ullage_router_ejected_engines", how="max"),
                gauge("ullage_router_stale_engines", how="max"),
            ],
        ),
        Panel(
            "Age of reports",
            "Of the oldest last report among engines. They come ten times a second while memory "
            "changes, once a second at rest.",
            "s",
            [gauge("ullage_router_headroom_age_seconds", how="max")],
        ),
        Panel(
            "Reports missed",
            "Headroom reports that never came: an engine's server or the network has no time.",
            "none",
            [rate("ullage_router_reports_missed_total")],
        ),
        Panel(
            "Retries",
            "Requests sent to another engine, those not retried as the budget was spent, and "
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
            "Answers that lost their engine after the first token, by why and what became of them.",
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
            "The first of a router's to end. Issuers renew long before; three days are an alert.",
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
            "Certificates and tenants' keys whose newest files are unusable; those before stay in "
            "use.",
            "none",
            [
                gauge("ullage_router_certificate_problems", how="max"),
                gauge("ullage_router_key_problems", how="max"),
            ],
        ),
        Panel(
            "Keys refused",
            "Requests refused for their key, by what was wrong.",
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
            "Steps of the cascade that were tried, by what became of them.",
            "reqps",
            [rate("ullage_router_cascade_attempts_total", "step, outcome", needs=CASCADE)],
        ),
        Panel(
            "Long conversations",
            "Those whose oldest turns were summed up, and prompt tokens that this saved.",
            "none",
            [
                rate("ullage_router_compressions_total", "method", needs="long conversations"),
                rate("ullage_router_compression_saved_tokens_total"),
            ],
        ),
    ],
)
PROCESS = Row(
    "Process",
    [
        Panel(
            "CPU of routers",
            "Processor time a second. A router uses one core at the most: add replicas before "
            "it does.",
            "none",
            [
                Query(
                    "{{pod}}",
                    f"sum by (pod) (rate(process_cpu_seconds_total{{{SERVICE}}}[{INTERVAL}]) "
                    f"and on (pod) ullage_router_engines_ready{{{SERVICE}}})",
                )
            ],
            width=12,
        ),
        Panel(
            "Memory of routers",
            "Resident; of it the prompts that wait and the answers kept by key.",
            "bytes",
            [
                Query(
                    "{{pod}}",
                    f"sum by (pod) (process_resident_memory_bytes{{{SERVICE}}} "
                    f"and on (pod) ullage_router_engines_ready{{{SERVICE}}})",
                ),
                gauge("ullage_router_kept_answer_bytes", needs=KEPT),
            ],
            width=12,
        ),
    ],
)
ROUTER = Dashboard(
    "ullage-router",
    "Ullage / Router",
    "What routers decide and why, where requests wait, and how they see their engines.",
    [NAMESPACE, LLMSERVICE],
    [ADMISSION, PLACEMENT, CONNECTIONS, OPTIONS, PROCESS],
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
                    "1 for the operator that acts. None: nothing is repaired, scaled or rolled "
                    "out; services keep serving.",
                    "none",
                    gauge("ullage_operator_leader", "pod", OPERATOR_PODS),
                ),
                of_operator(
                    "Reconciliations by result",
                    "temporary and denied are tried again; permanent and invalid wait for somebody "
                    "to change the spec, bug for us.",
                    "ops",
                    rate("ullage_operator_reconcile_total", "result", OPERATOR_PODS),
                ),
                of_operator(
                    "Time of a reconciliation",
                    "Long ones mean a slow API server, or too little CPU.",
                    "s",
                    *quantiles(RECONCILE, OPERATOR_PODS),
                ),
                of_operator(
                    "Objects watched",
                    "By kind. No LLMService though some exist: a wrong watch.namespaces or a "
                    "missing right.",
                    "none",
                    gauge("ullage_operator_objects", "kind", OPERATOR_PODS, how="max"),
                ),
                of_operator(
                    "Watches begun again",
                    "ended and forgotten are normal; denied is a missing right.",
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
                    "Resident; it grows with the number of objects watched.",
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
