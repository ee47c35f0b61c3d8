"""The bound of a step's seconds, which decides when a busy worker hangs."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.vllm_worker.step_bound import longest_step_s

MODEL: dict[str, Any] = {
    "num_stages": 1,
    "max_model_len": 1024,
    "hidden_size": 576,
    "pool_bytes": 256 << 20,
}


def test_nothing_measured_is_no_bound() -> None:
    assert longest_step_s(0.0, **MODEL) == 0.0


def test_a_small_models_busy_hang_is_found_before_thirty_seconds() -> None:
    longest_s = longest_step_s(1.0, **MODEL)
    assert 3.0 < longest_s < 4.0
    policy = RestartPolicy(step_deadline_s=60.0)
    assert policy.busy_after_s(longest_s, policy.slow_start_steps) < 12.0
    assert policy.busy_after_s(longest_s, 0) < 24.0


@given(
    warm_up_s=st.floats(0.01, 30.0),
    layers=st.integers(1, 80),
    hidden_size=st.integers(64, 16_384),
    share=st.floats(0.25, 4.0),
    tokens=st.integers(1, 8192),
    max_model_len=st.integers(1, 131_072),
    num_stages=st.integers(1, 8),
)
def test_attention_may_be_as_slow_as_a_quarter_of_the_matrices(
    warm_up_s: float,
    layers: int,
    hidden_size: int,
    share: float,
    tokens: int,
    max_model_len: int,
    num_stages: int,
) -> None:
    """The bound covers prompt tokens behind the longest context, for any width of the heads."""
    width = max(1, int(share * hidden_size))
    projections = 2 * 2 * hidden_size * width * layers * tokens
    matrices = 3 * projections
    attention = 2 * 2 * width * max_model_len * layers * tokens
    bound = longest_step_s(
        warm_up_s,
        num_stages=num_stages,
        max_model_len=max_model_len,
        hidden_size=hidden_size,
        pool_bytes=0,
    )
    needed = num_stages * warm_up_s * (1 + 4 * attention / matrices)
    assert bound >= needed * 0.999
