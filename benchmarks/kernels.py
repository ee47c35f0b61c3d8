"""Speed of the GPU kernels against torch's paths, and how near they are to what the GPU can do.

`python benchmarks/kernels.py [decode prefill matmul experts]`, a minute each, for LFM2-8B-A1B.
Copies are measured first: the share of their bandwidth is the figure that matters for decodes.

exit status: 0 measured, 2 there is no GPU or no Triton
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ullage_engine.kernels.arena import MAX_TILE_ROWS, partial_elements
from ullage_engine.kernels.attention import DecodeAttention, PrefillAttention, Workspace, fill_mask
from ullage_engine.kernels.batch import DecodeGroup, PrefillTile
from ullage_engine.kernels.kv_pool import KVPool
from ullage_engine.kernels.triton import (
    Format,
    PagedWorkspace,
    paged_attentions,
    quantized_matmul,
    runs_on,
)
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig

if TYPE_CHECKING:
    from ullage_engine.kernels.triton.attention import PagedDecode, PagedPrefill
    from ullage_engine.kernels.triton.matmul import TritonExperts

DEVICE = "cuda"
BLOCK = 16
DTYPE = torch.bfloat16
HIDDEN, EXPERTS, WIDTH = 2048, 32, 1792
GEOMETRY = ModelConfig(
    architecture="lfm2_moe", layers=(LayerSpec(),), hidden=HIDDEN, num_heads=32, num_kv_heads=8,
    head_dim=64, intermediate=7168, vocab=65536, max_position=128_000, rope_theta=1e6,
    rms_eps=1e-5, tied=True,
)  # fmt: skip
DECODES = [(1, 8192), (8, 4096), (32, 2048), (32, 8192), (128, 2048)]
PROMPTS = [2048, 4096, 8192]
ROWS = [1, 8, 32, 128, 1024, 4096]
SHAPES = [(2048, 14336), (7168, 2048)]
BITS = {"int8": 8.0, "fp8": 8.0, "int4": 4.25, "mxfp4": 4.25}

Action = Callable[[], object]


def main() -> int:
    parts = {"decode": decode, "prefill": prefill, "matmul": matmul, "experts": experts}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    chosen = parser.parse_args().parts or list(parts)
    if unknown := set(chosen) - set(parts):
        parser.error(f"there is no part {', '.join(unknown)}; choose from {', '.join(parts)}")
    if not torch.cuda.is_available() or not runs_on(torch.device(DEVICE)):
        print("error: kernels are measured on a CUDA GPU with triton installed", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    copied = measured_copy()
    print(f"{torch.cuda.get_device_name()}: copies move {copied / 1e12:.2f} TB/s")
    for part in chosen:
        parts[part](copied)
    return 0


def seconds(action: Action) -> float:
    """Median of many runs, each with a cold L2 cache."""
    from triton.testing import do_bench

    return float(do_bench(action, return_mode="median")) / 1e3


def measured_copy() -> float:
    """Bytes a second, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def decode(copied: float) -> None:
    print("decode: KV read, GB/s; wanted 70 % of copies from 64k tokens on, 50 % for 8 x 4096")
    for rows, context in DECODES:
        decode_case(rows, context, copied)


def decode_case(rows: int, context: int, copied: float) -> None:
    blocks = context // BLOCK
    cache = random_pool(rows * blocks).layers[0]
    ids = torch.randperm(rows * blocks).tolist()
    group = DecodeGroup(0, rows, rows, blocks, ids, [context] * rows)
    rotated, attended = buffers(rows)
    kernel = paged([group], [], rotated, attended)
    gathered = DecodeAttention(group, rotated, attended, gathering(rows, context), 0)
    moved = rows * context * GEOMETRY.kv_bytes_per_token(DTYPE.itemsize)
    ours = seconds(lambda: kernel.run(cache))
    theirs = seconds(lambda: gathered.run(cache, None))
    print(
        f"  {rows:4} x {context:5}: {moved / ours / 1e9:7.0f} ({moved / ours / copied:4.0%} of "
        f"copies, {ours * 1e6:6.0f} us)  torch {moved / theirs / 1e9:7.0f}"
    )


def prefill(copied: float) -> None:
    print("prefill: causal attention of one prompt, TFLOP/s; wanted 250")
    for tokens in PROMPTS:
        prefill_case(tokens)


