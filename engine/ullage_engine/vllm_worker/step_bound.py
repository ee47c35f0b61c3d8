"""How long a step of vLLM takes at most, by which the server knows one that has no end."""

_ATTENTION_COST = 4.0
"""Seconds of attention for those that matrices take for as many operations: its kernels are slower
on CPUs."""
_MATRIX_SHARE = 3.0
"""Operations of all matrices of a layer for those of its projections of queries and outputs, at
least."""
_KV_BYTES_PER_S = 2e9
"""Bytes of KV that decodes read a second, at least."""


def longest_step_s(
    warm_up_s: float, *, num_stages: int, max_model_len: int, hidden_size: int, pool_bytes: int
) -> float:
    """Return the seconds that a step takes at most.

    A warm-up computes the most tokens of a step, and none of their attention. That grows with the
    context, and takes as many operations as the two projections of queries and outputs where the
    context is as long as a token's vector. Decodes read the KV pool once. The bound is a wide one:
    a healthy step that exceeds it several times would be taken for a hang.

    Args:
        warm_up_s: seconds that a thread computed in the largest step of a stage; 0: not measured.
        num_stages: stages of a pipeline, which compute a step one after the other.
        max_model_len: longest context, tokens.
        hidden_size: numbers of a token's vector.
        pool_bytes: KV of all ranks.
    """
    if warm_up_s <= 0.0:
        return 0.0
    attention = _ATTENTION_COST * max_model_len / (_MATRIX_SHARE * hidden_size)
    return num_stages * warm_up_s * (1.0 + attention) + pool_bytes / _KV_BYTES_PER_S
