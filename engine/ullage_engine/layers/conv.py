"""LFM2's gated short convolution over a flat batch of sequences.

B, C, u = in(x);  y_t = C_t · Σ_j w_j (B·u)_{t-k+1+j};  hidden += out(y)

A sequence's state is the last k - 1 rows of B·u. All rows that a step's taps read lie in one
matrix: those the step computes, then each chunk's state (see `ConvPlan`).
"""

from dataclasses import dataclass

import torch

from ullage_engine.core.batch import ConvPlan
from ullage_engine.kernels.triton import Convolution, fused_convolution
from ullage_engine.layers.matrix import Matrix
from ullage_engine.layers.step import Step
from ullage_engine.models.geometry import ModelGeometry


class ConvStep:
    """What all convolution layers share in one step."""

    def __init__(self, step: Step, geometry: ModelGeometry, plan: ConvPlan, *, fused: bool) -> None:
        """`fused`: by one kernel, which needs no buffers of the arena."""
        channels = geometry.conv_channels
        self.projected = step.view("conv_in", step.rows, 3 * channels)
        self.mixed = step.view("conv_mixed", step.rows, channels)
        rows, out = self.projected[: step.tokens], self.mixed[: step.tokens]
        self.convolution: Convolution = (
            fused_convolution(plan, rows, out)
            if fused
            else GatheredConvolution(step, geometry, plan, rows, out)
        )


class GatheredConvolution:
    """Rows are gathered once a tap; for any device."""

    def __init__(
        self,
        step: Step,
        geometry: ModelGeometry,
        plan: ConvPlan,
        projected: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """projected [tokens, 3 * channels] into out [tokens, channels]."""
        tokens, channels = out.shape
        state_rows = len(plan.slots) * (geometry.conv_kernel - 1)
        self._b, self._c, self._u = projected.chunk(3, dim=1)
        self._out = out
        self._source = step.view("conv_source", tokens + state_rows, channels)
        self._tapped = step.view("conv_tapped", tokens, channels)
        self._kept = step.view("conv_kept", state_rows, channels)
        self._products = self._source[:tokens]
        self._states = self._source[tokens:].view(len(plan.slots), -1, channels)
        # The last tap is the row itself.
        self._taps = [step.indices(rows) for rows in plan.taps[:-1]]
        self._tails = step.indices(plan.tails)
        self._slots = step.indices(plan.slots)
        self._next_slots = step.indices(plan.next_slots)
        self._fresh = step.indices(plan.fresh) if plan.fresh else None

    def run(self, taps: torch.Tensor, state: torch.Tensor) -> None:
        torch.mul(self._b, self._u, out=self._products)
        torch.index_select(state, 0, self._slots, out=self._states)
        if self._fresh is not None:
            self._states.index_fill_(0, self._fresh, 0)
        torch.mul(self._products, taps[-1], out=self._out)
        for rows, weight in zip(self._taps, taps, strict=False):
            torch.index_select(self._source, 0, rows, out=self._tapped)
            self._out.addcmul_(self._tapped, weight)
        torch.index_select(self._source, 0, self._tails, out=self._kept)
        state.index_copy_(0, self._next_slots, self._kept.view_as(self._states))
        self._out.mul_(self._c)


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
        shared.convolution.run(self.taps, state)
        self.output.add(shared.mixed, step.hidden)
