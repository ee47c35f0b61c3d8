"""SmoothQuant: activations with a few large channels are made easier to round to int8.

Channel j of a matrix's input is divided by s_j and column j of the matrix multiplied by it, which
leaves the product as it is: s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) (Xiao et al. 2023,
arXiv:2211.10438, equation 4). The division is folded into the weights of the norm before the
matrix, so it costs nothing. Maxima are those of a calibration text.
"""

from collections.abc import Callable

import torch

from ullage_engine.layers.matrix import Matrix
from ullage_engine.quant.passes import TextPass
from ullage_engine.weights.prepared import MATRICES
from ullage_engine.weights.store import LoadedModel

WINDOW = 512
"""Tokens that are computed at once."""

FED_BY = {"qkv": "mixer_norm", "conv_in": "mixer_norm", "gate_up": "mlp_norm"}
"""Matrices whose input is a norm's output."""

_LEAST = 1e-5

Maxima = dict[str, torch.Tensor]
"""Of a matrix by name: the largest |activation| of each of its columns, float32 [in]."""


class Recorder:
    """A matrix that remembers the largest activations it was multiplied by."""

    def __init__(self, matrix: Matrix, largest: torch.Tensor) -> None:
        self._matrix, self._largest = matrix, largest

    @property
    def shape(self) -> tuple[int, int]:
        return self._matrix.shape

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._record(x)
        self._matrix.multiply(x, out)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._record(x)
        self._matrix.add(x, out)

    def _record(self, x: torch.Tensor) -> None:
        torch.maximum(self._largest, x.abs().amax(dim=0).float(), out=self._largest)


def calibrate(
    loaded: LoadedModel,
    dtype: torch.dtype,
    tokens: list[int],
    progress: Callable[[int, int], None],
) -> Maxima:
    """Runs a text through the model; tokens are counted by `progress`."""
    maxima: Maxima = {}

    def wrap(name: str, matrix: Matrix) -> Matrix:
        if name.rpartition(".")[2] not in MATRICES:
            return matrix
        maxima[name] = torch.zeros(matrix.shape[0])
        return Recorder(matrix, maxima[name])

    text = TextPass(loaded, dtype, WINDOW, wrap)
    for start in range(0, len(tokens), WINDOW):
        progress(start, len(tokens))
        text.hidden(tokens[start : start + WINDOW])
    return maxima


def smoothing(
    activations: torch.Tensor, weights: torch.Tensor, norm: torch.Tensor, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm's new weights, of its type, and what the matrix's columns are multiplied by.

    Args:
        activations: largest of each column, [in].
        weights: [out, in].
        norm: [in].
    """
    largest = weights.abs().amax(dim=0).float().clamp_(min=_LEAST)
    scales = activations.clamp(min=_LEAST) ** alpha / largest ** (1 - alpha)
    new = (norm.float() / scales.clamp_(min=_LEAST)).to(norm.dtype)
    # What the norm's type rounded away the matrix takes back, so the product stays as it was.
    exact = torch.where(new == 0, torch.ones_like(scales), norm.float() / new.float())
    return torch.where(new == 0, norm, new), exact
