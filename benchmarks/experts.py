"""Time each implementation of one mixture-of-experts layer, in milliseconds.

Weights are random, in the shape of LFM2-8B-A1B or a fraction of it. Pairs of token and expert are
either multiplied one by one or sorted by expert. The last line has the largest number of pairs for
which multiplying one by one is faster. This is the value for `FEW_PAIRS` in layers/moe.py and, on a
GPU, in kernels/triton/matmul.py. On a GPU, sorted rows are multiplied in three ways: by one grouped
matmul, by a Triton kernel, and by a loop over experts that copies their row ranges to the host.

examples:
  python -m benchmarks experts --hidden 256 --width 128
  python -m benchmarks experts --device cuda --dtype bfloat16
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.support.options import new_parser
from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import StepLimits, step_arena
from ullage_engine.kernels.kv_pool import allocate
from ullage_engine.layers.decoder import gate
from ullage_engine.layers.linear import PlainLinear
from ullage_engine.layers.moe import (
    ExpertLinears,
    Experts,
    ExpertWeights,
    GroupedExperts,
    LoopedExperts,
    can_group,
    packed_experts,
)
from ullage_engine.model_config.dtypes import DTYPES
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig

TOKENS = (1, 2, 3, 4, 6, 8, 16, 64, 256, 1024)
SORTED = ("sorted", "grouped", "triton")
PAIRWISE = ("by pair", "picked")

MOST_PAIRWISE = 64
"""Maximum number of pairs that are also measured one by one, because more would take minutes."""

SECONDS_EACH = 0.7
SEED = 14


def main() -> None:
    parser = new_parser("experts", __doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1792, help="width of one expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=4, help="experts of a token")
    parser.add_argument("--skew", type=float, default=0.5, help="spread of the router's bias")
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    paths = build_paths(arguments)
    print(f"{arguments.dtype}, {torch.get_num_threads()} threads, median ms a layer")
    print(f"{'tokens':>7} {'pairs':>7} " + " ".join(f"{name:>10}" for name in paths))

    rows = [measure_all(paths, tokens, arguments) for tokens in TOKENS]
    print(json.dumps({"benchmark": "experts", "few_pairs": crossover(rows), "rows": rows}))


def build_paths(arguments: argparse.Namespace) -> dict[str, Experts]:
    """Return the implementations of one layer, all with the same weights."""
    spec = ExpertsSpec(
        num_experts=arguments.experts,
        experts_per_token=arguments.chosen,
        intermediate=arguments.width,
        scoring="sigmoid",
    )
    dtype = DTYPES[arguments.dtype]
    device = torch.device(arguments.device)
    arena = allocate(step_arena(*arena_of(spec, arguments.hidden, dtype)), dtype, device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)

    router = PlainLinear(random(arguments.experts, arguments.hidden))
    bias = torch.randn(arguments.experts, device=device) * arguments.skew
    gate_up = random(arguments.experts, 2 * arguments.width, arguments.hidden)
    down = random(arguments.experts, arguments.hidden, arguments.width)

    def layer(kind: Kind, few_pairs: int) -> Experts:
        wide, narrow = (Forced(kind(each), few_pairs) for each in (gate_up, down))
        return Experts(spec, ExpertWeights(router, wide, narrow, gate, bias), arena)

    most = max(TOKENS) * arguments.chosen
    paths = {"sorted": layer(looped, 0)}
    if device.type == "cpu":
        return {"by pair": layer(looped, most)} | paths | {"grouped": layer(grouped, 0)}
    if can_group(gate_up):
        paths["grouped"] = layer(grouped, 0)
    if triton.runs_on(device):
        paths |= {"picked": layer(packed, most), "triton": layer(packed, 0)}
    return paths


Kind = Callable[[torch.Tensor], ExpertLinears]


class Forced:
    """Experts that always use the implementation to be measured."""

    def __init__(self, matrices: ExpertLinears, few_pairs: int) -> None:
        self.forward = matrices.forward
        self.forward_each = matrices.forward_each
        self.reads_ends = matrices.reads_ends
        self.few_pairs = few_pairs


def looped(weights: torch.Tensor) -> ExpertLinears:
    return LoopedExperts([PlainLinear(each) for each in weights])


def grouped(weights: torch.Tensor) -> ExpertLinears:
    return GroupedExperts(weights, [PlainLinear(each) for each in weights])


def packed(weights: torch.Tensor) -> ExpertLinears:
    return packed_experts(weights, None, "plain")


def arena_of(spec: ExpertsSpec, hidden: int, dtype: torch.dtype) -> tuple[ModelConfig, StepLimits]:
    model_config = ModelConfig(
        architecture="lfm2_moe",
        layers=(LayerSpec(feed_forward="experts"),),
        hidden=hidden,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        intermediate=1,
        vocab=1,
        max_position=64,
        rope_theta=1e6,
        rms_eps=1e-5,
        tied=True,
        experts=spec,
    )
    limits = StepLimits(
        max_tokens=max(TOKENS),
        max_rows=1,
        max_model_len=64,
        gather_tokens=64,
        block_tokens=16,
        itemsize=dtype.itemsize,
    )
    return model_config, limits


def measure_all(
    paths: dict[str, Experts], tokens: int, arguments: argparse.Namespace
) -> dict[str, float]:
    x = torch.randn(
        tokens, arguments.hidden, dtype=DTYPES[arguments.dtype], device=arguments.device
    )
    pairs = tokens * arguments.chosen
    measured = [name for name in paths if name not in PAIRWISE or pairs <= MOST_PAIRWISE]
    times = {name: measure(paths[name], x) for name in measured}
    shown = (f"{times[name]:10.3f}" if name in times else f"{'':10}" for name in paths)
    print(f"{tokens:7} {pairs:7} " + " ".join(shown), flush=True)
    return {"tokens": tokens, "pairs": pairs} | times


@torch.inference_mode()
def measure(experts: Experts, x: torch.Tensor) -> float:
    """Return the median time of several runs in milliseconds."""
    out = torch.zeros_like(x)
    times: list[float] = []
    deadline = time.perf_counter() + SECONDS_EACH
    while time.perf_counter() < deadline or len(times) < 3:
        started = time.perf_counter()
        experts.run(x, out)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def crossover(rows: Sequence[dict[str, float]]) -> int:
    """Return the largest number of pairs up to which one by one is not slower than sorting."""
    most = 0
    for row in rows:
        pairwise = min(row.get(name, float("inf")) for name in PAIRWISE)
        if pairwise > min(time for name, time in row.items() if name in SORTED):
            break
        most = int(row["pairs"])
    return most
