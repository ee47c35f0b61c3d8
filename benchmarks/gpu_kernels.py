"""What a GPU can do, and how near the kernels come to it: two parts of `benchmarks/gpu.py`.

Aims are shares of what the same GPU was just measured to copy and to multiply, and for products of
few rows the time of the same product in bfloat16, which small weights have to beat.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from ullage_engine.kernels.arena import MAX_TILE_ROWS, partial_elements
from ullage_engine.kernels.batch import DecodeGroup, PrefillTile
from ullage_engine.kernels.kv_pool import KVPool
from ullage_engine.kernels.triton import (
    Format,
    PagedWorkspace,
    paged_attentions,
    quantized_matmul,
)
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig

if TYPE_CHECKING:
    from ullage_engine.kernels.triton.attention import PagedDecode, PagedPrefill

BLOCK = 16
FORMATS: list[Format] = ["int8", "fp8", "int4", "mxfp4"]
BITS = {"int8": 8.0, "fp8": 8.0, "int4": 4.25, "mxfp4": 4.25}
FEW_ROWS = 32
"""Rows up to which a product waits for its weights."""

Action = Callable[[], object]


class Figure(NamedTuple):
    """One thing measured."""

    name: str
    value: float
    unit: str
    aim: float | None = None
    """The least value that passes; None where none is known."""
    is_limit: bool = False
    """Whether the aim is the greatest value that passes."""

    @property
    def passes(self) -> bool:
        if self.aim is None:
            return True
        return self.value <= self.aim if self.is_limit else self.value >= self.aim


class Rates(NamedTuple):
    """What the device does at best."""

    copied: float
    """Bytes a second, read and written."""
    multiplied: float
    """Operations a second of a large product."""


@dataclass(frozen=True)
class Device:
    """What computes, and in which numbers."""

    torch: torch.device
    dtype: torch.dtype

    def seconds(self, action: Action) -> float:
        """Measures an action: on a GPU the median of many runs, each with a cold L2 cache."""
        if self.torch.type == "cuda":
            from triton.testing import do_bench

            return float(do_bench(action, return_mode="median")) / 1e3
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.torch, dtype=self.dtype)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.torch, dtype=self.dtype)


@dataclass(frozen=True)
class KernelSizes:
    """What the kernels are measured with."""

    copied_bytes: int
    multiplied: int
    """Rows and columns of the large product."""
    attention: ModelConfig
    decodes: tuple[tuple[int, int], ...]
    """Rows, and the context of each."""
    prompts: tuple[int, ...]
    rows: tuple[int, ...]
    matrix: tuple[int, int]
    """Depth and columns."""
    experts: tuple[int, int, int]
    """Experts of a layer, their depth and columns; every token chooses four."""


def attention_config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama", layers=(LayerSpec(),), hidden=heads * head_dim, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, intermediate=64, vocab=64, max_position=128_000,
        rope_theta=1e6, rms_eps=1e-5, tied=True,
    )  # fmt: skip


FULL = KernelSizes(
    copied_bytes=1 << 30,
    multiplied=8192,
    attention=attention_config(32, 8, 128),
    decodes=((1, 8192), (8, 4096), (32, 2048), (32, 8192), (128, 2048)),
    prompts=(2048, 8192),
    rows=(1, 8, 32, 1024),
    matrix=(4096, 14336),
    experts=(32, 2048, 3584),
)
TINY = KernelSizes(
    copied_bytes=1 << 10,
    multiplied=16,
    attention=attention_config(4, 2, 16),
    decodes=((2, 32),),
    prompts=(MAX_TILE_ROWS,),
    rows=(1, 65),
    matrix=(64, 32),
    experts=(4, 64, 32),
)


def measure_rates(device: Device, sizes: KernelSizes) -> Rates:
    source = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / device.seconds(lambda: target.copy_(source))
    size = sizes.multiplied
    x, out = device.random(size, size), device.empty(size, size)
    return Rates(copied, 2 * size**3 / device.seconds(lambda: torch.mm(x, x, out=out)))


def measure_kernels(device: Device, sizes: KernelSizes, rates: Rates) -> Iterator[Figure]:
    for rows, context in sizes.decodes:
        yield decode_case(device, sizes, rates, rows, context)
    for tokens in sizes.prompts:
        yield prefill_case(device, sizes, rates, tokens)
    for rows in sizes.rows:
        yield from matmul_case(device, sizes, rows)
    for rows in sizes.rows:
        yield from experts_case(device, sizes, rows)


def decode_case(
    device: Device, sizes: KernelSizes, rates: Rates, rows: int, context: int
) -> Figure:
    """Decodes of one layer: the share of a copy's bandwidth at which KV is read."""
    model, blocks = sizes.attention, context // BLOCK
    cache = random_pool(device, model, rows * blocks).layers[0]
    ids = torch.randperm(rows * blocks).tolist()
    group = DecodeGroup(0, rows, rows, blocks, ids, [context] * rows)
    kernel = paged(device, model, [group], [], rows)
    moved = rows * context * model.kv_bytes_per_token(device.dtype.itemsize)
    share = moved / device.seconds(lambda: kernel.run(cache)) / rates.copied
    aim = 0.7 if rows * context >= 1 << 16 else 0.5 if rows * context >= 1 << 15 else None
    return Figure(f"decode attention, {rows} x {context}", share, "of copies", aim)


