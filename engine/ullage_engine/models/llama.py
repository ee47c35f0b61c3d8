"""The Llama family: Llama, SmolLM2 and whatever has their layers."""

from typing import NamedTuple

import torch

from ullage_engine.core.batch import StepBatch
from ullage_engine.kernels.buffers import shaped
from ullage_engine.kernels.pool import LayerCache
from ullage_engine.layers.compute import Compute
from ullage_engine.layers.norm import rms_norm
from ullage_engine.layers.rotary import fill_tables, rotate
from ullage_engine.memory.arena import StepLimits
from ullage_engine.models.geometry import ModelGeometry


class LayerWeights(NamedTuple):
    """One layer; matrices are [in, out] views of rows stored [out, in]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Llama:
    """Computes the hidden states and logits of a step in buffers it is given."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        geometry: ModelGeometry,
        limits: StepLimits,
        arena: dict[str, torch.Tensor],
        compute: Compute,
    ) -> None:
        self._geometry = geometry
        self._limits = limits
        self._compute = compute
        self._arena = arena
        self._embedding = tensors["embedding"]
        self._head = tensors["embedding" if geometry.tied else "head"].t()
        self._norm = tensors["norm"]
        self._layers = [_layer_weights(tensors, index) for index in range(geometry.num_layers)]
        positions = (limits.max_model_len, geometry.head_dim)
        self._cos, self._sin = shaped(arena["cos"], *positions), shaped(arena["sin"], *positions)
        fill_tables(geometry, self._cos, self._sin)

    def forward(self, batch: StepBatch, caches: list[LayerCache]) -> torch.Tensor:
        """Hidden states of the batch's rows after a layer for each cache, not yet normalised.

        Writes the KV of every token. The result lives in the arena until the next step.
        """
        tokens = len(batch.token_ids)
        padded = self._limits.product_rows(tokens)
        geometry, arena, device = self._geometry, self._arena, self._embedding.device
        compute = self._compute
        hidden = shaped(arena["hidden"], padded, geometry.hidden)
        normed = shaped(arena["normed"], padded, geometry.hidden)
        qkv = shaped(arena["qkv"], padded, geometry.qkv_width)
        attended = shaped(arena["attended"], padded, geometry.query_width)
        gate_up = shaped(arena["gate_up"], padded, 2 * geometry.intermediate)
        gated = shaped(arena["gated"], padded, geometry.intermediate)
        rotated = shaped(
            arena["rotated"], geometry.num_heads + geometry.num_kv_heads, tokens, geometry.head_dim
        )
        token_ids = torch.tensor(batch.token_ids, device=device)
        slots = torch.tensor(batch.slots, device=device)
        torch.index_select(self._embedding, 0, token_ids, out=hidden[:tokens])
        hidden[tokens:].zero_()
        cos, sin = self._rotations(torch.tensor(batch.positions, device=device))
        heads = qkv[:tokens].view(tokens, -1, geometry.head_dim).transpose(0, 1)
        unrotated, values = heads[: rotated.shape[0]], heads[rotated.shape[0] :]
        keys = rotated[geometry.num_heads :]
        attentions = compute.attentions(batch, rotated, attended)
        for layer, cache in zip(self._layers, caches, strict=False):
            rms_norm(hidden, layer.attention_norm, geometry.rms_eps, normed)
            compute.multiply(normed, layer.qkv, qkv)
            rotate(unrotated, cos, sin, rotated)
            cache.keys.index_copy_(1, slots, keys)
            cache.values.index_copy_(1, slots, values)
            for attention in attentions:
                attention.run(cache)
            compute.add(attended, layer.output, hidden)
            rms_norm(hidden, layer.mlp_norm, geometry.rms_eps, normed)
            compute.multiply(normed, layer.gate_up, gate_up)
            compute.gate(gate_up, gated)
            compute.add(gated, layer.down, hidden)
        return hidden[:tokens]

    def logits(self, hidden: torch.Tensor, rows: list[int], out: torch.Tensor) -> None:
        """Writes the logits of some rows of `forward`'s result to out [rows and padding, vocab]."""
        padded = rows + rows[-1:] * (out.shape[0] - len(rows))
        chosen = hidden.index_select(0, torch.tensor(padded, device=hidden.device))
        normed = shaped(self._arena["normed"], *chosen.shape)
        rms_norm(chosen, self._norm, self._geometry.rms_eps, normed)
        self._compute.multiply(normed, self._head, out)

    def prove(self) -> str | None:
        """See `Compute.prove`."""
        layer = self._layers[0]
        weights = [layer.qkv, layer.output, layer.gate_up, layer.down]
        return self._compute.prove(weights, self._head)

    def _rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of both tables for these positions."""
        shape = (positions.shape[0], self._geometry.head_dim)
        cos, sin = shaped(self._arena["step_cos"], *shape), shaped(self._arena["step_sin"], *shape)
        torch.index_select(self._cos, 0, positions, out=cos)
        torch.index_select(self._sin, 0, positions, out=sin)
        return cos, sin


def _layer_weights(tensors: dict[str, torch.Tensor], index: int) -> LayerWeights:
    prefix = f"layers.{index}."
    return LayerWeights(
        attention_norm=tensors[prefix + "attention_norm"],
        qkv=tensors[prefix + "qkv"].t(),
        output=tensors[prefix + "output"].t(),
        mlp_norm=tensors[prefix + "mlp_norm"],
        gate_up=tensors[prefix + "gate_up"].t(),
        down=tensors[prefix + "down"].t(),
    )
