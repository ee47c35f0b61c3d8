"""Time one engine step in milliseconds, without a server and a scheduler.

The benchmark measures decode steps of several batch sizes at one context length, then prompt
chunks, on a KV pool of zeros. It takes a minute.

examples:
  python -m benchmarks step
  python -m benchmarks step --quantization int8 --kv-dtype fp8
  python -m benchmarks step --device cuda
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch

from benchmarks.support.options import SMOLLM2, new_parser
from ullage_common.config.engine import ModelSection
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.layers.native_decoder import auto_kv_type, library_refusal
from ullage_engine.model_config.dtypes import resolve_dtype
from ullage_engine.model_loader.loader import load_weights
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner, Wrap

SECONDS_EACH = 3.0
BLOCK = 16
POOL_BLOCKS = 1024


def main() -> None:
    parser = new_parser("step", __doc__)
    parser.add_argument("--source", default=SMOLLM2, help="model source URI (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--quantization",
        default="auto",
        choices=["auto", "none", "int8", "int4"],
        help="value of spec.model.quantization",
    )
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument(
        "--torch", action="store_true", help="compute all but the products with torch, as ranks do"
    )
    parser.add_argument("--context", type=int, default=250, help="tokens behind each decode")
    parser.add_argument(
        "--deterministic", action="store_true", help="like spec.model.deterministic"
    )
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device)

    runner = load_runner(
        arguments.source,
        device,
        dtype,
        arguments.deterministic,
        quantization=arguments.quantization,
        fp8_kv=arguments.kv_dtype == "fp8",
        is_chosen=arguments.dtype != "auto",
        wrap=(lambda _, matrix: matrix) if arguments.torch else None,
    )

    print(f"{dtype}, {torch.get_num_threads()} threads, median ms a step")
    for batch in (1, 8, 32):
        plan = StepPlan([chunk(row, 1, arguments.context) for row in range(batch)])
        print(f"decode  batch {batch:3}  context {arguments.context}: {measure(runner, plan):8.2f}")

    for tokens in (256, 512):
        plan = StepPlan([chunk(0, tokens, 0)])
        print(f"prefill tokens {tokens:3}: {measure(runner, plan):8.2f}")


def load_runner(
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    *,
    max_rows: int = 64,
    max_model_len: int = 8192,
    quantization: Literal["auto", "none", "int8", "int4"] = "auto",
    warms_up: bool = True,
    is_chosen: bool = False,
    wrap: Wrap | None = None,
    fp8_kv: bool = False,
) -> ModelRunner:
    """Load a model, and return a runner whose arena and KV pool are allocated.

    Args:
        is_chosen: whether `dtype` comes from spec.model.dtype, so that KV has the same type.
        wrap: a wrapper for the model's matrices, with which torch then computes.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = ModelSection(source=source, name="benchmark", quantization=quantization)
        loaded = load_weights(model, device, dtype, Path(folder), lambda done, total: None)

    limits = StepLimits(
        max_tokens=512 + max_rows,
        max_rows=max_rows,
        max_model_len=min(max_model_len, loaded.model_config.max_position),
        gather_tokens=8192,
        itemsize=dtype.itemsize,
        deterministic=deterministic,
        fp8_kv=fp8_kv,
    )

    refusal = library_refusal(loaded, limits, device, dtype)
    kv_type = dtype if is_chosen or wrap else auto_kv_type(refusal, dtype)
    runner = ModelRunner(loaded, device, dtype, limits, wrap=wrap, kv_type=kv_type)

    runner.allocate_arena()
    runner.allocate_kv(POOL_BLOCKS)

    started = time.perf_counter()
    error = runner.verify_row_invariance()
    if error is not None:
        raise SystemExit(error)

    if warms_up:
        runner.warm_up()
        print(f"warm-up {time.perf_counter() - started:.1f} s")
    return runner


def chunk(row: int, tokens: int, start: int, pool_blocks: int = POOL_BLOCKS) -> Chunk:
    """Return a greedy chunk of random tokens.

    Tokens are random, because equal tokens would all choose the same experts. A sequence's blocks
    lie in strides across the KV pool.
    """
    token_ids = random.Random(f"{row} {start}").choices(range(4, 4096), k=tokens)
    blocks = -(-(start + tokens) // BLOCK)
    return Chunk(
        request_id=str(row),
        token_ids=token_ids,
        start=start,
        block_ids=[(row + 37 * block) % pool_blocks for block in range(blocks)],
        sampling=SamplingParams(temperature=0.0),
        history=[7] * (start + tokens),
        num_prompt_tokens=start + tokens,
        next_state_slot=row,
    )


def measure(runner: ModelRunner, plan: StepPlan) -> float:
    """Return the median time of a step plan in milliseconds.

    The sampled ids are copied to the host, so the time includes the GPU's work.
    """
    times: list[float] = []
    deadline = time.perf_counter() + SECONDS_EACH
    while time.perf_counter() < deadline or len(times) < 3:
        started = time.perf_counter()
        runner.execute(plan)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000
