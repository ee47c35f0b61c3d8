"""Attention over paged KV with torch operations, prepared once per step and run once per layer.

KV blocks are gathered into a workspace and multiplied there. All query heads that share a KV head
form one matrix. On a CPU this is several times faster than `scaled_dot_product_attention` for
decodes, and for prompts in bfloat16. Views are created once per step, so that each layer runs only
tensor operations.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ullage_engine.kernels.batch import DecodeGroup, PrefillTile
from ullage_engine.kernels.block_tables import Ints
from ullage_engine.kernels.kv_pool import LayerCache, gather, shaped
from ullage_engine.model_config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers for attention, which a step's decode groups and prefill tiles use one at a time."""

    model_config: ModelConfig
    block_tokens: int
    queries: torch.Tensor
    gathered: torch.Tensor
    scores: torch.Tensor
    mask: torch.Tensor  # [tile, earlier + tile], see fill_mask
    codes: torch.Tensor | None = None
    """Buffer for gathered float8 codes, or None if KV is not stored as float8."""

    def gather_view(self, num_blocks: int) -> torch.Tensor:
        """Return a view to gather blocks into: [2 * kv_heads, num_blocks, block_tokens * head_dim].

        Key heads come before value heads.
        """
        width = self.block_tokens * self.model_config.head_dim
        return shaped(self.gathered, 2 * self.model_config.num_kv_heads, num_blocks, width)

    def gather(self, cache: LayerCache, block_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy KV blocks of one layer into `out`, which is a view from `gather_view`."""
        gather(cache, slice(None), block_ids, self.codes, out)

    def mask_view(self, rows: int, context: int) -> torch.Tensor:
        """Return the causal mask of the last `rows` of `context` tokens, [rows, context]."""
        end = self.mask.shape[1] - self.mask.shape[0] + rows
        return self.mask[:rows, end - context : end]


def fill_mask(mask: torch.Tensor) -> None:
    """Write the causal mask [rows, columns] of a tile: 0 for visible positions, else -inf.

    Row i sees column c if c <= i + earlier, where earlier = columns - rows is the number of tokens
    before the tile. Drop leading columns to get the mask for a tile with fewer earlier tokens.
    """
    rows, columns = mask.shape
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=mask.device)
    mask.zero_().masked_fill_(hidden.triu_(columns - rows + 1), -math.inf)


class DecodeAttention:
    """Attention for a group of decodes. Each decode is one token of a different sequence."""

    def __init__(
        self,
        group: DecodeGroup,
        rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
        attended: torch.Tensor,  # [tokens, heads * head_dim]
        workspace: Workspace,
        window: int,
    ) -> None:
        model_config = workspace.model_config
        kv_heads, size, head_dim = model_config.head_shape
        rows = group.end - group.start
        padded = group.padded_rows
        length = group.num_blocks * workspace.block_tokens
        self._workspace = workspace
        self._scale = head_dim**-0.5
        self._block_ids = torch.from_numpy(group.block_ids.ravel()).to(rotated.device)
        self._gathered = workspace.gather_view(len(self._block_ids))
        keys, values = self._gathered.view(2, kv_heads * padded, length, head_dim)
        self._keys = keys.transpose(1, 2)
        self._values = values
        heads = rotated[: model_config.num_heads, group.start : group.end]
        self._heads = heads.view(kv_heads, size, rows, head_dim).transpose(1, 2)
        queries = shaped(workspace.queries, kv_heads, padded, size, head_dim)
        self._queries = queries[:, :rows]
        self._folded = queries.view(kv_heads * padded, size, head_dim)
        self._scores = shaped(workspace.scores, kv_heads * padded, size, length)
        self._masked = self._scores.view(kv_heads, padded, size, length)
        self._mask = _length_mask(group.lengths, length, window, rotated)
        out = attended[group.start : group.end].view(rows, kv_heads, size, head_dim)
        self._out = out.transpose(0, 1)

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Compute attention for one layer. The cache must already hold the KV of these tokens."""
        self._workspace.gather(cache, self._block_ids, self._gathered)
        torch.mul(self._heads, self._scale, out=self._queries)
        torch.bmm(self._folded, self._keys, out=self._scores)
        self._masked.add_(self._mask)
        if sinks is None:
            torch.softmax(self._scores, -1, out=self._scores)
        else:
            # [kv_heads, 1, size]: all rows have the same sinks.
            softmax_with_sinks(self._masked, sinks.view(self._masked.shape[0], 1, -1))
        torch.bmm(self._scores, self._values, out=self._folded)
        self._out.copy_(self._queries)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> None:
    """Compute the softmax of scores over the last dimension with attention sinks, in place.

    A sink is an extra logit that takes part in the softmax but has no value vector, as in gpt-oss.
    `sinks` broadcasts to the shape of `scores` without its last dimension. If m is the largest
    score and p its weight in the plain softmax, log(sum(exp(scores))) is m - log(p). The plain
    weights are therefore scaled by sigmoid(m - log(p) - sink).
    """
    peaks = scores.amax(-1).float()
    torch.softmax(scores, -1, out=scores)
    sums = peaks - scores.amax(-1).float().log()
    scores.mul_((sums - sinks.float()).sigmoid_().to(scores.dtype)[..., None])


def _length_mask(lengths: Ints, padded: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Return the mask [rows, 1, padded]: 0 within each row's context, else -inf."""
    columns = torch.arange(padded, device=like.device)
    ends = torch.from_numpy(lengths).to(like.device)[:, None, None]
    outside = columns >= ends
    if window:
        outside |= columns < ends - window
    return like.new_zeros(outside.shape).masked_fill_(outside, -math.inf)


class PrefillAttention:
    """Attention for a tile: consecutive tokens of one prompt, after any number of cached tokens."""

    def __init__(
        self,
        tile: PrefillTile,
        rotated: torch.Tensor,  # [heads + kv_heads, tokens, head_dim]
        attended: torch.Tensor,  # [tokens, heads * head_dim]
        workspace: Workspace,
        window: int,
    ) -> None:
        model_config = workspace.model_config
        kv_heads, size, head_dim = model_config.head_shape
        rows = tile.end - tile.start
        self._workspace = workspace
        self._tile = tile
        self._block_ids = torch.from_numpy(tile.block_ids).to(rotated.device)
        self._gathered = workspace.gather_view(len(self._block_ids))
        self._keys, self._values = self._gathered.view(2, kv_heads, -1, head_dim)
        heads = rotated[: model_config.num_heads, tile.start : tile.end]
        self._heads = heads.view(kv_heads, size, rows, head_dim)
        out = attended[tile.start : tile.end].view(rows, kv_heads, size, head_dim)
        self._out = out.permute(1, 2, 0, 3)
        self._mask = workspace.mask_view(rows, tile.earlier + rows)
        self._hidden = _hidden_by_window(rows, tile.earlier, window, rotated.device)
        # On a CPU the fused kernel was faster in float32, and two matrix products in bfloat16.
        fused = rotated.device.type != "cpu" or rotated.dtype == torch.float32
        self._is_fused = fused and not window

    def run(self, cache: LayerCache, sinks: torch.Tensor | None = None) -> None:
        """Compute attention for one layer. The cache must already hold the KV of these tokens."""
        self._workspace.gather(cache, self._block_ids, self._gathered)
        if self._is_fused and sinks is None:
            self._fused()
        else:
            self._multiplied(sinks)

    def _fused(self) -> None:
        grouped = (-1, self._workspace.model_config.group_size, -1, -1)
        context = self._mask.shape[1]
        self._out.copy_(
            F.scaled_dot_product_attention(
                self._heads,
                self._keys[:, None, :context].expand(grouped),
                self._values[:, None, :context].expand(grouped),
                attn_mask=self._mask,
            )
        )

    def _multiplied(self, sinks: torch.Tensor | None) -> None:
        model_config = self._workspace.model_config
        earlier = self._tile.earlier
        kv_heads, size, head_dim = model_config.head_shape
        rows = self._heads.shape[2]
        padded = self._tile.padded_rows
        context = earlier + rows
        length = self._keys.shape[1]
        queries = shaped(self._workspace.queries, kv_heads, size, padded, head_dim)
        folded = queries.view(kv_heads, size * padded, head_dim)
        scores = shaped(self._workspace.scores, kv_heads, size * padded, length)
        torch.mul(self._heads, head_dim**-0.5, out=queries[:, :, :rows])
        torch.bmm(folded, self._keys.transpose(1, 2), out=scores)
        by_row = scores.view(kv_heads, size, padded, length)
        by_row[:, :, :rows, earlier:context].add_(self._mask[:, earlier:])
        by_row[..., context:].fill_(-math.inf)
        if self._hidden is not None:
            by_row[:, :, :rows, :context].masked_fill_(self._hidden, -math.inf)
        if sinks is None:
            torch.softmax(scores, -1, out=scores)
        else:
            softmax_with_sinks(by_row, sinks.view(kv_heads, size, 1))
        torch.bmm(scores, self._values, out=folded)
        self._out.copy_(queries[:, :, :rows])


def _hidden_by_window(
    rows: int, earlier: int, window: int, device: torch.device
) -> torch.Tensor | None:
    """Return a mask of the positions before each row's sliding window: bool [rows, earlier + rows].

    Return None if every window reaches back to the first position, so that nothing is hidden.
    """
    if not window or earlier + rows <= window:
        return None
    columns = torch.arange(earlier + rows, device=device)
    return columns <= columns[earlier:, None] - window
