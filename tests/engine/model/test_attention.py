"""Paged attention against the definition, computed in float64."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.core.batch import build_batch
from ullage_engine.core.plan import Chunk, StepPlan
from ullage_engine.kernels.attention import (
    DecodeAttention,
    PrefillAttention,
    Workspace,
    fill_mask,
)
from ullage_engine.kernels.buffers import allocate, shaped
from ullage_engine.kernels.pool import KVPool, LayerCache, kv_block_bytes
from ullage_engine.memory.arena import StepLimits, gather_tokens, mask_width, step_arena
from ullage_engine.memory.rungs import MAX_TILE_ROWS
from ullage_engine.models.geometry import ModelGeometry

GEOMETRY = ModelGeometry(
    architecture="llama",
    num_layers=1,
    hidden=96,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate=64,
    vocab=50,
    max_position=512,
    rope_theta=1e4,
    rms_eps=1e-5,
    tied=True,
    eos_token_ids=[],
)
NUM_BLOCKS = 200
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def make_workspace(dtype: torch.dtype) -> tuple[Workspace, LayerCache]:
    limits = StepLimits(
        max_tokens=600,
        max_rows=16,
        max_model_len=400,
        max_gather_tokens=gather_tokens(400, 512, 16),
        block_tokens=16,
        itemsize=dtype.itemsize,
    )
    arena = allocate(step_arena(GEOMETRY, limits), dtype, torch.device("cpu"))
    mask = shaped(arena["mask"], MAX_TILE_ROWS, mask_width(400))
    fill_mask(mask)
    [cache] = KVPool(GEOMETRY, NUM_BLOCKS, 16, dtype, torch.device("cpu")).layers
    workspace = Workspace(GEOMETRY, 16, arena["queries"], arena["gathered"], arena["scores"], mask)
    return workspace, cache


def make_plan(shapes: list[tuple[int, int]], generator: random.Random) -> StepPlan:
    """Chunks of (earlier tokens, tokens), each in random blocks of its own."""
    free = list(range(NUM_BLOCKS))
    generator.shuffle(free)
    chunks = []
    for number, (start, tokens) in enumerate(shapes):
        blocks = [free.pop() for _ in range(-(-(start + tokens) // 16))]
        chunks.append(Chunk(str(number), [0] * tokens, start, blocks, None, [], 0))
    return StepPlan(chunks)


def dense(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of the last rows of a sequence, [heads, rows, head_dim], by its definition."""
    rows, context = queries.shape[1], keys.shape[1]
    group = GEOMETRY.group_size
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = queries.double() @ keys.double().transpose(1, 2) / math.sqrt(GEOMETRY.head_dim)
    hidden = torch.ones(rows, context, dtype=torch.bool).triu(context - rows + 1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ values.double()


def sequence_kv(cache: LayerCache, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    positions = range(chunk.start + len(chunk.token_ids))
    slots = torch.tensor([chunk.block_ids[p // 16] * 16 + p % 16 for p in positions])
    return cache.keys[:, slots], cache.values[:, slots]


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    decodes=st.lists(st.integers(0, 399), max_size=12),
    prefills=st.lists(st.tuples(st.integers(0, 200), st.integers(2, 200)), max_size=2),
    seed=st.integers(0, 1000),
)
def test_attention_is_what_its_definition_says(
    dtype: torch.dtype, decodes: list[int], prefills: list[tuple[int, int]], seed: int
) -> None:
    shapes = ([(start, 1) for start in decodes] + prefills) or [(0, 1)]
    while sum(-(-(start + tokens) // 16) for start, tokens in shapes) > NUM_BLOCKS:
        shapes.pop(0)
    generator = random.Random(seed)
    torch.manual_seed(seed)
    plan = make_plan(shapes, generator)
    batch = build_batch(plan, 16, gather_tokens(400, 512, 16))
    workspace, cache = make_workspace(dtype)
    cache.blocks.normal_()
    tokens = len(batch.token_ids)
    rotated = torch.randn(8, tokens, 16).to(dtype)
    attended = torch.full((tokens, 96), math.nan, dtype=dtype)
    for group in batch.decodes:
        DecodeAttention(group, rotated, attended, workspace).run(cache)
    for tile in batch.prefills:
        PrefillAttention(tile, rotated, attended, workspace).run(cache)

    ordered = sorted(
        (chunk for chunk in plan.chunks if len(chunk.token_ids) == 1), key=lambda c: -c.start
    )
    row = 0
    for chunk in ordered + [chunk for chunk in plan.chunks if len(chunk.token_ids) > 1]:
        rows = slice(row, row + len(chunk.token_ids))
        expected = dense(rotated[:6, rows], *sequence_kv(cache, chunk))
        got = attended[rows].view(-1, 6, 16).transpose(0, 1).double()
        assert (got - expected).abs().max() <= TOLERANCE[dtype]
        row = rows.stop


def test_keys_and_blocks_are_the_same_memory() -> None:
    _, cache = make_workspace(torch.float32)
    cache.keys[1, 35] = 5.0
    assert cache.blocks[1, 2].view(16, 16)[3].eq(5.0).all()
    cache.values[0, 16] = 7.0
    assert cache.blocks[2, 1].view(16, 16)[0].eq(7.0).all()


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_blocks_bytes_are_what_the_pool_takes(itemsize: int) -> None:
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    [cache] = KVPool(GEOMETRY, 10, 16, dtype, torch.device("cpu")).layers
    taken = cache.blocks.untyped_storage().nbytes()
    assert taken == 10 * kv_block_bytes(GEOMETRY, 16, itemsize)
