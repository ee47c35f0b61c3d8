"""What part of each prepared tensor a rank holds, by the tensor's name.

Matrices that widen (qkv, gate_up, conv_in) are cut by output, head by head or channel by channel;
those that narrow (output, down, conv_out) by the same inputs, so that a layer needs one sum over
its ranks after each. Norms and the router are small and whole; so is the vocabulary, which only the
first and the last stage hold.
"""

from dataclasses import dataclass

import torch

from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.parallel.layout import (
    RankLayout,
    Share,
    kv_heads,
    query_heads,
    rank_layers,
    share,
)

ROW_PARALLEL = ("output", "down", "conv_out")
"""Matrices whose products are partial sums, one a tensor rank."""

ADDED_ONCE = ("experts_down_bias",)
"""Biases that go into a partial sum: all tensor ranks but the first have zeros for them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs of one axis; no runs at all leave a tensor whole."""

    axis: int
    runs: tuple[Share, ...]


WHOLE = Cut(0, ())


class Slicer:
    """The parts of one rank."""

    def __init__(self, model_config: ModelConfig, layout: RankLayout, rank: int) -> None:
        """`model_config` is the whole model's."""
        self._layers = rank_layers(model_config, layout, rank)
        self._is_first, self._is_last = layout.is_first(rank), layout.is_last(rank)
        self._tensor_rank = layout.tensor_rank(rank)
        self._tied = model_config.tied
        self._cuts = _cuts(model_config, layout, rank) if layout.tensor > 1 else {}

    def holds(self, name: str) -> bool:
        """Whether the rank computes with any of a tensor."""
        if name.startswith("layers."):
            return self._layers.start <= int(name.split(".")[1]) < self._layers.end
        if name.partition(".")[0] == "embedding":
            return self._is_first or (self._is_last and self._tied)
        return self._is_last

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the rank's part: a view where the part lies in one piece, else a copy."""
        kind = name.rpartition(".")[2]
        if kind in ADDED_ONCE and self._tensor_rank > 0:
            return torch.zeros_like(tensor)
        cut = self._cuts.get(kind, WHOLE)
        if not cut.runs:
            return tensor
        pieces = [tensor.narrow(cut.axis, run.start, run.count) for run in cut.runs]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, cut.axis)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the rank's part of a tensor; None where it computes with none of it."""
        return self.cut(name, tensor) if self.holds(name) else None


def _cuts(model_config: ModelConfig, layout: RankLayout, rank: int) -> dict[str, Cut]:
    tensor, index = layout.tensor, layout.tensor_rank(rank)
    queries, keys = query_heads(model_config, layout, rank), kv_heads(model_config, layout, rank)
    dense = share(model_config.intermediate, tensor, index)
    channels = share(model_config.conv_channels, tensor, index)
    query_columns = _scaled(queries, model_config.head_dim)
    qkv = Cut(0, _qkv_rows(model_config, queries, keys))
    return {
        "qkv": qkv,
        "qkv_bias": qkv,
        "sinks": Cut(0, (queries,)),
        "output": Cut(1, (query_columns,)),
        "gate_up": Cut(0, _repeated(dense, model_config.intermediate, 2)),
        "down": Cut(1, (dense,)),
        "conv_in": Cut(0, _repeated(channels, model_config.conv_channels, 3)),
        "conv": Cut(0, (channels,)),
        "conv_out": Cut(1, (channels,)),
        **_expert_cuts(model_config, tensor, index),
    }


def _expert_cuts(model_config: ModelConfig, tensor: int, index: int) -> dict[str, Cut]:
    if model_config.experts is None:
        return {}
    width = model_config.experts.intermediate
    held = share(width, tensor, index)
    halves = Cut(1, _repeated(held, width, 2))
    return {
        "experts_gate_up": halves,
        "experts_gate_up_bias": halves,
        "experts_down": Cut(2, (held,)),
    }


def _qkv_rows(model_config: ModelConfig, queries: Share, keys: Share) -> tuple[Share, ...]:
    """Returns the rows of the fused projection: queries of all heads, then keys, then values."""
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
