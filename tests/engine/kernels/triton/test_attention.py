"""Paged attention equals attention over what the pages hold, computed in float64."""

from dataclasses import dataclass

import pytest
import torch

from ullage_engine.kernels.arena import partial_elements
from ullage_engine.kernels.batch import PagedRows, build_batch
from ullage_engine.kernels.kv_pool import KVPool, LayerCache, head_scales
from ullage_engine.kernels.triton import PagedWorkspace, Put, paged_attentions
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.protocol.step_plan import Chunk, StepPlan

BLOCK_TOKENS = 16
NUM_BLOCKS = 64


def model_config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama", layers=(LayerSpec(),), hidden=heads * head_dim, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, intermediate=1, vocab=1, max_position=4096,
        rope_theta=1e4, rms_eps=1e-5, tied=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Random pages, and the tables of sequences scattered over them."""

    model: ModelConfig
    cache: LayerCache
    tables: list[list[int]]

    def dense(self, sequence: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, length, head_dim] of one sequence."""
        positions = torch.arange(length)
        heads = self.model.num_kv_heads
        blocks = torch.tensor(self.tables[sequence])[positions // BLOCK_TOKENS]
        slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        numbers = self.cache.blocks.cpu()
        scales = self.cache.scales
        if scales is not None:
            numbers = numbers.view(torch.float8_e4m3fn).float() * scales.values.float().cpu()
        keys, values = numbers.double().view(2, heads, -1, self.model.head_dim)
        return keys[:, slots], values[:, slots]

    def rows(self, *chunks: tuple[int, int, int]) -> PagedRows:
        """Chunks of (sequence, earlier tokens, tokens), in the order of their rows."""
        plan = [
            Chunk(str(number), [0] * tokens, start, self.tables[sequence], None, [], 0)
            for number, (sequence, start, tokens) in enumerate(chunks)
        ]
        return build_batch(StepPlan(plan), BLOCK_TOKENS).rows


def make_case(
    model: ModelConfig,
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
    return Case(model, in_type(cache, dtype), tables)


def in_type(cache: LayerCache, dtype: torch.dtype) -> LayerCache:
    """The same numbers, as float8 with another scale for each head."""
    heads, _, head_dim = cache.keys.shape
    if dtype != torch.float8_e4m3fn:
        blocks = cache.blocks.to(dtype)
        scales = None
    else:
        bounds = [448 * 2.0 ** (head % 5 - 4) for head in range(2 * heads)]
        scales = head_scales(bounds, torch.float16, cache.blocks.device)
        blocks = (cache.blocks / scales.values.float()).to(dtype).view(torch.uint8)
    slots = blocks.view(2 * heads, -1, head_dim)
    return LayerCache(blocks, slots[:heads], slots[heads:], scales)


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
    keys = keys.repeat_interleave(size, 0)
    values = values.repeat_interleave(size, 0)
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
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    has_sinks: bool,
    device: torch.device,
    put: Put,
) -> None:
    lengths = [200, 130, 48, 1]
    model = model_config(heads, kv_heads, head_dim)
    case = make_case(model, lengths, device)
    rotated = torch.randn(heads + kv_heads, len(lengths) + 2, head_dim, device=device)
    attended = torch.full((len(lengths) + 2, heads * head_dim), torch.nan, device=device)
    sinks = torch.randn(heads, device=device) * 3 if has_sinks else None
    rows = case.rows(*((sequence, length - 1, 1) for sequence, length in enumerate(lengths)))
    partials = torch.full((partial_elements(model),), torch.nan, device=device)
    workspace = PagedWorkspace(model, partials)
    (decodes,) = paged_attentions(rows, put, rotated, attended, workspace, window)
    decodes.run(case.cache, sinks)
    for row, length in enumerate(lengths):
        wanted = attend(case, rotated[:heads, row], row, length, window, sinks)
        torch.testing.assert_close(attended[row].cpu().double(), wanted, rtol=1e-4, atol=1e-5)
    assert attended[len(lengths) :].isnan().all(), "rows of prefills are not touched"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "has_sinks"), CASES)
def test_tiles(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    has_sinks: bool,
    device: torch.device,
    put: Put,
) -> None:
    lengths = [90, 5]
    model = model_config(heads, kv_heads, head_dim)
    case = make_case(model, lengths, device)
    # One decode, the last 40 tokens of the first sequence, the whole second one.
    rotated = torch.randn(heads + kv_heads, 46, head_dim, device=device)
    attended = torch.full((46, heads * head_dim), torch.nan, device=device)
    sinks = torch.randn(heads, device=device) * 3 if has_sinks else None
    chunks = [(0, 50, 40), (1, 0, 5)]
    workspace = PagedWorkspace(model, torch.empty(0, device=device))
    rows = case.rows((1, 0, 1), *chunks)
    _, prompts = paged_attentions(rows, put, rotated, attended, workspace, window)
    prompts.run(case.cache, sinks)
    row = 0
    for sequence, start, tokens in chunks:
        for length in range(start + 1, start + tokens + 1):
            row += 1
            wanted = attend(case, rotated[:heads, row], sequence, length, window, sinks)
            torch.testing.assert_close(attended[row].cpu().double(), wanted, rtol=1e-4, atol=1e-5)
    assert attended[0].isnan().all(), "rows of decodes are not touched"


