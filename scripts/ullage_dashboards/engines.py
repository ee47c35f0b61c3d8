"""Dashboards of engines and of the tiers of their KV."""

from ullage_dashboards.model import (
    ENGINES,
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
HITS = "ullage_prefix_cache_hits_tokens_total"
LOOKED_UP = "ullage_prefix_cache_queries_tokens_total"
FAILURE = "a tier that fails"
FILES = "memory.tiers.file"
PEERS = "memory.tiers.remote"


def per_engine(name: str) -> Query:
    """Return a gauge by engine."""
    return gauge(name, "pod", ENGINES)


def all_of(counter: str, by: str = "", needs: str = "") -> Query:
    """Return the rate of a counter over the chosen engines."""
    return rate(counter, by, ENGINES, needs)


MEMORY = Row(
    "Memory",
    [
        Panel(
            "Headroom",
            "KV that a new request may take, of each engine. At zero routers send it nothing.",
            "bytes",
            [per_engine("ullage_memory_headroom_bytes")],
        ),
        Panel(
            "KV in use",
            "Share of the pool; near 1 is what it is there for, while nothing is preempted.",
            "percentunit",
            [per_engine("ullage_kv_used_ratio")],
            most=1,
        ),
        Panel(
            "Pressure and boost off",
            "Degrade level, 0 none and 1 the mildest; the share of the largest batch that may run, "
            "and 1 where GPUs' heat or power lowered it.",
            "none",
            [
                gauge("ullage_engine_pressure_level", where=ENGINES, how="max"),
                gauge("ullage_engine_batch_share", where=ENGINES, how="min"),
                gauge("ullage_engine_boost_off", where=ENGINES, how="max"),
            ],
        ),
        Panel(
            "Reserved, withheld, pool",
            "KV promised and not allocated yet, headroom withheld as another process took memory "
            "of the device, and the whole pool.",
            "bytes",
            [
                gauge("ullage_kv_committed_bytes", where=ENGINES),
                gauge("ullage_memory_withheld_bytes", where=ENGINES),
                gauge("ullage_kv_pool_bytes", where=ENGINES),
            ],
        ),
        Panel(
            "Waste",
            "Share of the KV in use that holds no tokens: the ends of last blocks.",
            "percentunit",
            [per_engine("ullage_kv_waste_ratio")],
        ),
        Panel(
            "Sessions",
            "KV that sessions keep between requests, and how many they are.",
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
            "Everything that is generated takes one: the median is the time between two tokens.",
            "s",
            quantiles(STEP, ENGINES),
        ),
        Panel(
            "Sequences of a step",
            "The batch: its mean, and its 95th percentile. batching.maxSequences bounds it.",
            "none",
            [mean("mean", SEQUENCES, ENGINES), quantile("p95", 0.95, SEQUENCES, ENGINES)],
        ),
        Panel(
            "Tokens of a step",
            "Of prompts and of output. batching.prefillChunkTokens bounds those of prompts.",
            "none",
            [
                mean("mean", "ullage_step_tokens", ENGINES),
                quantile("p95", 0.95, "ullage_step_tokens", ENGINES),
            ],
        ),
        Panel(
            "Batch size changes",
            "Steps with more sequences than the one before, and with fewer.",
            "ops",
            [all_of("ullage_batch_size_changes_total", "direction")],
        ),
        Panel(
            "Latency over batch size",
            "Each point is a moment: sequences of a step, and the 95th percentile of the time "
            "between two tokens. It should rise slowly; where it turns is the largest useful "
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
            "Each point is a moment: sequences running, and tokens a second. Right of the knee "
            "more sequences bring no more tokens.",
            "none",
            [
                Query("running", f"sum(ullage_requests_running{{{ENGINES}}})"),
                Query("tokens a second", summed_rate(GENERATED, ENGINES)),
            ],
            kind="xy",
        ),
        Panel(
            "Draft tokens",
            "Of speculation (batching.numSpeculativeTokens): checked, and those that answers "
            "got. Where these are few, set 0.",
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
            "From acceptance to the step that computes the prompt's first tokens.",
            "s",
            quantiles("ullage_request_queue_time_seconds", ENGINES),
        ),
        Panel(
            "Time to first token",
            "From acceptance by the engine: queue time and prefill.",
            "s",
            quantiles("ullage_time_to_first_token_seconds", ENGINES),
        ),
        Panel(
            "Between two tokens",
            "Of one request. 0.25 s is 4 tokens a second, which people read at least.",
            "s",
            quantiles(INTER_TOKEN, ENGINES),
            lines=(1 / 13, 1 / 7, 0.25),
        ),
        Panel(
            "Tokens",
            "Of started prompts, and generated.",
            "none",
            [all_of("ullage_prompt_tokens_total"), all_of(GENERATED)],
        ),
        Panel(
            "Running and waiting",
            "Sequences in the batch, and admitted ones that have not started.",
            "none",
            [
                gauge("ullage_requests_running", where=ENGINES),
                gauge("ullage_requests_waiting", where=ENGINES),
            ],
        ),
        Panel(
            "Requests by outcome",
            "stop and length are answers to their end.",
            "reqps",
            [all_of("ullage_requests_total", "outcome")],
            kind="stack",
        ),
    ],
)
PRESSURE = Row(
    "Preemption and caches",
    [
        Panel(
            "Preemptions",
            "Sequences put aside for memory, and those of them whose KV was copied to host memory "
            "rather than computed again.",
            "ops",
            [all_of("ullage_preemptions_total"), all_of("ullage_swaps_total")],
        ),
        Panel(
            "Swap",
            "KV copied to host memory and back.",
            "Bps",
            [all_of("ullage_swap_out_bytes_total"), all_of("ullage_swap_in_bytes_total")],
        ),
        Panel(
            "Time spent swapping",
            "Share of time in which KV is copied, beside the bandwidth measured at start.",
            "percentunit",
            [all_of("ullage_swap_seconds_total")],
        ),
        Panel(
            "Degraded answers",
            "Answers given less than was asked for, by what was lowered.",
            "reqps",
            [all_of("ullage_engine_degraded_requests_total", "what", needs="pressure")],
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens whose KV was there. Below 0.6 under load is worth a look.",
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
            "Workers replaced, starts that failed their proof, steps out of memory, groups of "
            "ranks lost, NaN: zero when all is well.",
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
            "The server, and the worker's ranks; on CUDA own bytes of its device.",
            "bytes",
            [
                gauge("ullage_server_resident_bytes", where=ENGINES),
                gauge("ullage_worker_resident_bytes", where=ENGINES),
            ],
        ),
        Panel(
            "Layers of each rank",
            "The device map: a model's layers over the ranks of each engine.",
            "none",
            [gauge("ullage_rank_layers", "pod, rank, device", ENGINES)],
        ),
        Panel(
            "Pipeline overlap",
            "Share of steps begun while later stages computed an earlier one; 0 without stages.",
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
            "LoRA adapters loaded into a slot, and those that gave way.",
            "ops",
            [all_of("ullage_adapter_loads_total"), all_of("ullage_adapter_unloads_total")],
        ),
        Panel(
            "Certificates end in",
            "Of each engine; three days are an alert.",
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
    [MEMORY, STEPS, LATENCY, PRESSURE, TROUBLE],
)


def tiers(counter: str, needs: str = "") -> Query:
    """Return a counter's rate by tier."""
    return all_of(f"ullage_kv_tier_{counter}_total", "tier", needs)


def by_tier(counter: str) -> str:
    return summed_rate(f"ullage_kv_tier_{counter}_total", ENGINES, "tier")


TIERS = Dashboard(
    "ullage-tiers",
    "Ullage / Tiers of KV",
    "What host memory, files and peers spare the devices, and what that costs.",
    [NAMESPACE, LLMSERVICE, POD],
    [
        Row(
            "Use",
            [
                Panel(
                    "Tokens found by tier",
                    "Prompt tokens whose KV was found: device, host memory, peers or files.",
                    "none",
                    [rate("ullage_router_cached_tokens_total", "tier")],
                    kind="stack",
                ),
                Panel(
                    "Hits by tier",
                    "Share of the blocks looked for that were read.",
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
                    "Share of a tier's capacity that holds KV; full is normal once it is warm.",
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
                    "Blocks that made room. Many with few hits: the tier is too small for what is "
                    "shared.",
                    "ops",
                    [tiers("evictions")],
                ),
                Panel(
                    "Found and not loaded",
                    "Blocks that a tier had and requests did not begin with, by reason: computing "
                    "them was quicker, or they came too late.",
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
                    "Bytes over the time in which something was read. The worker reads host "
                    "memory, in no time of the server's.",
                    "Bps",
                    [ratio("{{tier}}", by_tier("read_bytes"), by_tier("read_seconds"), FILES)],
                ),
                Panel(
                    "Time spent",
                    "Share of time in which something was read or written, by tier.",
                    "percentunit",
                    [
                        Query("{{tier}} read", by_tier("read_seconds")),
                        Query("{{tier}} written", by_tier("written_seconds")),
                    ],
                ),
                Panel(
                    "Queue",
                    "Transfers of blocks that wait or are under way.",
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
                    "Blocks neither read nor stored nor absent. timeout is a slow disk or peer, "
                    "full a device without room, corrupt damaged files, unavailable a tier left "
                    "alone after failures.",
                    "ops",
                    [all_of("ullage_kv_tier_failures_total", "tier, status", needs=FAILURE)],
                ),
                Panel(
                    "Read and written by peers",
                    "KV that other engines read here, or copied here.",
                    "Bps",
                    [
                        all_of("ullage_kv_peers_read_bytes_total", needs=PEERS),
                        all_of("ullage_kv_peers_written_bytes_total", needs=PEERS),
                    ],
                ),
                Panel(
                    "Leases of peers",
                    "Leases and blocks that other engines hold here.",
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
