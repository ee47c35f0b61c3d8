"""Names and shapes of the prepared tensors, and the checkpoint tensors that make up each one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.model_config.registry import FAMILIES, Names
from ullage_engine.model_loader.files import HEAD

EMBEDDING = "model.embed_tokens.weight"
"""Name of the embedding in Hugging Face checkpoints."""

Rearrange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor that becomes part of a prepared tensor, such as Q in the fused QKV."""

    source: str
    """Name of the tensor in Hugging Face checkpoints."""
    shape: tuple[int, ...]
    rearrange: Rearrange | None = None
    """Function that reorders the elements to match the layout of the prepared tensor."""
    rearrange_rows: Rearrange | None = None
    """Equivalent of `rearrange` for a quantised tensor [experts, out, ...]."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How to make one prepared tensor by stacking checkpoint tensors along their rows.

    Matrices are stored as [out, in], as in most checkpoints. oneDNN multiplies by a transposed view
    of such a matrix faster than by a transposed copy: 122 instead of 176 µs for 3072 x 576
    bfloat16.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def plan_tensors(model_config: ModelConfig) -> list[TensorPlan]:
    """Return the plans of all prepared tensors of a model, in the order in which they are used."""
    names = FAMILIES[model_config.architecture].names
    hidden = model_config.hidden
    vocab = model_config.vocab
    plans = [_single("embedding", EMBEDDING, vocab, hidden)]
    for index, layer in enumerate(model_config.layers, model_config.first_layer):
        plans += _LayerPlans(model_config, names, index).of(layer)
    plans.append(_single("norm", f"{names.norm}.weight", hidden))
    if not model_config.tied:
        plans.append(_single("head", HEAD, vocab, hidden))
    return plans


def fit_a_checkpoint(plans: Iterable[TensorPlan]) -> bool:
    """Return whether tensors prepared according to these plans can be saved as a checkpoint.

    This is the case if none of the checkpoint's tensors is rearranged.
    """
    return not any(part.rearrange for plan in plans for part in plan.parts)


class _LayerPlans:
    """Plans the prepared tensors of one layer."""

    def __init__(self, model_config: ModelConfig, names: Names, index: int) -> None:
        self._model_config = model_config
        self._names = names
        self._source = f"model.layers.{index}."
        self._prefix = f"layers.{index}."

    def of(self, layer: LayerSpec) -> Iterator[TensorPlan]:
        """Yield the plans of one layer's tensors."""
        hidden = self._model_config.hidden
        yield self._weight("mixer_norm", self._names.mixer_norm, hidden)
        yield from self._conv() if layer.mixer == "conv" else self._attention()
        yield self._weight("mlp_norm", self._names.mlp_norm, hidden)
        yield from self._mlp() if layer.feed_forward == "dense" else self._experts()

    def _attention(self) -> Iterator[TensorPlan]:
        config = self._model_config
        names = self._names
        hidden = config.hidden
        query = config.query_width
        head_dim = config.head_dim
        key = config.num_kv_heads * head_dim
        qkv = ((names.q, query), (names.k, key), (names.v, key))
        yield self._stacked("qkv", *qkv)
        yield self._weight("output", names.output, hidden, query)
        if config.has_qk_norm:
            yield self._weight("q_norm", names.q_norm, head_dim)
            yield self._weight("k_norm", names.k_norm, head_dim)
        if config.has_attention_bias:
            parts = [Part(f"{self._source}{name}.bias", (rows,)) for name, rows in qkv]
            yield self._plan("qkv_bias", (config.qkv_width,), *parts)
            yield self._single("output_bias", f"{names.output}.bias", hidden)
        if config.has_sinks:
            yield self._single("sinks", names.sinks, config.num_heads)

    def _conv(self) -> Iterator[TensorPlan]:
        names = self._names
        hidden = self._model_config.hidden
        kernel = self._model_config.conv_kernel
        yield self._weight("conv_in", names.conv_in, 3 * hidden, hidden)
        # The checkpoint stores the taps with a dimension for one input channel.
        taps = Part(f"{self._source}{names.conv}.weight", (hidden, 1, kernel))
        yield self._plan("conv", (hidden, kernel), taps)
        yield self._weight("conv_out", names.conv_out, hidden, hidden)

    def _mlp(self) -> Iterator[TensorPlan]:
        names = self._names
        width = self._model_config.intermediate
        yield self._stacked("gate_up", (names.gate, width), (names.up, width))
        yield self._weight("down", names.down, self._model_config.hidden, width)

    def _experts(self) -> Iterator[TensorPlan]:
        spec = self._model_config.experts
        names = self._names
        hidden = self._model_config.hidden
        assert spec is not None, "a layer of experts, and no experts"
        count = spec.num_experts
        width = spec.intermediate
        gate_up = (count, 2 * width, hidden)
        down = (count, hidden, width)
        yield self._weight("router", names.router, count, hidden)
        yield self._single("router_bias", names.router_bias, count)
        if names.expert:
            parts = [self._expert(e, n) for e in range(count) for n in (names.gate, names.up)]
            yield self._plan("experts_gate_up", gate_up, *parts)
            parts = [self._expert(e, names.down) for e in range(count)]
            yield self._plan("experts_down", down, *parts)
            return
        stacked = f"{self._source}mlp.experts."
        shape = (count, hidden, 2 * width)
        part = Part(stacked + "gate_up_proj", shape, _columns_apart, _rows_apart)
        yield self._plan("experts_gate_up", gate_up, part)
        part = Part(stacked + "down_proj", (count, width, hidden), _transposed)
        yield self._plan("experts_down", down, part)
        biases = Part(stacked + "gate_up_proj_bias", (count, 2 * width), _apart)
        yield self._plan("experts_gate_up_bias", (count, 2 * width), biases)
        yield self._single("experts_down_bias", "mlp.experts.down_proj_bias", count, hidden)

    def _expert(self, expert: int, name: str) -> Part:
        """Return the `Part` for one expert, for checkpoints that store each expert separately."""
        hidden = self._model_config.hidden
        spec = self._model_config.experts
        assert spec is not None, "a layer of experts, and no experts"
        is_down = name == self._names.down
        shape = (hidden, spec.intermediate) if is_down else (spec.intermediate, hidden)
        prefix = self._source + self._names.expert.format(expert)
        return Part(f"{prefix}{name.rpartition('.')[2]}.weight", shape)

    def _stacked(self, name: str, *parts: tuple[str, int]) -> TensorPlan:
        """Return the plan of a tensor that stacks several matrices, each with `hidden` columns."""
        columns = self._model_config.hidden
        rows = sum(count for _, count in parts)
        sources = [Part(f"{self._source}{each}.weight", (n, columns)) for each, n in parts]
        return self._plan(name, (rows, columns), *sources)

    def _weight(self, name: str, source: str, *shape: int) -> TensorPlan:
        return self._single(name, f"{source}.weight", *shape)

    def _single(self, name: str, source: str, *shape: int) -> TensorPlan:
        return _single(self._prefix + name, self._source + source, *shape)

    def _plan(self, name: str, shape: tuple[int, ...], *parts: Part) -> TensorPlan:
        return TensorPlan(self._prefix + name, shape, parts)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """Deinterleave gate and up values along the last dimension, with the gate values first."""
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
