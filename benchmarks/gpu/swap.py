"""Preemption: sequences that do not fit into the KV pool together are swapped to the host and back.

In float32, each sequence must have the same tokens as when it runs alone. Blocks of ended sessions
pass through the host tier.
"""

import asyncio

from benchmarks.gpu.figures import Fact, Figure, Job, Report, count, none_of
from benchmarks.gpu.service import (
    Stream,
    ask,
    engine_up,
    kv_bytes,
    metrics,
    pair,
    prompt_of,
)
from benchmarks.gpu.ties import compare
from ullage_common.wire.channels import open_channel

STREAMS = 4
SPARE = 0.75
"""Size of the KV pool, as a share of the KV of all streams at their ends."""


def run(job: Job, report: Report) -> None:
    asyncio.run(_run(job, report))


async def _run(job: Job, report: Report) -> None:
    prompt_tokens = 64
    output_tokens = 448
    whole = STREAMS * (prompt_tokens + output_tokens)
    sections = {
        "model": {"dtype": "float32"},
        "memory": {
            "max_kv": kv_bytes(job, int(SPARE * whole), itemsize=4),
            "host_kv": kv_bytes(job, whole, itemsize=4),
            # Blocks go to the host by preemption, not by caching.
            "tiers": {"host": {"size": kv_bytes(job, 2 * whole, itemsize=4)}},
        },
    }
    async with (
        engine_up(job, "swap", sections) as engine,
        # Directly to the engine, because a router would queue requests that do not fit.
        open_channel(engine.address) as channel,
    ):
        prompts = [prompt_of(job, number, prompt_tokens) for number in range(STREAMS)]
        # Together first: a new engine expects outputs of 256 tokens, and so admits more streams
        # than it can hold to their ends.
        together = await asyncio.gather(
            *(ask(channel, prompt, output_tokens) for prompt in prompts)
        )
        alone = [await ask(channel, prompt, output_tokens, gaps=True) for prompt in prompts]
        judge(alone, list(together), report)

        figures = await asyncio.to_thread(metrics, engine)
        rate = figures["ullage_swap_bandwidth_bytes_per_second"] / 1e9
        report(count("sequences swapped out", figures["ullage_swaps_total"], 1))
        report(Figure("swapping, block by block", rate, "GB/s"))
        hits = figures.get("ullage_kv_tier_hits_total", 0.0)
        report(Figure("blocks read from the host tier", hits, ""))


def judge(alone: list[Stream], together: list[Stream], report: Report) -> None:
    """Compare the tokens of streams that ran alone with those of the same streams run together."""
    errors = [each.error for each in (*alone, *together) if each.error]
    for error in sorted(set(errors)):
        report(Fact("error", error))
    report(none_of("failed streams", len(errors)))

    parted = compare(map(pair, alone, together))
    report(none_of("streams with other tokens", parted.elsewhere))
    report(Figure("streams that parted at a near-tie", parted.at_near_ties, ""))
    report(count("preemptions", sum(each.preemptions for each in together), 1))
