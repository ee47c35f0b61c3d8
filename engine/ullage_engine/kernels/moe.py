"""The steps of a mixture of experts, each into memory it is given and none waiting for the device.

A pair is a token and one of the experts it chose. Pairs are sorted by expert, so that every
expert's rows are neighbours; `places` says where a token's pairs went.
"""

import torch
import torch.nn.functional as F

from ullage_engine.model_config.model_config import ExpertsSpec

BIAS_ROWS = 512
"""Rows that biases are gathered for at once, which bounds the temporary."""

SIGMOID_EPS = 1e-6
"""Number that LFM2 adds to the sum by which weights are divided."""

GATE_LIMIT = 7.0
GATE_SLOPE = 1.702
"""Slope of the sigmoid in gpt-oss's gate."""


def choose(
    spec: ExpertsSpec,
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    ranks: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Write each token's experts, best first, and their weights.

    Args:
        scores: the router's logits [tokens, experts], float32; changed.
        bias: float32 [experts], added to what experts are ranked by.
        ranks: float32 memory like scores.
        chosen: int64 [tokens, experts_per_token].
        weights: float32 [tokens, experts_per_token].
    """
    if spec.scoring == "sigmoid":
        _choose_by_sigmoid(spec, scores.sigmoid_(), bias, ranks, chosen, weights)
    else:
        torch.topk(_ranked(scores, bias, ranks), chosen.shape[1], out=(weights, chosen))
        weights.copy_(F.softmax(weights, dim=1))
    weights.mul_(spec.scale)


def _choose_by_sigmoid(
    spec: ExpertsSpec,
    sigmoids: torch.Tensor,
    bias: torch.Tensor | None,
    ranks: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    torch.topk(_ranked(sigmoids, bias, ranks), chosen.shape[1], out=(weights, chosen))
    torch.gather(sigmoids, 1, chosen, out=weights)
    if spec.is_normalised:
        # Column by column: how a library sums a row may depend on how many rows there are.
        total = weights[:, 0] + SIGMOID_EPS
        for column in weights.unbind(1)[1:]:
            total.add_(column)
        weights.div_(total[:, None])


def _ranked(scores: torch.Tensor, bias: torch.Tensor | None, ranks: torch.Tensor) -> torch.Tensor:
    return scores if bias is None else torch.add(scores, bias, out=ranks)


def sort_pairs(
    chosen: torch.Tensor,
    experts: torch.Tensor,
    sorted_experts: torch.Tensor,
    order: torch.Tensor,
    places: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Sort pairs by expert, and pairs of one expert by token.

    Args:
        chosen: int64 [pairs], the expert of each.
        experts: int64 [experts], 0, 1, 2 and so on.
        sorted_experts: chosen, sorted.
        order: int64 [pairs], the pair that each sorted row is.
        places: int64 [pairs], the sorted row that each pair is.
        ends: int32 [experts], the row after each expert's last.
    """
    torch.sort(chosen, stable=True, out=(sorted_experts, order))
    places.scatter_(0, order, torch.arange(len(order), device=order.device))
    torch.searchsorted(sorted_experts, experts, right=True, out_int32=True, out=ends)


def add_biases(rows: torch.Tensor, biases: torch.Tensor, experts: torch.Tensor) -> None:
    """Adds to every row [pairs, width] the bias [experts, width] of its expert [pairs]."""
    for start in range(0, rows.shape[0], BIAS_ROWS):
        part = slice(start, start + BIAS_ROWS)
        rows[part].add_(biases.index_select(0, experts[part]))


def clamped_gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Write (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up within 7 of 0 (gpt-oss).

    Changes gate_up [rows, 2 * width].
    """
    width = out.shape[1]
    gate = gate_up[:, :width].clamp_(max=GATE_LIMIT)
    up = gate_up[:, width:]
    torch.mul(gate, GATE_SLOPE, out=out).sigmoid_().mul_(gate)
    out.mul_(up.clamp_(-GATE_LIMIT, GATE_LIMIT).add_(1))


def combine(
    rows: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    picked: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Write each token's weighted sum of its experts' rows, best expert first, in float32.

    Args:
        rows: [pairs, hidden].
        places: [tokens, experts_per_token], the row of each pair.
        weights: float32 [tokens, experts_per_token].
        picked: memory of [tokens, hidden] and rows' type.
        total: float32 [tokens, hidden].
    """
    total.zero_()
    for row, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        torch.index_select(rows, 0, row, out=picked)
        total.addcmul_(picked, weight[:, None])
