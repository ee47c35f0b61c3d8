"""Runs on an NVIDIA GPU what can be judged without a reader, with pass or fail: `make gpu`.

parts:
  tests    every kernel against float64, in pages whose free memory is not a number
  kernels  attention and products with small weights, against copies and cuBLAS
  steps    decode steps of a dense model of 8 billion parameters, against their floor
  mixed    1,000 steps of prompts and decodes: no memory beyond that of the warm-up
  tokens   greedy tokens of a small model of every family, equal to a CPU's

Each figure is printed as it is measured, with the aim that it has to reach. Aims of speed are meant
for H100s and H200s; `steps` takes 60 GB of the GPU's memory. Meant for ten minutes; not run yet.

examples:
  python benchmarks/gpu.py
  python benchmarks/gpu.py kernels steps
  python benchmarks/gpu.py --dry-run            the same program in tiny sizes on a CPU

exit status: 0 all passed, 1 something did not, 2 there is no GPU or no Triton, 130 interrupted
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from gpu_kernels import (
    FULL,
    TINY,
    Device,
    Figure,
    KernelSizes,
    Rates,
    measure_kernels,
    measure_rates,
)
from gpu_models import FULL as FULL_MODELS
from gpu_models import TINY as TINY_MODELS
from gpu_models import ModelSizes, decode_steps, equal_tokens, mixed_steps

from ullage_engine.kernels.triton import runs_on

INTERRUPTED = 130
ROOT = Path(__file__).parents[1]
KERNEL_TESTS = "tests/engine/kernels/triton"
PARTS = ("tests", "kernels", "steps", "mixed", "tokens")

Part = Callable[[], Iterator[Figure]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and whether speeds are judged."""

    kernels: KernelSizes
    models: ModelSizes
    tests: tuple[str, ...]
    """What pytest is asked for."""


FULL_SIZES = Sizes(FULL, FULL_MODELS, (KERNEL_TESTS,))
TINY_SIZES = Sizes(TINY, TINY_MODELS, (f"{KERNEL_TESTS}/test_conv.py",))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny sizes on a CPU, kernels in Triton's interpreter; speeds are not judged",
    )
    arguments = parser.parse_args()
    chosen = arguments.parts or list(PARTS)
    if unknown := sorted(set(chosen) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if arguments.dry_run:
        return dry_run(chosen)
    if reason := obstacle():
        print(f"error: {reason}; --dry-run tries the program without a GPU", file=sys.stderr)
        return 2
    device = Device(torch.device("cuda"), torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    return run(chosen, device, FULL_SIZES, judges_speed=True)


def obstacle() -> str | None:
    if torch.version.cuda is None:
        return "torch here is without CUDA: remove .venv, then `make gpu CUDA=1`"
    if not torch.cuda.is_available() or not runs_on(torch.device("cuda")):
        return "there is no CUDA GPU that Triton computes on"
    return None


def dry_run(chosen: list[str]) -> int:
    # Triton decides when it is imported, which is later; its interpreter has no bfloat16.
    os.environ["TRITON_INTERPRET"] = "1"
    device = Device(torch.device("cpu"), torch.float16)
    return run(chosen, device, TINY_SIZES, judges_speed=False)


def run(chosen: list[str], device: Device, sizes: Sizes, *, judges_speed: bool) -> int:
    """Measures parts one after another, whatever becomes of those before; returns the status."""
    torch.manual_seed(0)
    started, failed = time.perf_counter(), []
    rates = measure_rates(device, sizes.kernels)
    print(f"copies {rates.copied / 1e9:.4g} GB/s, products {rates.multiplied / 1e12:.4g} TFLOP/s")
    for name, (part, is_speed) in parts(device, sizes, rates).items():
        if name in chosen:
            print(f"{name}:")
            failed += measure(name, part, judges=judges_speed or not is_speed)
    took = time.perf_counter() - started
    print(f"{', '.join(failed)} failed" if failed else "all passed", f"in {took:.0f} s")
    return 1 if failed else 0


def parts(device: Device, sizes: Sizes, rates: Rates) -> dict[str, tuple[Part, bool]]:
    """Lists the parts in their order, and which of them measure speed."""
    return {
        "tests": (partial(kernel_tests, sizes.tests), False),
        "kernels": (partial(measure_kernels, device, sizes.kernels, rates), True),
        "steps": (partial(decode_steps, device, sizes.models, rates), True),
        "mixed": (partial(mixed_steps, device, sizes.models), False),
        "tokens": (partial(equal_tokens, device, sizes.models), False),
    }


def measure(name: str, part: Part, *, judges: bool) -> list[str]:
    """Prints a part's figures; returns what failed."""
    failed = []
    try:
        for figure in part():
            passes = figure.passes or not judges
            print(f"  {line(figure, judges)}", flush=True)
            if not passes:
                failed.append(f"{name}: {figure.name}")
    except Exception as error:  # whatever a kernel or the driver raises; other parts go on
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"  FAILED: {cause}", flush=True)
        failed.append(f"{name} ({cause})")
    return failed


def line(figure: Figure, judges: bool) -> str:
    """Returns a figure as a line of the table."""
    measured = f"{figure.name:44} {figure.value:9.3g} {figure.unit}"
    if figure.aim is None or not judges:
        return measured
    word = "at most" if figure.is_limit else "at least"
    verdict = "ok" if figure.passes else "FAILED"
    return f"{measured:72} {word} {figure.aim:g}: {verdict}"


def kernel_tests(paths: tuple[str, ...]) -> Iterator[Figure]:
    """Runs tests of the kernels: compiled where there is a GPU."""
    options = ("-q", "-m", "not slow", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *paths]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    yield Figure(f"{' '.join(paths)}, exit status", status, "", 0.0, is_limit=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
