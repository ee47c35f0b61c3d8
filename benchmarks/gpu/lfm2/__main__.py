"""Measure LFM2-8B-A1B in samples per second from tokens to logits, and check the logits.

The model has seeded random weights and a skewed router. The engine's own runner computes 1024
samples of 32 tokens in one step, on one device or on several pipeline stages. Stages have the same
layers, micro-batches and transfers as with `parallelism.pipeline`. The logits are compared with the
logits of a plain float32 implementation and, on request, of transformers.

The exit status is 1, and the reasons are printed, in three cases:

* In float32, a likeliest token differs, or a logit differs by 1e-5 of the largest logit or more.
* More than 15 % of the samples had to be replaced, because two experts or two answers were almost
  equally good.
* The full size in float32 on CUDA, 1024 x 32, does not exceed 358.56 samples/s.

If two experts are almost equal, an implementation in bfloat16 often chooses other experts than in
float32. So a plain bfloat16 implementation is also compared with float32, and the engine's median
error may be a quarter larger than this implementation's. The last line is the result as JSON.
"""

import argparse
import math
import sys

import torch

from benchmarks.gpu.lfm2.judge import Work
from benchmarks.gpu.lfm2.processes import run, run_processes
from benchmarks.gpu.lfm2.weights import SIZES, make_model_config

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def main() -> int:
    work = parse_work()
    try:
        if work.stages > 1:
            return run_processes(work)
        return run(0, work, None)
    except KeyboardInterrupt:
        return INTERRUPTED


def parse_work() -> Work:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.lfm2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    add = parser.add_argument
    has_cuda = torch.cuda.is_available()
    add("--device", default="cuda" if has_cuda else "cpu", choices=["cpu", "cuda"])
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--size", choices=sorted(SIZES), help="default: full on a GPU, small on a CPU")
    add("--stages", type=int, default=1, help="devices, or processes of a CPU (default: 1)")
    add("--samples", type=int, default=1024)
    add("--tokens", type=int, default=32, help="tokens of each sample")
    add("--micro-batches", type=int, default=8, help="most micro-batches with several stages")
    add("--spare", type=float, default=0.5, help="extra prompts to choose samples from, as a share")
    add("--runs", type=int, default=3, help="measured runs, of which the median counts")
    add(
        "--all-positions",
        action="store_true",
        help="compare the logits of all tokens, relative to the largest of all; needs one stage",
    )
    add(
        "--against-transformers",
        type=int,
        default=0,
        metavar="SAMPLES",
        help="compare so many samples with transformers on the same weights; needs one stage",
    )

    given = parser.parse_args()
    given.size = given.size or ("full" if given.device == "cuda" else "small")
    work = Work(**vars(given))

    if wrong := refusal(work):
        parser.error(wrong)
    return work


def refusal(work: Work) -> str | None:
    """Return why a workload cannot run, and the remedy, or None if it can run."""
    for name in ("stages", "samples", "micro_batches", "runs"):
        if getattr(work, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            return f"{flag} {getattr(work, name)} is not positive; give 1 or more"

    if work.tokens < 2:
        return f"--tokens {work.tokens} is not a prompt; give 2 or more"
    if not 0 <= work.spare < math.inf:
        return f"--spare {work.spare} is no share; give 0 or more"
    if not 0 <= work.against_transformers <= work.samples:
        return (
            f"--against-transformers {work.against_transformers} is not between 0 and the "
            f"{work.samples} samples"
        )

    if work.stages > 1 and (work.all_positions or work.against_transformers):
        return (
            f"--stages {work.stages}: no stage has the whole model, which --all-positions and "
            "--against-transformers need; give --stages 1"
        )
    if work.stages > (most := make_model_config(work.size).num_layers):
        return f"--stages {work.stages} is more than the model's {most} layers"

    if work.device == "cuda" and torch.cuda.device_count() < work.stages:
        return (
            f"--device cuda with --stages {work.stages} needs as many GPUs, and there are "
            f"{torch.cuda.device_count()}; give fewer stages, or --device cpu"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
