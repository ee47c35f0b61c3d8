"""A step's attention by kernels equals that by torch, for whatever a step is made of."""

import random
from dataclasses import replace

import pytest
import torch

from ullage_engine.kernels.arena import StepLimits, partial_elements, step_arena
from ullage_engine.kernels.batch import build_batch
from ullage_engine.kernels.kv_pool import KVPool, LayerCache, allocate, head_scales, write_kv
from ullage_engine.kernels.triton import Put
from ullage_engine.layers.attention import (
    AttentionBackend,
    DefaultBackend,
    PagedBackend,
    can_page,
)
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.protocol.step_plan import Chunk, StepPlan

GEOMETRY = ModelConfig(
    architecture="llama", layers=(LayerSpec(),), hidden=96, num_heads=6, num_kv_heads=2,
    head_dim=16, intermediate=64, vocab=50, max_position=512, rope_theta=1e4, rms_eps=1e-5,
    tied=True,
)  # fmt: skip
LIMITS = StepLimits(
    max_tokens=300, max_rows=16, max_model_len=400, gather_tokens=512,
    block_tokens=16, itemsize=4,
)  # fmt: skip
SHAPES = [(0, 1), (300, 1), (40, 1), (41, 1), (0, 90), (77, 33), (16, 2)]
"""(earlier tokens, tokens) of each chunk."""


def step_plan() -> StepPlan:
    free = list(range(60))
    random.shuffle(free)
    chunks = []
    for number, (start, tokens) in enumerate(SHAPES):
        blocks = [free.pop() for _ in range(-(-(start + tokens) // 16))]
        chunks.append(Chunk(str(number), [0] * tokens, start, blocks, None, [], 0))
    return StepPlan(chunks)


def filled_cache(arena: dict[str, torch.Tensor], is_fp8: bool, device: torch.device) -> LayerCache:
    scales = [head_scales([6.0, 0.3, 90.0, 700.0], torch.float32, device)] if is_fp8 else None
    [cache] = KVPool(GEOMETRY, 60, 16, torch.float32, device, scales).layers
    for start in range(0, 60 * 16, LIMITS.max_tokens):
        slots = torch.arange(start, min(start + LIMITS.max_tokens, 60 * 16), device=device)
        keys, values = torch.randn(2, 2, len(slots), 16, device=device)
        write_kv(cache, slots, keys, values, arena.get("kv_codes"))
    return cache


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (30, True)])
def test_mixed_step(
    window: int, has_sinks: bool, is_fp8: bool, device: torch.device, put: Put
) -> None:
    arena = allocate(step_arena(GEOMETRY, replace(LIMITS, fp8_kv=is_fp8)), torch.float32, device)
    cache = filled_cache(arena, is_fp8, device)
    batch = build_batch(step_plan(), 16)
    tokens = len(batch.token_ids)
    rotated = torch.randn(8, tokens, 16, device=device)
    sinks = torch.randn(6, device=device) if has_sinks else None
    computes: list[AttentionBackend] = [
        DefaultBackend(GEOMETRY, LIMITS, arena),
        PagedBackend(GEOMETRY, torch.empty(partial_elements(GEOMETRY), device=device)),
    ]
    results = []
    for backend in computes:
        attended = torch.full((tokens, 96), torch.nan, device=device)
        for attention in backend.attentions(batch.rows, put, rotated, attended, window):
            attention.run(cache, sinks)
        results.append(attended)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_cpu_has_no_pages() -> None:
    assert not can_page(GEOMETRY, 16, torch.device("cpu"))
