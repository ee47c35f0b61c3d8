"""Products and attention whose result for a row does not depend on the other rows of a step.

A row of a product is the same sums whatever stands in the other rows, but libraries choose the
order of each sum by the shape of the whole product, and rounding follows the order. A product of
`UNIT_ROWS` rows is the reference here. Larger ones are used where they were verified to give the
same bits on this machine, with these shapes and threads; else the product is computed in parts.

Attention cuts the context into spans of `SPAN_TOKENS`, counted from the sequence's first token.
Scores, softmax and weighted sum of a span have one width in every step, and spans are merged in
their order by their share of the softmax (split-KV; Dao et al., "Flash-Decoding", 2023). A span
that a row may not see gets the share 0, so it does not matter how far the rows beside it reach.
Decodes and prompt rows run the same code.
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
    """Products of x [units of rows, in] and weights [in, out], alone and in batches."""

    def __init__(self) -> None:
        self._sizes: dict[_Shape, list[int]] = {}
        self._batches: set[tuple[_Shape, _Shape]] = set()

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Write x @ weight."""
        for rows in self._parts(x.shape[0], weight.shape):
            torch.mm(x[rows], weight, out=out[rows])

    def add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Add x @ weight to out."""
        for rows in self._parts(x.shape[0], weight.shape):
            out[rows].addmm_(x[rows], weight)

    def multiply_each(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [batch, rows, in] @ y [batch, in, out]."""
        if (x.shape, y.shape) in self._batches:
            torch.bmm(x, y, out=out)
        else:
            _multiply_each_unit(x, y, out)

    def verify_row_invariance(self, weight: torch.Tensor, sizes: Iterable[int]) -> bool:
        """Find the sizes in which rows of x @ weight equal those of a unit.

        False: not even a unit's rows do, because their place in it matters.
        """
        ordered = sorted({UNIT_ROWS, *sizes}, reverse=True)
        self._sizes[weight.shape] = [UNIT_ROWS]
        equal = [size for size in ordered if self._is_equal_in(size, weight)]
        self._sizes[weight.shape] = equal
        return UNIT_ROWS in equal

    def verify_batched(self, x: _Shape, y: torch.Tensor) -> bool:
        """Whether a batch of products of shapes x and y is computed as one, from now on."""
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
        """Whether so many rows at once, and a unit's rows in other places, give the same bits."""
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
    """Cut rows into parts of these sizes, the largest first; the last size is a unit."""
    start = 0
    for size in sizes:
        while rows - start >= size:
            yield slice(start, start + size)
            start += size


def _probes(size: int, dtype: torch.dtype) -> int:
    """Return how many products of so many numbers must agree before an order of sums counts as
    the same: another order changes many a float32, but only one bfloat16 in ten thousand.
    """
    return 1 if dtype == torch.float32 else min(_MAX_PROBES, -(-_PROBED_NUMBERS // size))


def fill_random(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Fill a tensor in place, for a seed always alike."""
    generator = torch.Generator(x.device).manual_seed(_SEED + seed)
    return x.normal_(generator=generator)


def _both(
    products: RowProducts, x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """Compute the product, and the product added to `start`; [2, rows, out]."""
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
    """Buffers that all sequences share, one after another."""

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
    """Bytes of gathered KV, if it is stored as float8."""


def hidden_score(dtype: torch.dtype) -> float:
    """Return the number that masks a score.

    The softmax of a masked score is 0. It is not minus infinity, so a row whose scores are all
    masked does not become NaN.
    """
    return torch.finfo(dtype).min / 2


def fill_span_mask(mask: torch.Tensor) -> None:
    """Make the causal mask of a tile that begins anywhere in a span.

    Row i may see column c while c <= i + SPAN_TOKENS; a tile that begins at token t of its span
    takes the columns from SPAN_TOKENS - t on.
    """
    hidden = torch.ones(mask.shape, dtype=torch.bool, device=mask.device)
    mask.zero_().masked_fill_(hidden.triu_(SPAN_TOKENS + 1), hidden_score(mask.dtype))


class SplitAttention:
    """Rows of queries of several sequences, or of one, over their spans of context."""

    def __init__(
        self,
        workspace: SplitWorkspace,
        tables: Ints,
        rows: int,
        device: torch.device,
    ) -> None:
        """`tables`: blocks [sequences, width] in whole spans; `rows`: queries of each per KV head,
        in whole units.
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
        """Say where things are: `heads` to attend, their place in `queries`, the part of `scores`
        that gets `mask` added, and where the results of `placed` go.
        """
        self._heads = heads
        self._placed = placed
        self._out = out
        self._masked = masked
        self._mask = mask

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Attends in one layer; the tokens' own KV is in the cache already."""
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
            # Two roundings, not one: whether a fused operation is used depends on the place.
            self._merged.add_(self._scaled.copy_(self._folded).mul_(share[..., None]))
        self._folded.copy_(self._merged)

    def _sum_span(self, cache: LayerCache, span: int) -> None:
        """Write the span's weighted values over the queries, which are no longer needed."""
        gather(cache, self._of_values, self._spans[span], self._codes, self._gathered)
        self._products.multiply_each(self.scores[span], self._span, self._folded)


def span_shares(peaks: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """Compute each span's share of the whole softmax, float32 [spans, ...].

    `peaks` are the largest scores and `tops` the largest weights of the spans' own softmaxes; a top
    is 1 / sum(exp(score - peak)).
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
    """Attends one token each of several sequences."""
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
    """Return the mask of positions beyond each context, [spans, 1, sequences, 1, SPAN_TOKENS]."""
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
    """Attends consecutive tokens of one sequence, after any number of cached ones."""
    assert not window, "refused at start"
    model_config = workspace.model_config
    kv_heads, size, head_dim = model_config.head_shape
    rows = tile.end - tile.start
    padded = tile.padded_rows
    attention = SplitAttention(workspace, tile.block_ids[None], size * padded, rotated.device)
    queries = attention.queries.view(kv_heads, size, padded, head_dim)
    # Spans before the tile's first token are seen whole.
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
