"""Splits of decode attention stay within the memory that is reserved for them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.arena import num_splits, partial_elements
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 4096),
    kv_heads=st.integers(1, 64),
    group=st.integers(1, 16),
    context=st.integers(1, 1 << 20),
)
def test_any_step_fits(rows: int, kv_heads: int, group: int, context: int) -> None:
    model_config = ModelConfig(
        architecture="llama", layers=(LayerSpec(),), hidden=1, num_heads=kv_heads * group,
        num_kv_heads=kv_heads, head_dim=64, intermediate=1, vocab=1, max_position=1 << 20,
        rope_theta=1e4, rms_eps=1e-5, tied=True,
    )  # fmt: skip
    splits = num_splits(rows, kv_heads, context)
    assert splits & (splits - 1) == 0
    assert splits == 1 or rows * model_config.num_heads * splits * 65 <= partial_elements(
        model_config
    )


def test_few_long_sequences_are_split_and_many_are_not() -> None:
    assert num_splits(rows=1, num_kv_heads=8, context=100_000) == 64
    assert num_splits(rows=8, num_kv_heads=8, context=4096) == 16
    assert num_splits(rows=8, num_kv_heads=8, context=200) == 2
    assert num_splits(rows=256, num_kv_heads=8, context=100_000) == 1
