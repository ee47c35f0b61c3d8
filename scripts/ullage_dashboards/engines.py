"""Dashboards for engines and their KV tiers."""

from ullage_dashboards.model import (
    ENGINES,
    INTERVAL,
    LLMSERVICE,
    NAMESPACE,
    POD,
    Dashboard,
    Panel,
    Query,
    Row,
    gauge,
    mean,
    quantile,
    quantiles,
    rate,
    ratio,
    summed_rate,
)

STEP = "ullage_step_seconds"
SEQUENCES = "ullage_step_sequences"
INTER_TOKEN = "ullage_inter_token_latency_seconds"
GENERATED = "ullage_generation_tokens_total"
WORKER_CPU = "ullage_worker_cpu_seconds_total"
USED = "ullage_kv_used_ratio"
HITS = "ullage_prefix_cache_hits_tokens_total"
LOOKED_UP = "ullage_prefix_cache_queries_tokens_total"
FILES = "memory.tiers.file"
PEERS = "memory.tiers.remote"


def per_engine(name: str) -> Query:
    """Return the query for a gauge, with one series per engine."""
    return gauge(name, "pod", ENGINES)


def over_mean(legend: str, name: str) -> Query:
    """Return the query for the largest value of a gauge among engines, divided by the mean."""
    largest, mean_value = (f"{how}({name}{{{ENGINES}}})" for how in ("max", "avg"))
    return Query(legend, f"{largest} / ({mean_value} > 0)", needs="requests that run")


def all_of(counter: str, by: str = "", needs: str = "") -> Query:
    """Return the query for a counter's rate over the chosen engines."""
    return rate(counter, by, ENGINES, needs)


