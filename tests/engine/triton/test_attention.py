"""Paged attention equals attention over what the pages hold, computed in float64."""

from dataclasses import dataclass

import pytest
import torch

from ullage_engine.core.batch import DecodeGroup, PrefillTile
from ullage_engine.kernels.pool import KVPool, LayerCache
from ullage_engine.kernels.triton import PagedWorkspace, paged_attentions
from ullage_engine.memory.partials import partial_elements
from ullage_engine.models.geometry import LayerSpec, ModelGeometry

BLOCK_TOKENS = 16
NUM_BLOCKS = 64


def geometry(heads: int, kv_heads: int, head_dim: int) -> ModelGeometry:
    return ModelGeometry(
        architecture="llama", layers=(LayerSpec(),), hidden=heads * head_dim, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, intermediate=1, vocab=1, max_position=4096,
        rope_theta=1e4, rms_eps=1e-5, tied=True, eos_token_ids=[0],
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Random pages, and the tables of sequences scattered over them."""

    model: ModelGeometry
    cache: LayerCache
    tables: list[list[int]]

    def dense(self, sequence: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, length, head_dim] of one sequence."""
        positions = torch.arange(length)
        blocks = torch.tensor(self.tables[sequence])[positions // BLOCK_TOKENS]
        slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        keys, values = self.cache.keys.float().cpu(), self.cache.values.float().cpu()
        return keys[:, slots].double(), values[:, slots].double()


def make_case(
    model: ModelGeometry,
    lengths: list[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Memory that no sequence may read is not a number."""
    pool = KVPool(model, NUM_BLOCKS, BLOCK_TOKENS, torch.float32, device)
    cache = pool.layers[0]
    cache.blocks.fill_(torch.nan)
    free = torch.randperm(NUM_BLOCKS).tolist()
    tables = []
    for length in lengths:
        table = [free.pop() for _ in range(-(-length // BLOCK_TOKENS))]
        tables.append(table)
        for position in range(length):
            slot = table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            cache.keys[:, slot] = torch.randn(model.num_kv_heads, model.head_dim)
            cache.values[:, slot] = torch.randn(model.num_kv_heads, model.head_dim)
    typed = LayerCache(*(part.to(dtype) for part in cache))
    heads = model.num_kv_heads
    slots = typed.blocks.view(2 * heads, -1, model.head_dim)
    return Case(model, LayerCache(typed.blocks, slots[:heads], slots[heads:]), tables)


def attend(
    case: Case,
    query: torch.Tensor,
    sequence: int,
    length: int,
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One token's result [heads * head_dim], by the definition; query [heads, head_dim]."""
    keys, values = case.dense(sequence, length)
    size = case.model.group_size
    keys, values = keys.repeat_interleave(size, 0), values.repeat_interleave(size, 0)
    scores = (keys @ query.double().cpu()[:, :, None])[..., 0] * case.model.head_dim**-0.5
    if window:
        scores[:, : max(0, length - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().cpu()[:, None]], 1)
    weights = torch.softmax(scores, 1)[:, :length]
    return (weights[:, None] @ values)[:, 0].flatten()


CASES = [
    pytest.param(4, 2, 16, 0, False, id="grouped"),
    pytest.param(9, 3, 32, 0, False, id="odd-groups"),
    pytest.param(4, 1, 16, 20, True, id="window-and-sinks"),
    pytest.param(2, 2, 64, 0, True, id="sinks"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "has_sinks"), CASES)
def test_decodes(
    heads: int, kv_heads: int, head_dim: int, window: int, has_sinks: bool, device: torch.device
) -> None:

    lengths = [200, 130, 48, 1]
    model = geometry(heads, kv_heads, head_dim)
    case = make_case(model, lengths, device)
    rotated = torch.randn(heads + kv_heads, len(lengths) + 2, head_dim, device=device)
    attended = torch.full((len(lengths) + 2, heads * head_dim), torch.nan, device=device)
    sinks = torch.randn(heads, device=device) * 3 if has_sinks else None
    long, short = case.tables[:2], case.tables[2:]
    groups = [
        DecodeGroup(0, 2, 2, 13, [b for table in long for b in _padded(table, 13)], lengths[:2]),
        DecodeGroup(2, 4, 4, 3, short[0] + _padded(short[1], 9), [48, 1, 1, 1]),
    ]
    partials = torch.full((partial_elements(model),), torch.nan, device=device)
    workspace = PagedWorkspace(model, partials)
    (decodes,) = paged_attentions(groups, [], rotated, attended, workspace, window)
    decodes.run(case.cache, sinks)
    for row, length in enumerate(lengths):
        wanted = attend(case, rotated[:heads, row], row, length, window, sinks)
        torch.testing.assert_close(attended[row].cpu().double(), wanted, rtol=1e-4, atol=1e-5)
    assert attended[len(lengths) :].isnan().all(), "rows of prefills are not touched"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "has_sinks"), CASES)
def test_tiles(
    heads: int, kv_heads: int, head_dim: int, window: int, has_sinks: bool, device: torch.device
) -> None:

    lengths = [90, 5]
    model = geometry(heads, kv_heads, head_dim)
    case = make_case(model, lengths, device)
    # One decode, the last 40 tokens of the first sequence, the whole second one.
    rotated = torch.randn(heads + kv_heads, 46, head_dim, device=device)
    attended = torch.full((46, heads * head_dim), torch.nan, device=device)
    sinks = torch.randn(heads, device=device) * 3 if has_sinks else None
    tiles = [
        PrefillTile(1, 41, 64, 50, _padded(case.tables[0], 8)),
        PrefillTile(41, 46, 32, 0, case.tables[1]),
    ]
    workspace = PagedWorkspace(model, torch.empty(0, device=device))
    (prompts,) = paged_attentions([], tiles, rotated, attended, workspace, window)
    prompts.run(case.cache, sinks)
    for sequence, tile in enumerate(tiles):
        for row in range(tile.start, tile.end):
            length = tile.earlier + row - tile.start + 1
            wanted = attend(case, rotated[:heads, row], sequence, length, window, sinks)
            torch.testing.assert_close(attended[row].cpu().double(), wanted, rtol=1e-4, atol=1e-5)
    assert attended[0].isnan().all(), "rows of decodes are not touched"


def _padded(table: list[int], width: int) -> list[int]:
    return table + table[-1:] * (width - len(table))
