"""Layout of the buffers of a step, as arithmetic: the ledger reserves what the runner allocates.

Buffers that never live at the same time share bytes: attention's and the MLP's overlap.
"""

from dataclasses import dataclass

from ullage_engine.models.geometry import ModelGeometry

ALIGNMENT = 64
"""Bytes; a cache line, and enough for any vector instruction."""

PREFILL_TILE_ROWS = 128
"""Most prompt tokens whose scores are computed at once; measured fastest of 32 to 256."""

SCORE_TOKENS = 1 << 19
"""Rows times context of one prefill tile above which tiles get shorter, to bound the scores."""

FLOAT32_BYTES = 4


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
        return _aligned(max(buffer.end for buffer in self.buffers))


def gather_tokens(max_model_len: int, decode_max_batch_tokens: int, block_tokens: int) -> int:
    """Size of the gather workspace, tokens: at least the longest sequence, in whole blocks."""
    tokens = max(max_model_len, decode_max_batch_tokens)
    return -(-tokens // block_tokens) * block_tokens


def prefill_tile_rows(context: int) -> int:
    """How many prompt tokens with `context` tokens before and among them are scored at once."""
    return max(1, min(PREFILL_TILE_ROWS, SCORE_TOKENS // context))


def mask_width(max_model_len: int) -> int:
    """Columns of the causal mask: any number of earlier tokens, then a tile."""
    return max_model_len + PREFILL_TILE_ROWS


def padded_tokens(num_tokens: int) -> int:
    """Rows that matrix products compute for a step of `num_tokens`.

    Libraries keep compiled code for every shape they ever saw; few shapes keep memory flat.
    """
    step = 1 if num_tokens <= 8 else 4 if num_tokens <= 64 else 32
    return -(-num_tokens // step) * step


def step_arena(geometry: ModelGeometry, limits: StepLimits) -> ArenaLayout:
    """Activations of one layer at a time, the gather workspace, rotary tables and the mask."""
    tokens, itemsize = padded_tokens(limits.max_tokens), limits.itemsize
    always = {
        "hidden": tokens * geometry.hidden,
        "normed": tokens * geometry.hidden,
        "mask": PREFILL_TILE_ROWS * mask_width(limits.max_model_len),
        "cos": limits.max_model_len * geometry.head_dim,
        "sin": limits.max_model_len * geometry.head_dim,
        "step_cos": tokens * geometry.head_dim,
        "step_sin": tokens * geometry.head_dim,
    }
    base = _place(always, 0, itemsize)
    start = _aligned(base[-1].end)
    attention = _place(_attention_elements(geometry, limits), start, itemsize)
    mlp = {"gate_up": tokens * 2 * geometry.intermediate, "gated": tokens * geometry.intermediate}
    return ArenaLayout((*base, *attention, *_place(mlp, start, itemsize)))


def sampler_arena(geometry: ModelGeometry, limits: StepLimits) -> ArenaLayout:
    """Logits of every sampled row, as computed and in float32."""
    elements = limits.max_rows * geometry.vocab
    computed = _place({"computed": elements}, 0, limits.itemsize)
    return ArenaLayout(
        (*computed, *_place({"logits": elements}, _aligned(computed[-1].end), FLOAT32_BYTES))
    )


def _attention_elements(geometry: ModelGeometry, limits: StepLimits) -> dict[str, int]:
    tokens = padded_tokens(limits.max_tokens)
    rotated_heads = geometry.num_heads + geometry.num_kv_heads
    tile_scores = min(SCORE_TOKENS, PREFILL_TILE_ROWS * limits.max_model_len)
    return {
        "qkv": tokens * geometry.qkv_width,
        "rotated": tokens * rotated_heads * geometry.head_dim,
        "queries": max(limits.max_rows, PREFILL_TILE_ROWS) * geometry.query_width,
        "attended": tokens * geometry.query_width,
        "gathered": limits.max_gather_tokens * 2 * geometry.num_kv_heads * geometry.head_dim,
        "scores": geometry.num_heads * max(tile_scores, limits.max_gather_tokens),
    }


def _place(elements: dict[str, int], offset: int, itemsize: int) -> list[Buffer]:
    buffers = []
    for name, count in elements.items():
        buffers.append(Buffer(name, offset, count, itemsize))
        offset = _aligned(buffers[-1].end)
    return buffers


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
