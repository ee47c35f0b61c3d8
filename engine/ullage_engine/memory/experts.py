"""What a layer of experts computes in, as arithmetic: the step arena contains it.

Tokens beyond a slice are computed slice by slice, so that the buffers are bounded.
"""

from functools import cache

from ullage_engine.memory.rungs import token_rung, unit_rows
from ullage_engine.models.geometry import ModelGeometry

SLICE_TOKENS = 2048
"""Most tokens whose experts are computed at once. Each slice reads all experts again, which on a
GPU takes a third of the time that so many tokens compute."""

INT64_WORDS = 2
"""Four-byte elements of an index."""

INT32_BYTES = 4

MXFP4_PANELS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Numbers of packed experts decoded at once: on a CPU as many as stay in its cache, elsewhere
enough of every expert for a product that keeps the device busy."""


def mxfp4_panel(device: str) -> int:
    """Numbers that a panel of MXFP4 weights has room for on this kind of device."""
    return MXFP4_PANELS[device]


def mxfp4_scratch_bytes(device: str, itemsize: int) -> int:
    """Bytes that decoding takes, once for all layers: the numbers, and their codes as indices."""
    return mxfp4_panel(device) * itemsize + mxfp4_panel(device) // 2 * INT32_BYTES


def slice_tokens(tokens: int) -> int:
    """Tokens of the largest slice of a step of `tokens`."""
    return min(tokens, SLICE_TOKENS)


@cache
def padding_rows(pairs: int) -> int:
    """Rows that the last expert's product may write past the last of `pairs`; see
    `ullage_engine.layers.expert_matrices.ExpertMatrices`."""
    return max(max(token_rung(rows), unit_rows(rows)) - rows for rows in range(1, pairs + 1))


def expert_elements(geometry: ModelGeometry, tokens: int) -> dict[str, int]:
    """Elements of the buffers of the computing type, for steps of up to `tokens` rows.

    A pair is a token and one of its experts. Empty without experts.
    """
    spec = geometry.experts
    if spec is None:
        return {}
    tokens = slice_tokens(tokens)
    pairs = tokens * spec.experts_per_token
    rows = pairs + padding_rows(pairs)
    return {
        "expert_logits": tokens * spec.num_experts,
        "expert_rows": rows * geometry.hidden,
        "expert_gate_up": rows * 2 * spec.intermediate,
        "expert_gated": rows * spec.intermediate,
        "expert_picked": tokens * geometry.hidden,
    }


def routing_elements(geometry: ModelGeometry, tokens: int) -> dict[str, int]:
    """Elements of the four-byte buffers, for steps of up to `tokens` rows; indices take two each.

    Empty without experts.
    """
    spec = geometry.experts
    if spec is None:
        return {}
    tokens = slice_tokens(tokens)
    pairs = tokens * spec.experts_per_token
    indices = ("expert_chosen", "expert_sorted", "expert_order", "expert_places")
    return {
        "expert_sum": tokens * geometry.hidden,
        "expert_scores": tokens * spec.num_experts,
        "expert_ranks": tokens * spec.num_experts,
        "expert_weights": pairs,
        "expert_ends": spec.num_experts,
        **dict.fromkeys(indices, pairs * INT64_WORDS),
    }
