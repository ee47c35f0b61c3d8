"""LFM2's gated short convolution over a flat batch of sequences.

B, C, u = in(x);  y_t = C_t · Σ_j w_j (B·u)_{t-k+1+j};  hidden += out(y)

A sequence's state is the last k - 1 rows of B·u. All rows that a step's taps read lie in one
matrix: those the step computes, then each chunk's state (see `ConvPlan`).
"""

from dataclasses import dataclass

import torch

from ullage_engine.core.batch import ConvPlan
from ullage_engine.layers.matrix import Matrix
from ullage_engine.layers.step import Step
from ullage_engine.models.geometry import ModelGeometry


class ConvStep:
    """What all convolution layers share in one step."""

    def __init__(self, step: Step, geometry: ModelGeometry, plan: ConvPlan) -> None:
        tokens, channels = step.tokens, geometry.conv_channels
        columns = geometry.conv_kernel - 1
        source_rows = tokens + len(plan.slots) * columns
        self.projected = step.view("conv_in", step.rows, 3 * channels)
        self.mixed = step.view("conv_mixed", step.rows, channels)
        self.source = step.view("conv_source", source_rows, channels)
        self.tapped = step.view("conv_tapped", tokens, channels)
        self.kept = step.view("conv_kept", len(plan.slots) * columns, channels)
        self.products = self.source[:tokens]
        self.states = self.source[tokens:].view(-1, columns, channels)
        self.out = self.mixed[:tokens]
        self.b, self.c, self.u = self.projected[:tokens].chunk(3, dim=1)
        # The last tap is the row itself.
        self.taps = [step.indices(rows) for rows in plan.taps[:-1]]
        self.tails = step.indices(plan.tails)
        self.slots = step.indices(plan.slots)
        self.next_slots = step.indices(plan.next_slots)
        self.fresh = step.indices(plan.fresh) if plan.fresh else None


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """One layer's weights; `taps` is [kernel, channels], the oldest first."""

    project: Matrix
    taps: torch.Tensor
    output: Matrix

    def run(self, step: Step, shared: ConvStep, state: torch.Tensor) -> None:
        """Adds the layer's result for `step.normed` to `step.hidden`.

        state [slots, kernel - 1, channels]: one slot of each chunk is read, another written.
        """
        self.project.multiply(step.normed, shared.projected)
        torch.mul(shared.b, shared.u, out=shared.products)
        torch.index_select(state, 0, shared.slots, out=shared.states)
        if shared.fresh is not None:
            shared.states.index_fill_(0, shared.fresh, 0)
        torch.mul(shared.products, self.taps[-1], out=shared.out)
        for rows, weight in zip(shared.taps, self.taps, strict=False):
            torch.index_select(shared.source, 0, rows, out=shared.tapped)
            shared.out.addcmul_(shared.tapped, weight)
        torch.index_select(shared.source, 0, shared.tails, out=shared.kept)
        state.index_copy_(0, shared.next_slots, shared.kept.view_as(shared.states))
        shared.out.mul_(shared.c)
        self.output.add(shared.mixed, step.hidden)
