"""Upper bound of the time of a vLLM step, by which the server detects a hang."""

_ATTENTION_COST = 4.0
"""Time of attention, relative to matrix products with the same number of operations.

Attention kernels are slower on CPUs.
"""
_MATRIX_SHARE = 3.0
"""Operations of all matrices of a layer, relative to its query and output projections.

A lower bound.
"""
_KV_BYTES_PER_S = 2e9
"""Bytes of KV that decodes read per second, at least."""


def longest_step_s(
    warm_up_s: float, *, num_stages: int, max_model_len: int, hidden_size: int, pool_bytes: int
) -> float:
    """Return an upper bound of a step's time in seconds.

    A warm-up computes the most tokens of a step, but without their attention. The cost of attention
    grows with the context. It equals that of the query and output projections when the context has
    as many tokens as the hidden state has elements. Decodes read the KV pool once. The bound is
    loose on purpose: a healthy step that exceeded it several times would count as a hang.

    Args:
        warm_up_s: seconds that a thread computed in the largest step of a stage; 0 if not measured.
        num_stages: pipeline stages, which compute a step one after the other.
        max_model_len: longest context in tokens.
        hidden_size: elements of a token's hidden state.
        pool_bytes: KV bytes of all ranks.
    """
    if warm_up_s <= 0.0:
        return 0.0
    attention = _ATTENTION_COST * max_model_len / (_MATRIX_SHARE * hidden_size)
    return num_stages * warm_up_s * (1.0 + attention) + pool_bytes / _KV_BYTES_PER_S
