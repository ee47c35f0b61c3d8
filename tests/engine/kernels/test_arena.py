"""The arena's layout, and that the runner allocates exactly it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_fields

from ullage_engine.kernels.arena import (
    ALIGNMENT,
    MAX_PARTIALS,
    StepLimits,
    sampler_arena,
    step_arena,
)
from ullage_engine.kernels.kv_pool import allocate
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.runner.model_runner import ModelRunner

SMOLLM2 = ModelConfig(
    architecture="llama",
    layers=(LayerSpec(),) * 30,
    hidden=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    max_position=8192,
    rope_theta=1e5,
    rms_eps=1e-5,
    tied=True,
)
LFM2_MOE = replace_fields(
    SMOLLM2,
    architecture="lfm2_moe",
    layers=(LayerSpec(mixer="conv"), LayerSpec(feed_forward="experts")),
    conv_kernel=3,
    conv_channels=576,
    experts=ExpertsSpec(num_experts=8, experts_per_token=4, intermediate=128, scoring="sigmoid"),
)


def phase(name: str) -> str:
    """Buffers of one phase live together; those of two need not."""
    if name in ("hidden", "normed", "mask", "cos", "sin", "step_cos", "step_sin", "indices"):
        return "always"
    if name in ("gate_up", "gated"):
        return "mlp"
    return name.partition("_")[0] if name.startswith(("conv_", "expert_")) else "attention"


def limits(
    tokens: int = 576,
    rows: int = 64,
    length: int = 8192,
    itemsize: int = 2,
    deterministic: bool = False,
    fused: bool = False,
    fp8_kv: bool = False,
) -> StepLimits:
    return StepLimits(tokens, rows, length, 8192, itemsize, 16, deterministic, fused, fp8_kv)


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(1, 9000),
    rows=st.integers(1, 256),
    length=st.integers(1, 8192),
    itemsize=st.sampled_from([2, 4]),
    way=st.sampled_from(["", "deterministic", "fused"]),
    fp8_kv=st.booleans(),
    model_config=st.sampled_from([SMOLLM2, LFM2_MOE]),
)
def test_buffers_are_aligned_and_only_phases_overlap(
    tokens: int,
    rows: int,
    length: int,
    itemsize: int,
    way: str,
    fp8_kv: bool,
    model_config: ModelConfig,
) -> None:
    how = (way == "deterministic", way == "fused", fp8_kv)
    largest = limits(tokens, rows, length, itemsize, *how)
    for layout in (step_arena(model_config, largest), sampler_arena(model_config, largest)):
        buffers = sorted(layout.buffers, key=lambda buffer: buffer.offset)
        for index, buffer in enumerate(buffers):
            assert buffer.offset % ALIGNMENT == 0
            assert buffer.end <= layout.nbytes
            for other in buffers[index + 1 :]:
                phases = {phase(buffer.name), phase(other.name)}
                assert buffer.end <= other.offset or len(phases - {"always"}) == 2


def test_the_demo_models_arenas_are_small() -> None:
    assert step_arena(SMOLLM2, limits()).nbytes < 32 << 20
    assert step_arena(SMOLLM2, limits(deterministic=True)).nbytes < 34 << 20
    # Scores and gathered KV are what kernels that read pages do without.
    assert step_arena(SMOLLM2, limits(fused=True)).nbytes < step_arena(SMOLLM2, limits()).nbytes
    assert sampler_arena(SMOLLM2, limits()).nbytes == 64 * 49152 * (2 + 4)


def test_partial_results_of_the_library_are_bounded() -> None:
    most = replace(limits(length=1 << 17), library_threads=256)
    sizes = {each.name: each.num_elements for each in step_arena(SMOLLM2, most).buffers}
    assert sizes["partials"] == MAX_PARTIALS
    few = replace(limits(), library_threads=2)
    assert step_arena(SMOLLM2, few).nbytes < 32 << 20


def test_more_of_anything_takes_no_less() -> None:
    base = limits(tokens=100, rows=4, length=512)
    for change in (
        {"max_tokens": 200},
        {"max_model_len": 1024},
        {"gather_tokens": 20_000},
    ):
        assert (
            step_arena(SMOLLM2, replace(base, **change)).nbytes >= step_arena(SMOLLM2, base).nbytes
        )


@pytest.mark.parametrize("itemsize", [2, 4])
def test_allocation_is_exactly_the_layout(itemsize: int) -> None:
    layout = sampler_arena(SMOLLM2, limits(rows=3, itemsize=itemsize))
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    buffers = allocate(layout, dtype, torch.device("cpu"))
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers.values()}
    assert len(storages) == 1
    assert buffers["logits"].untyped_storage().nbytes() == layout.nbytes
    assert buffers["logits"].dtype == torch.float32
    assert buffers["computed"].dtype == dtype


def test_the_runner_names_what_it_allocates(
    smollm2: LoadedModel, new_runner: Callable[..., ModelRunner]
) -> None:
    runner = new_runner(smollm2, max_step_tokens=64, max_sequences=4, max_model_len=128)
    assert runner.kv_block_bytes == 16 * 30 * 2 * 3 * 64 * 4
    assert runner.sampler_arena_bytes == 4 * 49152 * 8
    assert runner.weights_bytes == smollm2.nbytes


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_runner_allocates_what_the_formulas_say(
    dtype: torch.dtype,
    kv_dtype: str,
    load_smollm2: Callable[..., LoadedModel],
    new_runner: Callable[..., ModelRunner],
) -> None:
    runner = new_runner(load_smollm2(dtype), dtype, num_blocks=7, kv_dtype=kv_dtype)
    assert runner.allocated_bytes() == {
        "weights": runner.weights_bytes,
        "step_arena": runner.step_arena_bytes,
        "sampler_arena": runner.sampler_arena_bytes,
        "kv_pool": 7 * runner.kv_block_bytes,
        "state_pool": 0,
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_asked_for_no_memory_after_warm_up(
    load_smollm2: Callable[..., LoadedModel],
    new_runner: Callable[..., ModelRunner],
    generate: Callable[..., list[list[int]]],
) -> None:
    device = torch.device("cuda")
    loaded = load_smollm2(torch.bfloat16, device)
    runner = new_runner(loaded, torch.bfloat16, device=device)
    runner.warm_up()
    before = num_device_allocations()
    generate(runner, [[5] * length for length in (1, 17, 130, 300)], 8)
    assert num_device_allocations() == before


def num_device_allocations() -> int:
    """Times that torch asked the device for memory, whatever it gave back since."""
    return int(torch.cuda.memory_stats()["num_device_alloc"])
