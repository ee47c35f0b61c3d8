"""Token-mixing layers: attention with its backends, and LFM2's gated short convolution.

An attention layer consists of projections, head norms, rotation, and attention over paged KV. The
rotation is a rotary position embedding of the two halves of each head (Su et al., 2021, in
GPT-NeoX's order). All norms are root mean square norms (Zhang and Sennrich, 2019). There are three
backends for attention: `DefaultBackend` gathers KV pages on any device, `DeterministicBackend` is
batch-invariant, and `PagedBackend` reads pages in place with Triton kernels.

The convolution runs over a flat batch of sequences:

    B, C, u = in(x);  y_t = C_t · Σ_j w_j (B·u)_{t-k+1+j};  hidden += out(y)

A sequence's state is the last k - 1 rows of B·u. A single matrix contains every row that the taps
read in a step: first the rows that the step computes, then the state of each chunk (see
`ConvPlan`).

`ForwardContext` holds the rows of one step and provides views of the arena's buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import (
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    SPAN_TOKENS,
    UNIT_ROWS,
    StepLimits,
    mask_width,
    pad_rows,
    span_mask_width,
)
from ullage_engine.kernels.attention import (
    DecodeAttention,
    PrefillAttention,
    Workspace,
    fill_mask,
)
from ullage_engine.kernels.batch import (
    NO_SLOT,
    ConvPlan,
    DecodeGroup,
    PagedRows,
    PrefillTile,
    StepBatch,
    decode_groups,
    prefill_tiles,
)
from ullage_engine.kernels.deterministic import (
    RowProducts,
    SplitWorkspace,
    fill_random,
    fill_span_mask,
    split_decodes,
    split_prefill,
)
from ullage_engine.kernels.kv_pool import LayerCache, shaped, write_kv
from ullage_engine.kernels.staging import Indices, Staging
from ullage_engine.kernels.triton import (
    PagedWorkspace,
    Put,
    fused_convolution,
    paged_attentions,
)
from ullage_engine.layers.linear import Linear, PlainLinear, RowInvariantLinear
from ullage_engine.layers.rotary_tables import fill_tables
from ullage_engine.model_config.model_config import ModelConfig

NORMALISED_AT_ONCE = 4 << 20
"""Number of elements normalised at once.

