"""Batch-invariant matrix products and attention: a row's result does not depend on other rows.

Libraries choose the summation order based on the shape of the whole product, and the order affects
rounding. A product of `UNIT_ROWS` rows therefore serves as the reference. A larger product is
computed in one call only if a check on this machine has shown that, with these shapes and threads,
the result is bit-identical to the reference. Otherwise it is computed a few rows at a time.

Attention divides the context into spans of `SPAN_TOKENS`, counted from the sequence's first token.
The scores, softmax and weighted sum of a span have the same shape in every step. Spans are merged
in order, each weighted by its fraction of the softmax total (split-KV; Dao et al.,
"Flash-Decoding", 2023). A span that a row must not see has weight 0, so the lengths of other rows
do not matter. Decodes and prompt rows use the same code.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ullage_engine.kernels.arena import SPAN_TOKENS, UNIT_ROWS, pad_rows
from ullage_engine.kernels.batch import DecodeGroup, PrefillTile
from ullage_engine.kernels.block_tables import Ints
from ullage_engine.kernels.kv_pool import LayerCache, gather, shaped
from ullage_engine.model_config.model_config import ModelConfig

_SEED = 20
_PROBED_NUMBERS = 1 << 18
_MAX_PROBES = 512
_Shape = tuple[int, ...]


class RowProducts:
    """Computes batch-invariant matmuls of x [rows, in] and weights [in, out], single or batched.

    The number of rows must be a multiple of `UNIT_ROWS`.
    """

    def __init__(self) -> None:
        self._sizes: dict[_Shape, list[int]] = {}
        self._batches: set[tuple[_Shape, _Shape]] = set()

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Compute x @ weight and write it to out."""
        for rows in self._parts(x.shape[0], weight.shape):
            torch.mm(x[rows], weight, out=out[rows])

    def add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Add x @ weight to out."""
        for rows in self._parts(x.shape[0], weight.shape):
            out[rows].addmm_(x[rows], weight)

    def multiply_each(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the batched product x [batch, rows, in] @ y [batch, in, out] into out."""
        if (x.shape, y.shape) in self._batches:
            torch.bmm(x, y, out=out)
        else:
            _multiply_each_unit(x, y, out)

    def verify_row_invariance(self, weight: torch.Tensor, sizes: Iterable[int]) -> bool:
        """Determine which row counts `multiply` may compute in one call with this weight shape.

        A row count qualifies if a single product of that many rows is bit-identical, row by row, to
        products of `UNIT_ROWS` rows.

        Returns:
            Whether `UNIT_ROWS` itself qualifies. If not, a row's result depends on its position
            among the rows, and no product is batch-invariant.
        """
        ordered = sorted({UNIT_ROWS, *sizes}, reverse=True)
        self._sizes[weight.shape] = [UNIT_ROWS]
        equal = [size for size in ordered if self._is_equal_in(size, weight)]
        self._sizes[weight.shape] = equal
        return UNIT_ROWS in equal

    def verify_batched(self, x: _Shape, y: torch.Tensor) -> bool:
        """Return whether a batched product of these shapes is bit-identical to separate products.

        If it is, `multiply_each` computes each batch of these shapes in one call from now on.

        Args:
            x: shape of the first operand, [batch, rows, in].
            y: the second operand [batch, in, out].
        """
        whole = y.new_empty((x[0], x[1], y.shape[2]))
        parts = torch.empty_like(whole)
        for seed in range(_probes(whole.numel(), y.dtype)):
            probe = fill_random(y.new_empty(x), seed)
            _multiply_each_unit(probe, y, parts)
            if not torch.equal(torch.bmm(probe, y, out=whole), parts):
                return False
        self._batches.add((torch.Size(x), y.shape))
        return True

    def _is_equal_in(self, size: int, weight: torch.Tensor) -> bool:
        """Return whether a product of `size` rows is bit-identical to products of `UNIT_ROWS` rows.

        The rows are at different positions in the two computations, so a result that depends on a
        row's position is detected as well.
        """
        for seed in range(_probes(size * weight.shape[1], weight.dtype)):
            x = fill_random(weight.new_empty(size, weight.shape[0]), seed)
            start = fill_random(weight.new_empty(1, weight.shape[1]), seed)
            by_units = _both(self, x.roll(1, 0), weight, start).roll(-1, 1)
            added = start.repeat(size, 1)
            multiplied = torch.mm(x, weight)
            if not torch.equal(torch.stack((multiplied, added.addmm_(x, weight))), by_units):
                return False
        return True

    def _parts(self, rows: int, weight: _Shape) -> Iterable[slice]:
        sizes = self._sizes.get(weight, [UNIT_ROWS])
        return [slice(0, rows)] if rows in sizes else _cut(rows, sizes)


def _cut(rows: int, sizes: Sequence[int]) -> Iterable[slice]:
    """Yield slices that cover the rows in order, always using the largest size that still fits.

    `sizes` is in descending order and ends with `UNIT_ROWS`.
    """
    start = 0
    for size in sizes:
        while rows - start >= size:
            yield slice(start, start + size)
            start += size


