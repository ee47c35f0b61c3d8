"""Computes the buffer sizes of a step: shape buckets and the arena's memory layout.

oneDNN prepares a kernel for every new shape of a matrix product. That takes about a millisecond and
0.6 MB, and oneDNN caches only the 100 most recent kernels (`ullage_engine.server.worker_env`).
Sizes are rounded up to buckets so that this cache rarely misses.

The memory ledger reserves the arena's bytes and the runner allocates them, so both use this layout.
Buffers that are never in use at the same time share memory, so the buffers of attention, the MLP
and the experts overlap. Two techniques bound the remaining buffers: a mixture-of-experts layer
processes a long step in slices of tokens, and decode attention divides the context into splits
(split-KV). The partial result of each split is one float32 vector per head plus the log of its
softmax sum.
"""

from dataclasses import dataclass
from functools import cache

from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.native.library import VECTOR
from ullage_engine.quantization.formats import TILE_GROUPS

MAX_TILE_ROWS = 128
"""Maximum number of prompt tokens whose attention scores are computed at once.

This value was the fastest of those tried between 32 and 256.
"""

MIN_TILE_ROWS = 32

SCORE_TOKENS = 1 << 19
"""Number of attention scores per head (query rows times context) above which prefill tiles shrink.
"""

MIN_BLOCKS = 8

MAX_ROW_WASTE = 0.25
"""Maximum fraction of padding rows in a decode group. Above this, decodes are split further."""


UNIT_ROWS = 8
"""Number of rows in the smallest matrix product (matmul) of a deterministic step.

Every matmul has a multiple of this many rows. MKL and oneDNN produce bit-identical results for a
given row in any matmul of at least 4 rows. With 8 rows, two threads compute 4 rows each.
"""

SERIAL_ELEMENTS = 32_767
"""Maximum number of elements that torch computes on one thread (ATen/Parallel.h, GRAIN_SIZE).

Torch splits larger tensors between threads, even in the middle of a row. The last elements of each
thread's chunk go through different instructions, so a sigmoid may differ in its last bit
(docs/reasons/decisions/0007-determinism.md).
"""

SPAN_TOKENS = 256
"""Tokens per span. Deterministic attention splits the context into spans of this fixed size.

Spans are counted from the sequence's first token.
"""


