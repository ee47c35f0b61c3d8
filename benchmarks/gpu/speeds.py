"""Measures the kernels' speeds as shares of the GPU's peak rates.

Attention is compared with the bandwidth of copies, or with the operations/s of a large matmul.
Matmuls with quantized weights are compared with the same matmul in bfloat16. They must be faster
with few rows, where the matmul is memory-bound.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from benchmarks.gpu.figures import Figure, Job, Report
from benchmarks.gpu.rates import rates, seconds_of
from ullage_engine.kernels.arena import MAX_TILE_ROWS, partial_elements
from ullage_engine.kernels.batch import build_batch
from ullage_engine.kernels.kv_pool import KVPool
from ullage_engine.kernels.staging import Indices
from ullage_engine.kernels.triton import (
    Format,
    PagedWorkspace,
    paged_attentions,
    quantized_matmul,
)
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.protocol.step_plan import Chunk, StepPlan

if TYPE_CHECKING:
    from ullage_engine.kernels.triton.attention import PagedDecode, PagedPrefill

BLOCK = 16
FORMATS: list[Format] = ["int8", "fp8", "int4", "mxfp4"]
INT4_GROUP = 32
"""Number of values that share a scale, as in the loader's int4."""
FEW_ROWS = 32
"""Number of rows up to which a matmul is memory-bound."""
LEAST_FEW = 1.0
LEAST_MANY = 0.4
"""Minimum speed with quantized weights relative to bfloat16, with few and with many rows."""
LEAST_PREFILL = 0.35
LEAST_DECODE = {1 << 16: 0.7, 1 << 15: 0.5}
"""Minimum share of a copy's bandwidth, by the minimum number of context tokens."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    attention: ModelConfig
    decodes: tuple[tuple[int, int], ...]
    """Pairs of a number of rows and their context length."""
    prompts: tuple[int, ...]
    rows: tuple[int, ...]
    matrix: tuple[int, int]
    """Depth and number of columns of the weight matrix."""
    experts: tuple[int, int, int]
    """Number of experts in a layer, their depth and columns. Every token chooses four experts."""


def attention_config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        layers=(LayerSpec(),),
        hidden=heads * head_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=64,
        vocab=64,
        max_position=128_000,
        rope_theta=1e6,
        rms_eps=1e-5,
        tied=True,
    )


FULL = Sizes(
    attention=attention_config(32, 8, 128),
    decodes=((1, 8192), (8, 4096), (32, 2048), (32, 8192), (128, 2048)),
    prompts=(2048, 8192),
    rows=(1, 8, 32, 1024),
    matrix=(4096, 14_336),
    experts=(32, 2048, 3584),
)
TINY = Sizes(
    attention=attention_config(4, 2, 16),
    decodes=((2, 32),),
    prompts=(MAX_TILE_ROWS,),
    rows=(1, 65),
    matrix=(64, 32),
    experts=(4, 64, 32),
)


@dataclass(frozen=True)
class Bench:
    """The device and the data type of the measurements."""

    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)


def run(job: Job, report: Report) -> None:
    if not job.on_gpu:
        # Triton reads the variable at its later import. Its interpreter has no bfloat16.
        os.environ["TRITON_INTERPRET"] = "1"
    device = torch.device(job.device)
    bench = Bench(device, torch.bfloat16 if job.on_gpu else torch.float16)
    copied, multiplied = rates(device, job.tiny)
    for figure in figures(bench, TINY if job.tiny else FULL, copied, multiplied):
        report(figure if not job.tiny else figure._replace(aim=None))


def figures(bench: Bench, sizes: Sizes, copied: float, multiplied: float) -> Iterator[Figure]:
    for rows, context in sizes.decodes:
        yield decode_case(bench, sizes.attention, copied, rows, context)
    for tokens in sizes.prompts:
        yield prefill_case(bench, sizes.attention, multiplied, tokens)
    for rows in sizes.rows:
        yield from product_case(bench, sizes, rows)
        yield from experts_case(bench, sizes, rows)


def decode_case(bench: Bench, model: ModelConfig, copied: float, rows: int, context: int) -> Figure:
    """Measure one layer's decode attention: its KV bandwidth as a share of a copy's bandwidth."""
    blocks = context // BLOCK
    cache = random_pool(bench, model, rows * blocks).layers[0]
    ids = torch.randperm(rows * blocks).tolist()
    chunks = [
        Chunk(str(row), [0], context - 1, ids[row * blocks : (row + 1) * blocks], None, [], 0)
        for row in range(rows)
    ]
    kernel = paged(bench, model, StepPlan(chunks))
    moved = rows * context * model.kv_bytes_per_token(bench.dtype.itemsize)
    share = moved / seconds_of(lambda: kernel.run(cache), bench.device) / copied
    aim = next((least for size, least in LEAST_DECODE.items() if rows * context >= size), None)
    return Figure(f"decode attention, {rows} x {context}", share, "of copies", aim)


def prefill_case(bench: Bench, model: ModelConfig, multiplied: float, tokens: int) -> Figure:
    """Measure one prompt's causal attention: operations/s as a share of a large matmul's."""
    blocks = tokens // BLOCK
    cache = random_pool(bench, model, blocks).layers[0]
    ids = torch.randperm(blocks).tolist()
    chunk = Chunk("0", [0] * tokens, 0, ids, None, [], 0)
    kernel = paged(bench, model, StepPlan([chunk]))
    operations = 2 * tokens * tokens * model.query_width
    share = operations / seconds_of(lambda: kernel.run(cache), bench.device) / multiplied
    return Figure(f"prefill attention, {tokens}", share, "of products", LEAST_PREFILL)


def product_case(bench: Bench, sizes: Sizes, rows: int) -> Iterator[Figure]:
    depth, columns = sizes.matrix
    x = bench.random(rows, depth)
    plain = bench.random(columns, depth).t()
    out = bench.empty(rows, columns)
    base = seconds_of(lambda: torch.mm(x, plain, out=out), bench.device)
    for format in FORMATS:
        weights = random_weights(bench, format, columns, depth)
        took = seconds_of(partial(quantized_matmul, x, *weights, out, format), bench.device)
        yield Figure(f"{format} product, {rows} rows", base / took, "x bfloat16", aim_of(rows))


def experts_case(bench: Bench, sizes: Sizes, tokens: int) -> Iterator[Figure]:
    """Compare the first matmul of an expert layer with torch's grouped matmul."""
    from ullage_engine.kernels.triton.matmul import TritonExperts

    experts, depth, columns = sizes.experts
    chosen = torch.rand(tokens, experts, device=bench.device).topk(4).indices.flatten()
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)
    plain = bench.random(experts, columns, depth)
    x = bench.random(4 * tokens, depth)
    out = bench.empty(4 * tokens, columns)
    base = seconds_of(lambda: F.grouped_mm(x, plain.transpose(1, 2), offs=ends), bench.device)
    for format in FORMATS:
        packed = random_weights(bench, format, experts * columns, depth)
        codes, scales, zeros = (
            None if each is None else each.view(experts, columns, -1) for each in packed
        )
        assert codes is not None
        ours = TritonExperts(codes, scales, zeros, format)
        took = seconds_of(partial(ours.forward, x, ends, len(x), out), bench.device)
        name = f"{format} experts, {tokens} tokens"
        yield Figure(name, base / took, "x bfloat16", aim_of(tokens))


