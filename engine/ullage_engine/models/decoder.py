"""Every model here: embed; in each layer x += mixer(norm(x)), x += feed_forward(norm(x)); norm;
project.

What the mixers and feed-forwards are the geometry says (`ullage_engine.models.families`). One rank
of several computes a run of the layers, or a part of each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ullage_engine.core.batch import StepBatch
from ullage_engine.kernels.buffers import shaped
from ullage_engine.kernels.experts import clamped_gate
from ullage_engine.kernels.float8 import HeadScales
from ullage_engine.kernels.pool import LayerCache
from ullage_engine.layers.attention import AttentionLayer, AttentionStep, RotaryTables
from ullage_engine.layers.compute import Compute
from ullage_engine.layers.conv import ConvLayer, ConvStep
from ullage_engine.layers.expert_matrices import ExpertMatrices
from ullage_engine.layers.experts import Experts, ExpertWeights, Reduce
from ullage_engine.layers.kv_bounds import kv_scales
from ullage_engine.layers.matrix import Matrix
from ullage_engine.layers.mlp import MlpLayer, MlpStep, gate
from ullage_engine.layers.norm import rms_norm
from ullage_engine.layers.step import Step
from ullage_engine.memory.arena import StepLimits
from ullage_engine.models.geometry import LayerSpec, ModelGeometry


@dataclass(frozen=True, slots=True)
class Weights:
    """Prepared tensors by name, and matrices made of them in whatever format they have."""

    tensors: dict[str, torch.Tensor]
    matrix: Callable[[str], Matrix]
    experts: Callable[[str], ExpertMatrices]
    """The matrix that every expert has of its own."""
    reduce: Reduce | None = None
    """Adds up what several ranks computed, each with its part of every expert."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer; `memory` is the index of its cache, or of its state."""

    mixer_norm: torch.Tensor
    mixer: AttentionLayer | ConvLayer
    memory: int
    mlp_norm: torch.Tensor
    mlp: MlpLayer | Experts


class Decoder:
    """Computes the hidden states and logits of a step in buffers it is given."""

    def __init__(
        self,
        weights: Weights,
        geometry: ModelGeometry,
        limits: StepLimits,
        arena: dict[str, torch.Tensor],
        compute: Compute,
    ) -> None:
        self._geometry, self._limits, self._arena = geometry, limits, arena
        self._compute = compute
        self._embedding = weights.tensors.get("embedding")
        self._norm = weights.tensors.get("norm")
        head = "embedding" if geometry.tied else "head"
        self._head = weights.matrix(head) if head in weights.tensors else None
        positions = (limits.max_model_len, geometry.head_dim)
        tables = shaped(arena["cos"], *positions), shaped(arena["sin"], *positions)
        self._tables = RotaryTables(geometry, *tables)
        build = _Builder(weights, geometry, arena, limits.deterministic)
        self._layers = list(build.layers())

    def forward(
        self,
        batch: StepBatch,
        caches: Sequence[LayerCache],
        states: Sequence[torch.Tensor],
        hidden_in: torch.Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Hidden states of the batch's rows after the last layer, not yet normalised.

        Writes the KV of every token, and every sequence's convolution state. `hidden_in` [tokens,
        hidden] is what the layers before these made of the tokens; without it they are embedded.
        `layers`: run only these. The result lives in the arena until the next step.
        """
        step = Step(batch, self._geometry, self._limits, self._arena)
        if hidden_in is None:
            self._embed(step)
        else:
            step.hidden[: step.tokens].copy_(hidden_in)
        step.hidden[step.tokens :].zero_()
        run = self._layers if layers is None else [self._layers[index] for index in layers]
        self._run(run, step, caches, states)
        return step.hidden[: step.tokens]

    def logits(self, hidden: torch.Tensor, rows: list[int], out: torch.Tensor) -> None:
        """Writes the logits of some rows of `forward`'s result to out [rows and padding, vocab]."""
        assert self._head is not None and self._norm is not None, "not the last stage"
        padded = rows + rows[-1:] * (out.shape[0] - len(rows))
        chosen = hidden.index_select(0, torch.tensor(padded, device=hidden.device))
        normed = shaped(self._arena["normed"], *chosen.shape)
        rms_norm(chosen, self._norm, self._geometry.rms_eps, normed)
        self._head.multiply(normed, out)

    def one_of_each_kind(self) -> list[int]:
        """Indices of layers that together do all that the model does."""
        kinds = {spec: index for index, spec in enumerate(self._geometry.layers)}
        return sorted(kinds.values())

    def kv_scales(self) -> list[HeadScales]:
        """With which each layer's KV can be stored as float8; overwrites the arena."""
        parts = (self._geometry, self._limits, self._arena)
        return [
            kv_scales(layer.mixer, layer.mixer_norm, *parts)
            for layer in self._layers
            if isinstance(layer.mixer, AttentionLayer)
        ]

    def prove(self) -> str | None:
        """See `Compute.prove`."""
        return self._compute.prove(self._head)

    def _embed(self, step: Step) -> None:
        assert self._embedding is not None, "not the first stage"
        token_ids = step.indices(step.batch.token_ids)
        torch.index_select(self._embedding, 0, token_ids, out=step.hidden[: step.tokens])

    def _run(
        self,
        layers: Sequence[DecoderLayer],
        step: Step,
        caches: Sequence[LayerCache],
        states: Sequence[torch.Tensor],
    ) -> None:
        geometry, eps = self._geometry, self._geometry.rms_eps
        attention = AttentionStep(step, geometry, self._tables, self._compute)
        plan, fused = step.batch.conv, self._limits.fused
        conv = ConvStep(step, geometry, plan, fused=fused) if plan else None
        deterministic = self._limits.deterministic
        mlp = MlpStep(step, geometry, deterministic)
        # Padding chooses experts, too; only whole units of rows need it.
        routed = step.rows if deterministic else step.tokens
        for layer in layers:
            rms_norm(step.hidden, layer.mixer_norm, eps, step.normed)
            if isinstance(layer.mixer, AttentionLayer):
                layer.mixer.run(step, attention, caches[layer.memory])
            else:
                assert conv is not None, "a batch without the convolutions' rows"
                layer.mixer.run(step, conv, states[layer.memory])
            rms_norm(step.hidden, layer.mlp_norm, eps, step.normed)
            if isinstance(layer.mlp, MlpLayer):
                layer.mlp.run(step, mlp)
            else:
                layer.mlp.run(step.normed[:routed], step.hidden[:routed])


