"""The attention layer: projections, head norms, rotation, paged KV, and what a step shares."""

from dataclasses import dataclass

import torch

from ullage_engine.kernels.pages import write_kv
from ullage_engine.kernels.pool import LayerCache
from ullage_engine.layers.compute import Compute
from ullage_engine.layers.matrix import Matrix
from ullage_engine.layers.norm import head_norm
from ullage_engine.layers.rotary import fill_tables, rotate
from ullage_engine.layers.step import Step
from ullage_engine.models.geometry import ModelGeometry


class RotaryTables:
    """Cosine and sine of every position."""

    def __init__(self, geometry: ModelGeometry, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Fills tables of [positions, head_dim]."""
        fill_tables(geometry, cos, sin)
        self._cos, self._sin = cos, sin

    def at(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of both for the step's positions."""
        positions = step.indices(step.batch.positions)
        shape = (positions.shape[0], self._cos.shape[1])
        cos, sin = step.view("step_cos", *shape), step.view("step_sin", *shape)
        torch.index_select(self._cos, 0, positions, out=cos)
        torch.index_select(self._sin, 0, positions, out=sin)
        return cos, sin


class AttentionStep:
    """What all attention layers share in one step."""

    def __init__(
        self, step: Step, geometry: ModelGeometry, tables: RotaryTables, compute: Compute
    ) -> None:
        tokens, heads = step.tokens, geometry.num_heads
        self.qkv = step.view("qkv", step.rows, geometry.qkv_width)
        self.attended = step.view("attended", step.rows, geometry.query_width)
        rotated_heads = heads + geometry.num_kv_heads
        self.rotated = step.view("rotated", rotated_heads, tokens, geometry.head_dim)
        by_token = self.qkv[:tokens].view(tokens, -1, geometry.head_dim)
        self.queries, self.keys = by_token[:, :heads], by_token[:, heads:rotated_heads]
        by_head = by_token.transpose(0, 1)
        self.unrotated, self._values = by_head[:rotated_heads], by_head[rotated_heads:]
        self._rotated_keys = self.rotated[heads:]
        self._slots, self._codes = step.indices(step.batch.slots), step.find("kv_codes")
        self.cos, self.sin = tables.at(step)
        # Each window is prepared once, however many layers have it.
        self._attentions = {
            window: compute.attentions(step.batch, self.rotated, self.attended, window)
            for window in {layer.window for layer in geometry.layers if layer.mixer == "attention"}
        }

    def store(self, cache: LayerCache) -> None:
        """Writes every token's rotated keys and values."""
        write_kv(cache, self._slots, self._rotated_keys, self._values, self._codes)

    def attend(self, cache: LayerCache, window: int, sinks: torch.Tensor | None) -> None:
        for attention in self._attentions[window]:
            attention.run(cache, sinks)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """hidden += out(softmax(rotate(q) rotate(k)ᵀ / √d) v), with what the family adds to it."""

    qkv: Matrix
    output: Matrix
    window: int = 0
    eps: float = 0.0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    """A logit for each query head."""
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None

    def run(self, step: Step, shared: AttentionStep, cache: LayerCache) -> None:
        """Adds the layer's result for `step.normed` to `step.hidden`; writes every token's KV."""
        self.qkv.multiply(step.normed, shared.qkv)
        if self.qkv_bias is not None:
            shared.qkv.add_(self.qkv_bias)
        if self.q_norm is not None and self.k_norm is not None:
            head_norm(shared.queries, self.q_norm, self.eps)
            head_norm(shared.keys, self.k_norm, self.eps)
        rotate(shared.unrotated, shared.cos, shared.sin, shared.rotated)
        shared.store(cache)
        shared.attend(cache, self.window, self.sinks)
        self.output.add(shared.attended, step.hidden)
        if self.output_bias is not None:
            step.hidden.add_(self.output_bias)