def aim_of(rows: int) -> float:
    return LEAST_FEW if rows <= FEW_ROWS else LEAST_MANY


def random_pool(bench: Bench, model: ModelConfig, num_blocks: int) -> KVPool:
    pool = KVPool(model, num_blocks, BLOCK, bench.dtype, bench.device)
    pool.blocks.normal_()
    return pool


def paged(bench: Bench, model: ModelConfig, plan: StepPlan) -> "PagedDecode | PagedPrefill":
    """Prepare the paged KV of a step with only decodes, or with one prompt."""
    rows = plan.num_tokens
    queries = bench.random(model.num_heads, rows, model.head_dim)
    attended = bench.empty(rows, model.query_width)
    workspace = PagedWorkspace(model, torch.empty(partial_elements(model), device=bench.device))

    def put(array: Indices) -> torch.Tensor:
        return torch.from_numpy(array).to(bench.device)

    batch = build_batch(plan, BLOCK)
    return paged_attentions(batch.rows, put, queries, attended, workspace)[0]


def random_weights(
    bench: Bench, format: Format, columns: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return random codes, scales and zeros, whose values do not matter."""
    width = depth if format in ("int8", "fp8") else depth // 2
    codes = torch.randint(0, 120, (columns, width), device=bench.device, dtype=torch.uint8)
    if format == "mxfp4":
        shape = (columns, depth // 32)
        return codes, torch.full(shape, 120, device=bench.device, dtype=torch.uint8), None
    groups = max(1, depth // INT4_GROUP) if format == "int4" else 1
    scales = bench.random(columns, groups)
    zeros = torch.rand_like(scales) if format == "int4" else None
    return codes.view(torch.int8) if format == "int8" else codes, scales, zeros
