"""The decoder that computes every model: embedding, layers, norm, projection to logits.

Each layer computes x += mixer(norm(x)); x += feed_forward(norm(x)). `ModelConfig` defines which
mixers and feed-forwards the layers have (`ullage_engine.model_config.registry`). In a group of
ranks, each rank computes a range of consecutive layers, a slice of each layer, or both.

The scales of float8 KV come from the largest key and value that a layer can produce for any input.
This bound follows from the layer's weights alone. A normalised row has a length of at most √hidden,
so |w · (row * norm)| is at most √hidden |w * norm| (Cauchy and Schwarz). Real inputs stay below
this bound by about the same factor √hidden, which wastes 5 or 6 of the 14 powers of two between
E4M3's smallest normal value and its largest. In return, values never saturate and keep their
floating-point precision, and no calibration text is needed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ullage_engine.kernels.arena import SERIAL_ELEMENTS, StepLimits
from ullage_engine.kernels.batch import StepBatch
from ullage_engine.kernels.block_tables import Ints
from ullage_engine.kernels.kv_pool import HeadScales, LayerCache, head_scales, shaped
from ullage_engine.kernels.moe import clamped_gate
from ullage_engine.kernels.staging import Staging
from ullage_engine.layers.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionStep,
    ConvLayer,
    ConvStep,
    ForwardContext,
    RotaryTables,
    rms_norm,
)
from ullage_engine.layers.linear import Linear, TiledEmbedding
from ullage_engine.layers.moe import (
    ExpertLinears,
    Experts,
    ExpertWeights,
    GatedActivation,
    Reduce,
)
from ullage_engine.layers.rotary_tables import different_table
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.quantization.formats import VALUES

RmsNorm = Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor], None]
"""A function with the signature of `ullage_engine.layers.attention.rms_norm`."""


class MlpStep:
    """The tensors that all dense feed-forward layers share in one step."""

    def __init__(
        self, step: ForwardContext, model_config: ModelConfig, deterministic: bool
    ) -> None:
        self.gate_up = step.view("gate_up", step.rows, 2 * model_config.intermediate)
        self.gated = step.view("gated", step.rows, model_config.intermediate)
        self.rows_at_once = step.rows
        """Number of rows per call of the gate operation."""
        if deterministic:
            self.rows_at_once = max(1, SERIAL_ELEMENTS // model_config.intermediate)


@dataclass(frozen=True, slots=True)
class MlpLayer:
    """Feed-forward layer: hidden += down(silu(gate x) · up x)."""

    gate_up: Linear
    down: Linear
    gate: GatedActivation

    @property
    def matrices(self) -> tuple[Linear, Linear]:
        return self.gate_up, self.down

    def run(self, step: ForwardContext, shared: MlpStep) -> None:
        """Add the layer's output for `step.normed` to `step.hidden`."""
        self.gate_up.forward(step.normed, shared.gate_up)
        for start in range(0, step.rows, shared.rows_at_once):
            rows = slice(start, start + shared.rows_at_once)
            self.gate(shared.gate_up[rows], shared.gated[rows])
        self.down.forward_add(shared.gated, step.hidden)


def gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Compute silu(gate) * up for gate_up [tokens, 2 * intermediate], overwriting its gate half."""
    width = out.shape[-1]
    torch.mul(F.silu(gate_up[:, :width], inplace=True), gate_up[:, width:], out=out)


@dataclass(frozen=True, slots=True)
class Operations:
    """The row-wise operations between matmuls: norms and gated activations."""

    rms_norm: RmsNorm
    gate: GatedActivation
    clamped_gate: GatedActivation


def make_operations(*, fused: bool) -> Operations:
    """Return the row-wise operations, each as one Triton kernel or as a series of torch calls."""
    if not fused:
        return Operations(rms_norm, gate, clamped_gate)

    # Imported here because Triton is not installed everywhere.
    from ullage_engine.kernels.triton import layer

    return Operations(layer.rms_norm, layer.gate, layer.clamped_gate)


def kv_bounds(
    layer: AttentionLayer,
    norm: torch.Tensor,
    model_config: ModelConfig,
    limits: StepLimits,
    arena: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return, for each KV head, an upper bound on the absolute value of any key or value element.

    The result is float32 [2 * kv_heads]: first the bounds of the rotated keys, then of the values.
    """
    lengths = _lengths(layer, norm, model_config, limits, arena)
    return head_bounds(lengths, model_config, layer.k_norm, layer.qkv_bias)


