"""Samples a second of LFM2-8B-A1B to logits, checked: `python benchmarks/lfm2_pipeline.py`.

1024 samples of 32 tokens, each to the logits after its last, with seeded random weights and a
skewed router: one step of the engine's own runner, on one device or on several stages, which get
the layers, the micro-batches and the transfers that `parallelism.pipeline` gives them. The logits
are compared with those of a plain float32 implementation (lfm2_reference.py).

Samples whose routing rounding could decide are replaced before anything is measured; how many is
printed. In float32 the exit status is 1 unless every first token agrees and no logit differs by
1e-5 of the largest. In bfloat16 experts chosen by a hair are often others than in float32, whoever
computes; there a plain bfloat16 implementation is compared with float32, too, and the exit status
is 1 if the engine's median error is a quarter larger than its.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lfm2_model import SIZES, SeededWeights, make_model_config, make_prompts
from lfm2_reference import Reference, compute_reference
from lfm2_stage import load_stage, make_plan, make_runner

from ullage_engine.model_config.dtypes import DTYPES
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.parallel.layout import RankLayout, device_map
from ullage_engine.parallel.pipeline import PipelineRank, RankGroup
from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.runner.model_runner import ModelRunner

PUBLISHED = 358.56
"""Samples a second of the same work in float32 on four GPUs, as the requirements give it."""

SAFE_MARGIN = 4e-6
"""Between the sigmoids of the last expert chosen and the first not chosen; rounding in float32 over
all layers moves them by less."""

TOLERANCE = 1e-5

MEDIAN_TOLERANCE = 1.25
"""Times the error of a plain bfloat16 implementation."""

REFERENCE_TIMEOUT_S = 3600.0
"""How long the other stages wait for the last one, which computes the reference."""

INTERRUPTED = 130
"""Exit status, as shells have it."""


@dataclass(frozen=True)
class Job:
    """What every process is told."""

    device: str
    dtype: str
    size: str
    stages: int
    samples: int
    tokens: int
    micro_batches: int
    spare: float
    runs: int

    def device_of(self, rank: int) -> torch.device:
        return torch.device(self.device, rank) if self.device == "cuda" else torch.device("cpu")


def main() -> None:
    job = parse_job()
    try:
        status = run_rank(0, job, None) if job.stages == 1 else run_processes(job)
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def run_processes(job: Job) -> int:
    """One process a stage; whichever fails ends the others, and so does Ctrl-C."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        started = mp.spawn(spawned, args=(job, store), nprocs=job.stages, join=False)
        try:
            while not started.join():
                pass
        except mp.ProcessExitedException as error:
            return int(error.exit_code)
        finally:
            for process in started.processes:
                process.kill()
                process.join()
    return 0


def parse_job() -> Job:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    has_cuda = torch.cuda.is_available()
    add("--device", default="cuda" if has_cuda else "cpu", choices=["cpu", "cuda"])
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--size", choices=sorted(SIZES), help="default: full on a GPU, small on a CPU")
    add("--stages", type=int, default=1, help="devices, or processes of a CPU (default: 1)")
    add("--samples", type=int, default=1024)
    add("--tokens", type=int, default=32, help="of each sample")
    add("--micro-batches", type=int, default=8, help="at most, of several stages")
    add("--spare", type=float, default=0.5, help="prompts to choose from beyond the samples, share")
    add("--runs", type=int, default=3, help="measured; the median counts")
    given = parser.parse_args()
    if given.stages > 1 and given.device == "cuda" and torch.cuda.device_count() < given.stages:
        parser.error(
            f"--stages {given.stages} needs as many GPUs, and there are "
            f"{torch.cuda.device_count()}; give --stages 1 or --device cpu"
        )
    for name in ("stages", "samples", "micro_batches", "runs"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)} is not positive")
    given.size = given.size or ("full" if given.device == "cuda" else "small")
    if given.stages > (most := make_model_config(given.size).num_layers):
        parser.error(f"--stages {given.stages} is more than the model's {most} layers")
    if given.tokens < 2:
        parser.error(f"--tokens {given.tokens} is not a prompt; give 2 or more")
    return Job(**vars(given))


def spawned(rank: int, job: Job, store: Path) -> None:
    status = run_rank(rank, job, store)
    if status:
        sys.exit(status)


def run_rank(rank: int, job: Job, store: Path | None) -> int:
    """One stage from its weights to the result, which the last stage prints."""
    device, layout = job.device_of(rank), RankLayout(pipeline=job.stages)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is None:
        return run_stage(rank, job, layout, None)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.stages))
    group = RankGroup(layout, rank, store, device, REFERENCE_TIMEOUT_S)
    status = run_stage(rank, job, layout, group)
    group.close()
    return status


def run_stage(rank: int, job: Job, layout: RankLayout, group: RankGroup | None) -> int:
    device, dtype = job.device_of(rank), DTYPES[job.dtype]
    whole = make_model_config(job.size)
    weights = SeededWeights(whole, dtype, device)
    chosen = choose_samples(job, whole, weights, device) if layout.is_last(rank) else None
    prompts = share_prompts(job, chosen, device)
    say(str(device_map(whole, layout, device.type)[rank]))
    rows = job.samples * job.tokens
    pipeline_rank = PipelineRank(group, rows, whole.hidden, dtype, job.micro_batches)
    loaded = load_stage(whole, weights, layout, rank)
    runner = make_runner(loaded, job.samples, job.tokens, device, dtype, pipeline_rank)
    plan = make_plan(prompts.tolist())
    run_step(runner, plan)  # Libraries prepare themselves.
    seconds = []
    for _ in range(job.runs):
        taken, logits = run_timed(runner, plan, job, device)
        seconds.append(taken)
    return report(job, statistics.median(seconds), logits, chosen) if chosen else 0


