"""Names and shapes of prepared tensors, and which checkpoint tensors each is made of."""

from dataclasses import dataclass

from ullage_engine.models.geometry import ModelGeometry


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One prepared tensor: checkpoint tensors stacked along their rows.

    Fused matrices are stored [out, in], as checkpoints are: oneDNN multiplies by their transposed
    view faster than by a transposed copy (measured: 122 against 176 µs for 3072 x 576 bfloat16).
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Checkpoint names, as Hugging Face spells them, and their shapes."""


def plan_tensors(geometry: ModelGeometry) -> list[TensorPlan]:
    """Everything a Llama-family model computes with, in the order it is used."""
    hidden, vocab = geometry.hidden, geometry.vocab
    plans = [_single("embedding", "model.embed_tokens.weight", vocab, hidden)]
    for index in range(geometry.num_layers):
        plans += _layer(geometry, index)
    plans.append(_single("norm", "model.norm.weight", hidden))
    if not geometry.tied:
        plans.append(_single("head", "lm_head.weight", vocab, hidden))
    return plans


def _layer(geometry: ModelGeometry, index: int) -> list[TensorPlan]:
    source, prefix = f"model.layers.{index}.", f"layers.{index}."
    hidden, width = geometry.hidden, geometry.intermediate
    query, key = geometry.query_width, geometry.num_kv_heads * geometry.head_dim
    attention, mlp = source + "self_attn.", source + "mlp."
    qkv = [(attention + "q_proj", query), (attention + "k_proj", key), (attention + "v_proj", key)]
    gate_up = [(mlp + "gate_proj", width), (mlp + "up_proj", width)]
    return [
        _single(prefix + "attention_norm", source + "input_layernorm.weight", hidden),
        _stacked(prefix + "qkv", qkv, hidden),
        _single(prefix + "output", attention + "o_proj.weight", hidden, query),
        _single(prefix + "mlp_norm", source + "post_attention_layernorm.weight", hidden),
        _stacked(prefix + "gate_up", gate_up, hidden),
        _single(prefix + "down", mlp + "down_proj.weight", hidden, width),
    ]


def _single(name: str, source: str, *shape: int) -> TensorPlan:
    return TensorPlan(name, shape, ((source, shape),))


def _stacked(name: str, parts: list[tuple[str, int]], columns: int) -> TensorPlan:
    rows = sum(count for _, count in parts)
    sources = tuple((f"{source}.weight", (count, columns)) for source, count in parts)
    return TensorPlan(name, (rows, columns), sources)
