"""Determines, by name, which part of each prepared tensor a rank holds.

Column-parallel matrices (qkv, gate_up, conv_in) are split along their outputs, by heads or
channels. Row-parallel matrices (output, down, conv_out) are split along the matching inputs, so
that a layer needs just one sum over its ranks after each row-parallel matrix. Norms and the router
are small, so every rank holds a full copy of them. Tensors with one row per vocabulary token
are not split either, and only the first and the last stage hold them.

The same code splits plain matrices and the tensors of quantised matrices, along rows or columns.
For each quantised tensor, `quantization.formats.Piece` says which axes are rows and columns, and
how many rows or columns one element covers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import torch

from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.parallel.layout import (
    LayoutError,
    RankLayout,
    Share,
    check_model,
    kv_heads,
    query_heads,
    rank_layers,
    share,
)
from ullage_engine.quantization.formats import Encoding, encoding_of_one, piece_of, pieces_of

ROW_PARALLEL = ("output", "down", "conv_out")
"""Matrices split along their inputs, so that each tensor rank's matmul result is a partial sum."""

ADDED_ONCE = ("experts_down_bias",)
"""Biases that only the first tensor rank adds to its partial sum. All other ranks hold zeros."""

ROWS = -2
COLUMNS = -1
"""The axes of matrices are `ROWS` and `COLUMNS`: [..., out, in]. A vector only has `COLUMNS`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The index ranges that a rank holds along one axis.

    If there are no ranges, the rank holds the whole tensor.
    """

    axis: int
    runs: tuple[Share, ...]


WHOLE = Cut(0, ())
"""The cut that keeps a tensor whole."""


