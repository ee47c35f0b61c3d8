"""SmoothQuant: makes activations with a few large channels easier to round to int8.

Channel j of a matrix's input is divided by s_j, and column j of the matrix is multiplied by s_j, so
the product does not change: s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) (Xiao et al. 2023,
arXiv:2211.10438, equation 4). The division is folded into the weights of the preceding norm, so it
costs nothing. The maxima come from a calibration text, which `TextPass` runs through the model
without an engine. Quality benchmarks also use `TextPass`.
"""

from collections.abc import Callable

import torch

from ullage_engine.kernels.arena import BLOCK_TOKENS, StepLimits
from ullage_engine.layers.linear import Linear
from ullage_engine.layers.native_decoder import auto_kv_type, library_refusal
from ullage_engine.model_config.dtypes import KvDtype
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.prepare import MATRICES
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner, Wrap


class TextPass:
    """Runs a model over a text, one window at a time. Windows are independent of each other."""

    def __init__(
        self,
        loaded: LoadedModel,
        dtype: torch.dtype,
        window: int,
        wrap: Wrap | None = None,
        kv_dtype: KvDtype = "auto",
    ) -> None:
        """Allocate the buffers of a pass.

        Args:
            loaded: the model.
            dtype: dtype in which the model computes.
            window: maximum number of tokens per window.
            wrap: returns a replacement for each linear layer. If there is no such function, the
                results match those of an engine with default dtypes.
            kv_dtype: dtype in which KV is stored.
        """
        limits = StepLimits(
            max_tokens=window,
            max_rows=1,
            max_model_len=window,
            gather_tokens=window,
            itemsize=dtype.itemsize,
            fp8_kv=kv_dtype == "fp8",
        )
        device = next(iter(loaded.tensors.values())).device
        refusal = library_refusal(loaded, limits, device, dtype) if wrap is None else "wrapped"
        kv_type = auto_kv_type(refusal, dtype)
        self._runner = ModelRunner(loaded, device, dtype, limits, wrap=wrap, kv_type=kv_type)
        self._runner.allocate_arena()
        self._runner.allocate_kv(-(-window // BLOCK_TOKENS))

    @property
    def kv_token_bytes(self) -> int:
        """Size of one token's KV in bytes."""
        return self._runner.kv_block_bytes // BLOCK_TOKENS

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Compute the hidden states after the last layer. They are valid until the next call."""
        chunk = Chunk(
            request_id="text",
            token_ids=tokens,
            start=0,
            block_ids=list(range(-(-len(tokens) // BLOCK_TOKENS))),
            sampling=None,
            history=tokens,
            num_prompt_tokens=len(tokens),
        )
        return self._runner.hidden(StepPlan([chunk]))

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Compute the next-token logits at each token, [tokens, vocab]."""
        hidden = self.hidden(tokens)
        out = hidden.new_empty(len(tokens), self._runner.model_config.vocab)
        self._runner.write_logits(hidden, out)
        return out


WINDOW = 512
"""Number of tokens of the calibration text that are computed at once."""

FED_BY = {"qkv": "mixer_norm", "conv_in": "mixer_norm", "gate_up": "mlp_norm"}
"""The norm that produces each matrix's input, keyed by matrix name."""

_LEAST = 1e-5

Maxima = dict[str, torch.Tensor]
"""Largest |activation| of each of a matrix's input channels, float32 [in], keyed by matrix name."""


class ActivationRecorder:
    """A linear layer that records the largest absolute activation of each input channel."""

    def __init__(self, matrix: Linear, largest: torch.Tensor) -> None:
        self._matrix = matrix
        self._largest = largest

    @property
    def shape(self) -> tuple[int, int]:
        return self._matrix.shape

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._record(x)
        self._matrix.forward(x, out)

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._record(x)
        self._matrix.forward_add(x, out)

    def _record(self, x: torch.Tensor) -> None:
        torch.maximum(self._largest, x.abs().amax(dim=0).float(), out=self._largest)


def calibrate(
    loaded: LoadedModel,
    dtype: torch.dtype,
    tokens: list[int],
    progress: Callable[[int, int], None],
) -> Maxima:
    """Run the model over a text, and return the largest input activations of each matrix.

    Args:
        loaded: the model.
        dtype: the computing dtype.
        tokens: the text.
        progress: called with the completed and the total number of tokens.
    """
    maxima: Maxima = {}

    def wrap(name: str, matrix: Linear) -> Linear:
        if name.rpartition(".")[2] not in MATRICES:
            return matrix
        maxima[name] = torch.zeros(matrix.shape[0])
        return ActivationRecorder(matrix, maxima[name])

    text = TextPass(loaded, dtype, WINDOW, wrap)
    for start in range(0, len(tokens), WINDOW):
        progress(start, len(tokens))
        text.hidden(tokens[start : start + WINDOW])
    return maxima


def smoothing(
    activations: torch.Tensor, weights: torch.Tensor, norm: torch.Tensor, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a norm's new weights, and the factors for the columns of the matrix.

    Args:
        activations: largest |activation| of each channel, [in].
        weights: weights of the matrix, [out, in].
        norm: weights of the norm, [in]. The new weights have the same dtype.
        alpha: fraction of the quantisation difficulty that moves to the weights.
    """
    largest = weights.abs().amax(dim=0).float().clamp_(min=_LEAST)
    scales = _balance(activations.clamp(min=_LEAST), largest, alpha)
    new = (norm.float() / scales.clamp_(min=_LEAST)).to(norm.dtype)
    # The matrix compensates the rounding to the norm's type, so the product does not change.
    exact = torch.where(new == 0, torch.ones_like(scales), norm.float() / new.float())
    return torch.where(new == 0, norm, new), exact


def _balance(activations: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return activations^alpha / weights^(1 - alpha), computed in float64 and rounded once."""
    powers = activations.double().numpy() ** alpha
    return torch.from_numpy(powers / weights.double().numpy() ** (1.0 - alpha)).float()