def pad_rows(rows: int) -> int:
    """Round a number of rows up to a multiple of `UNIT_ROWS`, as deterministic matmuls require."""
    return -(-rows // UNIT_ROWS) * UNIT_ROWS


def pad_to_bucket(tokens: int) -> int:
    """Return the padded row count that the layers' matmuls use for a batch of `tokens` tokens."""
    if tokens <= 64:
        return _round_up(tokens, 1)
    step = 64 if tokens <= 1024 else 512
    return -(-tokens // step) * step


def context_bucket(blocks: int) -> int:
    """Round a context length, given in KV blocks, up to the next bucket size.

    This is the number of blocks that attention gathers for each sequence.
    """
    return _round_up(blocks, MIN_BLOCKS)


def decode_rows(rows: int, max_rows: int) -> tuple[int, int]:
    """Return how many decodes to put in the next group, and the group's padded size.

    There are `rows` decodes left to group. The padded size is a power of two and at most
    `max_rows`.
    """
    above = 1 << (rows - 1).bit_length()
    if above <= max_rows and (above - rows) <= MAX_ROW_WASTE * above:
        return rows, above
    attended = 1 << (min(rows, max_rows).bit_length() - 1)
    return attended, attended


def tile_rows(blocks: int, block_tokens: int) -> int:
    """Return the number of prompt tokens per prefill tile for a context of `blocks` blocks."""
    affordable = SCORE_TOKENS // (blocks * block_tokens)
    return next((r for r in (128, 64) if r <= affordable), MIN_TILE_ROWS)


def tile_bucket(rows: int) -> int:
    """Round the number of rows in a prefill tile up to a power of two, at least `MIN_TILE_ROWS`."""
    return max(MIN_TILE_ROWS, 1 << (rows - 1).bit_length())


def _round_up(size: int, smallest: int) -> int:
    """Round up to the next value of smallest * (1, 2, 3, 4, 6, 8, 12, 16, 24, ...)."""
    bucket = smallest
    while bucket < size:
        half_steps = bucket + bucket // 2
        if half_steps >= size and half_steps % smallest == 0:
            return half_steps
        bucket *= 2
    return bucket


SLICE_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Maximum number of tokens whose experts are computed in one slice, by device type.

Every slice rereads the weights of all experts, so slices on a GPU are large. If 2,048 tokens choose
4 of 32 experts each, an expert has 256 rows on average. A float32 matmul of 256 rows has too
few tiles to occupy all SMs of a large GPU."""

INT64_WORDS = 2
"""Number of four-byte words in an int64 index."""

INT32_BYTES = 4

MXFP4_PANELS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Number of packed expert weights that are decoded at once, by device type.

On a CPU, the decoded weights fit into the cache. On a GPU, enough weights of every expert are
decoded to keep the device busy."""


def mxfp4_panel(device: str) -> int:
    """Return how many MXFP4 weights this type of device decodes at once (one panel)."""
    return MXFP4_PANELS[device]


def mxfp4_scratch_bytes(device: str, itemsize: int) -> int:
    """Return the size in bytes of the scratch memory in which all layers decode MXFP4 weights.

    The scratch memory holds one panel of decoded weights, at `itemsize` bytes per weight, and an
    int32 index for each pair of 4-bit codes.
    """
    return mxfp4_panel(device) * itemsize + mxfp4_panel(device) // 2 * INT32_BYTES


@cache
def padding_rows(pairs: int) -> int:
    """Return the maximum number of padding rows that the last expert's matmul may write.

    The matmul writes past the `pairs` real rows because its row count is rounded up
    (`ullage_engine.layers.moe.LoopedExperts`).
    """
    return max(max(pad_to_bucket(rows), pad_rows(rows)) - rows for rows in range(1, pairs + 1))


def expert_elements(model_config: ModelConfig, tokens: int) -> dict[str, int]:
    """Return the number of elements in each of the experts' activation buffers, keyed by name.

    The buffers hold slices of up to `tokens` tokens. Most of them need one row per (token, expert)
    pair. The result is empty for a model without experts.
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
    """Return the size of each expert-routing buffer in four-byte words, keyed by buffer name.

    The buffers hold slices of up to `tokens` tokens. An int64 index takes two words. The result is
    empty for a model without experts.
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
"""Number of Triton programs that keep a large GPU busy: an H200 runs 4 to 8 on each of 132 SMs."""

MAX_SPLITS = 64
"""Maximum number of splits per context. The results of all splits are merged in registers."""

SPLIT_TOKENS = 128
"""Minimum number of context tokens per split. Smaller splits cost more time than they save."""


def num_splits(rows: int, num_kv_heads: int, context: int) -> int:
    """Return the number of splits per context in decode attention, which is a power of two.

    The result depends only on shapes, never on actual context lengths, so a captured CUDA graph
    stays valid.

    Args:
        rows: number of sequences in the step.
        num_kv_heads: number of KV heads in the model.
        context: number of tokens that each sequence's block table has space for.
    """
    splits = min(MAX_SPLITS, TARGET_PROGRAMS // (rows * num_kv_heads), -(-context // SPLIT_TOKENS))
    return 1 << (max(1, splits).bit_length() - 1)


def partial_elements(model_config: ModelConfig) -> int:
    """Return how many float32 elements the partial results of split-KV take up at most in a step.

    If contexts are split, at most TARGET_PROGRAMS programs run, each for `group_size` query heads.
    Otherwise, decode attention writes its result directly.
    """
    return TARGET_PROGRAMS * model_config.group_size * (model_config.head_dim + 1)


ALIGNMENT = 64
"""Alignment of buffers in bytes: one cache line, enough for every vector instruction.

The alignment is a multiple of 16 because Triton compiles a separate kernel variant for pointers
that are not 16-byte aligned.
"""


def aligned(offset: int) -> int:
    """Round an offset in bytes up to a multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


FLOAT32_BYTES = 4
CODE_BYTES = 1
"""Bytes per float8 element."""

GATHER_TOKENS = 8192
"""Number of context tokens whose KV is gathered in one pass of decode attention. A batch with more
context takes several passes."""

BLOCK_TOKENS = 16
"""Tokens per KV block."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that the arena must hold, and the features that change its layout."""

    max_tokens: int
    """Maximum number of tokens in a step, prompts and decodes together."""
    max_rows: int
    """Maximum number of sequences in a step, which is also the number of rows of logits."""
    max_model_len: int
    """Length of the longest sequence, in tokens."""
    gather_tokens: int
    """Number of context tokens whose KV is gathered in one pass of decode attention."""
    itemsize: int
    """Bytes per element of the activations."""
    block_tokens: int = BLOCK_TOKENS
    deterministic: bool = False
    """Whether results must be batch-invariant: a row's result does not depend on other rows."""
    fused: bool = False
    """Whether GPU kernels read KV and convolution states in place. If so, the arena needs no
    workspace for gathering them."""
    fp8_kv: bool = False
    """Whether KV is stored as float8. The float8 codes pass through separate buffers unless
    `fused`."""
    windowed: bool = False
    """Whether layers with sliding windows have separate KV blocks."""
    library_threads: int = 0
    """Number of threads in the C++ library if it computes whole steps, otherwise 0."""
    max_slice_tokens: int = SLICE_TOKENS["cpu"]
    """Maximum number of tokens per expert slice (see `SLICE_TOKENS`)."""

    def product_rows(self, tokens: int) -> int:
        """Return how many rows, including padding, the layers' matmuls have for `tokens` tokens."""
        return pad_to_bucket(pad_rows(tokens) if self.deterministic else tokens)

    def slice_tokens(self, tokens: int) -> int:
        """Return the most tokens that the experts process at once in a step of `tokens` tokens."""
        return min(tokens, self.max_slice_tokens)

    def context_blocks(self, blocks: int) -> int:
        """Round a context length in blocks up to the number of blocks that attention reads.

        A deterministic step rounds up to whole spans, because its results must not depend on
        buckets. Other steps round up to a bucket.
        """
        span = SPAN_TOKENS // self.block_tokens
        return -(-blocks // span) * span if self.deterministic else context_bucket(blocks)

    @property
    def max_gather_tokens(self) -> int:
        """Size of the gather workspace in tokens, which is enough for the longest sequence.

        The size is a whole number of blocks.
        """
        longest = self.context_blocks(-(-self.max_model_len // self.block_tokens))
        blocks = max(longest, self.gather_tokens // self.block_tokens)
        return blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class ArenaBuffer:
    """The position of one named buffer in the arena."""

    name: str
    offset: int
    """Distance from the arena's start in bytes, a multiple of `ALIGNMENT`."""
    num_elements: int
    itemsize: int

    @property
    def end(self) -> int:
        return self.offset + self.num_elements * self.itemsize


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The positions of all buffers in one allocation. Buffers may overlap."""

    buffers: tuple[ArenaBuffer, ...]

    @property
    def nbytes(self) -> int:
        return aligned(max((buffer.end for buffer in self.buffers), default=0))


def span_mask_width() -> int:
    """Return the number of columns in the causal mask of deterministic attention.

    The columns cover the span in which a tile begins, the tile itself, and the rest of the span in
    which the tile ends.
    """
    return 2 * SPAN_TOKENS + MAX_TILE_ROWS


def mask_width(max_model_len: int) -> int:
    """Return the number of columns in the causal mask.

    The columns cover the longest context that can precede a tile, and the tile itself.
    """
    return max_model_len + MAX_TILE_ROWS


def step_arena(model_config: ModelConfig, limits: StepLimits) -> ArenaLayout:
    """Lay out a step's activations, gather workspace, rotary tables and attention mask.

    The arena has space for the activations of only one layer, because all layers reuse the same
    buffers.
    """
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
"""Maximum number of consecutive query rows that the C++ library's attention processes together."""

MAX_PARTIALS = 4 << 20
"""Maximum number of float32 elements for the C++ library's partial attention results.

A step that would exceed this limit (many threads and a long context) does not split contexts.
"""


def native_arena(model_config: ModelConfig, limits: StepLimits) -> ArenaLayout:
    """Lay out the arena of `ullage_engine.native`, the C++ library that computes whole steps.

    The arena holds activations, rotary tables and a workspace for each thread.
    """
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
    """Lay out the logits of all sampled rows, in the activations' dtype and in float32.

    The C++ library computes logits in float32 only.
    """
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
    # GPU kernels write rotated keys directly to the pages.
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
    """Return the size in bytes of each float8 code buffer, keyed by buffer name.

    One buffer holds the codes that a step writes to the cache. Keys and values share it, because
    they are written one after the other. The other buffer holds the codes that a step gathers from
    the cache.
    """
    width = model_config.num_kv_heads * model_config.head_dim
    return {
        "kv_codes": limits.product_rows(limits.max_tokens) * width,
        "gathered_codes": limits.max_gather_tokens * 2 * width,
    }


def _index_words(model_config: ModelConfig, limits: StepLimits) -> int:
    """Return the number of four-byte words that a step's index arrays need, with alignment.

    The arrays are the fields of `ullage_engine.kernels.batch.StepBatch`. If layers with sliding
    windows have separate KV blocks, arrays of slots or blocks are counted twice.
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
    # Alignment counts one array more, since block tables are two arrays.
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
    """Return the maximum number of query elements in a padded decode group or in a prefill tile."""
    decodes = 2 * limits.max_rows * _decode_heads(model_config, limits)
    return max(decodes, MAX_TILE_ROWS * model_config.num_heads) * model_config.head_dim


def _decode_heads(model_config: ModelConfig, limits: StepLimits) -> int:
    """Return the number of query heads per decode, including padding."""
    if not limits.deterministic:
        return model_config.num_heads
    return model_config.num_kv_heads * pad_rows(model_config.group_size)


def _place(elements: dict[str, int], offset: int, itemsize: int) -> list[ArenaBuffer]:
    buffers = []
    for name, count in elements.items():
        buffers.append(ArenaBuffer(name, offset, count, itemsize))
        offset = aligned(buffers[-1].end)
    return buffers