@dataclass(frozen=True)
class Chosen:
    """Samples and what is expected of them."""

    prompts: torch.Tensor
    logits: torch.Tensor
    load: torch.Tensor
    num_replaced: int
    plain: torch.Tensor | None
    """Logits by a plain implementation in the engine's type, where that is not float32."""


def choose_samples(
    job: Job, whole: ModelConfig, weights: SeededWeights, device: torch.device
) -> Chosen:
    """The first samples of the random prompts whose routing does not hang on rounding."""
    prompts = make_prompts(whole, int(job.samples * (1 + job.spare)), job.tokens)
    reference = run_reference(whole, weights, prompts, torch.float32)
    safe = (reference.margins > SAFE_MARGIN).nonzero()[: job.samples, 0]
    if len(safe) < job.samples:
        raise SystemExit(
            f"--spare {job.spare}: only {len(safe)} of {len(prompts)} prompts have routing that "
            f"rounding cannot decide, not {job.samples}; give a larger --spare"
        )
    replaced = int(safe[-1]) + 1 - job.samples
    say(f"reference: done, {replaced} samples replaced")
    prompts, plain = prompts[safe], None
    if job.dtype != "float32":
        plain = run_reference(whole, weights, prompts, DTYPES[job.dtype]).logits
    return Chosen(prompts, reference.logits[safe], reference.load, replaced, plain)


def run_reference(
    whole: ModelConfig, weights: SeededWeights, prompts: torch.Tensor, dtype: torch.dtype
) -> Reference:
    name = f"reference in {str(dtype).removeprefix('torch.')}"
    return compute_reference(
        whole, weights, prompts, lambda layer: say(f"{name}: layer {layer}", end="\r"), dtype
    )


def share_prompts(job: Job, chosen: Chosen | None, device: torch.device) -> torch.Tensor:
    """The samples, which the last stage chose, in every process."""
    prompts = torch.zeros(job.samples, job.tokens, dtype=torch.int64, device=device)
    if chosen is not None:
        prompts.copy_(chosen.prompts)
    if job.stages > 1:
        dist.broadcast(prompts, job.stages - 1)
    return prompts.cpu()


def run_step(runner: ModelRunner, plan: StepPlan) -> list[tuple[list[int], torch.Tensor]]:
    """Of each micro-batch the samples and their logits; nothing but on the last stage."""
    return [
        ([int(chunk.request_id) for chunk in chunks], logits.clone())
        for chunks, logits in runner.logits(plan)
    ]


def run_timed(
    runner: ModelRunner, plan: StepPlan, job: Job, device: torch.device
) -> tuple[float, torch.Tensor]:
    """Seconds until the last stage has all logits; and these, in the order of the samples."""
    wait_for_all(job, device)
    started = time.perf_counter()
    computed = run_step(runner, plan)
    wait_for_all(job, device)
    seconds = time.perf_counter() - started
    samples = torch.tensor([each for samples, _ in computed for each in samples])
    if not computed:
        return seconds, torch.empty(0)
    return seconds, torch.cat([logits.cpu() for _, logits in computed])[samples.argsort()]


def wait_for_all(job: Job, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if job.stages > 1:
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


@dataclass(frozen=True)
class Agreement:
    """How logits compare with the reference's."""

    top1: int
    """Samples whose first token is the same."""
    largest: float
    """The largest difference, as a share of the largest logit."""
    median: float
    """Of all samples the median of the difference's length, as a share of the logits'."""


def compare(actual: torch.Tensor, expected: torch.Tensor) -> Agreement:
    difference = actual - expected
    return Agreement(
        top1=int((actual.argmax(1) == expected.argmax(1)).sum()),
        largest=float(difference.abs().max() / expected.abs().max()),
        median=float((difference.norm(dim=1) / expected.norm(dim=1)).median()),
    )


def is_right(own: Agreement, plain: Agreement | None, samples: int) -> bool:
    if plain is None:
        return own.top1 == samples and own.largest < TOLERANCE
    return own.median <= MEDIAN_TOLERANCE * plain.median


def report(job: Job, seconds: float, logits: torch.Tensor, chosen: Chosen) -> int:
    """Prints the result; the exit status."""
    own = compare(logits.float().cpu(), chosen.logits)
    plain = compare(chosen.plain, chosen.logits) if chosen.plain is not None else None
    rate = job.samples / seconds
    compared = f" ({rate / PUBLISHED:.2f} of {PUBLISHED} on four GPUs)"
    say(f"{rate:.2f} samples/s{compared if job.size == 'full' else ''}")
    say(f"the engine: {own}")
    if plain is not None:
        say(f"plain {job.dtype}: {plain}")
    load = chosen.load / chosen.load.float().mean()
    result = {
        "benchmark": "lfm2_pipeline",
        **asdict(job),
        "seconds": seconds,
        "samples_per_second": rate,
        "published_samples_per_second": PUBLISHED if job.size == "full" else None,
        "engine": asdict(own),
        "plain": asdict(plain) if plain else None,
        "samples_replaced": chosen.num_replaced,
        "busiest_expert_times_mean": float(load.max()),
        "idlest_expert_times_mean": float(load.min()),
    }
    say(json.dumps(result))
    return 0 if is_right(own, plain, job.samples) else 1


def say(text: str, end: str = "\n") -> None:
    # In one piece: several processes write at once.
    print(f"{text}{end}", end="", flush=True)


if __name__ == "__main__":
    main()
