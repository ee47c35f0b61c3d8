"""Layout of the buffers of a step, as arithmetic: the ledger reserves what the runner allocates.

Buffers that never live at the same time share bytes: attention's, the MLP's and the experts'
overlap.
"""

from dataclasses import dataclass

from ullage_engine.memory.experts import expert_elements, routing_elements
from ullage_engine.memory.partials import partial_elements
from ullage_engine.memory.rungs import (
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    SCORE_TOKENS,
    SPAN_TOKENS,
    block_rung,
    token_rung,
    unit_rows,
)
from ullage_engine.models.geometry import ModelGeometry

ALIGNMENT = 64
"""Bytes; a cache line, and enough for any vector instruction."""

FLOAT32_BYTES = 4
CODE_BYTES = 1
"""Of a float8."""

BLOCK_TOKENS = 16
"""Of a block of KV."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step."""

    max_tokens: int
    """Prompt and decode tokens together."""
    max_rows: int
    """Sequences, so rows of logits."""
    max_model_len: int
    max_gather_tokens: int
    """Tokens of context whose KV is gathered at once, padding included."""
    block_tokens: int
    itemsize: int
    """Bytes of an activation."""
    deterministic: bool = False
    """A row's result may not depend on the step that it is part of."""
    fused: bool = False
    """GPU kernels read KV and convolution states where they lie, so there is no workspace that
    these are gathered in."""
    fp8_kv: bool = False
    """KV is stored as float8, and passes through bytes of its own on the way in and out."""

    def product_rows(self, tokens: int) -> int:
        """Rows of the layers' products for a step of `tokens`, padding included."""
        return token_rung(unit_rows(tokens) if self.deterministic else tokens)

    def context_blocks(self, blocks: int) -> int:
        """Blocks of context attended for sequences of at most `blocks`, padding included."""
        return context_blocks(blocks, self.block_tokens, self.deterministic)


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    offset: int
    """Bytes from the arena's start, aligned."""
    num_elements: int
    itemsize: int

    @property
    def end(self) -> int:
        return self.offset + self.num_elements * self.itemsize


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where each buffer lies."""

    buffers: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        return _aligned(max((buffer.end for buffer in self.buffers), default=0))


def context_blocks(blocks: int, block_tokens: int, deterministic: bool) -> int:
    """A rung of context, or whole spans of it where a token's result may not depend on the rung."""
    span = SPAN_TOKENS // block_tokens
    return -(-blocks // span) * span if deterministic else block_rung(blocks)


def gather_tokens(
    max_model_len: int, decode_max_batch_tokens: int, block_tokens: int, deterministic: bool = False
) -> int:
    """Size of the gather workspace, tokens: at least the longest sequence, in whole blocks."""
    longest = context_blocks(-(-max_model_len // block_tokens), block_tokens, deterministic)
    return max(longest, decode_max_batch_tokens // block_tokens) * block_tokens


def span_mask_width() -> int:
    """Columns of deterministic attention's mask: the span a tile begins in, the tile, the rest of
    the span it ends in."""
    return 2 * SPAN_TOKENS + MAX_TILE_ROWS


def mask_width(max_model_len: int) -> int:
    """Columns of the causal mask: any number of earlier tokens, then a tile."""
    return max_model_len + MAX_TILE_ROWS


def step_arena(geometry: ModelGeometry, limits: StepLimits) -> ArenaLayout:
    """Activations of one layer at a time, the gather workspace, rotary tables and the mask."""
    tokens, itemsize = limits.product_rows(limits.max_tokens), limits.itemsize
    width = span_mask_width() if limits.deterministic else mask_width(limits.max_model_len)
    always = {
        "hidden": tokens * geometry.hidden,
        "normed": tokens * geometry.hidden,
        "mask": 0 if limits.fused else MAX_TILE_ROWS * width,
        "cos": limits.max_model_len * geometry.head_dim,
        "sin": limits.max_model_len * geometry.head_dim,
        "step_cos": tokens * geometry.head_dim,
        "step_sin": tokens * geometry.head_dim,
    }
    base = _place(always, 0, itemsize)
    start = _aligned(base[-1].end)
    attention = _place(_attention_elements(geometry, limits), start, itemsize)
    if limits.fused:
        partials = {"partials": partial_elements(geometry)}
        attention += _place(partials, _aligned(attention[-1].end), FLOAT32_BYTES)
    if limits.deterministic:
        merged = dict.fromkeys(("merged", "scaled"), _query_elements(geometry, limits))
        attention += _place(merged, _aligned(attention[-1].end), FLOAT32_BYTES)
    if limits.fp8_kv:
        codes = _code_elements(geometry, limits)
        attention += _place(codes, _aligned(attention[-1].end), CODE_BYTES)
    mlp = {"gate_up": tokens * 2 * geometry.intermediate, "gated": tokens * geometry.intermediate}
    conv = _place(_conv_elements(geometry, limits), start, itemsize)
    experts = _place(expert_elements(geometry, tokens), start, itemsize)
    if experts:
        routing = routing_elements(geometry, tokens)
        experts += _place(routing, _aligned(experts[-1].end), FLOAT32_BYTES)
    return ArenaLayout((*base, *attention, *conv, *_place(mlp, start, itemsize), *experts))


def sampler_arena(geometry: ModelGeometry, limits: StepLimits) -> ArenaLayout:
    """Logits of every sampled row, as computed and in float32."""
    elements = limits.product_rows(limits.max_rows) * geometry.vocab
    computed = _place({"computed": elements}, 0, limits.itemsize)
    return ArenaLayout(
        (*computed, *_place({"logits": elements}, _aligned(computed[-1].end), FLOAT32_BYTES))
    )


def _attention_elements(geometry: ModelGeometry, limits: StepLimits) -> dict[str, int]:
    tokens = limits.product_rows(limits.max_tokens)
    rotated_heads = geometry.num_heads + geometry.num_kv_heads
    rows = {
        "qkv": tokens * geometry.qkv_width,
        "rotated": tokens * rotated_heads * geometry.head_dim,
        "attended": tokens * geometry.query_width,
    }
    if limits.fused:
        return rows
    most_blocks = -(-limits.max_model_len // limits.block_tokens)
    longest = limits.context_blocks(most_blocks) * limits.block_tokens
    tile_scores = max(min(SCORE_TOKENS, MAX_TILE_ROWS * longest), MIN_TILE_ROWS * longest)
    return rows | {
        "queries": _query_elements(geometry, limits),
        "gathered": limits.max_gather_tokens * 2 * geometry.num_kv_heads * geometry.head_dim,
        "scores": max(
            geometry.num_heads * tile_scores,
            _decode_heads(geometry, limits) * limits.max_gather_tokens,
        ),
    }


def _code_elements(geometry: ModelGeometry, limits: StepLimits) -> dict[str, int]:
    """Bytes of the keys, or values, that a step writes, and of those that it gathers."""
    width = geometry.num_kv_heads * geometry.head_dim
    written = {"kv_codes": limits.product_rows(limits.max_tokens) * width}
    if limits.fused:
        return written
    return written | {"gathered_codes": limits.max_gather_tokens * 2 * width}


def _conv_elements(geometry: ModelGeometry, limits: StepLimits) -> dict[str, int]:
    if not geometry.num_conv_layers:
        return {}
    tokens, channels = limits.product_rows(limits.max_tokens), geometry.conv_channels
    state_rows = limits.max_rows * (geometry.conv_kernel - 1)
    rows = {"conv_in": tokens * 3 * channels, "conv_mixed": tokens * channels}
    if limits.fused:
        return rows
    return rows | {
        "conv_source": (tokens + state_rows) * channels,
        "conv_tapped": tokens * channels,
        "conv_kept": state_rows * channels,
    }


def _query_elements(geometry: ModelGeometry, limits: StepLimits) -> int:
    """Queries of a padded group of decodes, or of a tile."""
    decodes = 2 * limits.max_rows * _decode_heads(geometry, limits)
    return max(decodes, MAX_TILE_ROWS * geometry.num_heads) * geometry.head_dim


def _decode_heads(geometry: ModelGeometry, limits: StepLimits) -> int:
    """Rows of queries that one decode takes, padding included."""
    if not limits.deterministic:
        return geometry.num_heads
    return geometry.num_kv_heads * unit_rows(geometry.group_size)


def _place(elements: dict[str, int], offset: int, itemsize: int) -> list[Buffer]:
    buffers = []
    for name, count in elements.items():
        buffers.append(Buffer(name, offset, count, itemsize))
        offset = _aligned(buffers[-1].end)
    return buffers


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