This caps the size of the temporary tensor. A typical step needs only one launch.
"""

HeadNorms = tuple[torch.Tensor, torch.Tensor]
"""Weights [head_dim] of the query norm and of the key norm."""


class Attention(Protocol):
    """Protocol for attention over a subset of a step's rows, such as its decodes."""

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Compute attention for one layer. The cache must already hold these tokens' KV.

        Args:
            cache: KV of the layer.
            sinks: logits [heads] of the attention sinks. A sink is an additional entry in a head's
                softmax that has no value vector.
        """
        ...


class AttentionBackend(Protocol):
    """Protocol for attention backends.

    A backend creates the linear layers that its kernels expect, and prepares the inputs of the
    attention kernels for each step.
    """

    def linear(self, rows: torch.Tensor) -> Linear:
        """Create an unquantised linear layer from `rows` [out, in], the layout of checkpoints."""
        ...

    def attentions(
        self, rows: PagedRows, put: Put, rotated: torch.Tensor, attended: torch.Tensor, window: int
    ) -> Sequence[Attention]:
        """Prepare attention for every row of a step, for all layers with the same window.

        Args:
            rows: rows of the step and their pages.
            put: copies index arrays to the device.
            rotated: input [heads + kv_heads, tokens, head_dim].
            attended: output [tokens, heads * head_dim].
            window: number of most recent tokens that a row attends to, or 0 for all.
        """
        ...

    def verify_row_invariance(self, head: Linear | None) -> str | None:
        """Check the batch invariance of all layers created so far, if the backend guarantees it.

        Args:
            head: the layer that computes logits, which multiplies only sampled rows.

        Returns:
            A description of the violation, or None if there is none.
        """
        ...


def _gathered_parts(
    rows: PagedRows, limits: StepLimits
) -> tuple[list[DecodeGroup], list[PrefillTile]]:
    """Split a step into decode groups and prefill tiles that fit in the gather workspace."""
    block_tokens = limits.block_tokens
    bucket = limits.context_blocks
    groups = decode_groups(rows, block_tokens, limits.max_gather_tokens, bucket)
    return groups, prefill_tiles(rows, block_tokens, bucket)


class DefaultBackend:
    """The default backend, for any device: ordinary matmuls, and attention over gathered pages."""

    def __init__(
        self, model_config: ModelConfig, limits: StepLimits, arena: dict[str, torch.Tensor]
    ) -> None:
        mask = shaped(arena["mask"], MAX_TILE_ROWS, mask_width(limits.max_model_len))
        fill_mask(mask)
        buffers = (arena["queries"], arena["gathered"], arena["scores"])
        codes = arena.get("gathered_codes")
        self._limits = limits
        self._workspace = Workspace(model_config, limits.block_tokens, *buffers, mask, codes)

    def linear(self, rows: torch.Tensor) -> Linear:
        return PlainLinear(rows)

    def attentions(
        self, rows: PagedRows, put: Put, rotated: torch.Tensor, attended: torch.Tensor, window: int
    ) -> Sequence[Attention]:
        parts = (rotated, attended, self._workspace, window)
        groups, tiles = _gathered_parts(rows, self._limits)
        decodes = [DecodeAttention(group, *parts) for group in groups]
        return [*decodes, *(PrefillAttention(tile, *parts) for tile in tiles)]

    def verify_row_invariance(self, head: Linear | None) -> str | None:
        return None


class DeterministicBackend:
    """The batch-invariant backend: a row's result depends only on its token's context.

    Results are bit-identical regardless of the other rows in the step and of how the context was
    split into chunks.
    """

    def __init__(
        self, model_config: ModelConfig, limits: StepLimits, arena: dict[str, torch.Tensor]
    ) -> None:
        products = RowProducts()
        mask = shaped(arena["mask"], MAX_TILE_ROWS, span_mask_width())
        fill_span_mask(mask)

        self._matrices: list[RowInvariantLinear] = []
        self._products = products
        self._limits = limits
        self._model_config = model_config
        self._workspace = SplitWorkspace(
            model_config=model_config,
            block_tokens=limits.block_tokens,
            products=products,
            queries=arena["queries"],
            gathered=arena["gathered"],
            scores=arena["scores"],
            merged=arena["merged"],
            scaled=arena["scaled"],
            mask=mask,
            codes=arena.get("gathered_codes"),
        )

    def linear(self, rows: torch.Tensor) -> Linear:
        self._matrices.append(RowInvariantLinear(rows, self._products))
        return self._matrices[-1]

    def attentions(
        self, rows: PagedRows, put: Put, rotated: torch.Tensor, attended: torch.Tensor, window: int
    ) -> Sequence[Attention]:
        parts = (rotated, attended, self._workspace, window)
        groups, tiles = _gathered_parts(rows, self._limits)
        decodes = [split_decodes(group, *parts) for group in groups]
        return [*decodes, *(split_prefill(tile, *parts) for tile in tiles)]

    def verify_row_invariance(self, head: Linear | None) -> str | None:
        model_config = self._model_config
        limits = self._limits
        if model_config.has_sinks or any(layer.window for layer in model_config.layers):
            return f"{model_config.architecture} has windows and sinks, which have no such path"

        steps = {limits.product_rows(tokens) for tokens in range(1, limits.max_tokens + 1)}
        samples = {limits.product_rows(rows) for rows in range(1, limits.max_rows + 1)}
        # Matrices of one shape are multiplied by the same kernel, so one of each is enough.
        for matrix in {each.shape: each for each in self._matrices}.values():
            if not matrix.verify_row_invariance(samples if matrix is head else steps):
                return (
                    f"products of {UNIT_ROWS} rows with {list(matrix.shape)} weights give a row "
                    "other bits in another place"
                )

        for sequences, rows in self._attended_shapes():
            self._verify_attention(sequences, rows)
        return None

    def _attended_shapes(self) -> list[tuple[int, int]]:
        """Return every shape that attention's matmuls can have, so that each can be verified.

        A shape is given as (number of sequences, number of query rows per KV head).
        """
        size = self._model_config.group_size
        limits = self._limits
        max_sequences = min(2 * limits.max_rows - 1, limits.max_gather_tokens // SPAN_TOKENS)
        decodes = [(1 << power, pad_rows(size)) for power in range(max_sequences.bit_length())]
        tiles = [MIN_TILE_ROWS << power for power in range(3)]
        return [*decodes, *((1, size * rows) for rows in tiles if rows <= MAX_TILE_ROWS)]

    def _verify_attention(self, sequences: int, rows: int) -> None:
        batch = sequences * self._model_config.num_kv_heads
        head_dim = self._model_config.head_dim
        context = shaped(self._workspace.gathered, batch, SPAN_TOKENS, head_dim)
        fill_random(context)
        self._products.verify_batched((batch, rows, head_dim), context.transpose(1, 2))
        self._products.verify_batched((batch, rows, SPAN_TOKENS), context)


def can_page(model_config: ModelConfig, block_tokens: int, device: torch.device) -> bool:
    """Return whether `PagedBackend` supports this model on this device."""
    return triton.runs_on(device) and triton.attends(model_config.head_dim, block_tokens)


class PagedBackend:
    """The backend with Triton kernels, which read KV pages in place."""

    def __init__(self, model_config: ModelConfig, partials: torch.Tensor) -> None:
        """Create a backend.

        When a context is split, the partial results are written to `partials`, a float32 tensor
        with `ullage_engine.kernels.arena.partial_elements` elements.
        """
        self._workspace = PagedWorkspace(model_config, partials)

    def linear(self, rows: torch.Tensor) -> Linear:
        return PlainLinear(rows)

    def attentions(
        self, rows: PagedRows, put: Put, rotated: torch.Tensor, attended: torch.Tensor, window: int
    ) -> Sequence[Attention]:
        return paged_attentions(rows, put, rotated, attended, self._workspace, window)

    def verify_row_invariance(self, head: Linear | None) -> str | None:
        return None


class ForwardContext:
    """The rows that a step computes, and views of the arena's buffers.

    Views are created once per step, so that layers only have to launch operations.
    """

    def __init__(
        self,
        batch: StepBatch,
        model_config: ModelConfig,
        limits: StepLimits,
        arena: dict[str, torch.Tensor],
        staging: Staging | None = None,
    ) -> None:
        """Lay out a batch in the arena.

        `staging` copies index arrays to the device for `PagedBackend`. For other backends it is
        None.
        """
        self.batch = batch
        self.device = arena["hidden"].device
        self.tokens = len(batch.token_ids)
        self.rows = limits.product_rows(self.tokens)
        """Number of rows in every matmul, which is tokens plus padding."""

        self._staging = staging
        if staging is not None:
            staging.begin()

        self.hidden = shaped(arena["hidden"], self.rows, model_config.hidden)
        self.normed = shaped(arena["normed"], self.rows, model_config.hidden)
        self._arena = arena

    def view(self, name: str, *shape: int) -> torch.Tensor:
        """Return the first elements of an arena buffer, in this shape."""
        return shaped(self._arena[name], *shape)

    def find(self, name: str) -> torch.Tensor | None:
        """Return a flat buffer of the arena, or None if the arena has no buffer of that name."""
        return self._arena.get(name)

    def indices(self, values: Indices) -> torch.Tensor:
        """Return a device tensor that will hold these values after `upload`."""
        if self._staging is not None:
            return self._staging.put(values)
        return torch.from_numpy(values).to(self.device)

    def upload(self) -> None:
        """Copy all index arrays to the device.

        Call this method after the last call of `indices` and before the first operation.
        """
        if self._staging is not None:
            self._staging.upload()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate heads x [heads, tokens, head_dim] by tables [tokens, head_dim] into `out`."""
    half = x.shape[-1] // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[:, :half])
    out[..., half:].addcmul_(x[..., :half], sin[:, half:])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Compute x / sqrt(mean(x²) + eps) * weight, row by row (Zhang and Sennrich, 2019)."""
    shape = (x.shape[-1],)
    size = max(1, NORMALISED_AT_ONCE // x.shape[-1])
    for start in range(0, x.shape[0], size):
        rows = slice(start, start + size)
        out[rows].copy_(F.rms_norm(x[rows], shape, weight, eps))


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Normalise each head of [tokens, heads, head_dim] separately, in place."""
    size = max(1, NORMALISED_AT_ONCE // heads[0].numel())
    for start in range(0, heads.shape[0], size):
        rows = heads[start : start + size]
        rows.copy_(F.rms_norm(rows, (rows.shape[-1],), weight, eps))


class RotaryTables:
    """Cosine and sine tables with one row per position."""

    def __init__(self, model_config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Fill both tables, each of shape [positions, head_dim]."""
        fill_tables(model_config, cos, sin)
        self.cos = cos
        self.sin = sin

    def read(self, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Copy the rows of both tables at `positions` to cos and sin [tokens, head_dim]."""
        torch.index_select(self.cos, 0, positions, out=cos)
        torch.index_select(self.sin, 0, positions, out=sin)


class Rotary(Protocol):
    """Protocol for preparing a layer's queries, keys and values for attention."""

    def run(
        self, norms: HeadNorms | None, eps: float, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        """Normalise and rotate queries and keys, and store keys and values in the cache."""
        ...


class TorchRotary:
    """Rotary embedding in torch: a series of operations, each on all heads."""

    def __init__(
        self,
        step: ForwardContext,
        model_config: ModelConfig,
        tables: RotaryTables,
        qkv: torch.Tensor,  # [tokens, qkv_width]
        rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
    ) -> None:
        tokens = step.tokens
        heads = model_config.num_heads
        head_dim = model_config.head_dim
        rotated_heads = heads + model_config.num_kv_heads

        by_token = qkv.view(tokens, -1, head_dim)
        by_head = by_token.transpose(0, 1)
        self._queries = by_token[:, :heads]
        self._keys = by_token[:, heads:rotated_heads]
        self._unrotated = by_head[:rotated_heads]
        self._values = by_head[rotated_heads:]
        self._rotated = rotated
        self._rotated_keys = rotated[heads:]

        self._codes = step.find("kv_codes")
        self._cos = step.view("step_cos", tokens, head_dim)
        self._sin = step.view("step_sin", tokens, head_dim)
        tables.read(step.indices(step.batch.positions), self._cos, self._sin)

    def run(
        self, norms: HeadNorms | None, eps: float, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        if norms is not None:
            head_norm(self._queries, norms[0], eps)
            head_norm(self._keys, norms[1], eps)
        rotate(self._unrotated, self._cos, self._sin, self._rotated)
        write_kv(cache, slots, self._rotated_keys, self._values, self._codes)


class FusedRotary:
    """Rotary embedding in Triton: a single kernel reads the tables and writes KV pages in place."""

    def __init__(
        self,
        step: ForwardContext,
        tables: RotaryTables,
        qkv: torch.Tensor,  # [tokens, qkv_width]
        rotated: torch.Tensor,  # [heads, tokens, head_dim]
    ) -> None:
        # Imported here because Triton is not installed everywhere.
        from ullage_engine.kernels.triton.layer import rotate_and_store

        self._rotate_and_store = rotate_and_store
        self._tables = tables
        self._qkv = qkv
        self._rotated = rotated
        self._positions = step.indices(step.batch.positions)

    def run(
        self, norms: HeadNorms | None, eps: float, cache: LayerCache, slots: torch.Tensor
    ) -> None:
        tables = (self._tables.cos, self._tables.sin)
        places = (self._positions, slots)
        self._rotate_and_store(self._qkv, norms, eps, tables, *places, self._rotated, cache)


class AttentionStep:
    """The tensors that all attention layers share in one step."""

    def __init__(
        self,
        step: ForwardContext,
        model_config: ModelConfig,
        tables: RotaryTables,
        backend: AttentionBackend,
        *,
        fused: bool,
    ) -> None:
        """Prepare a step. If `fused`, use Triton kernels, which need no buffer for rotated keys."""
        self.qkv = step.view("qkv", step.rows, model_config.qkv_width)
        self.attended = step.view("attended", step.rows, model_config.query_width)
        heads = model_config.num_heads + (0 if fused else model_config.num_kv_heads)
        rotated = step.view("rotated", heads, step.tokens, model_config.head_dim)
        qkv = self.qkv[: step.tokens]
        self._rotary: Rotary = (
            FusedRotary(step, tables, qkv, rotated)
            if fused
            else TorchRotary(step, model_config, tables, qkv, rotated)
        )

        # Each window is prepared once for all layers that have it.
        windows = {layer.window for layer in model_config.layers if layer.mixer == "attention"}
        rows = {window: step.batch.paged(window) for window in windows}
        self._attentions = {
            window: backend.attentions(rows[window], step.indices, rotated, self.attended, window)
            for window in windows
        }
        self._slots = {window: step.indices(rows[window].slots) for window in windows}

    def rotate_and_store(
        self, norms: HeadNorms | None, eps: float, cache: LayerCache, window: int
    ) -> None:
        """Prepare `qkv` for attention, and write the keys and values of every token to the cache.

        `window` is the size of the layer's sliding window.
        """
        self._rotary.run(norms, eps, cache, self._slots[window])

    def attend(self, cache: LayerCache, window: int, sinks: torch.Tensor | None) -> None:
        """Compute attention for a layer with window size `window`, and write it to `attended`."""
        for attention in self._attentions[window]:
            attention.run(cache, sinks)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention layer: hidden += out(softmax(rotate(q) rotate(k)ᵀ / √d) v).

    Some model families also have head norms, biases, sinks or a sliding window.
    """

    qkv: Linear
    output: Linear
    window: int = 0
    eps: float = 0.0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    """Logits of the attention sinks, one per query head."""
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None

    def run(self, step: ForwardContext, shared: AttentionStep, cache: LayerCache) -> None:
        """Add the layer's output for `step.normed` to `step.hidden`, and store every token's KV."""
        self.qkv.forward(step.normed, shared.qkv)
        if self.qkv_bias is not None:
            shared.qkv.add_(self.qkv_bias)

        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm, self.k_norm)
        shared.rotate_and_store(norms, self.eps, cache, self.window)
        shared.attend(cache, self.window, self.sinks)

        self.output.forward_add(shared.attended, step.hidden)
        if self.output_bias is not None:
            step.hidden.add_(self.output_bias)


class ConvStep:
    """The tensors that all convolution layers share in one step."""

    def __init__(
        self, step: ForwardContext, model_config: ModelConfig, plan: ConvPlan, *, fused: bool
    ) -> None:
        """Prepare a step. If `fused`, use one Triton kernel, which needs no other buffers."""
        channels = model_config.conv_channels
        self.projected = step.view("conv_in", step.rows, 3 * channels)
        self.mixed = step.view("conv_mixed", step.rows, channels)
        rows = self.projected[: step.tokens]
        out = self.mixed[: step.tokens]
        self.convolution = (
            fused_convolution(plan, step.indices, rows, out)
            if fused
            else GatheredConvolution(step, model_config, plan, rows, out)
        )


class GatheredConvolution:
    """The convolution for any device, which gathers the input rows of each tap."""

    def __init__(
        self,
        step: ForwardContext,
        model_config: ModelConfig,
        plan: ConvPlan,
        projected: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Prepare the convolutions of a step.

        The convolutions read `projected` [tokens, 3 * channels] and write to `out` [tokens,
        channels].
        """
        tokens, channels = out.shape
        state_rows = len(plan.slots) * (model_config.conv_kernel - 1)
        self._b, self._c, self._u = projected.chunk(3, dim=1)
        self._out = out

        # Products and states are neighbours in one matrix, so that one gather reads both.
        self._source = step.view("conv_source", tokens + state_rows, channels)
        self._tapped = step.view("conv_tapped", tokens, channels)
        self._kept = step.view("conv_kept", state_rows, channels)
        self._products = self._source[:tokens]
        self._states = self._source[tokens:].view(len(plan.slots), -1, channels)

        # The last tap reads the row itself, so it needs no gather.
        self._taps = step.indices(plan.taps[:-1])
        self._tails = step.indices(plan.tails.ravel())
        self._slots = step.indices(np.maximum(plan.slots, 0))
        self._next_slots = step.indices(plan.next_slots)

        # Chunks at the beginning of a sequence have no slot, and their state is zeros.
        fresh = np.flatnonzero(plan.slots == NO_SLOT)
        self._fresh = step.indices(fresh) if len(fresh) else None

    def run(self, taps: torch.Tensor, state: torch.Tensor) -> None:
        """Apply the gated causal convolution to every row, and update the states in place.

        For row t this is C_t · Σ_j taps_j · (B·u)_{t - (kernel-1) + j}. B, C and u are the three
        parts of the input projection.

        Args:
            taps: weights [kernel, channels], oldest tap first.
            state: states [slots, kernel - 1, channels], read and written.
        """
        torch.mul(self._b, self._u, out=self._products)
        torch.index_select(state, 0, self._slots, out=self._states)
        if self._fresh is not None:
            self._states.index_fill_(0, self._fresh, 0)

        torch.mul(self._products, taps[-1], out=self._out)
        for rows, weight in zip(self._taps, taps, strict=False):
            torch.index_select(self._source, 0, rows, out=self._tapped)
            self._out.addcmul_(self._tapped, weight)

        torch.index_select(self._source, 0, self._tails, out=self._kept)
        state.index_copy_(0, self._next_slots, self._kept.view_as(self._states))

        self._out.mul_(self._c)


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """One convolution layer with `taps` [kernel, channels], oldest first."""

    project: Linear
    taps: torch.Tensor
    output: Linear

    def run(self, step: ForwardContext, shared: ConvStep, state: torch.Tensor) -> None:
        """Add the layer's output for `step.normed` to `step.hidden`.

        For each chunk, the layer reads one slot of `state` [slots, kernel - 1, channels] and writes
        another.
        """
        self.project.forward(step.normed, shared.projected)
        shared.convolution.run(self.taps, state)
        self.output.forward_add(shared.mixed, step.hidden)
