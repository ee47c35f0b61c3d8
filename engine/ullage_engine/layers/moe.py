"""The mixture of experts: hidden += Σ weight · down(gate(gate_up x)), over a token's experts.

The linear layers hold one matrix per expert. Depending on the implementation, a call multiplies by
one matrix after another or by all matrices in one grouped matmul. For a few tokens, it may use
only the matrices of the experts chosen for them.

MXFP4, in which gpt-oss stores its experts, has 4 bits per element and 8 bits for the scale of each
group of 32. An element has 1 sign bit, 2 exponent bits and 1 mantissa bit. A scale is the power of
two 2^(byte - 127), and byte 255 is NaN (OCP Microscaling Formats 1.0). Weights stay packed. One
panel of rows at a time is decoded into scratch memory and multiplied from there. The decoded values
are exact in float32 and bfloat16.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import (
    INT32_BYTES,
    SERIAL_ELEMENTS,
    UNIT_ROWS,
    mxfp4_panel,
    pad_rows,
    pad_to_bucket,
    padding_rows,
)
from ullage_engine.kernels.kv_pool import shaped
from ullage_engine.kernels.moe import add_biases, choose, combine, sort_pairs
from ullage_engine.layers.linear import Linear, has_kernel
from ullage_engine.model_config.model_config import ExpertsSpec
from ullage_engine.quantization.formats import MXFP4_GROUP as GROUP
from ullage_engine.quantization.formats import Format, Packed, mxfp4_numbers, mxfp4_powers

if TYPE_CHECKING:
    from ullage_engine.kernels.triton.matmul import TritonExperts

GROUPED_ALIGNMENT = 16
"""Alignment in bytes of the rows that `grouped_mm` multiplies."""

PANEL_ELEMENTS = 1 << 24
"""Number of elements of a grouped matmul that are computed at once.

`grouped_mm` has no `out` parameter, so this caps the size of the temporary tensor.
"""

PANEL_COLUMNS = 16
"""Minimum number of columns in a panel. The number of columns is always a multiple of this."""

FEW_PAIRS = 4
"""Maximum number of (token, expert) pairs that a CPU multiplies one by one.

A single token has this many pairs. With two tokens, an expert that both chose would be read twice.
The command `python -m benchmarks experts` measures this.
"""

EXPERT_KERNELS: dict[Format, triton.Format] = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "fp8",
    "w8a8": "int8",
}
"""The format that Triton kernels use for each format of expert weights.

These kernels do not round the activations of w8a8 experts. Each expert has few rows, so the gain
comes from reading smaller weights.
"""

_WORDS = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
"""Integer dtype as wide as two elements of the dtype that is the key."""

GatedActivation = Callable[[torch.Tensor, torch.Tensor], None]
"""Function that computes the gated activation of gate_up [rows, 2 * width] into out [rows, width].

The function may overwrite gate_up.
"""

Reduce = Callable[[torch.Tensor], None]
"""Function that sums a tensor [tokens, hidden] over all ranks, in place."""


class ExpertLinears(Protocol):
    """Linear layers for all experts of a decoder layer, one weight matrix [in, out] per expert."""

    @property
    def few_pairs(self) -> int:
        """Maximum number of pairs for which `forward_each` beats sorting followed by `forward`."""
        ...

    @property
    def reads_ends(self) -> bool:
        """Whether `forward` needs its argument `ends` in host memory."""
        ...

    def forward(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        """Multiply each row by its expert's matrix, for rows sorted by expert.

        Args:
            x: [pairs and padding, in], sorted by expert. Padding rows may be overwritten.
            ends: int32 [experts], the end of each expert's rows, on the host if `reads_ends`,
                otherwise on the device.
            pairs: number of rows without padding.
            out: [pairs and padding, out]. The content of padding rows is undefined.
        """
        ...

    def forward_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply each row by its expert's matrix, for a few rows in any order.

        Args:
            x: [pairs, in], or [tokens, in] if the pairs of a token are consecutive.
            chosen: expert of each pair, [pairs].
            out: [pairs, out].
        """
        ...


