"""The gated feed-forward layer."""

import torch
import torch.nn.functional as F


def gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Writes silu(gate) * up for gate_up [tokens, 2 * intermediate]; changes its gate half."""
    width = out.shape[-1]
    torch.mul(F.silu(gate_up[:, :width], inplace=True), gate_up[:, width:], out=out)
