"""Runs one worker with every feature that behaves differently on a GPU.

These features are pinned host slots, the host tier, float8 KV and the driver's figures. This part
reveals a fault in any of them within seconds.
"""

import asyncio
from collections.abc import Sequence

from benchmarks.gpu.checkpoint import service_checkpoint
from benchmarks.gpu.device_memory import nvml_used
from benchmarks.gpu.figures import Fact, Figure, Job, Report, at_most, count, none_of
from benchmarks.gpu.service import (
    MIB,
    ask,
    engine_up,
    judge_log,
    kv_bytes,
    metrics,
    pair,
    prompt_of,
)
from benchmarks.gpu.ties import NEAR_TIE, compare
from benchmarks.support.one_engine import Engine
from ullage_common.wire.channels import open_channel

LAYERS = 2
PROMPT_TOKENS = 600
OUTPUT_TOKENS = 40
SERVICES = (("none", "fp8"), ("int8", "auto"))
"""Pairs of weight format and KV format. For each pair, a model is prepared, loaded and served."""
TIES = {"auto": NEAR_TIE, "fp8": 5e-2}
"""Gap in log-probability below which rounding may choose either token, by KV format. A key whose
last bit differs may be rounded to the next float8 value, 1/16 away."""
DRIVER_FIGURES = (
    "ullage_gpu_memory_total_bytes",
    "ullage_gpu_memory_used_bytes",
    "ullage_gpu_power_watts",
    "ullage_gpu_temperature_celsius",
    "ullage_gpu_sm_clock_hertz",
)
MOST_ERROR = 0.05


def run(job: Job, report: Report) -> None:
    asyncio.run(serve_all(job, SERVICES, report))


async def serve_all(job: Job, services: Sequence[tuple[str, str]], report: Report) -> None:
    """Start one service after another, and send each a prompt that is already cached."""
    pool = kv_bytes(job, 4 * (PROMPT_TOKENS + OUTPUT_TOKENS), itemsize=4)
    memory = {"max_kv": pool, "host_kv": pool, "tiers": {"host": {"size": 4 * pool}}}
    checkpoint = await asyncio.to_thread(service_checkpoint, job, LAYERS)
    for quantization, kv_dtype in services:
        name = f"worker-{quantization}"
        sections = {
            "memory": memory,
            "model": {
                "source": f"file://{checkpoint}",
                "dtype": "float32",
                "quantization": quantization,
                "kv_dtype": kv_dtype,
            },
        }
        async with (
            engine_up(job, name, sections) as engine,
            open_channel(engine.address) as channel,
        ):
            label = f"weights {quantization}, KV {kv_dtype}"
            prompt = prompt_of(job, 0, PROMPT_TOKENS)
            first = await ask(channel, prompt, OUTPUT_TOKENS, gaps=True)
            # Evicted from the pool by other prompts, to the host tier.
            for other in range(1, 5):
                await ask(channel, prompt_of(job, other, PROMPT_TOKENS), OUTPUT_TOKENS)
            again = await ask(channel, prompt, OUTPUT_TOKENS)

            for stream in (first, again):
                if stream.error:
                    report(Fact(label, stream.error))
            report(none_of(f"{label}: failed answers", bool(first.error) + bool(again.error)))
            parted = compare([pair(first, again)], TIES[kv_dtype])
            report(none_of(f"{label}: other tokens from cached KV", parted.elsewhere))
            report(count(f"{label}: cached prompt tokens", again.cached_tokens, 1))
            await measured(job, engine, label, report)
        judge_log(job, name, report)


async def measured(job: Job, engine: Engine, label: str, report: Report) -> None:
    """Report the memory ledger by line, and judge the driver figures that the engine publishes."""
    for line in (await engine.state()).ledger:
        report(Figure(f"{label}: ledger, {line.name}", line.allocated_bytes / MIB, "MiB"))
    figures = await asyncio.to_thread(metrics, engine)
    rate = figures["ullage_swap_bandwidth_bytes_per_second"]
    report(count(f"{label}: measured bandwidth of swapping", rate, 1))
    if not job.on_gpu:
        return
    for name in DRIVER_FIGURES:
        report(count(f"{label}: {name}", figures.get(name, 0.0), 1e-9))
    used, _ = nvml_used()
    error = abs(figures.get("ullage_gpu_memory_used_bytes", 0.0) - used) / used
    report(at_most(f"{label}: published use against NVML's", error, "off", MOST_ERROR))
