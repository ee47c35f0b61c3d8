"""The operations in a mixture-of-experts (MoE) layer that surround the experts' matmuls.

These operations run before, between and after the matmuls. Each one writes to memory that the
caller passes, and none of them waits for the device. A pair is a token and one of its experts.
Pairs are sorted by expert, so that the rows of each expert are consecutive. `places` holds the row
of each pair after sorting.
"""

import torch
import torch.nn.functional as F

from ullage_engine.model_config.model_config import ExpertsSpec

BIAS_ROWS = 512
"""Number of rows to which biases are added at once. This caps the size of the temporary tensor."""

SIGMOID_EPS = 1e-6
"""Epsilon that LFM2 adds to the sum of a token's expert weights before normalising them."""

GATE_LIMIT = 7.0
"""Clamping limit of gpt-oss's gate (see `clamped_gate`)."""

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
    """Choose each token's experts, best first, and compute their weights.

    Args:
        spec: the model's experts.
        scores: the router's logits, float32 [tokens, experts]. They are overwritten.
        bias: float32 [experts], added to the scores only to rank the experts.
        ranks: scratch memory with the shape and type of `scores`.
        chosen: output, int64 [tokens, experts_per_token].
        weights: output, float32 [tokens, experts_per_token].
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
        # Sum column by column, since a library's row sums may depend on the number of rows.
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
        chosen: int64 [pairs], the expert of each pair.
        experts: int64 [experts], the expert ids 0, 1, 2 and so on.
        sorted_experts: output, int64 [pairs]: `chosen`, sorted.
        order: output, int64 [pairs]: the pair in each sorted row.
        places: output, int64 [pairs]: the row of each pair after sorting.
        ends: output, int32 [experts]: the row after each expert's last row.
    """
    torch.sort(chosen, stable=True, out=(sorted_experts, order))
    places.scatter_(0, order, torch.arange(len(order), device=order.device))
    torch.searchsorted(sorted_experts, experts, right=True, out_int32=True, out=ends)


def add_biases(rows: torch.Tensor, biases: torch.Tensor, experts: torch.Tensor) -> None:
    """Add the bias of each row's expert to the row, in place.

    Args:
        rows: [pairs, width].
        biases: [experts, width].
        experts: expert of each row, [pairs].
    """
    for start in range(0, rows.shape[0], BIAS_ROWS):
        part = slice(start, start + BIAS_ROWS)
        rows[part].add_(biases.index_select(0, experts[part]))


def clamped_gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Compute gpt-oss's gated activation, (up + 1) * gate * sigmoid(1.702 * gate).

    `gate` is clamped to at most 7, and `up` to the range from -7 to 7.

    Args:
        gate_up: [rows, 2 * width], the gate first. It is overwritten.
        out: [rows, width].
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
    """Sum the weighted results of each token's experts, best expert first, in float32.

    Args:
        rows: the experts' results, [pairs, hidden].
        places: the row of each pair, [tokens, experts_per_token].
        weights: float32 [tokens, experts_per_token].
        picked: scratch memory [tokens, hidden] of the type of `rows`.
        total: output, float32 [tokens, hidden].
    """
    total.zero_()
    for row, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        torch.index_select(rows, 0, row, out=picked)
        total.addcmul_(picked, weight[:, None])