MEMORY = Row(
    "Memory",
    [
        Panel(
            "Headroom",
            "KV that new requests may take, by engine. At zero, routers send the engine nothing.",
            "bytes",
            [per_engine("ullage_memory_headroom_bytes")],
        ),
        Panel(
            "KV in use",
            "Share of the KV pool in use. Near 1 is good as long as no sequences are preempted.",
            "percentunit",
            [per_engine(USED)],
            most=1,
        ),
        Panel(
            "Pressure and boost off",
            "Degrade level (0 none, 1 the mildest), the share of the largest batch that may run, "
            "and 1 while heat or power lowers that share.",
            "none",
            [
                gauge("ullage_engine_pressure_level", where=ENGINES, how="max"),
                gauge("ullage_engine_batch_share", where=ENGINES, how="min"),
                gauge("ullage_engine_boost_off", where=ENGINES, how="max"),
            ],
        ),
        Panel(
            "Reserved, withheld, pool",
            "KV that is reserved but not allocated yet, headroom withheld because another process "
            "took device memory, and the size of the pool.",
            "bytes",
            [
                gauge("ullage_kv_committed_bytes", where=ENGINES),
                gauge("ullage_memory_withheld_bytes", where=ENGINES),
                gauge("ullage_kv_pool_bytes", where=ENGINES),
            ],
        ),
        Panel(
            "Waste",
            "Share of the KV in use without tokens, which is the unused end of each last block.",
            "percentunit",
            [per_engine("ullage_kv_waste_ratio")],
        ),
        Panel(
            "Sessions",
            "KV that sessions keep between requests, and the number of sessions.",
            "bytes",
            [
                gauge("ullage_session_bytes", where=ENGINES),
                gauge("ullage_sessions", where=ENGINES),
            ],
        ),
    ],
)
STEPS = Row(
    "Steps and batches",
    [
        Panel(
            "Time of a step",
            "Every generated token takes a step, so the median is the time between two tokens.",
            "s",
            quantiles(STEP, ENGINES),
        ),
        Panel(
            "Sequences of a step",
            "Mean and 95th percentile of the batch size, which batching.maxSequences bounds.",
            "none",
            [mean("mean", SEQUENCES, ENGINES), quantile("p95", 0.95, SEQUENCES, ENGINES)],
        ),
        Panel(
            "Tokens of a step",
            "Prompt and output tokens in a step. batching.prefillChunkTokens bounds those of "
            "prompts.",
            "none",
            [
                mean("mean", "ullage_step_tokens", ENGINES),
                quantile("p95", 0.95, "ullage_step_tokens", ENGINES),
            ],
        ),
        Panel(
            "Batch size changes",
            "Steps with more sequences than the previous one, and with fewer.",
            "ops",
            [all_of("ullage_batch_size_changes_total", "direction")],
        ),
        Panel(
            "Latency over batch size",
            "Each point is a moment: sequences of a step, and the 95th percentile of the time "
            "between two tokens. The curve should rise slowly. Its bend is the largest useful "
            "batching.maxSequences.",
            "s",
            [
                mean("sequences", SEQUENCES, ENGINES),
                quantile("inter-token p95", 0.95, INTER_TOKEN, ENGINES),
            ],
            kind="xy",
        ),
        Panel(
            "Knee",
            "Each point is a moment: running sequences, and tokens a second. To the right of the "
            "knee more sequences bring no more tokens.",
            "none",
            [
                Query("running", f"sum(ullage_requests_running{{{ENGINES}}})"),
                Query("tokens a second", summed_rate(GENERATED, ENGINES)),
            ],
            kind="xy",
        ),
        Panel(
            "Draft tokens",
            "Tokens of speculation (batching.numSpeculativeTokens) that were checked, and those "
            "that were accepted. If few are accepted, set 0.",
            "none",
            [
                all_of("ullage_spec_decode_draft_tokens_total"),
                all_of("ullage_spec_decode_accepted_tokens_total"),
            ],
        ),
    ],
)
LATENCY = Row(
    "Latency and throughput",
    [
        Panel(
            "Queue time",
            "Time from acceptance to the step that computes the prompt's first tokens.",
            "s",
            quantiles("ullage_request_queue_time_seconds", ENGINES),
        ),
        Panel(
            "Time to first token",
            "Time from acceptance by the engine, which is queue time and prefill.",
            "s",
            quantiles("ullage_time_to_first_token_seconds", ENGINES),
        ),
        Panel(
            "Between two tokens",
            "Time between two tokens of a request. At 0.25 s a stream has 4 tokens a second, the "
            "speed of slow readers.",
            "s",
            quantiles(INTER_TOKEN, ENGINES),
            lines=(1 / 13, 1 / 7, 0.25),
        ),
        Panel(
            "Tokens",
            "Tokens of started prompts, and generated tokens.",
            "none",
            [all_of("ullage_prompt_tokens_total"), all_of(GENERATED)],
        ),
        Panel(
            "Running and waiting",
            "Sequences in the batch, and admitted sequences that have not started.",
            "none",
            [
                gauge("ullage_requests_running", where=ENGINES),
                gauge("ullage_requests_waiting", where=ENGINES),
            ],
        ),
        Panel(
            "Requests by outcome",
            "stop and length are complete answers.",
            "reqps",
            [all_of("ullage_requests_total", "outcome")],
            kind="stack",
        ),
    ],
)
BALANCE = Row(
    "Balance and CPU",
    [
        Panel(
            "Running by engine",
            "Sequences in the batch of each engine. An alert compares the engines of a pool.",
            "none",
            [per_engine("ullage_requests_running")],
        ),
        Panel(
            "Tokens by engine",
            "Generated tokens a second of each engine.",
            "none",
            [all_of(GENERATED, "pod")],
        ),
        Panel(
            "Busiest engine over the mean",
            "Load of the busiest engine divided by the mean of all, by running sequences and by "
            "KV in use. 1 is perfect balance. 2 means that one engine has twice its share.",
            "none",
            [over_mean("sequences", "ullage_requests_running"), over_mean("KV", USED)],
        ),
        Panel(
            "CPU of engines",
            "CPU time a second of each engine's server and of its worker with all ranks.",
            "none",
            [
                Query(
                    "{{pod}} server",
                    f"sum by (pod) (rate(process_cpu_seconds_total{{{ENGINES}}}[{INTERVAL}]) "
                    f"and on (pod) ullage_requests_running{{{ENGINES}}})",
                ),
                Query("{{pod}} worker", summed_rate(WORKER_CPU, ENGINES, "pod")),
            ],
        ),
        Panel(
            "Waiting for a core",
            "Share of time in which some thread of the engine waited for a core. Without cgroup v2 "
            "the threads are those of the whole node. Above the line an alert fires.",
            "percentunit",
            [all_of("ullage_cpu_waiting_seconds_total", "pod")],
            lines=(0.5,),
            most=1,
        ),
    ],
)
PRESSURE = Row(
    "Preemption and caches",
    [
        Panel(
            "Preemptions",
            "Preempted sequences, and those of them that were swapped to host memory instead of "
            "recomputed.",
            "ops",
            [all_of("ullage_preemptions_total"), all_of("ullage_swaps_total")],
        ),
        Panel(
            "Swap",
            "KV swapped to host memory and back.",
            "Bps",
            [all_of("ullage_swap_out_bytes_total"), all_of("ullage_swap_in_bytes_total")],
        ),
        Panel(
            "Time spent swapping",
            "Share of time spent on swapping KV. Compare it with the bandwidth measured at start.",
            "percentunit",
            [all_of("ullage_swap_seconds_total")],
        ),
        Panel(
            "Degraded answers",
            "Answers with lower limits than requested, by the limit.",
            "reqps",
            [all_of("ullage_engine_degraded_requests_total", "what", needs="pressure")],
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens whose KV was cached. Investigate values below 0.6 under load.",
            "percentunit",
            [ratio("hits", summed_rate(HITS, ENGINES), summed_rate(LOOKED_UP, ENGINES))],
            lines=(0.6,),
            most=1,
        ),
        Panel(
            "Merged tokens",
            "Tokens whose KV was computed twice and is stored once.",
            "none",
            [all_of("ullage_prefix_cache_merged_tokens_total")],
        ),
    ],
)
TROUBLE = Row(
    "Trouble and processes",
    [
        Panel(
            "Trouble",
            "Replaced workers, starts that failed their proof, steps out of memory, lost groups of "
            "ranks, and NaN. All are zero in a healthy service.",
            "none",
            [
                all_of("ullage_worker_restarts_total"),
                all_of("ullage_start_proof_failures_total"),
                all_of("ullage_oom_events_total"),
                all_of("ullage_collective_errors_total"),
                all_of("ullage_nonfinite_logits_total"),
            ],
        ),
        Panel(
            "Memory of processes",
            "Resident memory of the server and of the worker's ranks (on CUDA the bytes of the "
            "device).",
            "bytes",
            [
                gauge("ullage_server_resident_bytes", where=ENGINES),
                gauge("ullage_worker_resident_bytes", where=ENGINES),
            ],
        ),
        Panel(
            "Layers of each rank",
            "Device map: the layers of the model on each rank of each engine.",
            "none",
            [gauge("ullage_rank_layers", "pod, rank, device", ENGINES)],
        ),
        Panel(
            "Pipeline overlap",
            "Share of steps that began while later stages computed an earlier one (0 without "
            "stages).",
            "percentunit",
            [
                ratio(
                    "overlapped",
                    summed_rate("ullage_steps_overlapped_total", ENGINES),
                    summed_rate("ullage_steps_total", ENGINES),
                )
            ],
        ),
        Panel(
            "Adapters",
            "LoRA adapters that were loaded into a slot, and those that were evicted.",
            "ops",
            [all_of("ullage_adapter_loads_total"), all_of("ullage_adapter_unloads_total")],
        ),
        Panel(
            "Certificates end in",
            "Time to expiry by engine. An alert fires at three days.",
            "s",
            [
                Query(
                    "{{pod}}",
                    "min by (pod) (ullage_certificate_expiry_timestamp_seconds"
                    f"{{{ENGINES}}}) - time()",
                    needs="TLS",
                )
            ],
        ),
    ],
)
ENGINE = Dashboard(
    "ullage-engine",
    "Ullage / Engine",
    "Memory, batches and latency of engines, and what keeps them from their work.",
    [NAMESPACE, LLMSERVICE, POD],
    [MEMORY, STEPS, LATENCY, BALANCE, PRESSURE, TROUBLE],
)