def _probes(size: int, dtype: torch.dtype) -> int:
    """Return how many random products to compare to prove that two methods sum in the same order.

    A different summation order changes many float32 results, but only one bfloat16 result in ten
    thousand. `size` is the number of results per product.
    """
    return 1 if dtype == torch.float32 else min(_MAX_PROBES, -(-_PROBED_NUMBERS // size))


def fill_random(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Fill a tensor in place with normally distributed random values, reproducible by seed."""
    generator = torch.Generator(x.device).manual_seed(_SEED + seed)
    return x.normal_(generator=generator)


def _both(
    products: RowProducts, x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """Compute a product with both `multiply` and `add`, to test the two methods.

    The result is [2, rows, out]: first x @ weight, then `start` + x @ weight. `start` [1, out] is
    the same for all rows.
    """
    out = start.repeat(2, x.shape[0], 1)
    products.multiply(x, weight, out[0])
    products.add(x, weight, out[1])
    return out


def _multiply_each_unit(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    for index in range(x.shape[0]):
        item = slice(index, index + 1)
        for start in range(0, x.shape[1], UNIT_ROWS):
            rows = slice(start, start + UNIT_ROWS)
            torch.bmm(x[item, rows], y[item], out=out[item, rows])


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Buffers for deterministic attention, reused from one decode group or tile to the next."""

    model_config: ModelConfig
    block_tokens: int
    products: RowProducts
    queries: torch.Tensor
    gathered: torch.Tensor
    scores: torch.Tensor
    merged: torch.Tensor  # float32
    scaled: torch.Tensor  # float32
    mask: torch.Tensor  # [tile, span_mask_width()], see fill_span_mask
    codes: torch.Tensor | None = None
    """Buffer for gathered float8 codes, or None if KV is not stored as float8."""


def hidden_score(dtype: torch.dtype) -> float:
    """Return the score for a masked position, low enough that its softmax weight is 0.

    The value is finite, because a row of only -inf scores would become NaN.
    """
    return torch.finfo(dtype).min / 2


def fill_span_mask(mask: torch.Tensor) -> None:
    """Write the causal mask of a tile that may begin anywhere in a span.

    Row i sees column c if c <= i + SPAN_TOKENS. A tile that begins t tokens into its span uses the
    mask's columns starting at SPAN_TOKENS - t.
    """
    hidden = torch.ones(mask.shape, dtype=torch.bool, device=mask.device)
    mask.zero_().masked_fill_(hidden.triu_(SPAN_TOKENS + 1), hidden_score(mask.dtype))


class SplitAttention:
    """Attention computed span by span, for several decodes or for a tile of one prompt."""

    def __init__(
        self,
        workspace: SplitWorkspace,
        tables: Ints,
        rows: int,
        device: torch.device,
    ) -> None:
        """Prepare views of the workspace.

        Args:
            workspace: buffers shared with the step's other attention objects.
            tables: block ids [sequences, width]. The width covers whole spans.
            rows: number of queries per sequence and KV head, a multiple of `UNIT_ROWS`.
            device: device of the buffers.
        """
        model_config = workspace.model_config
        block_tokens = workspace.block_tokens
        kv_heads = model_config.num_kv_heads
        head_dim = model_config.head_dim
        batch = kv_heads * len(tables)
        blocks = SPAN_TOKENS // block_tokens
        num_spans = tables.shape[1] // blocks
        self.rows_shape = (kv_heads, len(tables), rows, head_dim)
        self.queries = shaped(workspace.queries, *self.rows_shape)
        self.scores = shaped(workspace.scores, num_spans, batch, rows, SPAN_TOKENS)
        self._of_keys, self._of_values = slice(kv_heads), slice(kv_heads, None)
        self._products = workspace.products
        self._codes = workspace.codes
        self._spans = [
            torch.from_numpy(tables[:, span * blocks : (span + 1) * blocks].ravel()).to(device)
            for span in range(num_spans)
        ]
        gathered = (kv_heads, len(tables) * blocks, block_tokens * head_dim)
        self._gathered = shaped(workspace.gathered, *gathered)
        self._span = self._gathered.view(batch, SPAN_TOKENS, head_dim)
        self._folded = self.queries.view(batch, rows, head_dim)
        self._merged = shaped(workspace.merged, batch, rows, head_dim)
        self._scaled = shaped(workspace.scaled, batch, rows, head_dim)

    def place(
        self,
        heads: torch.Tensor,
        placed: torch.Tensor,
        masked: torch.Tensor,
        mask: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Set the views that `run` reads and writes.

        Args:
            heads: query heads for which attention is computed.
            placed: view of `queries` that receives the scaled `heads` and later holds the results.
            masked: view of `scores` to which `mask` is added.
            mask: 0 where a query sees a position, otherwise `hidden_score`.
            out: tensor that receives a copy of the results in `placed`.
        """
        self._heads = heads
        self._placed = placed
        self._out = out
        self._masked = masked
        self._mask = mask

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Compute attention for one layer. The cache must already hold the KV of these tokens."""
        assert sinks is None, "refused at start"
        torch.mul(self._heads, self._heads.shape[-1] ** -0.5, out=self._placed)
        for block_ids, scores in zip(self._spans, self.scores, strict=True):
            gather(cache, self._of_keys, block_ids, self._codes, self._gathered)
            self._products.multiply_each(self._folded, self._span.transpose(1, 2), scores)
        self._masked.add_(self._mask)
        if len(self._spans) == 1:
            torch.softmax(self.scores, -1, out=self.scores)
            self._sum_span(cache, 0)
        else:
            self._sum_spans(cache)
        self._out.copy_(self._placed)

    def _sum_spans(self, cache: LayerCache) -> None:
        peaks = self.scores.amax(-1)
        torch.softmax(self.scores, -1, out=self.scores)
        shares = span_shares(peaks, self.scores.amax(-1))
        self._merged.zero_()
        for span, share in enumerate(shares):
            self._sum_span(cache, span)
            # Multiply and add separately, which rounds twice. Whether a library fuses the two
            # operations would depend on a number's place in the tensor.
            self._merged.add_(self._scaled.copy_(self._folded).mul_(share[..., None]))
        self._folded.copy_(self._merged)

    def _sum_span(self, cache: LayerCache, span: int) -> None:
        """Compute the span's weighted sum of values, and overwrite the queries with it.

        The queries are no longer needed at this point.
        """
        gather(cache, self._of_values, self._spans[span], self._codes, self._gathered)
        self._products.multiply_each(self.scores[span], self._span, self._folded)


def span_shares(peaks: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """Return each span's fraction of the softmax over all spans, float32 [spans, ...].

    Args:
        peaks: largest score of each span.
        tops: largest weight in each span's own softmax, which is 1 / sum(exp(score - peak)).
    """
    heights = peaks.float()
    sums = (heights - heights.amax(0)).exp_() / tops.float()
    total = sums[0].clone()
    for span in sums[1:]:
        total += span
    return sums / total


def split_decodes(
    group: DecodeGroup,
    rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
    attended: torch.Tensor,  # [tokens, heads * head_dim]
    workspace: SplitWorkspace,
    window: int,
) -> SplitAttention:
    """Prepare deterministic attention for a group of decodes."""
    assert not window, "refused at start"
    model_config = workspace.model_config
    kv_heads, size, head_dim = model_config.head_shape
    rows = group.end - group.start
    attention = SplitAttention(workspace, group.block_ids, pad_rows(size), rotated.device)
    heads = rotated[: model_config.num_heads, group.start : group.end]
    scores = attention.scores
    attention.place(
        heads=heads.view(kv_heads, size, rows, head_dim).transpose(1, 2),
        placed=attention.queries[:, :rows, :size],
        masked=scores.view(scores.shape[0], kv_heads, group.padded_rows, -1, SPAN_TOKENS),
        mask=_length_mask(group.lengths, scores),
        out=attended[group.start : group.end].view(rows, kv_heads, size, head_dim).transpose(0, 1),
    )
    return attention


def _length_mask(lengths: Ints, scores: torch.Tensor) -> torch.Tensor:
    """Return a mask that hides all positions after the end of each sequence's context.

    Its shape is [spans, 1, sequences, 1, SPAN_TOKENS].
    """
    columns = torch.arange(scores.shape[0] * SPAN_TOKENS, device=scores.device)
    hidden = columns >= torch.from_numpy(lengths).to(scores.device)[:, None]
    mask = scores.new_zeros(hidden.shape).masked_fill_(hidden, hidden_score(scores.dtype))
    return mask.view(len(lengths), -1, SPAN_TOKENS).transpose(0, 1)[:, None, :, None]


def split_prefill(
    tile: PrefillTile,
    rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
    attended: torch.Tensor,  # [tokens, heads * head_dim]
    workspace: SplitWorkspace,
    window: int,
) -> SplitAttention:
    """Prepare deterministic attention for a tile (consecutive tokens of one prompt)."""
    assert not window, "refused at start"
    model_config = workspace.model_config
    kv_heads, size, head_dim = model_config.head_shape
    rows = tile.end - tile.start
    padded = tile.padded_rows
    attention = SplitAttention(workspace, tile.block_ids[None], size * padded, rotated.device)
    queries = attention.queries.view(kv_heads, size, padded, head_dim)
    # Every row sees all of the spans before the tile's first token, so they need no mask.
    first, offset = divmod(tile.earlier, SPAN_TOKENS)
    masked = attention.scores[first:].view(-1, kv_heads, size, padded, SPAN_TOKENS)
    columns = slice(SPAN_TOKENS - offset, SPAN_TOKENS - offset + masked.shape[0] * SPAN_TOKENS)
    mask = workspace.mask[:padded, columns].view(padded, -1, SPAN_TOKENS)
    attention.place(
        heads=rotated[: model_config.num_heads, tile.start : tile.end].view(
            kv_heads, size, rows, head_dim
        ),
        placed=queries[:, :, :rows],
        masked=masked,
        mask=mask.transpose(0, 1)[:, None, None],
        out=attended[tile.start : tile.end]
        .view(rows, kv_heads, size, head_dim)
        .permute(1, 2, 0, 3),
    )
    return attention
