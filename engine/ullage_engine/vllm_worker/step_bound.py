"""Upper bound on the duration of a vLLM step, which the server uses to detect hangs."""

_ATTENTION_COST = 4.0
"""Duration of attention, relative to matmuls with the same number of operations.

On CPUs, attention kernels are slower than matmuls.
"""
_MATRIX_SHARE = 3.0
"""Lower bound on a layer's matmul operations, relative to its query and output projections."""
_KV_BYTES_PER_S = 2e9
"""Lower bound on the rate at which decodes can read KV, in bytes per second."""


def longest_step_s(
    warm_up_s: float, *, num_stages: int, max_model_len: int, hidden_size: int, pool_bytes: int
) -> float:
    """Return an upper bound on a step's duration in seconds.

    The bound is extrapolated from the warm-up step, which computes the maximum number of tokens but
    skips their attention. The cost of attention grows with the context length, and equals that of
    the query and output projections when the context length in tokens equals the hidden size. In
    addition, a step's decodes are assumed to read the whole KV pool once. The bound is deliberately
    loose, because a healthy step that took several times as long as the bound would be mistaken for
    a hang.

    Args:
        warm_up_s: CPU seconds that each thread spends on a stage's largest step. If 0 (not
            measured), the result is 0.
        num_stages: number of pipeline stages, which compute a step one after another.
        max_model_len: maximum context length in tokens.
        hidden_size: number of elements in a token's hidden state.
        pool_bytes: KV bytes of all ranks.
    """
    if warm_up_s <= 0.0:
        return 0.0
    attention = _ATTENTION_COST * max_model_len / (_MATRIX_SHARE * hidden_size)
    return num_stages * warm_up_s * (1.0 + attention) + pool_bytes / _KV_BYTES_PER_S
