"""Names and shapes of prepared tensors, and which checkpoint tensors each is made of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ullage_engine.models.families import FAMILIES
from ullage_engine.models.geometry import ExpertsSpec, LayerSpec, ModelGeometry
from ullage_engine.models.names import Names

Rearrange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor that a prepared one is made of."""

    source: str
    """Name, as Hugging Face spells it."""
    shape: tuple[int, ...]
    rearrange: Rearrange | None = None
    """Brings the elements into the order of the prepared tensor."""
    rearrange_rows: Rearrange | None = None
    """The same for the numbers of a quantised tensor [experts, out, ...]."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One prepared tensor: checkpoint tensors stacked along their rows.

    Matrices are stored [out, in], as most checkpoints do: oneDNN multiplies by their transposed
    view faster than by a transposed copy (measured: 122 against 176 µs for 3072 x 576 bfloat16).
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def plan_tensors(geometry: ModelGeometry) -> list[TensorPlan]:
    """Everything a model computes with, in the order it is used."""
    names = FAMILIES[geometry.architecture].names
    hidden, vocab = geometry.hidden, geometry.vocab
    plans = [_single("embedding", "model.embed_tokens.weight", vocab, hidden)]
    for index, layer in enumerate(geometry.layers, geometry.first_layer):
        plans += _layer(geometry, names, layer, index)
    plans.append(_single("norm", f"{names.norm}.weight", hidden))
    if not geometry.tied:
        plans.append(_single("head", "lm_head.weight", vocab, hidden))
    return plans


def _layer(
    geometry: ModelGeometry, names: Names, layer: LayerSpec, index: int
) -> Iterator[TensorPlan]:
    source, prefix = f"model.layers.{index}.", f"layers.{index}."
    hidden = geometry.hidden
    yield _single(prefix + "mixer_norm", f"{source}{names.mixer_norm}.weight", hidden)
    if layer.mixer == "conv":
        yield from _conv(geometry, names, source, prefix)
    else:
        yield from _attention(geometry, names, source, prefix)
    yield _single(prefix + "mlp_norm", f"{source}{names.mlp_norm}.weight", hidden)
    if layer.feed_forward == "dense":
        yield from _mlp(geometry, names, source, prefix)
    else:
        assert geometry.experts is not None, "layers of experts, and no experts"
        yield from _experts(geometry.experts, names, source, prefix, hidden)


def _attention(
    geometry: ModelGeometry, names: Names, source: str, prefix: str
) -> Iterator[TensorPlan]:
    hidden, query, head_dim = geometry.hidden, geometry.query_width, geometry.head_dim
    key = geometry.num_kv_heads * head_dim
    qkv = [(source + names.q, query), (source + names.k, key), (source + names.v, key)]
    yield _stacked(prefix + "qkv", qkv, hidden)
    yield _single(prefix + "output", f"{source}{names.output}.weight", hidden, query)
    if geometry.has_qk_norm:
        yield _single(prefix + "q_norm", f"{source}{names.q_norm}.weight", head_dim)
        yield _single(prefix + "k_norm", f"{source}{names.k_norm}.weight", head_dim)
    if geometry.has_attention_bias:
        parts = tuple(Part(f"{name}.bias", (rows,)) for name, rows in qkv)
        yield TensorPlan(prefix + "qkv_bias", (geometry.qkv_width,), parts)
        yield _single(prefix + "output_bias", f"{source}{names.output}.bias", hidden)
    if geometry.has_sinks:
        yield _single(prefix + "sinks", source + names.sinks, geometry.num_heads)


def _conv(geometry: ModelGeometry, names: Names, source: str, prefix: str) -> Iterator[TensorPlan]:
    hidden, kernel = geometry.hidden, geometry.conv_kernel
    yield _single(prefix + "conv_in", f"{source}{names.conv_in}.weight", 3 * hidden, hidden)
    # Stored as one channel each in and out.
    taps = Part(f"{source}{names.conv}.weight", (hidden, 1, kernel))
    yield TensorPlan(prefix + "conv", (hidden, kernel), (taps,))
    yield _single(prefix + "conv_out", f"{source}{names.conv_out}.weight", hidden, hidden)


def _mlp(geometry: ModelGeometry, names: Names, source: str, prefix: str) -> Iterator[TensorPlan]:
    hidden, width = geometry.hidden, geometry.intermediate
    gate_up = [(source + names.gate, width), (source + names.up, width)]
    yield _stacked(prefix + "gate_up", gate_up, hidden)
    yield _single(prefix + "down", f"{source}{names.down}.weight", hidden, width)


def _experts(
    spec: ExpertsSpec, names: Names, source: str, prefix: str, hidden: int
) -> Iterator[TensorPlan]:
    count, width = spec.num_experts, spec.intermediate
    yield _single(prefix + "router", f"{source}{names.router}.weight", count, hidden)
    yield _single(prefix + "router_bias", source + names.router_bias, count)
    separate = names.expert
    gate_up, down = (count, 2 * width, hidden), (count, hidden, width)
    if separate:
        yield TensorPlan(
            prefix + "experts_gate_up", gate_up, tuple(_gate_up(spec, names, source, hidden))
        )
        yield TensorPlan(prefix + "experts_down", down, tuple(_down(spec, names, source, hidden)))
        return
    stacked = f"{source}mlp.experts."
    shape = (count, hidden, 2 * width)
    parts = (Part(stacked + "gate_up_proj", shape, _columns_apart, _rows_apart),)
    yield TensorPlan(prefix + "experts_gate_up", gate_up, parts)
    parts = (Part(stacked + "down_proj", (count, width, hidden), _transposed),)
    yield TensorPlan(prefix + "experts_down", down, parts)
    biases = (Part(stacked + "gate_up_proj_bias", (count, 2 * width), _apart),)
    yield TensorPlan(prefix + "experts_gate_up_bias", (count, 2 * width), biases)
    yield _single(prefix + "experts_down_bias", stacked + "down_proj_bias", count, hidden)


def _gate_up(spec: ExpertsSpec, names: Names, source: str, hidden: int) -> Iterator[Part]:
    for expert in range(spec.num_experts):
        for name in (names.gate, names.up):
            yield Part(_expert(names, source, expert, name), (spec.intermediate, hidden))


def _down(spec: ExpertsSpec, names: Names, source: str, hidden: int) -> Iterator[Part]:
    for expert in range(spec.num_experts):
        yield Part(_expert(names, source, expert, names.down), (hidden, spec.intermediate))


def _expert(names: Names, source: str, expert: int, name: str) -> str:
    return f"{source}{names.expert.format(expert)}{name.rpartition('.')[2]}.weight"


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Gates and ups that alternate along the last dimension: first all gates, then all ups."""
    pairs = tensor.view(*tensor.shape[:-1], -1, 2)
    return pairs.transpose(-1, -2).reshape(tensor.shape)


def _columns_apart(tensor: torch.Tensor) -> torch.Tensor:
    return _apart(tensor).transpose(1, 2)


def _rows_apart(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:, ::2], tensor[:, 1::2]], dim=1)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _single(name: str, source: str, *shape: int) -> TensorPlan:
    return TensorPlan(name, shape, (Part(source, shape),))


def _stacked(name: str, parts: list[tuple[str, int]], columns: int) -> TensorPlan:
    rows = sum(count for _, count in parts)
    sources = tuple(Part(f"{source}.weight", (count, columns)) for source, count in parts)
    return TensorPlan(name, (rows, columns), sources)
