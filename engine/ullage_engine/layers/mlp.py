"""The gated feed-forward layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ullage_engine.layers.matrix import Matrix
from ullage_engine.layers.step import Step
from ullage_engine.memory.rungs import SERIAL_ELEMENTS
from ullage_engine.models.geometry import ModelGeometry


class MlpStep:
    """What all dense feed-forward layers share in one step."""

    def __init__(self, step: Step, geometry: ModelGeometry, deterministic: bool) -> None:
        self.gate_up = step.view("gate_up", step.rows, 2 * geometry.intermediate)
        self.gated = step.view("gated", step.rows, geometry.intermediate)
        self.rows_at_once = step.rows
        """Rows gated by one operation."""
        if deterministic:
            self.rows_at_once = max(1, SERIAL_ELEMENTS // geometry.intermediate)


@dataclass(frozen=True, slots=True)
class MlpLayer:
    """hidden += down(silu(gate x) · up x)."""

    gate_up: Matrix
    down: Matrix

    def run(self, step: Step, shared: MlpStep) -> None:
        """Adds the layer's result for `step.normed` to `step.hidden`."""
        self.gate_up.multiply(step.normed, shared.gate_up)
        for start in range(0, step.rows, shared.rows_at_once):
            rows = slice(start, start + shared.rows_at_once)
            gate(shared.gate_up[rows], shared.gated[rows])
        self.down.add(shared.gated, step.hidden)


def gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Writes silu(gate) * up for gate_up [tokens, 2 * intermediate]; changes its gate half."""
    width = out.shape[-1]
    torch.mul(F.silu(gate_up[:, :width], inplace=True), gate_up[:, width:], out=out)