class Slicer:
    """Cuts one rank's slices out of the whole model's tensors."""

    def __init__(
        self,
        model_config: ModelConfig,
        layout: RankLayout,
        rank: int,
        encodings: Mapping[str, Encoding] = MappingProxyType({}),
    ) -> None:
        """Determine how to cut the rank's slice from each tensor.

        Args:
            model_config: configuration of the whole model.
            layout: arrangement of the ranks.
            rank: rank whose slices are cut.
            encodings: encodings of the whole model's quantised matrices. A cut never divides a
                group of packed values, which `check_groups` verifies.
        """
        self._layers = rank_layers(model_config, layout, rank)
        self._is_first = layout.is_first(rank)
        self._is_last = layout.is_last(rank)
        self._tensor_rank = layout.tensor_rank(rank)
        self._tied = model_config.tied
        self._cuts = _cuts(model_config, layout, rank) if layout.tensor > 1 else {}
        self._counts = {name: _num_matrices(model_config, name) for name in encodings}
        self._whole = encodings
        self.encodings = {
            name: self._cut_encoding(name, each)
            for name, each in encodings.items()
            if self.holds(name)
        }
        """Encodings of the rank's slices of quantised matrices, by name."""

    def holds(self, name: str) -> bool:
        """Return whether the rank needs a tensor, in full or in part."""
        if name.startswith("layers."):
            return self._layers.start <= int(name.split(".")[1]) < self._layers.end
        if name.partition(".")[0] == "embedding":
            return self._is_first or (self._is_last and self._tied)
        return self._is_last

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's slice of a tensor, as a view if possible, otherwise as a copy."""
        matrix, _, kind = name.rpartition(".")
        if matrix in self.encodings:
            return self._cut_piece(matrix, kind, tensor)
        if kind in ADDED_ONCE and self._tensor_rank > 0:
            return torch.zeros_like(tensor)
        cut = self._cuts.get(kind, WHOLE)
        return _joined(tensor, cut.axis, cut.runs) if cut.runs else tensor

    def _cut_piece(self, matrix: str, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's slice of one of the tensors that store a quantised matrix."""
        cut = self._cut_of(matrix)
        count = self._counts[matrix]
        piece = piece_of(encoding_of_one(self._whole[matrix], count), kind)
        axis = piece.axis(cut.axis == ROWS)
        if not cut.runs or axis is None:
            return tensor

        runs = [Share(run.start // axis.unit, run.end // axis.unit) for run in cut.runs]
        part = _joined(tensor.view(count, *piece.shape), 1 + axis.dim, runs)
        return part.view(piece_of(self.encodings[matrix], kind).shape)

    def _cut_encoding(self, matrix: str, encoding: Encoding) -> Encoding:
        cut = self._cut_of(matrix)
        rows, columns = encoding.shape
        group = encoding.group

        size = sum(run.count for run in cut.runs)
        if cut.runs and cut.axis == ROWS:
            rows = self._counts[matrix] * size
        elif cut.runs:
            columns = size
            group = size if encoding.is_scaled_by_row else group
        return msgspec.structs.replace(encoding, shape=(rows, columns), group=group)

    def _cut_of(self, matrix: str) -> Cut:
        return self._cuts.get(matrix.rpartition(".")[2], WHOLE)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the rank's slice of a tensor, or None if the rank holds no part of it."""
        return self.cut(name, tensor) if self.holds(name) else None


def _joined(tensor: torch.Tensor, axis: int, runs: Sequence[Share]) -> torch.Tensor:
    """Concatenate ranges of an axis, or return a view of a single range that is contiguous."""
    parts = [tensor.narrow(axis, run.start, run.count) for run in runs]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, axis)


def check_groups(
    pool: str, model_config: ModelConfig, encodings: Mapping[str, Encoding], layout: RankLayout
) -> None:
    """Check that ranks never split a group of packed values in a quantised matrix.

    Raises:
        LayoutError: a rank would get only part of a group.
    """
    broken = next(_broken_groups(model_config, encodings, layout), None)
    if broken is None:
        return

    world = layout.world
    fitting = []
    for tensor in (each for each in range(1, world + 1) if world % each == 0):
        other = RankLayout(tensor, world // tensor)
        if _is_possible(pool, model_config, encodings, other):
            fitting.append(str(tensor))

    remedy = f"set {' or '.join(fitting)} and let pipeline make up the rest"
    raise LayoutError(
        f"pools.{pool}.parallelism.tensor: {layout.tensor} ranks would cut {broken}; "
        f"{remedy if fitting else 'set gpus, tensor and pipeline to 1'}"
    )


def _is_possible(
    pool: str, model_config: ModelConfig, encodings: Mapping[str, Encoding], layout: RankLayout
) -> bool:
    try:
        check_model(pool, model_config, layout)
    except LayoutError:
        return False
    return next(_broken_groups(model_config, encodings, layout), None) is None


def _broken_groups(
    model_config: ModelConfig, encodings: Mapping[str, Encoding], layout: RankLayout
) -> Iterator[str]:
    """Describe every group of packed values that the layout would split between ranks."""
    for rank in range(layout.tensor if layout.tensor > 1 else 0):
        cuts = _cuts(model_config, layout, rank)
        for name, encoding in encodings.items():
            cut = cuts.get(name.rpartition(".")[2], WHOLE)
            one = encoding_of_one(encoding, _num_matrices(model_config, name))
            is_of_rows = cut.axis == ROWS
            total = one.shape[0 if is_of_rows else 1]
            kind = "outputs" if is_of_rows else "inputs"
            axes = [piece.axis(is_of_rows) for piece in pieces_of(one, torch.float32)]
            units = {axis.unit for axis in axes if axis is not None}
            for edge in (edge for run in cut.runs for edge in (run.start, run.end)):
                for unit in (unit for unit in units if edge % unit):
                    yield (
                        f"the {total} {kind} of {name} at {edge}, but {encoding.format} keeps "
                        f"{unit} of them together"
                    )


def _num_matrices(model_config: ModelConfig, name: str) -> int:
    """Return how many matrices a tensor stacks: one per expert, or 1 if it holds no experts."""
    experts = model_config.experts
    return experts.num_experts if experts is not None and ".experts_" in name else 1


def _cuts(model_config: ModelConfig, layout: RankLayout, rank: int) -> dict[str, Cut]:
    tensor = layout.tensor
    index = layout.tensor_rank(rank)
    queries = query_heads(model_config, layout, rank)
    keys = kv_heads(model_config, layout, rank)
    dense = share(model_config.intermediate, tensor, index)
    channels = share(model_config.conv_channels, tensor, index)
    query_columns = _scaled(queries, model_config.head_dim)
    qkv = _qkv_rows(model_config, queries, keys)
    return {
        "qkv": Cut(ROWS, qkv),
        "qkv_bias": Cut(COLUMNS, qkv),
        "sinks": Cut(COLUMNS, (queries,)),
        "output": Cut(COLUMNS, (query_columns,)),
        "gate_up": Cut(ROWS, _repeated(dense, model_config.intermediate, 2)),
        "down": Cut(COLUMNS, (dense,)),
        "conv_in": Cut(ROWS, _repeated(channels, model_config.conv_channels, 3)),
        "conv": Cut(ROWS, (channels,)),
        "conv_out": Cut(COLUMNS, (channels,)),
        **_expert_cuts(model_config, tensor, index),
    }


def _expert_cuts(model_config: ModelConfig, tensor: int, index: int) -> dict[str, Cut]:
    if model_config.experts is None:
        return {}
    width = model_config.experts.intermediate
    held = share(width, tensor, index)
    halves = _repeated(held, width, 2)
    return {
        "experts_gate_up": Cut(ROWS, halves),
        "experts_gate_up_bias": Cut(COLUMNS, halves),
        "experts_down": Cut(COLUMNS, (held,)),
    }


def _qkv_rows(model_config: ModelConfig, queries: Share, keys: Share) -> tuple[Share, ...]:
    """Return a rank's rows of the fused QKV projection: its queries, then keys, then values."""
    first_key = model_config.num_heads
    first_value = first_key + model_config.num_kv_heads
    heads = (queries, _moved(keys, first_key), _moved(keys, first_value))
    return tuple(_scaled(run, model_config.head_dim) for run in heads)


def _repeated(run: Share, width: int, times: int) -> tuple[Share, ...]:
    return tuple(_moved(run, width * index) for index in range(times))


def _moved(run: Share, by: int) -> Share:
    return Share(run.start + by, run.end + by)


def _scaled(run: Share, by: int) -> Share:
    return Share(run.start * by, run.end * by)