class LoopedExperts:
    """Expert linear layers of any type, computed one expert after another.

    On a CPU, an expert's row count is rounded up to a size for which matmuls are prepared, so the
    matmul also covers rows of the next expert. Those rows hold wrong results until the next
    expert's matmul overwrites them.
    """

    def __init__(self, matrices: Sequence[Linear], deterministic: bool = False) -> None:
        """Create a layer that multiplies the rows of each expert by that expert's matrix.

        Args:
            matrices: one matrix for each expert.
            deterministic: whether each matmul's rows are padded to a multiple of a fixed number, so
                that results do not depend on the batch (`ullage_engine.kernels.arena`).
        """
        self._matrices = matrices
        self._deterministic = deterministic

    @property
    def few_pairs(self) -> int:
        return 0 if self._deterministic else FEW_PAIRS

    @property
    def reads_ends(self) -> bool:
        return True

    def forward_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        share = out.shape[0] // x.shape[0]
        for pair, expert in enumerate(chosen.tolist()):
            row = pair // share
            self._matrices[expert].forward(x[row : row + 1], out[pair : pair + 1])

    def forward(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        x[pairs:].zero_()
        start = 0
        for matrix, end in zip(self._matrices, ends.tolist(), strict=True):
            if end > start:
                rows = slice(start, start + self._padded(end - start, x.device))
                matrix.forward(x[rows], out[rows])
            start = end

    def _padded(self, rows: int, device: torch.device) -> int:
        if self._deterministic:
            return pad_rows(rows)
        return pad_to_bucket(rows) if device.type == "cpu" else rows


class GroupedExperts(LoopedExperts):
    """Unquantised linear layers, computed by one grouped matmul with group sizes on the device.

    Before compute capability 9.0, torch copies the group sizes to the host and runs a loop.
    """

    def __init__(self, weights: torch.Tensor, matrices: Sequence[Linear]) -> None:
        """Create layers from `weights` [experts, out, in]. `matrices` has one layer per expert."""
        super().__init__(matrices)
        self._weights = weights

    @property
    def few_pairs(self) -> int:
        return 0

    @property
    def reads_ends(self) -> bool:
        return False

    def forward(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        for columns in column_panels(self._weights.shape[1], PANEL_ELEMENTS // pairs):
            panel = self._weights[:, columns].transpose(1, 2)
            out[:pairs, columns].copy_(F.grouped_mm(x[:pairs], panel, offs=ends))


@dataclass(frozen=True, slots=True)
class PickedExperts:
    """Expert linear layers that combine two implementations.

    `few` multiplies a small number of (token, expert) pairs in any order. `many` multiplies any
    number of pairs that are sorted by expert.
    """

    few: ExpertLinears
    many: ExpertLinears

    @property
    def encoding(self) -> object:
        """Encoding of the weights in `few`, or None if `few` has no `encoding` attribute."""
        return getattr(self.few, "encoding", None)

    @property
    def few_pairs(self) -> int:
        return self.few.few_pairs

    @property
    def reads_ends(self) -> bool:
        return self.many.reads_ends

    def forward_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        self.few.forward_each(x, chosen, out)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        self.many.forward(x, ends, pairs, out)


def expert_linears(
    weights: torch.Tensor, matrix: Callable[[torch.Tensor], Linear], deterministic: bool
) -> ExpertLinears:
    """Create the fastest linear layers for unquantised weights [experts, out, in].

    `matrix` creates the layer of one expert.
    """
    matrices = [matrix(each) for each in weights]
    if deterministic or not weights.is_cuda:
        return LoopedExperts(matrices, deterministic)

    many = GroupedExperts(weights, matrices) if can_group(weights) else LoopedExperts(matrices)
    if not triton.runs_on(weights.device):
        return many
    return PickedExperts(packed_experts(weights, None, "plain"), many)


def packed_experts(
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    format: triton.Format,
    zeros: torch.Tensor | None = None,
) -> "TritonExperts":
    """Create linear layers that read weights [experts, out, ...] with Triton kernels."""
    # Imported here because Triton is not installed everywhere.
    from ullage_engine.kernels.triton.matmul import TritonExperts

    return TritonExperts(packed, scales, zeros, format)


def picked_experts(packed: Packed, count: int) -> ExpertLinears | None:
    """Create linear layers that use Triton kernels, which find each expert's rows on the device.

    Args:
        packed: quantised matrices of all experts, stacked along their rows.
        count: number of experts.

    Returns:
        The layers, or None if no kernel supports this group size.
    """
    format = EXPERT_KERNELS[packed.encoding.format]
    if not has_kernel(packed.encoding, format):
        return None

    values = packed.values.view(count, -1, packed.values.shape[1])
    scales = packed.scales.view(count, -1, packed.scales.shape[1])
    zeros = None if packed.zeros is None else packed.zeros.view(scales.shape)
    return packed_experts(values, scales, format, zeros)


def can_group(weights: torch.Tensor) -> bool:
    """Return whether CUDA can multiply weights [experts, out, in] in one grouped matmul."""
    return (
        hasattr(F, "grouped_mm")
        and weights.dtype == torch.bfloat16
        and all(size * weights.itemsize % GROUPED_ALIGNMENT == 0 for size in weights.shape[1:])
    )


def column_panels(columns: int, max_columns: int) -> list[slice]:
    """Split columns into panels of at most `max_columns` columns.

    Panel sizes are multiples of `PANEL_COLUMNS`, which all kernels support.
    """
    size = max(PANEL_COLUMNS, max_columns // PANEL_COLUMNS * PANEL_COLUMNS)
    return [slice(start, min(start + size, columns)) for start in range(0, columns, size)]


def decodes(device: torch.device) -> bool:
    """Return whether MXFP4 weights are decoded before the matmul.

    This is necessary on devices without Triton. Triton kernels decode weights within the matmul.
    """
    return not triton.runs_on(device)


class Mxfp4Decoder:
    """Decodes MXFP4 weights, one panel at a time, into scratch memory that all layers share."""

    def __init__(self, dtype: torch.dtype, scratch: torch.Tensor) -> None:
        """Create a decoder that converts weights to `dtype`.

        `scratch` is a uint8 buffer with at least `mxfp4_scratch_bytes` bytes.

        Raises:
            ValueError: `dtype` cannot represent every scale.
        """
        if dtype not in _WORDS:
            raise ValueError(
                f"model.dtype {str(dtype).removeprefix('torch.')} cannot hold the scales of MXFP4 "
                "weights; use bfloat16 or float32"
            )
        device = scratch.device
        self.elements = mxfp4_panel(device.type)
        """Number of elements in a decoded panel."""

        # The table has both numbers of every byte, low bits first, as one word.
        numbers = mxfp4_numbers().to(dtype)
        pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)
        self._pairs = pairs.view(_WORDS[dtype]).view(-1).to(device)
        self._powers = mxfp4_powers().to(dtype).to(device)

        end = self.elements * dtype.itemsize
        self._values = scratch[:end].view(dtype)
        self._codes = scratch[end : end + self.elements // 2 * INT32_BYTES].view(torch.int32)

    def decode(self, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the decoded values [..., groups * 32], which are valid until the next call.

        Args:
            blocks: packed values, uint8 [..., groups, 16].
            scales: scales, uint8 [..., groups].
        """
        codes = self._codes[: blocks.numel()]
        values = self._values[: 2 * blocks.numel()]
        codes.view(blocks.shape).copy_(blocks)
        torch.index_select(self._pairs, 0, codes, out=values.view(self._pairs.dtype))
        powers = self._powers.index_select(0, scales.reshape(-1).int())
        values.view(-1, GROUP).mul_(powers[:, None])
        return values.view(*scales.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class Mxfp4Linear:
    """Linear layer for one expert's MXFP4 matrix, which is decoded panel by panel."""

    blocks: torch.Tensor
    """Packed values, uint8 [out, groups, 16]. The groups run along `in`."""
    scales: torch.Tensor
    """Scales, uint8 [out, groups]."""
    decoder: Mxfp4Decoder

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[1] * GROUP, self.scales.shape[0]

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for columns in self._panels():
            torch.mm(x, self._decode(columns), out=out[:, columns])

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for columns in self._panels():
            out[:, columns].addmm_(x, self._decode(columns))

    def _panels(self) -> list[slice]:
        return column_panels(self.shape[1], self.decoder.elements // self.shape[0])

    def _decode(self, columns: slice) -> torch.Tensor:
        return self.decoder.decode(self.blocks[columns], self.scales[columns]).t()


class Mxfp4Experts(LoopedExperts):
    """Linear layers for the packed matrices of all experts.

    On a GPU, a panel of every expert is decoded and multiplied in one grouped matmul, so that the
    group sizes stay on the device. On a CPU, experts are decoded one after another, and experts
    without rows are not decoded.
    """

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor, decoder: Mxfp4Decoder) -> None:
        """Create layers from blocks, uint8 [experts, out, groups, 16].

        `scales` is uint8 [experts, out, groups].
        """
        pairs = zip(blocks, scales, strict=True)
        super().__init__([Mxfp4Linear(*each, decoder) for each in pairs])
        self._blocks = blocks
        self._scales = scales
        self._decoder = decoder

    @property
    def few_pairs(self) -> int:
        return 0 if self._blocks.is_cuda else super().few_pairs

    @property
    def reads_ends(self) -> bool:
        return not self._blocks.is_cuda

    def forward(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        if x.is_cuda:
            self.forward_grouped(x, ends, pairs, out)
        else:
            super().forward(x, ends, pairs, out)

    def forward_grouped(
        self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor
    ) -> None:
        """Compute the results of `forward` on a GPU, with one grouped matmul per panel.

        `ends` stays on the device, so the host does not wait for it.
        """
        experts, columns, groups = self._scales.shape
        for panel in column_panels(columns, self._decoder.elements // (experts * groups * GROUP)):
            weights = self._decoder.decode(self._blocks[:, panel], self._scales[:, panel])
            product = F.grouped_mm(x[:pairs], weights.transpose(1, 2), offs=ends)
            out[:pairs, panel].copy_(product)


def mxfp4_experts(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, scratch: torch.Tensor
) -> ExpertLinears:
    """Create the fastest linear layers for MXFP4 weights.

    Triton kernels decode weights within the matmul. Without them (see `decodes`), weights are
    decoded into `scratch`, a uint8 buffer of `mxfp4_scratch_bytes`.
    """
    if not decodes(blocks.device):
        return packed_experts(blocks.flatten(2), scales, "mxfp4")
    return Mxfp4Experts(blocks, scales, Mxfp4Decoder(dtype, scratch))


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one layer's experts, or this rank's slice of every expert."""

    router: Linear
    """Matrix [hidden, experts]."""
    gate_up: ExpertLinears
    """Matrices [hidden, 2 * width], one per expert."""
    down: ExpertLinears
    """Matrices [width, hidden], one per expert."""
    gate: GatedActivation
    router_bias: torch.Tensor | None = None
    """Bias, float32 [experts], added to the scores when experts are chosen."""
    gate_up_bias: torch.Tensor | None = None
    """Bias [experts, 2 * width]."""
    down_bias: torch.Tensor | None = None
    """Bias [experts, hidden]. Only one rank of a group holds it, since ranks sum their results."""


class Experts:
    """One mixture-of-experts layer, computed in buffers that all such layers share.

    If there are only a few (token, expert) pairs, they are multiplied one by one. If not, the pairs
    are sorted by expert, so that all rows of an expert are multiplied together. Tokens are
    processed in slices, one after another.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        weights: ExpertWeights,
        arena: dict[str, torch.Tensor],
        deterministic: bool = False,
        reduce: Reduce | None = None,
    ) -> None:
        """Create one layer.

        Args:
            spec: the experts of the model.
            weights: weights of this layer.
            arena: buffers of `ullage_engine.kernels.arena`.
            deterministic: whether results are batch-invariant.
            reduce: sums a tensor over the ranks, each of which has a slice of every expert. None if
                there is only one rank.
        """
        self._spec = spec
        self._weights = weights
        self._arena = arena
        self._reduce = reduce
        self._experts = torch.arange(spec.num_experts, device=arena["expert_rows"].device)
        self._deterministic = deterministic
        self._few_pairs = min(weights.gate_up.few_pairs, weights.down.few_pairs)
        # The size of a slice follows from the arena's, so that only the arena's layout decides it.
        self._slice_tokens = arena["expert_weights"].numel() // spec.experts_per_token

    @property
    def matrices(self) -> tuple[ExpertLinears, ExpertLinears]:
        return self._weights.gate_up, self._weights.down

    def run(self, normed: torch.Tensor, out: torch.Tensor) -> None:
        """Add the experts' output for normed [tokens, hidden] to out [tokens, hidden].

        A deterministic layer requires a multiple of `UNIT_ROWS` rows
        (`ullage_engine.kernels.arena`).
        """
        for start in range(0, normed.shape[0], self._slice_tokens):
            rows = slice(start, start + self._slice_tokens)
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
        """Choose each token's experts, best first. Return the experts and their weights."""
        tokens = x.shape[0]
        arena = self._arena
        logits = shaped(arena["expert_logits"], tokens, self._spec.num_experts)
        self._weights.router.forward(x, logits)

        scores = shaped(arena["expert_scores"], *logits.shape).copy_(logits)
        ranks = shaped(arena["expert_ranks"], *logits.shape)
        chosen = self._indices("expert_chosen", tokens, self._spec.experts_per_token)
        weights = shaped(arena["expert_weights"], *chosen.shape)
        bias = self._weights.router_bias
        for part in self._parts(tokens, self._spec.num_experts, UNIT_ROWS):
            choose(self._spec, scores[part], bias, ranks[part], chosen[part], weights[part])
        return chosen, weights

    def _run_each(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the (token, expert) pairs one by one.

        Returns:
            The results [pairs, hidden], and the row of each pair in these results.
        """
        pairs = chosen.view(-1)
        weights = self._weights
        gate_up, gated, rows = self._buffers(len(pairs))
        weights.gate_up.forward_each(x, pairs, gate_up)
        self._gate(gate_up, gated, pairs)
        weights.down.forward_each(gated, pairs, rows)
        if weights.down_bias is not None:
            add_biases(rows, weights.down_bias, pairs)
        return rows, torch.arange(len(pairs), out=self._indices("expert_places", len(pairs)))

    def _run_sorted(
        self, x: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the same as `_run_each`, but with one matmul for all rows of an expert."""
        pairs = chosen.numel()
        weights = self._weights
        experts, order, places = (
            self._indices(name, pairs)
            for name in ("expert_sorted", "expert_order", "expert_places")
        )
        ends = self._arena["expert_ends"].view(torch.int32)
        sort_pairs(chosen.view(-1), self._experts, experts, order, places, ends)

        gate_up, gated, rows = self._buffers(pairs + padding_rows(pairs))
        torch.index_select(x, 0, order.floor_divide_(chosen.shape[1]), out=rows[:pairs])

        # One copy to the host serves both products. The host waits here until the device has
        # sorted, and does not wait again in this slice.
        both = (weights.gate_up, weights.down)
        host_ends = ends.cpu() if any(each.reads_ends for each in both) else ends
        gate_up_ends, down_ends = (host_ends if each.reads_ends else ends for each in both)

        # Results overwrite the gathered inputs, which the second product no longer reads.
        weights.gate_up.forward(rows, gate_up_ends, pairs, gate_up)
        self._gate(gate_up[:pairs], gated[:pairs], experts)
        weights.down.forward(gated, down_ends, pairs, rows)
        if weights.down_bias is not None:
            add_biases(rows[:pairs], weights.down_bias, experts)
        return rows, places

    def _gate(self, gate_up: torch.Tensor, gated: torch.Tensor, experts: torch.Tensor) -> None:
        """Add biases to gate_up, and compute the gated activation into `gated`."""
        if self._weights.gate_up_bias is not None:
            add_biases(gate_up, self._weights.gate_up_bias, experts)
        for part in self._parts(len(gated), gated.shape[1], 1):
            self._weights.gate(gate_up[part], gated[part])

    def _parts(self, rows: int, width: int, unit: int) -> list[slice]:
        """Split rows into slices, one for each call of an elementwise operation.

        A deterministic layer limits each call to the size that torch computes on a single thread.
        """
        size = max(unit, SERIAL_ELEMENTS // width // unit * unit) if self._deterministic else rows
        return [slice(start, start + size) for start in range(0, rows, size)]

    def _buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return buffers gate_up [rows, 2 * width], gated [rows, width] and rows [rows, hidden]."""
        width = self._spec.intermediate
        arena = self._arena
        hidden = self._weights.router.shape[0]
        return (
            shaped(arena["expert_gate_up"], rows, 2 * width),
            shaped(arena["expert_gated"], rows, width),
            shaped(arena["expert_rows"], rows, hidden),
        )

    def _indices(self, name: str, *shape: int) -> torch.Tensor:
        return shaped(self._arena[name].view(torch.int64), *shape)
