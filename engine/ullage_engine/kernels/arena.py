"""Sizes of all that a step computes in, as arithmetic: shape buckets, and the arena's buffers.

oneDNN prepares every new shape of a product, about a millisecond and 0.6 MB each, and keeps the
latest hundred (`ullage_engine.server.worker_env`). Sizes are rounded up to buckets, so that
they seldom miss.

The ledger reserves the arena's bytes and the runner allocates them, so both follow one layout.
Buffers that never live at the same time share bytes: attention's, the MLP's and the experts'
overlap. A layer of experts computes slice by slice beyond a number of tokens, and decode attention
is cut into splits of context (split-KV; a split's result is a head's worth of float32 and the
logarithm of its softmax's sum), so that those buffers are bounded too.
"""

from dataclasses import dataclass
from functools import cache

from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.native.library import VECTOR
from ullage_engine.quantization.formats import TILE_GROUPS

MAX_TILE_ROWS = 128
"""Most prompt tokens whose scores are computed at once; measured fastest of 32 to 256."""

MIN_TILE_ROWS = 32

SCORE_TOKENS = 1 << 19
"""Rows times context of one prefill tile above which tiles get shorter, to bound the scores."""

MIN_BLOCKS = 8

MAX_ROW_WASTE = 0.25
"""Share of padding rows accepted to save a decode group."""


UNIT_ROWS = 8
"""Rows of the smallest product of a deterministic step; all others are multiples of it. From 4 rows
on MKL and oneDNN give a row the same bits; with 8 each of two threads has 4."""

SERIAL_ELEMENTS = 32_767
"""Most that torch computes with one thread (ATen/Parallel.h, GRAIN_SIZE). More are shared out in
the middle of rows, and the last elements of a share are computed by other instructions than the
others: a sigmoid may differ in the last bit (docs/reasons/decisions/0007-determinism.md)."""

SPAN_TOKENS = 256
"""Context that deterministic attention scores and sums by itself, counted from the first token."""