def _padded(table: list[int], width: int) -> list[int]:
    return table + table[-1:] * (width - len(table))


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_halves_and_float8_pages(kv_dtype: torch.dtype, device: torch.device, put: Put) -> None:
    lengths = [40, 33]
    model = model_config(4, 2, 16)
    case = make_case(model, lengths, device, kv_dtype)
    rotated = torch.randn(6, 34, 16, device=device).half()
    attended = torch.empty(34, 64, device=device, dtype=torch.float16)
    rows = case.rows((0, 39, 1), (1, 0, 33))
    workspace = PagedWorkspace(model, torch.empty(partial_elements(model), device=device))
    for attention in paged_attentions(rows, put, rotated, attended, workspace):
        attention.run(case.cache)
    for row in range(34):
        sequence, length = (0, 40) if row == 0 else (1, row)
        wanted = attend(case, rotated[:4, row], sequence, length, 0, None)
        torch.testing.assert_close(attended[row].cpu().double(), wanted, rtol=0.02, atol=0.01)


def test_float8_pages_are_attended_as_their_numbers(device: torch.device, put: Put) -> None:
    """Scales are powers of two, so it changes no bit where they are applied.

    The interpreter computes both alike. Compiled they are two kernels, which may fuse or order a
    sum's terms in two ways: each of 300 terms can differ by a rounding, 6e-8 of sums near 1.
    """
    lengths = [300, 60]
    model = model_config(4, 2, 16)
    case = make_case(model, lengths, device, torch.float8_e4m3fn)
    assert case.cache.scales is not None
    stored = case.cache.blocks.view(torch.float8_e4m3fn).float()
    blocks = stored * case.cache.scales.values.float()
    slots = blocks.view(4, -1, 16)
    plain = LayerCache(blocks, slots[:2], slots[2:])
    rotated = torch.randn(6, 61, 16, device=device)
    rows = case.rows((0, 299, 1), (1, 0, 60))
    results = []
    for cache in (case.cache, plain):
        results.append(torch.full((61, 64), torch.nan, device=device))
        workspace = PagedWorkspace(model, torch.empty(partial_elements(model), device=device))
        for attention in paged_attentions(rows, put, rotated, results[-1], workspace):
            attention.run(cache)
    assert results[0].isfinite().all()
    if device.type == "cpu":
        assert torch.equal(*results)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_rows_of_padding_are_zero(device: torch.device) -> None:
    """A captured graph has more rows than some of its steps."""
    from ullage_engine.kernels.triton.attention import attend_decodes

    model = model_config(4, 2, 16)
    case = make_case(model, [20], device)
    tables = torch.tensor([_padded(case.tables[0], 16)] * 2, dtype=torch.int32, device=device)
    lengths = torch.tensor([20, 0], dtype=torch.int32, device=device)
    queries = torch.randn(4, 2, 16, device=device)
    out = torch.full((2, 64), torch.nan, device=device)
    partials = torch.full((partial_elements(model),), torch.nan, device=device)
    for width in (16, 2):  # split, and in one piece
        attend_decodes(queries, case.cache, tables[:, :width].contiguous(), lengths, out, partials)
        wanted = attend(case, queries[:, 0], 0, 20, 0, None)
        torch.testing.assert_close(out[0].cpu().double(), wanted, rtol=1e-4, atol=1e-5)
        assert not out[1].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_a_graph_serves_other_lengths(device: torch.device) -> None:
    from ullage_engine.kernels.triton.attention import attend_decodes

    model = model_config(8, 2, 64)
    case = make_case(model, [300], device)
    tables = torch.tensor([_padded(case.tables[0], 32)], dtype=torch.int32, device=device)
    length = torch.tensor([7], dtype=torch.int32, device=device)
    queries = torch.randn(8, 1, 64, device=device)
    out = torch.empty(1, 512, device=device)
    partials = torch.empty(partial_elements(model), device=device)
    attend_decodes(queries, case.cache, tables, length, out, partials)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_decodes(queries, case.cache, tables, length, out, partials)
    for tokens in (1, 130, 300):
        length.fill_(tokens)
        graph.replay()
        wanted = attend(case, queries[:, 0], 0, tokens, 0, None)
        torch.testing.assert_close(out[0].cpu().double(), wanted, rtol=1e-4, atol=1e-5)