def prefill_case(tokens: int) -> None:
    blocks, rows = tokens // BLOCK, MAX_TILE_ROWS
    cache = random_pool(blocks).layers[0]
    ids = torch.randperm(blocks).tolist()
    tiles = [
        PrefillTile(at, at + rows, rows, at, ids[: (at + rows) // BLOCK])
        for at in range(0, tokens, rows)
    ]
    rotated, attended = buffers(tokens)
    kernel = paged([], tiles, rotated, attended)
    workspace = gathering(rows, tokens)
    gathered = [PrefillAttention(tile, rotated, attended, workspace, 0) for tile in tiles]

    def run_gathered() -> None:
        for tile in gathered:
            tile.run(cache, None)

    flops = 2 * tokens * tokens * GEOMETRY.query_width
    ours, theirs = seconds(lambda: kernel.run(cache)), seconds(run_gathered)
    print(f"  {tokens:5}: {flops / ours / 1e12:6.0f}  torch {flops / theirs / 1e12:6.0f}")


def matmul(copied: float) -> None:
    print("matmul: weights, GB/s | TFLOP/s | times as fast as bfloat16")
    for depth, columns in SHAPES:
        for rows in ROWS:
            matmul_case(rows, depth, columns)


def matmul_case(rows: int, depth: int, columns: int) -> None:
    x = torch.randn(rows, depth, device=DEVICE, dtype=DTYPE)
    plain = torch.randn(depth, columns, device=DEVICE, dtype=DTYPE)
    out = torch.empty(rows, columns, device=DEVICE, dtype=DTYPE)
    base = seconds(lambda: torch.mm(x, plain, out=out))
    print(f"  {rows:4} x {depth} x {columns}: bfloat16 {base * 1e6:7.1f} us")
    for format in BITS:
        weights = random_weights(format, columns, depth)
        took = seconds(partial(quantized_matmul, x, *weights, out, format))
        report(format, took, base, rows, depth * columns, depth * columns)


def experts(copied: float) -> None:
    print("experts: the first product of a layer, as above; tokens choose 4 of 32")
    plain = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device=DEVICE, dtype=DTYPE)
    for tokens in ROWS:
        experts_case(tokens, plain)


def experts_case(tokens: int, plain: torch.Tensor) -> None:
    chosen = torch.rand(tokens, EXPERTS, device=DEVICE).topk(4).indices.flatten()
    counts = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS)
    ends = counts.cumsum(0).to(torch.int32)
    matrix = HIDDEN * 2 * WIDTH
    read = int(counts.count_nonzero()) * matrix
    few = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=DTYPE)
    x = torch.randn(4 * tokens, HIDDEN, device=DEVICE, dtype=DTYPE)
    out = torch.empty(4 * tokens, 2 * WIDTH, device=DEVICE, dtype=DTYPE)
    base = seconds(lambda: F.grouped_mm(x, plain.transpose(1, 2), offs=ends))
    print(f"  {tokens:4} tokens: grouped_mm bfloat16 {base * 1e6:7.1f} us")
    formats: list[Format] = ["plain", "int8", "mxfp4"]
    for format in formats:
        packed = random_experts(format)
        took = seconds(partial(packed.forward, x, ends, len(x), out))
        report(format, took, base, len(x), read, matrix)
        if len(chosen) <= EXPERTS:
            took = seconds(partial(packed.forward_each, few, chosen, out))
            report(f"{format}, each", took, base, len(x), len(x) * matrix, matrix)


def report(name: str, took: float, base: float, rows: int, read: int, matrix: int) -> None:
    moved = read * BITS.get(name.split(",")[0], 16.0) / 8
    print(
        f"    {name:12} {moved / took / 1e9:7.0f} | {2 * rows * matrix / took / 1e12:6.1f} | "
        f"{base / took:5.2f}"
    )


def random_pool(num_blocks: int) -> KVPool:
    pool = KVPool(GEOMETRY, num_blocks, BLOCK, DTYPE, torch.device(DEVICE))
    pool.blocks.normal_()
    return pool


def buffers(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of a step, and room for its results."""
    heads = GEOMETRY.num_heads + GEOMETRY.num_kv_heads
    rotated = torch.randn(heads, rows, GEOMETRY.head_dim, device=DEVICE, dtype=DTYPE)
    return rotated, torch.empty(rows, GEOMETRY.query_width, device=DEVICE, dtype=DTYPE)


def paged(
    groups: list[DecodeGroup],
    tiles: list[PrefillTile],
    rotated: torch.Tensor,
    attended: torch.Tensor,
) -> "PagedDecode | PagedPrefill":
    partials = torch.empty(partial_elements(GEOMETRY), device=DEVICE)
    workspace = PagedWorkspace(GEOMETRY, partials)
    return paged_attentions(groups, tiles, rotated, attended, workspace)[0]


def gathering(rows: int, context: int) -> Workspace:
    """What torch's path gathers pages and scores into."""
    kv, heads, head_dim = GEOMETRY.num_kv_heads, GEOMETRY.num_heads, GEOMETRY.head_dim
    sizes = (rows * heads * head_dim, rows * context * 2 * kv * head_dim, rows * heads * context)
    mask = torch.empty(MAX_TILE_ROWS, context + MAX_TILE_ROWS, device=DEVICE, dtype=DTYPE)
    fill_mask(mask)
    queries, pages, scores = (torch.empty(size, device=DEVICE, dtype=DTYPE) for size in sizes)
    return Workspace(GEOMETRY, BLOCK, queries, pages, scores, mask)


def random_weights(
    format: str, columns: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Codes, scales and zeros; what they stand for does not matter."""
    if format == "plain":
        return torch.randn(columns, depth, device=DEVICE, dtype=DTYPE), None, None
    width = depth if format in ("int8", "fp8") else depth // 2
    codes = torch.randint(0, 120, (columns, width), device=DEVICE, dtype=torch.uint8)
    if format == "mxfp4":
        return (
            codes,
            torch.full((columns, depth // 32), 120, device=DEVICE, dtype=codes.dtype),
            None,
        )
    groups = depth // 128 if format == "int4" else 1
    scales = torch.rand(columns, groups, device=DEVICE, dtype=DTYPE)
    zeros = torch.rand_like(scales) if format == "int4" else None
    return codes.view(torch.int8) if format == "int8" else codes, scales, zeros


def random_experts(format: Format) -> "TritonExperts":
    """Packed matrices of all experts."""
    from ullage_engine.kernels.triton.matmul import TritonExperts

    packed, scales, zeros = random_weights(format, EXPERTS * 2 * WIDTH, HIDDEN)
    shape = (EXPERTS, 2 * WIDTH, -1)
    return TritonExperts(
        packed.view(shape),
        None if scales is None else scales.view(shape),
        None if zeros is None else zeros.view(shape),
        format,
    )


if __name__ == "__main__":
    sys.exit(main())