def tiers(counter: str, needs: str = "") -> Query:
    """Return the query for a counter's rate by KV tier."""
    return all_of(f"ullage_kv_tier_{counter}_total", "tier", needs)


def by_tier(counter: str) -> str:
    return summed_rate(f"ullage_kv_tier_{counter}_total", ENGINES, "tier")


TIERS = Dashboard(
    "ullage-tiers",
    "Ullage / Tiers of KV",
    "How much work host memory, files and peers save the devices, and at what cost.",
    [NAMESPACE, LLMSERVICE, POD],
    [
        Row(
            "Use",
            [
                Panel(
                    "Tokens found by tier",
                    "Prompt tokens whose KV was found on the device, in host memory, at peers or "
                    "in files.",
                    "none",
                    [rate("ullage_router_cached_tokens_total", "tier")],
                    kind="stack",
                ),
                Panel(
                    "Hits by tier",
                    "Share of lookups of blocks that found the block in the tier.",
                    "percentunit",
                    [
                        ratio(
                            "{{tier}}",
                            by_tier("hits"),
                            f"({by_tier('hits')} + {by_tier('misses')})",
                        )
                    ],
                    most=1,
                ),
                Panel(
                    "Fill",
                    "Share of a tier's capacity that holds KV. A warm tier is normally full.",
                    "percentunit",
                    [
                        ratio(
                            "{{tier}}",
                            f"sum by (tier) (ullage_kv_tier_used_bytes{{{ENGINES}}})",
                            f"sum by (tier) (ullage_kv_tier_capacity_bytes{{{ENGINES}}})",
                        )
                    ],
                    most=1,
                ),
                Panel("Blocks read", "By tier.", "ops", [tiers("hits")]),
                Panel(
                    "Evictions",
                    "Blocks that were evicted to make room. If they are many and hits few, the "
                    "tier is too small for the prefixes that requests share.",
                    "ops",
                    [tiers("evictions")],
                ),
                Panel(
                    "Found and not loaded",
                    "Blocks that a tier had but requests did not use, by reason: computing them "
                    "was quicker, or they came too late.",
                    "ops",
                    [
                        all_of(
                            "ullage_kv_tier_not_loaded_total",
                            "tier, reason",
                            needs="blocks that are not worth their load",
                        )
                    ],
                ),
            ],
        ),
        Row(
            "Transfers",
            [
                Panel("Read", "Bytes a second.", "Bps", [tiers("read_bytes")]),
                Panel("Written", "Bytes a second.", "Bps", [tiers("written_bytes")]),
                Panel(
                    "Bandwidth while reading",
                    "Bytes divided by the time in which anything was read. Host memory is missing: "
                    "the worker reads it, and the server does not measure its time.",
                    "Bps",
                    [ratio("{{tier}}", by_tier("read_bytes"), by_tier("read_seconds"), FILES)],
                ),
                Panel(
                    "Time spent",
                    "Share of time in which a tier was read or written.",
                    "percentunit",
                    [
                        Query("{{tier}} read", by_tier("read_seconds")),
                        Query("{{tier}} written", by_tier("written_seconds")),
                    ],
                ),
                Panel(
                    "Queue",
                    "Transfers of blocks that are waiting or running.",
                    "none",
                    [gauge("ullage_kv_tier_queued", "tier", ENGINES)],
                ),
                Panel(
                    "How bytes move",
                    "The backend of each tier: memory, threads, direct I/O, a peer's server.",
                    "none",
                    [gauge("ullage_kv_tier_info", "tier, backend", ENGINES)],
                ),
            ],
        ),
        Row(
            "Failures and peers",
            [
                Panel(
                    "Failures",
                    "Blocks that could not be read or stored, by status. timeout: the disk or peer "
                    "is slow. full: no room is left. corrupt: files are damaged. unavailable: "
                    "the tier is not used for a while after failures.",
                    "ops",
                    [all_of("ullage_kv_tier_failures_total", "tier, status")],
                ),
                Panel(
                    "Read and written by peers",
                    "KV that other engines read from this one or copied to it.",
                    "Bps",
                    [
                        all_of("ullage_kv_peers_read_bytes_total", needs=PEERS),
                        all_of("ullage_kv_peers_written_bytes_total", needs=PEERS),
                    ],
                ),
                Panel(
                    "Leases of peers",
                    "Leases and blocks that other engines hold on this one.",
                    "none",
                    [
                        gauge("ullage_kv_peers_leases", where=ENGINES, needs=PEERS),
                        gauge("ullage_kv_peers_held_slots", where=ENGINES, needs=PEERS),
                    ],
                ),
            ],
        ),
    ],
)
