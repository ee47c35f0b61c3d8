"""Compiles kernels in the variants that a runner launches, for GPU architectures, without a GPU.

`compile_kernels.py 90:common,sample 80:common` compiles two lists of variants for sm90 and one for
sm80. Prints a line of JSON for each kernel: its name, the architecture, the variant, bytes of
shared memory, bytes of registers that were spilled to memory, and whether tensor cores are used. A
process of its own, because the tests' Triton interprets, with a cache of its own, because the
assembler says nothing of what was compiled before.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ullage_engine.kernels.batch import ConvPlan
from ullage_engine.kernels.kv_pool import LayerCache, head_scales
from ullage_engine.kernels.triton import Format
from ullage_engine.kernels.triton.attention import attend_decodes, attend_tiles
from ullage_engine.kernels.triton.conv import FusedConvolution
from ullage_engine.kernels.triton.launch import SIZE, launch_count
from ullage_engine.kernels.triton.layer import clamped_gate, gate, rms_norm, rotate_and_store
from ullage_engine.kernels.triton.matmul import grouped_matmul, picked_matmul, quantized_matmul

Variant = tuple[str, Callable[[], None]]
"""What it is, and what launches its kernels."""

BYTES = torch.uint8
INTS = torch.int32
HALVES = torch.bfloat16
HEADS = 32
BLOCK_TOKENS = 16
DEPTH = 256


class Absent:
    """A GPU of some architecture that nothing is launched on."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Pages:
    """What attention is compiled for."""

    head_dim: int
    dtype: torch.dtype = HALVES
    window: int = 0
    has_sinks: bool = False
    is_fp8: bool = False
    kv_heads: int = 8

    def cache(self) -> LayerCache:
        dtype = BYTES if self.is_fp8 else self.dtype
        blocks = torch.zeros(2 * self.kv_heads, 4, BLOCK_TOKENS * self.head_dim, dtype=dtype)
        slots = blocks.view(2 * self.kv_heads, -1, self.head_dim)
        scales = None
        if self.is_fp8:
            scales = head_scales([1.0] * 2 * self.kv_heads, self.dtype, torch.device("cpu"))
        return LayerCache(blocks, slots[: self.kv_heads], slots[self.kv_heads :], scales)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self.dtype)

    @property
    def sinks(self) -> torch.Tensor | None:
        return self.zeros(HEADS) if self.has_sinks else None


def decodes(pages: Pages, *, whole: bool) -> None:
    """`whole`: each sequence is attended by one program a head; else by several, and merged."""
    queries = pages.zeros(HEADS, 4, pages.head_dim)
    out = pages.zeros(4, HEADS * pages.head_dim)
    tables = torch.zeros(4, 1 if whole else 1024, dtype=INTS)
    lengths = torch.zeros(4, dtype=INTS)
    partials = torch.zeros(1 << 22)
    cache = pages.cache()
    attend_decodes(queries, cache, tables, lengths, out, partials, pages.window, pages.sinks)


def tiles(pages: Pages) -> None:
    queries = pages.zeros(HEADS, 4, pages.head_dim)
    out = pages.zeros(4, HEADS * pages.head_dim)
    tables = torch.zeros(4, 64, dtype=INTS)
    rows = torch.zeros(4, dtype=INTS)
    cache = pages.cache()
    attend_tiles(queries, cache, tables, rows, rows, rows, rows, out, pages.window, pages.sinks)


def rotation(pages: Pages, *, has_norms: bool) -> None:
    """Rows of queries, keys and values on their way into pages."""
    head_dim = pages.head_dim
    rows = 4
    qkv = pages.zeros(rows, (HEADS + 2 * pages.kv_heads) * head_dim)
    tables = (pages.zeros(8, head_dim), pages.zeros(8, head_dim))
    norms = (pages.zeros(head_dim), pages.zeros(head_dim)) if has_norms else None
    positions = torch.zeros(rows, dtype=INTS)
    slots = torch.zeros(rows, dtype=torch.int64)
    queries = pages.zeros(HEADS, rows, head_dim)
    rotate_and_store(qkv, norms, 1e-5, tables, positions, slots, queries, pages.cache())


def norm(columns: int, dtype: torch.dtype = HALVES) -> None:
    x = torch.zeros(3, columns, dtype=dtype)
    rms_norm(x, x[0], 1e-5, x)