def head_bounds(
    lengths: torch.Tensor,
    model_config: ModelConfig,
    k_norm: torch.Tensor | None = None,
    qkv_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the bounds that `kv_bounds` returns, given the length of each scaled weight row.

    Args:
        lengths: Euclidean length |w * norm| of each row w of the key and value projections, float32
            [2 * kv_heads * head_dim].
        model_config: the configuration of this rank's part of the model.
        k_norm: weights [head_dim] of the key norm, or None if keys are not normalised.
        qkv_bias: bias [qkv_width] of the projection, or None if it has no bias.
    """
    largest = math.sqrt(model_config.hidden) * lengths
    if qkv_bias is not None:
        largest += qkv_bias[model_config.query_width :].float().abs()
    by_head = largest.view(2 * model_config.num_kv_heads, model_config.head_dim).amax(1)

    keys = by_head[: model_config.num_kv_heads]
    # Rotation keeps the length of a pair of numbers, and either number may become that long.
    keys.mul_(math.sqrt(2))
    if k_norm is not None:
        # The norm of a head replaces the bound: a normalised head is at most √head_dim long.
        keys.copy_(math.sqrt(model_config.head_dim) * k_norm.float().abs().max())
    keys.mul_(model_config.rope_scale)

    return by_head


def _lengths(
    layer: AttentionLayer,
    norm: torch.Tensor,
    model_config: ModelConfig,
    limits: StepLimits,
    arena: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Compute |w * norm| for each row w of the key and value projections.

    The result is float32 [2 * kv_heads * head_dim]. The rows are obtained by applying the linear
    layer to the diagonal matrix of the norm's weights, because this works for weights in any
    format.
    """
    hidden = model_config.hidden
    rows = limits.product_rows(min(limits.max_tokens, hidden))
    inputs = shaped(arena["normed"], rows, hidden)
    products = shaped(arena["qkv"], rows, model_config.qkv_width)
    kv = products[:, model_config.query_width :]
    squares = torch.zeros(kv.shape[1], dtype=torch.float64, device=norm.device)

    for start in range(0, hidden, rows):
        columns = torch.arange(start, min(start + rows, hidden), device=norm.device)
        inputs.zero_()[columns - start, columns] = norm[columns]
        layer.qkv.forward(inputs, products)
        squares += torch.linalg.vector_norm(kv, dim=0, dtype=torch.float64).square_()

    return squares.sqrt_().float()


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's prepared tensors by name, and functions that create its linear layers from them."""

    tensors: dict[str, torch.Tensor]
    linear: Callable[[str], Linear]
    """Function that creates the linear layer with a given name."""
    experts: Callable[[str], ExpertLinears]
    """Function that creates the experts' linear layers with a given name."""
    embedding: TiledEmbedding | None = None
    """The embedding if it is stored in tiles, otherwise None."""
    reduce: Reduce | None = None
    """Function that sums a tensor over the ranks, which hold slices of every expert.

    None on a single rank.
    """


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer. `memory` is the index of its KV cache or convolution state."""

    mixer_norm: torch.Tensor
    mixer: AttentionLayer | ConvLayer
    memory: int
    mlp_norm: torch.Tensor
    mlp: MlpLayer | Experts

    def formats(self) -> tuple[object, ...]:
        """Return the encodings of the layer's matrices, which determine the matmul kernels.

        Layers of the same model may differ. For example, a GGUF file may store some layers in
        another format.
        """
        mixer = self.mixer
        mlp = self.mlp
        first = mixer.qkv if isinstance(mixer, AttentionLayer) else mixer.project
        matrices = [first, mixer.output, *mlp.matrices]
        return tuple(getattr(matrix, "encoding", None) for matrix in matrices)


def padded_rows(rows: Ints, limits: StepLimits) -> Ints:
    """Pad rows to the row count that a matmul needs, by repeating the last row."""
    count = limits.product_rows(len(rows)) if len(rows) else 0
    padded: Ints = rows[np.minimum(np.arange(count), len(rows) - 1)]
    return padded


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """The tensors of one step, laid out in the arena."""

    rows: ForwardContext
    token_ids: torch.Tensor
    attention: AttentionStep
    conv: ConvStep | None


class Decoder:
    """A decoder implemented in torch, which computes in the arena's buffers."""

    def __init__(
        self,
        weights: Weights,
        model_config: ModelConfig,
        limits: StepLimits,
        arena: dict[str, torch.Tensor],
        backend: AttentionBackend,
    ) -> None:
        self._model_config = model_config
        self._limits = limits
        self._arena = arena
        self._backend = backend
        self._sampled_rows = torch.empty(0, dtype=torch.int32)

        self._embedding = weights.tensors.get("embedding")
        self._tiled_embedding = weights.embedding
        self._norm = weights.tensors.get("norm")
        head = "embedding" if model_config.tied else "head"
        has_head = head in weights.tensors or f"{head}.{VALUES}" in weights.tensors
        self._head = weights.linear(head) if has_head else None

        positions = (limits.max_model_len, model_config.head_dim)
        cos = shaped(arena["cos"], *positions)
        sin = shaped(arena["sin"], *positions)
        self._tables = RotaryTables(model_config, cos, sin)

        # Only Triton's kernels read all indices of a step from one place of the arena.
        self._staging = Staging(arena["indices"].view(torch.uint8)) if limits.fused else None
        self._operations = make_operations(fused=limits.fused)
        build = _Builder(weights, model_config, arena, self._operations, limits.deterministic)
        self._layers = list(build.layers())

    def forward(
        self,
        batch: StepBatch,
        caches: Sequence[LayerCache],
        states: Sequence[torch.Tensor],
        hidden_in: torch.Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute the hidden states of a batch, and write its KV and convolution states.

        Args:
            batch: rows of the step.
            caches: KV of each attention layer.
            states: states of each convolution layer.
            hidden_in: hidden states [tokens, hidden] of the previous stage, or None on the first
                stage, which embeds the tokens.
            layers: indices of the layers to run, or None for all.

        Returns:
            Hidden states [tokens, hidden] after the last layer, not normalised. They are stored in
            the arena and are valid until the next step.
        """
        return self.compute(self.prepare(batch), caches, states, hidden_in, layers)

    def prepare(self, batch: StepBatch) -> DecoderStep:
        """Lay out a step in the arena, and start copying the step's index arrays to the device.

        Steps with the same shapes use the same addresses, so operations captured from one step can
        be replayed for a later one.
        """
        model_config = self._model_config
        limits = self._limits
        rows = ForwardContext(batch, model_config, limits, self._arena, self._staging)
        token_ids = rows.indices(batch.token_ids)

        fused = limits.fused
        attention = AttentionStep(rows, model_config, self._tables, self._backend, fused=fused)
        conv = None
        if batch.conv is not None:
            conv = ConvStep(rows, model_config, batch.conv, fused=fused)

        self._sampled_rows = rows.indices(padded_rows(batch.sampled_rows, limits))
        rows.upload()
        return DecoderStep(rows, token_ids, attention, conv)

    def compute(
        self,
        step: DecoderStep,
        caches: Sequence[LayerCache],
        states: Sequence[torch.Tensor],
        hidden_in: torch.Tensor | None = None,
        layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute a prepared step, and return the same result as `forward`.

        With Triton kernels, no tensor is read on the host unless the model has experts.
        """
        rows = step.rows
        num_tokens = rows.batch.num_tokens
        if hidden_in is None:
            self._embed(step.token_ids, rows)
        else:
            rows.hidden[:num_tokens].copy_(hidden_in)
        rows.hidden[num_tokens:].zero_()

        run = self._layers if layers is None else [self._layers[index] for index in layers]
        self._run(run, rows, step.attention, step.conv, caches, states)
        return rows.hidden[:num_tokens]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the logits of the batch's sampled rows into out [rows, vocab].

        The rows of `out` include padding. `hidden` is the result of the last `forward`.
        """
        chosen = shaped(self._arena["normed"], out.shape[0], self._model_config.hidden)
        torch.index_select(hidden, 0, self._sampled_rows, out=chosen)
        self._project(chosen, out)

    def logits_of(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the logits of `rows`, taken from a `forward` result, into out [rows, vocab].

        The rows of `out` may include padding.
        """
        chosen = shaped(self._arena["normed"], out.shape[0], self._model_config.hidden)
        chosen[: len(rows)].copy_(rows)
        chosen[len(rows) :].zero_()
        self._project(chosen, out)

    def _project(self, chosen: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the logits of hidden states [rows, hidden]. The hidden states are overwritten."""
        assert self._head is not None, "not the last stage"
        assert self._norm is not None, "not the last stage"
        eps = self._model_config.rms_eps
        self._operations.rms_norm(chosen, self._norm, eps, chosen)
        self._head.forward(chosen, out)

    def one_of_each_kind(self) -> list[int]:
        """Return the indices of some layers, one for each kind of layer in the model.

        Two layers are of the same kind if their specifications and weight formats are equal. They
        have the same shapes, so it is enough for a trial step to run one layer of each kind.
        """
        kinds = {
            (spec, layer.formats()): index
            for index, (spec, layer) in enumerate(
                zip(self._model_config.layers, self._layers, strict=True)
            )
        }
        return sorted(kinds.values())

    def kv_scales(self) -> list[HeadScales]:
        """Return float8 scales for each attention layer, large enough for every key and value.

        The computation overwrites the arena.
        """
        scales = []
        for layer in self._layers:
            if isinstance(layer.mixer, AttentionLayer):
                norm = layer.mixer_norm
                parts = (self._model_config, self._limits, self._arena)
                bounds = kv_bounds(layer.mixer, norm, *parts)
                scales.append(head_scales(bounds.tolist(), norm.dtype, norm.device))
        return scales

    def check_tables(self) -> str:
        """Check the rotary tables against recomputed ones.

        Return the name of a table that differs, or "" if all match.
        """
        return different_table(self._model_config, self._tables.cos, self._tables.sin)

    def verify_row_invariance(self) -> str | None:
        """Check batch invariance as described in `AttentionBackend.verify_row_invariance`."""
        return self._backend.verify_row_invariance(self._head)

    def _embed(self, token_ids: torch.Tensor, step: ForwardContext) -> None:
        if self._tiled_embedding is not None:
            self._tiled_embedding.read(token_ids, step.hidden[: step.tokens])
            return

        assert self._embedding is not None, "not the first stage"
        torch.index_select(self._embedding, 0, token_ids, out=step.hidden[: step.tokens])

    def _run(
        self,
        layers: Sequence[DecoderLayer],
        step: ForwardContext,
        attention: AttentionStep,
        conv: ConvStep | None,
        caches: Sequence[LayerCache],
        states: Sequence[torch.Tensor],
    ) -> None:
        rms_norm = self._operations.rms_norm
        eps = self._model_config.rms_eps
        deterministic = self._limits.deterministic
        mlp = MlpStep(step, self._model_config, deterministic)
        # Padding rows would choose experts, whose weights would be read for nothing. Only
        # deterministic products need them.
        routed = step.rows if deterministic else step.batch.num_tokens

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
    """Builds the decoder's layers from prepared tensors."""

    def __init__(
        self,
        weights: Weights,
        model_config: ModelConfig,
        arena: dict[str, torch.Tensor],
        operations: Operations,
        deterministic: bool,
    ) -> None:
        self._weights = weights
        self._model_config = model_config
        self._arena = arena
        self._operations = operations
        self._deterministic = deterministic

    def layers(self) -> Iterator[DecoderLayer]:
        count = {"attention": 0, "conv": 0}
        for index, spec in enumerate(self._model_config.layers, self._model_config.first_layer):
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
            project=weights.linear(prefix + "conv_in"),
            taps=weights.tensors[prefix + "conv"].t().contiguous(),
            output=weights.linear(prefix + "conv_out"),
        )

    def _attention(self, spec: LayerSpec, prefix: str) -> AttentionLayer:
        weights = self._weights
        optional = self._weights.tensors.get
        return AttentionLayer(
            qkv=weights.linear(prefix + "qkv"),
            output=weights.linear(prefix + "output"),
            window=spec.window,
            eps=self._model_config.rms_eps,
            q_norm=optional(prefix + "q_norm"),
            k_norm=optional(prefix + "k_norm"),
            sinks=optional(prefix + "sinks"),
            qkv_bias=optional(prefix + "qkv_bias"),
            output_bias=optional(prefix + "output_bias"),
        )

    def _mlp(self, prefix: str) -> MlpLayer:
        linear = self._weights.linear
        return MlpLayer(
            gate_up=linear(prefix + "gate_up"),
            down=linear(prefix + "down"),
            gate=self._operations.gate,
        )

    def _experts(self, prefix: str) -> Experts:
        weights = self._weights
        spec = self._model_config.experts
        optional = self._weights.tensors.get
        assert spec is not None, "a layer of experts, and no experts"
        operations = self._operations
        own = ExpertWeights(
            router=weights.linear(prefix + "router"),
            gate_up=weights.experts(prefix + "experts_gate_up"),
            down=weights.experts(prefix + "experts_down"),
            gate=operations.clamped_gate if spec.is_biased else operations.gate,
            router_bias=optional(prefix + "router_bias"),
            gate_up_bias=optional(prefix + "experts_gate_up_bias"),
            down_bias=optional(prefix + "experts_down_bias"),
        )
        return Experts(spec, own, self._arena, self._deterministic, weights.reduce)
