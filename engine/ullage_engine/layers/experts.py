"""The mixture of experts: hidden += Σ weight · down(gate(gate_up x)), over a token's experts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ullage_engine.kernels.buffers import shaped
from ullage_engine.kernels.experts import add_biases, choose, combine, sort_pairs
from ullage_engine.layers.expert_matrices import ExpertMatrices
from ullage_engine.layers.matrix import Matrix
from ullage_engine.memory.experts import SLICE_TOKENS, padding_rows
from ullage_engine.memory.rungs import SERIAL_ELEMENTS, UNIT_ROWS
from ullage_engine.models.geometry import ExpertsSpec

Gate = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes the gated half of gate_up [rows, 2 * width] to out [rows, width]; may change gate_up."""

Reduce = Callable[[torch.Tensor], None]
"""Adds up, in place, what every rank has computed of [tokens, hidden]."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer, or this rank's slice of each expert's width."""

    router: Matrix
    """[hidden, experts]."""
    gate_up: ExpertMatrices
    """[hidden, 2 * width] each."""
    down: ExpertMatrices
    """[width, hidden] each."""
    gate: Gate
    router_bias: torch.Tensor | None = None
    """float32 [experts], added to what experts are chosen by."""
    gate_up_bias: torch.Tensor | None = None
    """[experts, 2 * width]."""
    down_bias: torch.Tensor | None = None
    """[experts, hidden]. Of several ranks one alone has it, because their results are added."""


class Experts:
    """One layer of experts, computed in buffers that it shares with all others.

    Few pairs of token and expert are multiplied one by one. More are sorted by expert, so that
    each expert multiplies all its rows together, and a slice of tokens is computed after another.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        weights: ExpertWeights,
        arena: dict[str, torch.Tensor],
        deterministic: bool = False,
        reduce: Reduce | None = None,
    ) -> None:
        """`arena` has the buffers of `ullage_engine.memory.experts`; `reduce` is for ranks that
        each have a slice of every expert."""
        self._spec, self._weights, self._arena, self._reduce = spec, weights, arena, reduce
        self._experts = torch.arange(spec.num_experts, device=arena["expert_rows"].device)
        self._deterministic = deterministic
        self._few_pairs = min(weights.gate_up.few_pairs, weights.down.few_pairs)

    def run(self, normed: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the experts' result for normed [tokens, hidden] to out [tokens, hidden].

        Deterministic: rows are whole units of `ullage_engine.memory.rungs`.
        """
        for start in range(0, normed.shape[0], SLICE_TOKENS):
            rows = slice(start, start + SLICE_TOKENS)
            self._run_slice(normed[rows], out[rows])

    def _run_slice(self, x: torch.Tensor, out: torch.Tensor) -> None:
        chosen, weights = self._route(x)
        few = chosen.numel() <= self._few_pairs
        rows, places = self._run_each(x, chosen) if few else self._run_sorted(x, chosen)
        picked = shaped(self._arena["expert_picked"], *x.shape)
        total = shaped(self._arena["expert_sum"], *x.shape)
        combine(rows, places.view(chosen.shape), weights, picked, total)
        if self._reduce is not None:
            picked.copy_(total)
            self._reduce(picked)
            total = picked
        out.add_(total)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every token's experts, best first, and their weights."""
        tokens, arena = x.shape[0], self._arena
        logits = shaped(arena["expert_logits"], tokens, self._spec.num_experts)
        self._weights.router.multiply(x, logits)
        scores = shaped(arena["expert_scores"], *logits.shape).copy_(logits)
        ranks = shaped(arena["expert_ranks"], *logits.shape)
        chosen = self._indices("expert_chosen", tokens, self._spec.experts_per_token)
        weights = shaped(arena["expert_weights"], *chosen.shape)
        bias = self._weights.router_bias
        for part in self._parts(tokens, self._spec.num_experts, UNIT_ROWS):
            choose(self._spec, scores[part], bias, ranks[part], chosen[part], weights[part])
        return chosen, weights

    def _run_each(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [pairs, hidden] of the experts' results, and the row of each pair."""
        pairs, weights = chosen.view(-1), self._weights
        gate_up, gated, rows = self._buffers(len(pairs))
        weights.gate_up.multiply_each(x, pairs, gate_up)
        self._gate(gate_up, gated, pairs)
        weights.down.multiply_each(gated, pairs, rows)
        if weights.down_bias is not None:
            add_biases(rows, weights.down_bias, pairs)
        return rows, torch.arange(len(pairs), out=self._indices("expert_places", len(pairs)))

    def _run_sorted(
        self, x: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, with all rows of an expert in one product."""
        pairs, weights = chosen.numel(), self._weights
        experts, order, places = (
            self._indices(name, pairs)
            for name in ("expert_sorted", "expert_order", "expert_places")
        )
        ends = self._arena["expert_ends"].view(torch.int32)
        sort_pairs(chosen.view(-1), self._experts, experts, order, places, ends)
        gate_up, gated, rows = self._buffers(pairs + padding_rows(pairs))
        torch.index_select(x, 0, order.floor_divide_(chosen.shape[1]), out=rows[:pairs])
        weights.gate_up.multiply(rows, ends, pairs, gate_up)
        self._gate(gate_up[:pairs], gated[:pairs], experts)
        weights.down.multiply(gated, ends, pairs, rows)
        if weights.down_bias is not None:
            add_biases(rows[:pairs], weights.down_bias, experts)
        return rows, places

    def _gate(self, gate_up: torch.Tensor, gated: torch.Tensor, experts: torch.Tensor) -> None:
        if self._weights.gate_up_bias is not None:
            add_biases(gate_up, self._weights.gate_up_bias, experts)
        for part in self._parts(len(gated), gated.shape[1], 1):
            self._weights.gate(gate_up[part], gated[part])

    def _parts(self, rows: int, width: int, unit: int) -> list[slice]:
        """Rows of one operation on each element: all, or as many as one thread computes."""
        size = max(unit, SERIAL_ELEMENTS // width // unit * unit) if self._deterministic else rows
        return [slice(start, start + size) for start in range(0, rows, size)]

    def _buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """gate_up [rows, 2 * width], gated [rows, width] and rows [rows, hidden]."""
        width, arena = self._spec.intermediate, self._arena
        hidden = self._weights.router.shape[0]
        return (
            shaped(arena["expert_gate_up"], rows, 2 * width),
            shaped(arena["expert_gated"], rows, width),
            shaped(arena["expert_rows"], rows, hidden),
        )

    def _indices(self, name: str, *shape: int) -> torch.Tensor:
        return shaped(self._arena[name].view(torch.int64), *shape)
