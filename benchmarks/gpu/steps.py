"""Compares the time of decode steps in Llama-3-8B's shape with a lower bound.

The lower bound is the time in which the device copies as many bytes as a step reads. Steps are
measured with greedy and with top-p sampling, in bfloat16, int8 and int4. One step of each kind is
profiled, and its kernels are counted.
"""

import gzip
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import Fact, Figure, Job, Report
from benchmarks.gpu.models import decode_of, random_model
from benchmarks.gpu.rates import rates, seconds_of
from benchmarks.gpu.sequences import GREEDY, make_runner
from ullage_engine.kernels.arena import BLOCK_TOKENS
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.quantization.formats import Format
from ullage_engine.runner.model_runner import ModelRunner

BATCHES = (1, 32, 256)
JUDGED = (1, 32)
"""Memory-bound batch sizes, at which steps must be near the lower bound."""
LEAST_SHARE = 0.5
CONTEXT = 1024
KINDS = {"greedy": GREEDY, "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=1)}
PROFILED = 32
"""Number of rows in the steps that are profiled."""
PROFILE = "step-profile.json.gz"


def run(job: Job, report: Report) -> None:
    device = torch.device(job.device)
    dtype = torch.bfloat16 if job.on_gpu else torch.float32
    copied, _ = rates(device, job.tiny)
    for format in formats(job):
        loaded = random_model(dense_config(job.tiny), dtype, device, format)
        measure(job, loaded, dtype, format, copied, report)


def formats(job: Job) -> tuple[Format | None, ...]:
    """Return the weight formats to measure, with None for the data type of the computation."""
    return (None, "int8") if job.tiny else (None, "int8", "int4")


def dense_config(tiny: bool) -> ModelConfig:
    """Return Llama-3-8B's configuration, or a small one for a rehearsal."""
    sizes = (2, 64, 4, 2, 128) if tiny else (32, 4096, 32, 8, 128_256)
    layers, hidden, heads, kv_heads, vocab = sizes
    return ModelConfig(
        architecture="llama",
        layers=(LayerSpec(),) * layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=hidden * 7 // 2,
        vocab=vocab,
        max_position=4096,
        rope_theta=5e5,
        rms_eps=1e-5,
        tied=False,
    )


def measure(
    job: Job,
    loaded: LoadedModel,
    dtype: torch.dtype,
    format: Format | None,
    copied: float,
    report: Report,
) -> None:
    """Report the milliseconds of steps, and the lower bound as a share of that time."""
    device = torch.device(job.device)
    context = CONTEXT if not job.tiny else 40
    batches = BATCHES if not job.tiny else (1, 3)
    blocks = -(-context // BLOCK_TOKENS)
    rows = max(batches)
    runner = make_runner(loaded, device, dtype, rows, rows * blocks, max_model_len=context)
    runner.warm_up()

    vocab = loaded.model_config.vocab
    label = format or str(dtype).removeprefix("torch.")
    for batch in batches:
        floor = floor_seconds(loaded, dtype, batch, context, copied)
        report(Figure(f"{label}, {batch} x {context}, floor", floor * 1e3, "ms"))
        for kind, sampling in KINDS.items():
            plan = decodes(batch, context, blocks, vocab, sampling)
            took = seconds_of(partial(runner.execute, plan), device)
            name = f"{label}, {batch} x {context}, {kind}"
            report(Figure(name, took * 1e3, "ms"))
            is_judged = format is None and kind == "greedy" and batch in JUDGED
            aim = job.speed_aim(LEAST_SHARE) if is_judged else None
            report(Figure(f"{name}, floor / measured", floor / took, "", aim))
    if job.on_gpu and format is None:
        for kind, sampling in KINDS.items():
            plan = decodes(PROFILED, context, blocks, vocab, sampling)
            profile(job, runner, plan, kind, report)


def floor_seconds(
    loaded: LoadedModel, dtype: torch.dtype, batch: int, context: int, copied: float
) -> float:
    """Return the seconds in which the device copies the bytes that a step reads: weights and KV."""
    kv = context * loaded.model_config.kv_bytes_per_token(dtype.itemsize)
    embedding = loaded.tensors["embedding"].nbytes  # a step reads a row of it for each sequence
    return float((loaded.nbytes - embedding + batch * kv) / copied)


def decodes(
    batch: int, context: int, blocks: int, vocab: int, sampling: SamplingParams
) -> StepPlan:
    """Return the plan of a decode step."""
    return StepPlan([decode_of(row, context, blocks, vocab, sampling) for row in range(batch)])


def profile(job: Job, runner: ModelRunner, plan: StepPlan, kind: str, report: Report) -> None:
    """Write a trace of one step, and report its kernels and copies."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    runner.execute(plan)
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        runner.execute(plan)
        torch.cuda.synchronize()
    trace = job.scratch / "trace.json"
    seen.export_chrome_trace(str(trace))
    events = list(device_events(trace))
    busy_ms = sum(event["dur"] for event in events) / 1e3
    kernels = sum(event["cat"] == "kernel" for event in events)
    label = f"{kind}, {PROFILED} rows"
    report(Figure(f"{label}: kernels", kernels, ""))
    report(Figure(f"{label}: copies and fills", len(events) - kernels, ""))
    report(Figure(f"{label}: device busy", busy_ms, "ms"))
    slowest = sorted(events, key=lambda event: -event["dur"])[:5]
    for event in slowest:
        report(Fact(f"{kind}, slowest", f"{event['dur']:.0f} us {event['name'][:80]}"))
    with trace.open("rb") as plain, gzip.open(job.out / f"{kind}-{PROFILE}", "wb") as packed:
        shutil.copyfileobj(plain, packed)


def device_events(trace: Path) -> Iterator[dict[str, Any]]:
    """Yield the events that ran on the device."""
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            yield event
