"""Compiles every kernel for the GPU architectures given (80, 90, ...), without a GPU.

Prints a line of JSON for each: name, arch, bytes of shared memory, and whether tensor cores are
used. A process of its own, because the tests' Triton interprets.
"""

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ullage_engine.kernels.batch import ConvPlan
from ullage_engine.kernels.kv_pool import HeadScales, LayerCache, head_scales
from ullage_engine.kernels.triton.attention import attend_decodes, attend_tiles
from ullage_engine.kernels.triton.conv import FusedConvolution
from ullage_engine.kernels.triton.launch import SIZE, launch_count
from ullage_engine.kernels.triton.matmul import grouped_matmul, picked_matmul, quantized_matmul

BYTES, INTS, HALVES = torch.uint8, torch.int32, torch.bfloat16


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


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
    """In place of kernel[grid]."""

    def compiled(*args: object, **constants: object) -> None:
        binary = kernel.warmup(*args, grid=grid, **constants)
        facts = {
            "name": binary.metadata.name,
            "arch": driver.active.get_current_target().arch,
            "shared": binary.metadata.shared,
            "uses_tensor_cores": "mma" in binary.asm["ptx"],
        }
        print(json.dumps(facts))

    return compiled


def attention(head_dim: int, scales: HeadScales | None, window: int) -> None:
    blocks = torch.zeros(4, 8, 16 * head_dim, dtype=BYTES if scales else HALVES)
    slots = blocks.view(4, -1, head_dim)
    cache = LayerCache(blocks, slots[:2], slots[2:], scales)
    queries = torch.zeros(8, 4, head_dim, dtype=HALVES)
    tables, lengths = torch.zeros(4, 64, dtype=INTS), torch.zeros(4, dtype=INTS)
    out, sinks = torch.zeros(4, 8 * head_dim, dtype=HALVES), torch.zeros(8, dtype=HALVES)
    partials = torch.zeros(1 << 18)
    attend_decodes(queries, cache, tables, lengths, out, partials, window, sinks)
    attend_tiles(queries, cache, tables, lengths, lengths, lengths, out, window, sinks)


def products(rows: int) -> None:
    x, out = torch.zeros(rows, 256, dtype=HALVES), torch.zeros(rows, 512, dtype=HALVES)
    scales = torch.zeros(512, 2, dtype=HALVES)
    quantized_matmul(x, torch.zeros(512, 128, dtype=BYTES), scales, scales, out, "int4")
    single = torch.zeros(512, 1, dtype=HALVES)
    quantized_matmul(x, torch.zeros(512, 256, dtype=torch.int8), single, None, out, "int8")
    quantized_matmul(x, torch.zeros(512, 256, dtype=BYTES), single, None, out, "fp8", adds=True)


def experts(rows: int) -> None:
    x, out = torch.zeros(rows, 256, dtype=HALVES), torch.zeros(rows, 512, dtype=HALVES)
    packed = torch.zeros(2, 512, 128, dtype=BYTES)
    scales = torch.zeros(2, 512, 8, dtype=BYTES)
    wide = torch.zeros(2, 512, 2, dtype=HALVES)
    ends = torch.zeros(2, dtype=INTS)
    grouped_matmul(x, ends, packed, scales, None, out, "mxfp4")
    plain = torch.zeros(2, 512, 256, dtype=HALVES)
    grouped_matmul(x, ends, plain, None, None, out, "plain")
    chosen = torch.zeros(rows, dtype=torch.int64)
    picked_matmul(x, chosen, packed, scales, None, out, "mxfp4")
    grouped_matmul(x, ends, packed, wide, wide, out, "int4")
    single = torch.zeros(2, 512, 1, dtype=HALVES)
    grouped_matmul(x, ends, torch.zeros(2, 512, 256, dtype=torch.int8), single, None, out, "int8")
    picked_matmul(x, chosen, torch.zeros(2, 512, 256, dtype=BYTES), single, None, out, "fp8")


def convolutions() -> None:
    plan = ConvPlan([[0], [1], [2]], [1, 2], [0], [1], [])
    projected, weights = torch.zeros(1, 192, dtype=HALVES), torch.zeros(3, 64, dtype=HALVES)
    state, out = torch.zeros(2, 2, 64, dtype=HALVES), torch.zeros(1, 64, dtype=HALVES)
    FusedConvolution(plan, projected, out).run(weights, state)


def main(archs: list[int]) -> None:
    JITFunction.__getitem__ = compile_only
    for arch in archs:
        driver.set_active(Absent(arch))
        attention(64, head_scales([1.0] * 4, HALVES, torch.device("cpu")), 0)
        attention(128, None, 128)
        products(512)
        experts(512)
        convolutions()
        launch_count(torch.zeros(SIZE, dtype=INTS))


if __name__ == "__main__":
    main([int(arch) for arch in sys.argv[1:]])
