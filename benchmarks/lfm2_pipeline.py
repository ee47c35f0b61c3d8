"""Samples a second of LFM2-8B-A1B to logits, checked: `python benchmarks/lfm2_pipeline.py`.

1024 samples of 32 tokens, each to the logits after its last, with seeded random weights and a
skewed router, by the engine's own model on one device or on several stages that each compute a run
of the layers. While a stage computes one micro-batch it receives the next and sends the one before:
by NCCL, whose transfers have a stream of their own, or between processes of a CPU by gloo's
threads. The logits are compared with those of a plain float32 implementation (lfm2_reference.py).

Samples whose routing rounding could decide are replaced before anything is measured; how many is
printed. In float32 the exit status is 1 unless every first token agrees and no logit differs by
1e-5 of the largest.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lfm2_model import SIZES, SeededWeights, make_geometry, make_prompts, stage_geometry
from lfm2_reference import Reference, compute_reference
from lfm2_stage import Link, Stage

from ullage_engine.models.dtypes import DTYPES
from ullage_engine.models.geometry import ModelGeometry

PUBLISHED = 358.56
"""Samples a second of the same work in float32 on four GPUs, as the requirements give it."""

SAFE_MARGIN = 4e-6
"""Between the sigmoids of the last expert chosen and the first not chosen; rounding in float32 over
all layers moves them by less."""

TOLERANCE = 1e-5


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
    if job.stages == 1:
        sys.exit(run_rank(0, job, 0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        mp.spawn(spawned, args=(job, port), nprocs=job.stages)
    except mp.ProcessExitedException as error:
        sys.exit(error.exit_code)


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
    add("--micro-batches", type=int, default=8)
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
    if given.tokens < 2:
        parser.error(f"--tokens {given.tokens} is not a prompt; give 2 or more")
    given.size = given.size or ("full" if given.device == "cuda" else "small")
    return Job(**vars(given))


def spawned(rank: int, job: Job, port: int) -> None:
    status = run_rank(rank, job, port)
    if status:
        sys.exit(status)


def run_rank(rank: int, job: Job, port: int) -> int:
    """One stage from its weights to the result, which the last stage prints."""
    device = job.device_of(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if job.stages > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.stages))
        backend = "nccl" if device.type == "cuda" else "gloo"
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, address, rank=rank, world_size=job.stages)
    whole = make_geometry(job.size)
    weights = SeededWeights(whole, DTYPES[job.dtype], device)
    status = run_stage(rank, job, whole, weights, device)
    if job.stages > 1:
        dist.destroy_process_group()
    return status


def run_stage(
    rank: int, job: Job, whole: ModelGeometry, weights: SeededWeights, device: torch.device
) -> int:
    is_last = rank == job.stages - 1
    chosen = choose_samples(job, whole, weights, device) if is_last else None
    prompts = share_prompts(job, chosen, device)
    own = stage_geometry(whole, rank, job.stages)
    say(f"stage {rank}: layers {own.first_layer} to {own.first_layer + own.num_layers - 1}")
    per_batch = -(-job.samples // job.micro_batches)
    stage = Stage(own, weights, per_batch, job.tokens, device, DTYPES[job.dtype], is_last)
    link = Link(rank, job.stages, stage.new_hidden())
    logits = stage.new_logits(job.samples if is_last else 0)
    batches = [batch.tolist() for batch in prompts.split(per_batch)]
    run_batches(stage, link, batches[:1], logits)
    seconds = [run_timed(stage, link, batches, logits, job, device) for _ in range(job.runs)]
    return report(job, statistics.median(seconds), logits, chosen) if chosen else 0


@dataclass(frozen=True)
class Chosen:
    """Samples and what is expected of them."""

    prompts: torch.Tensor
    logits: torch.Tensor
    load: torch.Tensor
    num_replaced: int


def choose_samples(
    job: Job, whole: ModelGeometry, weights: SeededWeights, device: torch.device
) -> Chosen:
    """The first samples of the random prompts whose routing does not hang on rounding."""
    prompts = make_prompts(whole, int(job.samples * (1 + job.spare)), job.tokens)
    found: Reference = compute_reference(
        whole, weights, prompts, lambda layer: say(f"reference: layer {layer}", end="\r")
    )
    safe = (found.margins > SAFE_MARGIN).nonzero()[: job.samples, 0]
    if len(safe) < job.samples:
        raise SystemExit(
            f"--spare {job.spare}: only {len(safe)} of {len(prompts)} prompts have routing that "
            f"rounding cannot decide, not {job.samples}; give a larger --spare"
        )
    replaced = int(safe[-1]) + 1 - job.samples
    say(f"reference: done, {replaced} samples replaced")
    return Chosen(prompts[safe], found.logits[safe], found.load, replaced)


def share_prompts(job: Job, chosen: Chosen | None, device: torch.device) -> torch.Tensor:
    """The samples, which the last stage chose, in every process."""
    prompts = torch.zeros(job.samples, job.tokens, dtype=torch.int64, device=device)
    if chosen is not None:
        prompts.copy_(chosen.prompts)
    if job.stages > 1:
        dist.broadcast(prompts, job.stages - 1)
    return prompts.cpu()


@torch.inference_mode()
def run_batches(
    stage: Stage, link: Link, batches: list[list[list[int]]], logits: torch.Tensor
) -> None:
    """Computes this stage's part of every micro-batch; the last writes its logits in order."""
    done = 0
    link.expect(len(batches))
    for prompts in batches:
        hidden = stage.forward(prompts, link.receive(stage.rows(prompts)))
        if link.is_last:
            stage.logits(len(prompts), hidden, logits[done : done + len(prompts)])
        else:
            link.send(hidden)
        done += len(prompts)
    link.finish()


def run_timed(
    stage: Stage,
    link: Link,
    batches: list[list[list[int]]],
    logits: torch.Tensor,
    job: Job,
    device: torch.device,
) -> float:
    """Seconds until the last stage has all logits."""
    wait_for_all(job, device)
    started = time.perf_counter()
    run_batches(stage, link, batches, logits)
    wait_for_all(job, device)
    return time.perf_counter() - started


def wait_for_all(job: Job, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if job.stages > 1:
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def report(job: Job, seconds: float, logits: torch.Tensor, chosen: Chosen) -> int:
    """Prints the result; the exit status."""
    actual, expected = logits.float().cpu(), chosen.logits
    agreed = int((actual.argmax(1) == expected.argmax(1)).sum())
    difference = float((actual - expected).abs().max() / expected.abs().max())
    rate = job.samples / seconds
    is_right = agreed == job.samples and difference < TOLERANCE
    compared = f" ({rate / PUBLISHED:.2f} of {PUBLISHED} on four GPUs)"
    say(f"{rate:.2f} samples/s{compared if job.size == 'full' else ''}")
    say(f"first tokens: {agreed} of {job.samples}; largest difference {difference:.1e}")
    result = {
        "benchmark": "lfm2_pipeline",
        **{name: getattr(job, name) for name in job.__dataclass_fields__},
        "seconds": seconds,
        "samples_per_second": rate,
        "published_samples_per_second": PUBLISHED if job.size == "full" else None,
        "top1_agreed": agreed,
        "max_relative_difference": difference,
        "samples_replaced": chosen.num_replaced,
        "busiest_expert_times_mean": float(chosen.load.max() / chosen.load.float().mean()),
        "idlest_expert_times_mean": float(chosen.load.min() / chosen.load.float().mean()),
    }
    say(json.dumps(result))
    return 0 if is_right or job.dtype != "float32" else 1


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


if __name__ == "__main__":
    main()
