"""Paged attention against the definition, computed in float64."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.arena import StepLimits, step_arena
from ullage_engine.kernels.batch import build_batch
from ullage_engine.kernels.kv_pool import KVPool, LayerCache, allocate, kv_block_bytes
from ullage_engine.layers.attention import DefaultBackend, DeterministicBackend
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.protocol.step_plan import Chunk, StepPlan

GEOMETRY = ModelConfig(
    architecture="llama",
    layers=(LayerSpec(),) * 1,
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
)
NUM_BLOCKS = 200
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def limits_of(dtype: torch.dtype, deterministic: bool) -> StepLimits:
    return StepLimits(
        max_tokens=600,
        max_rows=16,
        max_model_len=400,
        gather_tokens=512,
        block_tokens=16,
        itemsize=dtype.itemsize,
        deterministic=deterministic,
    )


def make_cache(dtype: torch.dtype) -> LayerCache:
    [cache] = KVPool(GEOMETRY, NUM_BLOCKS, 16, dtype, torch.device("cpu")).layers
    return cache


def attend(
    limits: StepLimits, plan: StepPlan, rotated: torch.Tensor, cache: LayerCache
) -> torch.Tensor:
    """All rows of a plan; [tokens, heads * head_dim]."""
    arena = allocate(step_arena(GEOMETRY, limits), rotated.dtype, torch.device("cpu"))
    make = DeterministicBackend if limits.deterministic else DefaultBackend
    batch = build_batch(plan, 16, limits.context_blocks)
    attended = torch.full((rotated.shape[1], 96), math.nan, dtype=rotated.dtype)
    parts = (batch.rows, torch.from_numpy, rotated, attended, 0)
    for attention in make(GEOMETRY, limits, arena).attentions(*parts):
        attention.run(cache, None)
    return attended


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
    rows = queries.shape[1]
    context = keys.shape[1]
    group = GEOMETRY.group_size
    keys = keys.repeat_interleave(group, 0)
    values = values.repeat_interleave(group, 0)
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
    deterministic=st.booleans(),
)
def test_attention_is_what_its_definition_says(
    dtype: torch.dtype,
    decodes: list[int],
    prefills: list[tuple[int, int]],
    seed: int,
    deterministic: bool,
) -> None:
    shapes = ([(start, 1) for start in decodes] + prefills) or [(0, 1)]
    while sum(-(-(start + tokens) // 16) for start, tokens in shapes) > NUM_BLOCKS:
        shapes.pop(0)
    generator = random.Random(seed)
    torch.manual_seed(seed)
    plan = make_plan(shapes, generator)
    cache = make_cache(dtype)
    cache.blocks.normal_()
    rotated = torch.randn(8, plan.num_tokens, 16).to(dtype)
    attended = attend(limits_of(dtype, deterministic), plan, rotated, cache)

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


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    start=st.integers(0, 399),
    others=st.lists(st.integers(0, 399), max_size=6),
    seed=st.integers(0, 1000),
)
def test_deterministic_attention_of_a_token_is_its_own(
    dtype: torch.dtype, start: int, others: list[int], seed: int
) -> None:
    """The last token of a prompt, computed with the prompt, alone, and among others."""
    torch.manual_seed(seed)
    limits = limits_of(dtype, deterministic=True)
    whole = make_plan([(0, start + 1)], random.Random(seed))
    blocks = whole.chunks[0].block_ids
    cache = make_cache(dtype)
    cache.blocks.normal_()
    rotated = torch.randn(8, start + 1, 16).to(dtype)
    expected = attend(limits, whole, rotated, cache)[-1]

    alone = Chunk("0", [0], start, blocks, None, [], 0)
    beside = [
        Chunk(str(n + 1), [0], other, blocks * 2, None, [], 0) for n, other in enumerate(others)
    ]
    beside = [chunk for chunk in beside if chunk.start < len(chunk.block_ids) * 16]
    for chunks in ([alone], [alone, *beside]):
        order = sorted(chunks, key=lambda chunk: -chunk.start)
        row = order.index(alone)
        queries = torch.randn(8, len(chunks), 16).to(dtype)
        queries[:, row] = rotated[:, -1]
        assert torch.equal(attend(limits, StepPlan(chunks), queries, cache)[row], expected)


def test_keys_and_blocks_are_the_same_memory() -> None:
    cache = make_cache(torch.float32)
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
