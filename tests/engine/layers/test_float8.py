"""Keys and values as float8: what is lost, and that nothing but the rounding is."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.arena import StepLimits, step_arena
from ullage_engine.kernels.batch import build_batch
from ullage_engine.kernels.kv_pool import (
    HeadScales,
    KVPool,
    LayerCache,
    allocate,
    head_scales,
    narrow,
    widen,
    write_kv,
)
from ullage_engine.layers.attention import DefaultBackend, DeterministicBackend
from ullage_engine.model_config.dtypes import kv_itemsize
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

GEOMETRY = ModelConfig(
    architecture="llama",
    layers=(LayerSpec(),),
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
CPU = torch.device("cpu")
NUM_BLOCKS = 60
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from(DTYPES)


def stored(numbers: torch.Tensor, scales: HeadScales) -> torch.Tensor:
    """What is read of numbers [heads, rows, head_dim] that were written."""
    codes = torch.empty(numbers.shape, dtype=torch.uint8)
    narrow(numbers.clone(), scales.values, codes)
    out = torch.empty_like(numbers)
    widen(codes, scales.factors, out)
    return out


@settings(max_examples=50, deadline=None)
@given(dtype=dtypes, exponent=st.floats(-20, 15), seed=st.integers(0, 1 << 31))
def test_a_number_within_its_bound_keeps_four_bits(
    dtype: torch.dtype, exponent: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bound = min(2.0**exponent, 57344.0)
    numbers = (torch.rand(1, 8, 16, generator=generator) * 2 - 1) * bound
    numbers *= torch.exp2(-20 * torch.rand(1, 8, 16, generator=generator))
    numbers = numbers.to(dtype)
    scales = head_scales([bound], dtype, CPU)
    scale = float(scales.values)
    error = (stored(numbers, scales).double() - numbers.double()).abs()
    # Half a step: three bits behind the point, and below the normal numbers steps of 2^-9.
    allowed = (numbers.double().abs() * 2.0**-4).clamp(min=scale * 2.0**-10)
    # float16 has its own least step.
    assert (error <= allowed.clamp(min=2.0**-24 if dtype == torch.float16 else 0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-15, -3, 0, 7])
def test_every_code_is_read_as_torch_reads_it(dtype: torch.dtype, exponent: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = head_scales([448 * 2.0**exponent * 0.9], dtype, CPU)
    assert float(scales.values) == 2.0**exponent
    read = torch.empty(codes.shape, dtype=dtype)
    widen(codes, scales.factors, read)
    expected = codes.view(torch.float8_e4m3fn).double() * 2.0**exponent
    is_number = ~expected.isnan()
    # Of scale 2^-15 the least of float16's steps are larger than some numbers.
    assert torch.equal(read[is_number].double(), expected.to(dtype).double()[is_number])
    assert read.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_too_large_becomes_the_largest(dtype: torch.dtype) -> None:
    scales = head_scales([448.0, 1e9, 0.0, math.inf], dtype, CPU)
    largest = [448.0 * float(scale) for scale in scales.values.flatten()]
    numbers = torch.full((4, 2, 3), torch.finfo(dtype).max, dtype=dtype)
    numbers[:, 1] = -math.inf
    read = stored(numbers, scales)
    assert read.isfinite().all()
    for head, limit in enumerate(largest):
        assert read[head, 0].tolist() == [limit] * 3
        assert read[head, 1].tolist() == [-limit] * 3


def limits_of(dtype: torch.dtype, deterministic: bool) -> StepLimits:
    return StepLimits(
        max_tokens=300,
        max_rows=16,
        max_model_len=400,
        gather_tokens=512,
        block_tokens=16,
        itemsize=dtype.itemsize,
        deterministic=deterministic,
        fp8_kv=True,
    )


def attend(
    limits: StepLimits,
    arena: dict[str, torch.Tensor],
    plan: StepPlan,
    rotated: torch.Tensor,
    cache: LayerCache,
    window: int,
) -> torch.Tensor:
    make = DeterministicBackend if limits.deterministic else DefaultBackend
    batch = build_batch(plan, 16, limits.context_blocks)
    attended = torch.full((rotated.shape[1], 96), math.nan, dtype=rotated.dtype)
    parts = (batch.rows, torch.from_numpy, rotated, attended, window)
    for attention in make(GEOMETRY, limits, arena).attentions(*parts):
        attention.run(cache, None)
    return attended


def dequantised(cache: LayerCache, dtype: torch.dtype) -> LayerCache:
    """A cache of the computing type with the numbers of one of float8."""
    assert cache.scales is not None
    [plain] = KVPool(GEOMETRY, cache.blocks.shape[1], 16, dtype, CPU).layers
    numbers = cache.blocks.view(torch.float8_e4m3fn).float() * cache.scales.values.float()
    plain.blocks.copy_(numbers)
    return plain


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    starts=st.lists(st.integers(0, 120), min_size=1, max_size=5),
    prefill=st.tuples(st.integers(0, 250), st.integers(2, 100)),
    kind=st.sampled_from(["fast", "windowed", "deterministic"]),
    seed=st.integers(0, 1 << 31),
)
def test_attention_is_that_of_the_numbers_stored(
    dtype: torch.dtype, starts: list[int], prefill: tuple[int, int], kind: str, seed: int
) -> None:
    torch.manual_seed(seed)
    free = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    chunks = []
    for number, (start, tokens) in enumerate([*((start, 1) for start in starts), prefill]):
        blocks = [free.pop() for _ in range(-(-(start + tokens) // 16))]
        chunks.append(Chunk(str(number), [0] * tokens, start, blocks, None, [], 0))
    plan = StepPlan(chunks)
    limits = limits_of(dtype, kind == "deterministic")
    window = 30 if kind == "windowed" else 0
    arena = allocate(step_arena(GEOMETRY, limits), dtype, CPU)
    scales = head_scales([3.0, 700.0, 20.0, 0.02], dtype, CPU)
    [cache] = KVPool(GEOMETRY, NUM_BLOCKS, 16, dtype, CPU, [scales]).layers
    sizes = torch.tensor([0.3, 9.0, 2.0, 0.002])[:, None, None]
    numbers = (torch.randn(4, NUM_BLOCKS * 16, 16) * sizes).to(dtype)
    for start in range(0, NUM_BLOCKS * 16, 300):
        slots = torch.arange(start, min(start + 300, NUM_BLOCKS * 16))
        write_kv(cache, slots, numbers[:2, slots], numbers[2:, slots], arena["kv_codes"])
    rotated = torch.randn(8, plan.num_tokens, 16).to(dtype)
    narrowed = attend(limits, arena, plan, rotated, cache, window)
    plain = attend(limits, arena, plan, rotated, dequantised(cache, dtype), window)
    assert torch.equal(narrowed, plain)
    assert narrowed.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pool_of_float8_takes_a_byte_a_number(dtype: torch.dtype) -> None:
    scales = [head_scales([1.0] * 4, dtype, CPU)]
    pools = [
        KVPool(GEOMETRY, 10, 16, dtype, CPU, chosen).blocks.untyped_storage().nbytes()
        for chosen in (None, scales)
    ]
    assert pools[0] == dtype.itemsize * pools[1]
    assert (kv_itemsize("fp8", dtype), kv_itemsize("auto", dtype)) == (1, dtype.itemsize)


@pytest.mark.parametrize("family", ["llama", "qwen3", "lfm2", "gpt_oss"])
def test_no_key_and_no_value_exceeds_its_bound(
    family: str,
    random_model: Callable[[str, int], Any],
    load: Callable[..., LoadedModel],
    new_runner: Callable[..., ModelRunner],
    generate: Callable[..., list[list[int]]],
    tmp_path: Path,
) -> None:
    """And no bound is so far above that numbers would lose their precision."""
    seed = 20_261
    random_model(family, seed).save_pretrained(tmp_path)
    loaded = load(f"file://{tmp_path}")
    narrow_runner = new_runner(loaded, kv_dtype="fp8")
    plain = new_runner(loaded)
    generator = random.Random(seed)
    prompts = [[generator.randrange(199) for _ in range(n)] for n in (100, 37, 5)]
    generate(plain, prompts, 3)
    for scales, cache in zip(layer_scales(narrow_runner), plain._kv.layers, strict=True):
        largest = cache.blocks.abs().amax(dim=(1, 2))
        room = 448 * scales.values.flatten() / largest
        assert (room >= 1).all()
        assert (room <= 2**7).all()


def layer_scales(runner: ModelRunner) -> list[HeadScales]:
    return [cache.scales for cache in runner._kv.layers if cache.scales is not None]


def test_smollm2_answers_alike(
    smollm2: LoadedModel,
    new_runner: Callable[..., ModelRunner],
    generate: Callable[..., list[list[int]]],
) -> None:
    """`The capital of France is`, and what the model says to it; a quarter of the memory."""
    runner = new_runner(smollm2, kv_dtype="fp8")
    plain = new_runner(smollm2)
    assert 4 * runner.kv_block_bytes == plain.kv_block_bytes
    prompt = [504, 3575, 282, 4649, 314]
    assert generate(runner, [prompt], 8) == generate(plain, [prompt], 8)