class _Builder:
    """Makes layers of their prepared tensors."""

    def __init__(
        self,
        weights: Weights,
        geometry: ModelGeometry,
        arena: dict[str, torch.Tensor],
        deterministic: bool,
    ) -> None:
        self._weights, self._geometry, self._arena = weights, geometry, arena
        self._deterministic = deterministic

    def layers(self) -> Iterator[DecoderLayer]:
        count = {"attention": 0, "conv": 0}
        for index, spec in enumerate(self._geometry.layers, self._geometry.first_layer):
            prefix = f"layers.{index}."
            yield DecoderLayer(
                mixer_norm=self._weights.tensors[prefix + "mixer_norm"],
                mixer=self._conv(prefix) if spec.mixer == "conv" else self._attention(spec, prefix),
                memory=count[spec.mixer],
                mlp_norm=self._weights.tensors[prefix + "mlp_norm"],
                mlp=self._mlp(prefix) if spec.feed_forward == "dense" else self._experts(prefix),
            )
            count[spec.mixer] += 1

    def _conv(self, prefix: str) -> ConvLayer:
        weights = self._weights
        return ConvLayer(
            project=weights.matrix(prefix + "conv_in"),
            taps=weights.tensors[prefix + "conv"].t().contiguous(),
            output=weights.matrix(prefix + "conv_out"),
        )

    def _attention(self, spec: LayerSpec, prefix: str) -> AttentionLayer:
        weights, optional = self._weights, self._weights.tensors.get
        return AttentionLayer(
            qkv=weights.matrix(prefix + "qkv"),
            output=weights.matrix(prefix + "output"),
            window=spec.window,
            eps=self._geometry.rms_eps,
            q_norm=optional(prefix + "q_norm"),
            k_norm=optional(prefix + "k_norm"),
            sinks=optional(prefix + "sinks"),
            qkv_bias=optional(prefix + "qkv_bias"),
            output_bias=optional(prefix + "output_bias"),
        )

    def _mlp(self, prefix: str) -> MlpLayer:
        weights = self._weights
        return MlpLayer(weights.matrix(prefix + "gate_up"), weights.matrix(prefix + "down"))

    def _experts(self, prefix: str) -> Experts:
        weights, spec, optional = self._weights, self._geometry.experts, self._weights.tensors.get
        assert spec is not None, "a layer of experts, and no experts"
        own = ExpertWeights(
            router=weights.matrix(prefix + "router"),
            gate_up=weights.experts(prefix + "experts_gate_up"),
            down=weights.experts(prefix + "experts_down"),
            gate=clamped_gate if spec.is_biased else gate,
            router_bias=optional(prefix + "router_bias"),
            gate_up_bias=optional(prefix + "experts_gate_up_bias"),
            down_bias=optional(prefix + "experts_down_bias"),
        )
        return Experts(spec, own, self._arena, self._deterministic, weights.reduce)