def prefill_case(device: Device, sizes: KernelSizes, rates: Rates, tokens: int) -> Figure:
    """Causal attention of one prompt: the share of a large product's operations a second."""
    model, blocks, rows = sizes.attention, tokens // BLOCK, MAX_TILE_ROWS
    cache = random_pool(device, model, blocks).layers[0]
    ids = torch.randperm(blocks).tolist()
    tiles = [
        PrefillTile(at, at + rows, rows, at, ids[: (at + rows) // BLOCK])
        for at in range(0, tokens, rows)
    ]
    kernel = paged(device, model, [], tiles, tokens)
    flops = 2 * tokens * tokens * model.query_width
    share = flops / device.seconds(lambda: kernel.run(cache)) / rates.multiplied
    return Figure(f"prefill attention, {tokens}", share, "of products", 0.35)


def matmul_case(device: Device, sizes: KernelSizes, rows: int) -> Iterator[Figure]:
    depth, columns = sizes.matrix
    x, plain = device.random(rows, depth), device.random(columns, depth).t()
    out = device.empty(rows, columns)
    base = device.seconds(lambda: torch.mm(x, plain, out=out))
    for format in FORMATS:
        weights = random_weights(device, format, columns, depth)
        took = device.seconds(partial(quantized_matmul, x, *weights, out, format))
        yield Figure(f"{format} product, {rows} rows", base / took, "x bfloat16", aim_of(rows))


def experts_case(device: Device, sizes: KernelSizes, tokens: int) -> Iterator[Figure]:
    """The first product of a layer of experts against torch's grouped one."""
    from ullage_engine.kernels.triton.matmul import TritonExperts

    experts, depth, columns = sizes.experts
    chosen = torch.rand(tokens, experts, device=device.torch).topk(4).indices.flatten()
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)
    plain = device.random(experts, columns, depth)
    x, out = device.random(4 * tokens, depth), device.empty(4 * tokens, columns)
    base = device.seconds(lambda: F.grouped_mm(x, plain.transpose(1, 2), offs=ends))
    for format in FORMATS:
        packed = random_weights(device, format, experts * columns, depth)
        stacked = [None if each is None else each.view(experts, columns, -1) for each in packed]
        assert stacked[0] is not None
        ours = TritonExperts(stacked[0], stacked[1], stacked[2], format)
        took = device.seconds(partial(ours.forward, x, ends, len(x), out))
        name = f"{format} experts, {tokens} tokens"
        yield Figure(name, base / took, "x bfloat16", aim_of(tokens))


def aim_of(rows: int) -> float:
    """Returns how fast small weights have to be: few rows wait for them, many for the product."""
    return 1.0 if rows <= FEW_ROWS else 0.4


def random_pool(device: Device, model: ModelConfig, num_blocks: int) -> KVPool:
    pool = KVPool(model, num_blocks, BLOCK, device.dtype, device.torch)
    pool.blocks.normal_()
    return pool


def paged(
    device: Device,
    model: ModelConfig,
    groups: list[DecodeGroup],
    tiles: list[PrefillTile],
    rows: int,
) -> "PagedDecode | PagedPrefill":
    rotated = device.random(model.num_heads + model.num_kv_heads, rows, model.head_dim)
    partials = torch.empty(partial_elements(model), device=device.torch)
    attended = device.empty(rows, model.query_width)
    return paged_attentions(groups, tiles, rotated, attended, PagedWorkspace(model, partials))[0]


def random_weights(
    device: Device, format: Format, columns: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Codes, scales and zeros; what they stand for does not matter."""
    width = depth if format in ("int8", "fp8") else depth // 2
    codes = torch.randint(0, 120, (columns, width), device=device.torch, dtype=torch.uint8)
    if format == "mxfp4":
        exponents = torch.full((columns, depth // 32), 120, device=device.torch, dtype=torch.uint8)
        return codes, exponents, None
    groups = max(1, depth // 128) if format == "int4" else 1
    scales = device.random(columns, groups)
    zeros = torch.rand_like(scales) if format == "int4" else None
    return codes.view(torch.int8) if format == "int8" else codes, scales, zeros
