"""The arena of experts: enough for every step, and bounded."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ullage_engine.kernels.arena import (
    SLICE_TOKENS,
    StepLimits,
    expert_elements,
    pad_rows,
    pad_to_bucket,
    padding_rows,
    step_arena,
)
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig

LFM2_8B = ModelConfig(
    architecture="lfm2_moe",
    layers=(LayerSpec(feed_forward="experts"),) * 24,
    hidden=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate=7168,
    vocab=65536,
    max_position=32768,
    rope_theta=1e6,
    rms_eps=1e-5,
    tied=True,
    experts=ExpertsSpec(num_experts=32, experts_per_token=4, intermediate=1792, scoring="sigmoid"),
)
LIMITS = StepLimits(
    max_tokens=1024,
    max_rows=32,
    max_model_len=4096,
    gather_tokens=8192,
    block_tokens=16,
    itemsize=2,
)


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_no_expert_writes_past_the_padding(counts: list[int]) -> None:
    pairs = sum(counts)
    end = 0
    for count in counts:
        if count:
            assert end + pad_to_bucket(count) <= pairs + padding_rows(pairs)
            assert end + pad_rows(count) <= pairs + padding_rows(pairs)
        end += count


@pytest.mark.parametrize("kind", SLICE_TOKENS)
def test_buffers_stop_growing_at_a_slice(kind: str) -> None:
    most = SLICE_TOKENS[kind]
    limits = replace(LIMITS, max_tokens=most, max_slice_tokens=most)
    beyond = replace(limits, max_tokens=8 * most)
    assert expert_buffers(beyond) == expert_buffers(limits)
    assert expert_buffers(replace(limits, max_tokens=most // 2)) < expert_buffers(limits)
    nbytes = 2 * sum(expert_elements(LFM2_8B, most).values())
    assert nbytes == pytest.approx(2 * 4 * most * (2048 + 3 * 1792), rel=0.15)


def expert_buffers(limits: StepLimits) -> list[int]:
    """The elements of every buffer of the experts."""
    buffers = step_arena(LFM2_8B, limits).buffers
    return [each.num_elements for each in buffers if each.name.startswith("expert_")]


def test_a_dense_model_has_none_of_them() -> None:
    dense = structs.replace(LFM2_8B, experts=None)
    names = [buffer.name for buffer in step_arena(dense, LIMITS).buffers]
    assert not any(name.startswith("expert") for name in names)


def test_experts_share_bytes_with_attention() -> None:
    layout = step_arena(LFM2_8B, LIMITS)
    by_name: dict[str, Any] = {buffer.name: buffer for buffer in layout.buffers}
    assert by_name["expert_logits"].offset == by_name["qkv"].offset
    assert by_name["expert_places"].end <= layout.nbytes
    smaller = step_arena(LFM2_8B, replace(LIMITS, max_tokens=512))
    assert smaller.nbytes < layout.nbytes