def gates(width: int, dtype: torch.dtype = HALVES, *, clamped: bool = False) -> None:
    gate_up = torch.zeros(3, 2 * width, dtype=dtype)
    out = torch.zeros(3, width, dtype=dtype)
    (clamped_gate if clamped else gate)(gate_up, out)


def weights(
    format: Format, columns: int, group: int, dtype: torch.dtype = HALVES
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Codes, scales and zeros, which a GGUF file's int8 has too; group 0: a scale for the whole
    column."""
    if format == "plain":
        return torch.zeros(columns, DEPTH, dtype=dtype), None, None
    width = DEPTH // 2 if format in ("int4", "mxfp4") else DEPTH
    codes = torch.zeros(columns, width, dtype=torch.int8 if format == "int8" else BYTES)
    groups = DEPTH // group if group else 1
    scales = torch.zeros(columns, groups, dtype=BYTES if format == "mxfp4" else dtype)
    has_zeros = format == "int4" or (format == "int8" and group > 0)
    return codes, scales, scales if has_zeros else None


def linear(
    format: Format,
    group: int,
    rows: int,
    columns: int,
    adds: bool = False,
    dtype: torch.dtype = HALVES,
) -> None:
    x = torch.zeros(rows, DEPTH, dtype=dtype)
    out = torch.zeros(rows, columns, dtype=dtype)
    quantized_matmul(x, *weights(format, columns, group, dtype), out, format, adds)


def experts(format: Format, group: int, rows: int, *, picked: bool, count: int = 2) -> None:
    """`rows` of each of so many experts."""
    codes, scales, zeros = weights(format, count * 512, group)
    stacked = [None if each is None else each.view(count, 512, -1) for each in (scales, zeros)]
    x = torch.zeros(count * rows, DEPTH, dtype=HALVES)
    out = torch.zeros(count * rows, 512, dtype=HALVES)
    packed = codes.view(count, 512, -1)
    if picked:
        chosen = torch.zeros(count * rows, dtype=torch.int64)
        picked_matmul(x, chosen, packed, *stacked, out, format)
    else:
        ends = torch.zeros(count, dtype=INTS)
        grouped_matmul(x, ends, packed, *stacked, out, format)


def convolution(taps: int) -> None:
    one = np.zeros((1, 1), np.int32)
    plan = ConvPlan(
        taps=one.repeat(taps, 0), tails=one.repeat(taps - 1, 1), slots=one[0],
        next_slots=np.ones(1, np.int64),
    )  # fmt: skip
    projected = torch.zeros(1, 192, dtype=HALVES)
    kernel = torch.zeros(taps, 64, dtype=HALVES)
    state = torch.zeros(2, taps - 1, 64, dtype=HALVES)
    out = torch.zeros(1, 64, dtype=HALVES)
    FusedConvolution(plan, torch.from_numpy, projected, out).run(kernel, state)


def counting() -> None:
    launch_count(torch.zeros(SIZE, dtype=INTS))


SCALES: list[tuple[Format, int]] = [
    ("int8", 0), ("int8", 32), ("fp8", 0), ("fp8", 128), ("int4", 32), ("int4", 64), ("int4", 128),
    ("mxfp4", 32),
]  # fmt: skip
"""Formats that checkpoints and rounding leave, and the weights of a column that share a scale."""

ROWS = (16, 32, 64, 128)
"""Rows of a program's tile."""

COLUMNS = (512, 4224, 8448)
"""Columns of matrices that are cut into tiles of 16, 32 and 64 for few rows."""


def common() -> Iterator[Variant]:
    """What most models are served with: bfloat16, no window, no sinks, head_dim 128."""
    pages = Pages(128)
    yield "decodes, split", partial(decodes, pages, whole=False)
    yield "tiles", partial(tiles, pages)
    yield "int8, one row", partial(linear, "int8", 0, 1, 4224)
    yield "rotation", partial(rotation, pages, has_norms=False)
    yield "norm", partial(norm, 4096)
    yield "gate", partial(gates, 14336)


def sample() -> Iterator[Variant]:
    """Every kernel, and every option of each of them at least once."""
    small = Pages(64, window=128, has_sinks=True)
    yield f"decodes, split, {small}", partial(decodes, small, whole=False)
    large = Pages(256, window=128, has_sinks=True, is_fp8=True)
    yield f"decodes, whole, {large}", partial(decodes, large, whole=True)
    yield f"tiles, {large}", partial(tiles, large)
    yield f"rotation, norms, {large}", partial(rotation, large, has_norms=True)
    yield "clamped gate", partial(gates, 2880, clamped=True)
    yield "int4, 128 rows", partial(linear, "int4", 128, 128, 512, adds=True)
    yield "sorted mxfp4", partial(experts, "mxfp4", 32, 128, picked=False)
    yield "picked fp8", partial(experts, "fp8", 0, 1, picked=True)
    yield "convolution", partial(convolution, 3)
    yield "counting", counting


def every() -> Iterator[Variant]:
    """What a runner launches, except for pages of other sizes than 16 tokens, other depths than
    256, and most pairs of options that have nothing to do with each other."""
    for pages in product((64, 128, 256), [HALVES], (0, 128), (False, True), (False, True)):
        yield from _attention(Pages(*pages))
    for head_dim, dtype in product((64, 128, 256), (torch.float32, torch.float16)):
        yield from _attention(Pages(head_dim, dtype))
    # One and eight query heads a KV head; all others have four.
    for head_dim, kv_heads, is_fp8 in product((64, 128, 256), (HEADS, 4), (False, True)):
        yield from _attention(Pages(head_dim, is_fp8=is_fp8, kv_heads=kv_heads))
    for (format, group), rows, columns in product(SCALES, ROWS, COLUMNS):
        name = f"{format} of {group}, {rows} rows, {columns} columns"
        yield name, partial(linear, format, group, rows, columns)
        if columns == COLUMNS[0]:
            yield f"{name}, adds", partial(linear, format, group, rows, columns, adds=True)
            half = partial(linear, format, group, rows, columns, dtype=torch.float16)
            yield f"{name}, float16", half
    for (format, group), rows in product([*SCALES, ("plain", 0)], ROWS):
        name = f"experts, {format} of {group}, {rows} rows"
        yield name, partial(experts, format, group, rows, picked=False)
        if rows == ROWS[0]:
            yield f"{name}, picked", partial(experts, format, group, rows, picked=True)
        if rows in (ROWS[0], ROWS[-1]):
            yield f"{name}, 32", partial(experts, format, group, rows, picked=False, count=32)
    for dtype in (HALVES, torch.float16, torch.float32):
        for columns in (576, 2880, 8192):
            yield f"norm, {columns}, {dtype}", partial(norm, columns, dtype)
        for width, clamped in product((48, 14336), (False, True)):
            name = f"gate, {width}, {clamped}, {dtype}"
            yield name, partial(gates, width, dtype, clamped=clamped)
    for taps in (3, 5):
        yield f"convolution, {taps}", partial(convolution, taps)
    yield "counting", counting


def _attention(pages: Pages) -> Iterator[Variant]:
    yield f"decodes, whole, {pages}", partial(decodes, pages, whole=True)
    yield f"decodes, split, {pages}", partial(decodes, pages, whole=False)
    yield f"tiles, {pages}", partial(tiles, pages)
    if not pages.window and not pages.has_sinks:
        for has_norms in (False, True):
            name = f"rotation, {has_norms}, {pages}"
            yield name, partial(rotation, pages, has_norms=has_norms)


LISTS: dict[str, Callable[[], Iterator[Variant]]] = {
    "common": common,
    "sample": sample,
    "every": every,
}


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
    """In place of kernel[grid]."""

    def compiled(*args: object, **constants: object) -> None:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            binary = kernel.warmup(*args, grid=grid, **constants)
        LOGS.setdefault(binary.hash, log.getvalue())
        spills = re.findall(r"(\d+) bytes spill stores", LOGS[binary.hash])
        assert spills, f"the assembler says nothing of spills: {LOGS[binary.hash]}"
        facts = {
            "name": binary.metadata.name,
            "arch": driver.active.get_current_target().arch,
            "variant": VARIANT[-1],
            "shared": binary.metadata.shared,
            "spilled": sum(map(int, spills)),
            "uses_tensor_cores": "mma" in binary.asm["ptx"],
        }
        print(json.dumps(facts), flush=True)

    return compiled


LOGS: dict[str, str] = {}
"""What the assembler said of each binary: one that another variant has, too, is not made again."""

VARIANT: list[str] = []
"""The last one is being compiled."""


def main(given: list[str]) -> None:
    JITFunction.__getitem__ = compile_only
    knobs.nvidia.dump_ptxas_log = True
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        for each in given:
            arch, _, names = each.partition(":")
            driver.set_active(Absent(int(arch)))
            for name in names.split(","):
                for variant, launch in LISTS[name]():
                    VARIANT.append(variant)
                    launch()


if __name__ == "__main__":
    main(sys.argv[1:])