def pad_rows(rows: int) -> int:
    """Return rows rounded up to whole units of a deterministic product."""
    return -(-rows // UNIT_ROWS) * UNIT_ROWS


def pad_to_bucket(tokens: int) -> int:
    """Return the rows of the layers' products for a step of `tokens`."""
    if tokens <= 64:
        return _round_up(tokens, 1)
    step = 64 if tokens <= 1024 else 512
    return -(-tokens // step) * step


def context_bucket(blocks: int) -> int:
    """Return the blocks of context gathered for sequences of at most `blocks`."""
    return _round_up(blocks, MIN_BLOCKS)


def decode_rows(rows: int, max_rows: int) -> tuple[int, int]:
    """Return how many of `rows` decodes to attend together, and their number with padding.

    Padded rows are a power of two, at most `max_rows`.
    """
    above = 1 << (rows - 1).bit_length()
    if above <= max_rows and (above - rows) <= MAX_ROW_WASTE * above:
        return rows, above
    attended = 1 << (min(rows, max_rows).bit_length() - 1)
    return attended, attended


def tile_rows(blocks: int, block_tokens: int) -> int:
    """Return how many prompt tokens are scored at once against this many blocks of context."""
    affordable = SCORE_TOKENS // (blocks * block_tokens)
    return next((r for r in (128, 64) if r <= affordable), MIN_TILE_ROWS)


def tile_bucket(rows: int) -> int:
    """Return the rows of a prefill tile, padding included."""
    return max(MIN_TILE_ROWS, 1 << (rows - 1).bit_length())


def _round_up(size: int, smallest: int) -> int:
    """Round up to smallest * (1, 2, 3, 4, 6, 8, 12, 16, 24, ...)."""
    bucket = smallest
    while bucket < size:
        half_steps = bucket + bucket // 2
        if half_steps >= size and half_steps % smallest == 0:
            return half_steps
        bucket *= 2
    return bucket


SLICE_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Most tokens whose experts are computed at once, by kind of device. Each slice reads all experts
again, and gives each of them its share of rows: 2,048 tokens that choose four of 32 are 256 rows an
expert, too few tiles of a float32 product for all multiprocessors of a large GPU."""

INT64_WORDS = 2
"""Four-byte elements that one index takes."""

INT32_BYTES = 4

MXFP4_PANELS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Numbers of packed experts decoded at once: on a CPU as many as stay in its cache, elsewhere
enough of every expert for a product that keeps the device busy."""


def mxfp4_panel(device: str) -> int:
    """Numbers that a panel of MXFP4 weights has room for on this kind of device."""
    return MXFP4_PANELS[device]


def mxfp4_scratch_bytes(device: str, itemsize: int) -> int:
    """Return the bytes that decoding takes, once for all layers: the numbers, and their codes as
    indices.
    """
    return mxfp4_panel(device) * itemsize + mxfp4_panel(device) // 2 * INT32_BYTES


@cache
def padding_rows(pairs: int) -> int:
    """Count the rows that the last expert's product may write past the last of `pairs`; see
    `ullage_engine.layers.moe.ExpertLinears`.
    """
    return max(max(pad_to_bucket(rows), pad_rows(rows)) - rows for rows in range(1, pairs + 1))


def expert_elements(model_config: ModelConfig, tokens: int) -> dict[str, int]:
    """Count the elements of the buffers of the computing type, for slices of up to `tokens` rows.

    A pair is a token and one of its experts. Empty without experts.
    """
    spec = model_config.experts
    if spec is None:
        return {}
    pairs = tokens * spec.experts_per_token
    rows = pairs + padding_rows(pairs)
    return {
        "expert_logits": tokens * spec.num_experts,
        "expert_rows": rows * model_config.hidden,
        "expert_gate_up": rows * 2 * spec.intermediate,
        "expert_gated": rows * spec.intermediate,
        "expert_picked": tokens * model_config.hidden,
    }


def routing_elements(model_config: ModelConfig, tokens: int) -> dict[str, int]:
    """Count the elements of the four-byte buffers, for slices of up to `tokens` rows; indices
    take two each.

    Empty without experts.
    """
    spec = model_config.experts
    if spec is None:
        return {}
    pairs = tokens * spec.experts_per_token
    indices = ("expert_chosen", "expert_sorted", "expert_order", "expert_places")
    return {
        "expert_sum": tokens * model_config.hidden,
        "expert_scores": tokens * spec.num_experts,
        "expert_ranks": tokens * spec.num_experts,
        "expert_weights": pairs,
        "expert_ends": spec.num_experts,
        **dict.fromkeys(indices, pairs * INT64_WORDS),
    }


TARGET_PROGRAMS = 1024
"""Programs that keep a large GPU busy: 132 multiprocessors of an H200 with 4 to 8 each."""

MAX_SPLITS = 64
"""Results of one head that are merged in registers."""

SPLIT_TOKENS = 128
"""Context below which a split costs more than it saves."""


def num_splits(rows: int, num_kv_heads: int, context: int) -> int:
    """Return the number of splits of the context of `rows` sequences with room for `context`
    tokens; a power of two.

    It depends on shapes alone, not on lengths, so that a captured graph stays valid.
    """
    splits = min(MAX_SPLITS, TARGET_PROGRAMS // (rows * num_kv_heads), -(-context // SPLIT_TOKENS))
    return 1 << (max(1, splits).bit_length() - 1)


def partial_elements(model_config: ModelConfig) -> int:
    """Count the elements of float32 for the splits of any step.

    Split decodes are at most TARGET_PROGRAMS programs of `group_size` query heads each; a decode in
    one piece writes its result directly.
    """
    return TARGET_PROGRAMS * model_config.group_size * (model_config.head_dim + 1)


ALIGNMENT = 64
"""Bytes; a cache line, enough for any vector instruction, and a multiple of the 16 without which
kernels are compiled once more."""


def aligned(offset: int) -> int:
    """Return a number of bytes rounded up to the next aligned place."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


FLOAT32_BYTES = 4
CODE_BYTES = 1
"""Bytes of a float8."""

GATHER_TOKENS = 8192
"""Tokens of context whose KV one pass of decode attention gathers; more sequences take several."""

BLOCK_TOKENS = 16
"""Tokens of a block of KV."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step."""

    max_tokens: int
    """Tokens of a step, prompts and decodes together."""
    max_rows: int
    """Sequences, so rows of logits."""
    max_model_len: int
    """Longest sequence, tokens."""
    gather_tokens: int
    """Tokens of context whose KV one pass of decode attention gathers."""
    itemsize: int
    """Bytes of an activation."""
    block_tokens: int = BLOCK_TOKENS
    deterministic: bool = False
    """Whether a row's result must be independent of the step that it is part of."""
    fused: bool = False
    """Whether GPU kernels read KV and convolution states where they lie, so that there is no
    workspace that these are gathered in."""
    fp8_kv: bool = False
    """Whether KV is stored as float8, which passes through bytes of its own on the way in and
    out."""
    windowed: bool = False
    """Whether layers with sliding windows have KV blocks of their own."""
    library_threads: int = 0
    """Threads of the C++ library, if it computes whole steps; 0: it does not."""
    max_slice_tokens: int = SLICE_TOKENS["cpu"]
    """Most tokens whose experts are computed at once: those of the device's kind."""

    def product_rows(self, tokens: int) -> int:
        """Return the rows of the layers' products for a step of `tokens`, padding included."""
        return pad_to_bucket(pad_rows(tokens) if self.deterministic else tokens)

    def slice_tokens(self, tokens: int) -> int:
        """Return the tokens of the largest slice of experts of a step of `tokens`."""
        return min(tokens, self.max_slice_tokens)

    def context_blocks(self, blocks: int) -> int:
        """Return the blocks of context attended for sequences of at most `blocks`, padding
        included: a bucket, or whole spans where results may not depend on buckets.
        """
        span = SPAN_TOKENS // self.block_tokens
        return -(-blocks // span) * span if self.deterministic else context_bucket(blocks)

    @property
    def max_gather_tokens(self) -> int:
        """Size of the gather workspace, tokens: at least the longest sequence, in whole blocks."""
        longest = self.context_blocks(-(-self.max_model_len // self.block_tokens))
        blocks = max(longest, self.gather_tokens // self.block_tokens)
        return blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class ArenaBuffer:
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
    """The place and size of each buffer."""

    buffers: tuple[ArenaBuffer, ...]

    @property
    def nbytes(self) -> int:
        return aligned(max((buffer.end for buffer in self.buffers), default=0))


def span_mask_width() -> int:
    """Count the columns of deterministic attention's mask: the span a tile begins in, the tile,
    the rest of the span it ends in.
    """
    return 2 * SPAN_TOKENS + MAX_TILE_ROWS


def mask_width(max_model_len: int) -> int:
    """Count the columns of the causal mask: any number of earlier tokens, then a tile."""
    return max_model_len + MAX_TILE_ROWS


def step_arena(model_config: ModelConfig, limits: StepLimits) -> ArenaLayout:
    """Activations of one layer at a time, the gather workspace, rotary tables and the mask."""
    if limits.library_threads:
        return native_arena(model_config, limits)
    tokens = limits.product_rows(limits.max_tokens)
    itemsize = limits.itemsize
    width = span_mask_width() if limits.deterministic else mask_width(limits.max_model_len)
    always = {
        "hidden": tokens * model_config.hidden,
        "normed": tokens * model_config.hidden,
        "mask": 0 if limits.fused else MAX_TILE_ROWS * width,
        "cos": limits.max_model_len * model_config.head_dim,
        "sin": limits.max_model_len * model_config.head_dim,
        "step_cos": 0 if limits.fused else tokens * model_config.head_dim,
        "step_sin": 0 if limits.fused else tokens * model_config.head_dim,
    }
    base = _place(always, 0, itemsize)
    if limits.fused:
        indices = {"indices": _index_words(model_config, limits)}
        base += _place(indices, aligned(base[-1].end), INT32_BYTES)
    start = aligned(base[-1].end)
    attention = _place(_attention_elements(model_config, limits), start, itemsize)
    if limits.fused:
        partials = {"partials": partial_elements(model_config)}
        attention += _place(partials, aligned(attention[-1].end), FLOAT32_BYTES)
    if limits.deterministic:
        merged = dict.fromkeys(("merged", "scaled"), _query_elements(model_config, limits))
        attention += _place(merged, aligned(attention[-1].end), FLOAT32_BYTES)
    if limits.fp8_kv and not limits.fused:
        codes = _code_elements(model_config, limits)
        attention += _place(codes, aligned(attention[-1].end), CODE_BYTES)
    mlp = {
        "gate_up": tokens * 2 * model_config.intermediate,
        "gated": tokens * model_config.intermediate,
    }
    conv = _place(_conv_elements(model_config, limits), start, itemsize)
    sliced = limits.slice_tokens(tokens)
    experts = _place(expert_elements(model_config, sliced), start, itemsize)
    if experts:
        routing = routing_elements(model_config, sliced)
        experts += _place(routing, aligned(experts[-1].end), FLOAT32_BYTES)
    return ArenaLayout((*base, *attention, *conv, *_place(mlp, start, itemsize), *experts))


ROWS_TOGETHER = 64
"""Most queries that the C++ library attends together, of rows that follow one another."""

MAX_PARTIALS = 4 << 20
"""Most numbers of the C++ library's partial results. A step with more, which has many threads and a
long context, attends each sequence's context in one piece."""


def native_arena(model_config: ModelConfig, limits: StepLimits) -> ArenaLayout:
    """Activations, rotary tables and each thread's workspace of `ullage_engine.native`."""
    tokens = limits.max_tokens
    hidden = model_config.hidden
    dim = model_config.head_dim
    queries = model_config.query_width
    gated = model_config.intermediate
    spec = model_config.experts
    convolved = 3 * hidden if model_config.num_conv_layers else 0
    expert, count = (spec.intermediate, spec.num_experts) if spec else (0, 0)
    pairs = limits.slice_tokens(tokens) * spec.experts_per_token if spec else 0
    together = max(ROWS_TOGETHER, model_config.group_size)
    spans = -(-limits.max_model_len // SPAN_TOKENS)
    workspace = together * (SPAN_TOKENS + 4 + 3 * dim)
    wide = tokens * max(model_config.qkv_width, 2 * gated, convolved)
    rounded = max(tokens * max(hidden, queries, gated), pairs * max(hidden, expert))
    groups = rounded // min(TILE_GROUPS)
    elements = {
        "hidden": tokens * hidden,
        "wide": max(wide, pairs * max(hidden, 2 * expert)),
        "attended": tokens * max(hidden, queries),
        "expert_weights": pairs,
        "pairs": 6 * pairs + count + 1 if pairs else 0,
        "row_scales": groups,
        "row_sums": groups,
        "cos": limits.max_model_len * dim // 2,
        "sin": limits.max_model_len * dim // 2,
        "partials": min(4 * limits.library_threads * spans * together * (dim + 2), MAX_PARTIALS),
        "workspace": limits.library_threads
        * max(workspace, hidden, gated, expert, 2 * count + VECTOR),
    }
    floats = _place(elements, 0, FLOAT32_BYTES)
    codes = _place({"rounded": rounded}, aligned(floats[-1].end), CODE_BYTES)
    return ArenaLayout((*floats, *codes))


def sampler_arena(model_config: ModelConfig, limits: StepLimits) -> ArenaLayout:
    """Logits of every sampled row, as computed and in float32."""
    if limits.library_threads:
        return ArenaLayout(
            tuple(_place({"logits": limits.max_rows * model_config.vocab}, 0, FLOAT32_BYTES))
        )
    elements = limits.product_rows(limits.max_rows) * model_config.vocab
    computed = _place({"computed": elements}, 0, limits.itemsize)
    return ArenaLayout(
        (*computed, *_place({"logits": elements}, aligned(computed[-1].end), FLOAT32_BYTES))
    )


def _attention_elements(model_config: ModelConfig, limits: StepLimits) -> dict[str, int]:
    tokens = limits.product_rows(limits.max_tokens)
    # Kernels rotate keys on their way into the pages.
    rotated_heads = model_config.num_heads + (0 if limits.fused else model_config.num_kv_heads)
    rows = {
        "qkv": tokens * model_config.qkv_width,
        "rotated": tokens * rotated_heads * model_config.head_dim,
        "attended": tokens * model_config.query_width,
    }
    if limits.fused:
        return rows
    max_blocks = -(-limits.max_model_len // limits.block_tokens)
    longest = limits.context_blocks(max_blocks) * limits.block_tokens
    tile_scores = max(min(SCORE_TOKENS, MAX_TILE_ROWS * longest), MIN_TILE_ROWS * longest)
    return rows | {
        "queries": _query_elements(model_config, limits),
        "gathered": limits.max_gather_tokens
        * 2
        * model_config.num_kv_heads
        * model_config.head_dim,
        "scores": max(
            model_config.num_heads * tile_scores,
            _decode_heads(model_config, limits) * limits.max_gather_tokens,
        ),
    }


def _code_elements(model_config: ModelConfig, limits: StepLimits) -> dict[str, int]:
    """Count the bytes of the keys, or values, that a step writes, and of those that it gathers."""
    width = model_config.num_kv_heads * model_config.head_dim
    return {
        "kv_codes": limits.product_rows(limits.max_tokens) * width,
        "gathered_codes": limits.max_gather_tokens * 2 * width,
    }


def _index_words(model_config: ModelConfig, limits: StepLimits) -> int:
    """Count the four-byte words of the index arrays of any step, each aligned.

    See `ullage_engine.kernels.batch.StepBatch`; windows with blocks of their own have all that
    concerns blocks twice.
    """
    rows = limits.product_rows(limits.max_tokens)
    chunks = limits.product_rows(limits.max_rows)
    width = limits.context_blocks(-(-limits.max_model_len // limits.block_tokens))
    tiles = limits.max_tokens // MAX_TILE_ROWS + limits.max_rows
    kernel = model_config.conv_kernel if model_config.num_conv_layers else 0

    once = [rows, rows, chunks]  # token ids, positions, sampled rows
    paged = [
        rows * INT64_WORDS,  # slots
        chunks,  # lengths
        chunks * width,  # block tables, of decodes and of prompts
        *[tiles] * 4,
    ]
    conv = [kernel * rows, kernel * chunks, chunks, chunks * INT64_WORDS]

    arrays = [*once, *paged * (2 if limits.windowed else 1), *conv]
    # One more for the tables, which are two arrays.
    return sum(arrays) + (len(arrays) + 2) * ALIGNMENT // INT32_BYTES


def _conv_elements(model_config: ModelConfig, limits: StepLimits) -> dict[str, int]:
    if not model_config.num_conv_layers:
        return {}
    tokens = limits.product_rows(limits.max_tokens)
    channels = model_config.conv_channels
    state_rows = limits.max_rows * (model_config.conv_kernel - 1)
    rows = {"conv_in": tokens * 3 * channels, "conv_mixed": tokens * channels}
    if limits.fused:
        return rows
    return rows | {
        "conv_source": (tokens + state_rows) * channels,
        "conv_tapped": tokens * channels,
        "conv_kept": state_rows * channels,
    }


def _query_elements(model_config: ModelConfig, limits: StepLimits) -> int:
    """Count the numbers in queries of a padded group of decodes, or of a tile."""
    decodes = 2 * limits.max_rows * _decode_heads(model_config, limits)
    return max(decodes, MAX_TILE_ROWS * model_config.num_heads) * model_config.head_dim


def _decode_heads(model_config: ModelConfig, limits: StepLimits) -> int:
    """Count the rows of queries that one decode takes, padding included."""
    if not limits.deterministic:
        return model_config.num_heads
    return model_config.num_kv_heads * pad_rows(model_config.group_size)


def _place(elements: dict[str, int], offset: int, itemsize: int) -> list[ArenaBuffer]:
    buffers = []
    for name, count in elements.items():
        buffers.append(ArenaBuffer(name, offset, count, itemsize))
        offset = aligned(buffers[-1].end)
    return buffers
