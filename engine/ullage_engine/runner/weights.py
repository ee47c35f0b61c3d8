"""The linear layers of a loaded model, plain or quantised."""

from collections.abc import Iterator

import msgspec
import torch

from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import StepLimits, mxfp4_scratch_bytes
from ullage_engine.kernels.kv_pool import shaped
from ullage_engine.layers.attention import AttentionBackend
from ullage_engine.layers.decoder import Weights
from ullage_engine.layers.linear import (
    Linear,
    TiledEmbedding,
    quantized_linear,
    row_invariant_linear,
    scratch_bytes,
)
from ullage_engine.layers.moe import (
    ExpertLinears,
    LoopedExperts,
    Reduce,
    decodes,
    expert_linears,
    mxfp4_experts,
    picked_experts,
)
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.parallel.pipeline import PipelineRank
from ullage_engine.parallel.slices import ROW_PARALLEL
from ullage_engine.quantization.formats import MXFP4_GROUP, Encoding, Packed


class RowParallelLinear:
    """Linear layer whose inputs are split over ranks, which sum their partial results."""

    def __init__(self, part: Linear, reduce: Reduce, buffer: torch.Tensor) -> None:
        """Create the layer for this rank's part of the inputs.

        Args:
            part: this rank's slice of the layer, [this rank's inputs, out].
            reduce: sums a tensor over the ranks.
            buffer: flat tensor, large enough for the largest result.
        """
        self.shape = part.shape
        self._part = part
        self._reduce = reduce
        self._buffer = buffer

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._part.forward(x, out)
        self._reduce(out)

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        product = shaped(self._buffer, *out.shape)
        self.forward(x, product)
        out.add_(product)


def linear_scratch_bytes(loaded: LoadedModel, limits: StepLimits, device: torch.device) -> int:
    """Return the size in bytes of the scratch memory for matmuls with quantised matrices."""
    packed = any(each.format == "mxfp4" for each in loaded.encodings.values())
    decoded = mxfp4_scratch_bytes(device.type, limits.itemsize) if packed and decodes(device) else 0
    encodings = [each for each in _encodings_of_products(loaded) if each.format != "mxfp4"]
    others = scratch_bytes(encodings, limits.itemsize, deterministic=limits.deterministic)
    return max(decoded, others)


def model_weights(
    loaded: LoadedModel,
    limits: StepLimits,
    backend: AttentionBackend,
    dtype: torch.dtype,
    scratch: torch.Tensor,
    rank: PipelineRank | None = None,
) -> Weights:
    """Create the linear layers of a model, or of one rank's part of it.

    Args:
        loaded: tensors of the model or of the rank's part.
        limits: limits of a step.
        backend: creates unquantised layers.
        dtype: type of activations.
        scratch: uint8 tensor of `linear_scratch_bytes` bytes, shared by all layers.
        rank: the rank's part in its group. None if this process holds the whole model.
    """
    reduce = rank.reduce if rank else None
    tensors = loaded.tensors
    deterministic = limits.deterministic
    fused = triton.quantized_matmul if triton.runs_on(_device(loaded)) else None

    def quantized(packed: Packed) -> Linear:
        if deterministic:
            return row_invariant_linear(packed, dtype, scratch, backend.linear)
        return quantized_linear(packed, dtype, scratch, fused)

    def linear(name: str) -> Linear:
        is_packed = name in loaded.encodings
        matrix = quantized(loaded.packed(name)) if is_packed else backend.linear(tensors[name])
        if rank and reduce and name.rpartition(".")[2] in ROW_PARALLEL:
            return RowParallelLinear(matrix, reduce, rank.partial_sums)
        return matrix

    def experts(name: str) -> ExpertLinears:
        if name not in loaded.encodings:
            return expert_linears(tensors[name], backend.linear, deterministic)

        stored = loaded.packed(name)
        count = _num_experts(loaded)
        if stored.encoding.format == "mxfp4":
            blocks = stored.values.view(count, -1, stored.encoding.num_groups, MXFP4_GROUP // 2)
            scales = stored.scales.view(count, -1, stored.encoding.num_groups)
            return mxfp4_experts(blocks, scales, dtype, scratch)

        picked = picked_experts(stored, count) if fused and not deterministic else None
        if picked is not None:
            return picked
        return LoopedExperts([quantized(part) for part in stored.split(count)], deterministic)

    has_tiles = "embedding" in loaded.encodings
    embedding = TiledEmbedding(loaded.packed("embedding")) if has_tiles else None
    return Weights(tensors, linear, experts, embedding, reduce)


def _encodings_of_products(loaded: LoadedModel) -> Iterator[Encoding]:
    """Yield the encoding of the matrix that each quantised matmul reads.

    For stacked experts, this is the encoding of a single expert's matrix.
    """
    for name, encoding in loaded.encodings.items():
        rows, columns = encoding.shape
        if ".experts_" in name:
            rows //= _num_experts(loaded)
        yield msgspec.structs.replace(encoding, shape=(rows, columns))


def _device(loaded: LoadedModel) -> torch.device:
    return next(iter(loaded.tensors.values())).device


def _num_experts(loaded: LoadedModel) -> int:
    assert loaded.model_config.experts is not None, "weights of experts, and no experts"
    return loaded.model_config.experts.num_experts
