"""Kernels between a layer's products equal their definitions in float64, and torch's operations.

Memory that they may neither read nor write is not a number.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from ullage_engine.kernels import moe
from ullage_engine.kernels.kv_pool import LayerCache, head_scales, narrow
from ullage_engine.layers.rotary_tables import fill_tables
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig

TYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    TYPES.append(torch.bfloat16)  # which the interpreter does not have

ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative distance of neighbouring numbers; float32 is summed in another order than by torch."""

EPS = 1e-5
SLOTS = 96


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """At most one rounding apart from the exact result, and another from a sum that cancels."""
    step = ROUNDING[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), exact, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 576), (5, 4096), (2, 5000)])
def test_norms(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    from ullage_engine.kernels.triton.layer import rms_norm

    x = (torch.randn(rows, columns) * 3).to(dtype).to(device)
    weight = torch.randn(columns).to(dtype).to(device)
    out = torch.full((rows + 1, columns), torch.nan, dtype=dtype, device=device)
    rms_norm(x, weight, EPS, out[:rows])
    exact = F.rms_norm(x.cpu().double(), (columns,), weight.cpu().double(), EPS)
    assert_rounded(out[:rows], exact)
    assert out[rows].isnan().all()
    rms_norm(x, weight, EPS, x)
    assert torch.equal(x, out[:rows]), "in place"


def test_a_norm_of_rows_that_are_no_numbers_is_none(device: torch.device) -> None:
    from ullage_engine.kernels.triton.layer import rms_norm

    x = torch.zeros(3, 20, device=device)
    x[1, 7] = torch.nan
    out = torch.empty_like(x)
    rms_norm(x, torch.ones(20, device=device), EPS, out)
    assert out[1].isnan().all()
    assert not out[[0, 2]].any(), "a row of zeros is zero"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 48), (5, 1536), (2, 2880)])
def test_gates(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    from ullage_engine.kernels.triton.layer import clamped_gate, gate

    # Some gates and ups are beyond their limits.
    gate_up = (torch.randn(rows, 2 * width) * 6).to(dtype).to(device)
    exact = gate_up.cpu().double()
    left, right = exact.chunk(2, 1)
    clamped = torch.empty(rows, width, dtype=torch.float64)
    moe.clamped_gate(exact.clone(), clamped)
    cases = [(gate, F.silu(left) * right), (clamped_gate, clamped)]
    for kernel, wanted in cases:
        out = torch.full((rows + 1, width), torch.nan, dtype=dtype, device=device)
        kernel(gate_up, out[:rows])
        assert_rounded(out[:rows], wanted)
        assert out[rows].isnan().all()


def test_gates_of_what_is_no_number_are_none(device: torch.device) -> None:
    from ullage_engine.kernels.triton.layer import clamped_gate, gate

    for kernel in (gate, clamped_gate):
        gate_up = torch.ones(1, 8, device=device)
        gate_up[0, 0], gate_up[0, 5] = torch.nan, torch.nan
        out = torch.empty(1, 4, device=device)
        kernel(gate_up, out)
        assert out.isnan().tolist() == [[True, True, False, False]]


def test_float8_codes_are_those_of_torch(device: torch.device) -> None:
    """Of every float16, which every E4M3 and every boundary between two of them is."""
    from ullage_engine.kernels.triton.layer import rotate_and_store

    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    numbers[numbers.isinf()] = 0  # at which numpy warns, as at a NaN that signals
    is_nan = numbers.isnan()
    numbers[is_nan] = torch.full_like(numbers, torch.nan).copysign(numbers)[is_nan]
    rows = len(numbers) // 256
    qkv = numbers.view(rows, 256).repeat(1, 3).to(device)
    tables = torch.ones(1, 256).half().to(device), torch.zeros(1, 256).half().to(device)
    positions = torch.zeros(rows, dtype=torch.int32, device=device)
    queries = torch.empty(1, rows, 256, dtype=torch.float16, device=device)
    order = torch.arange(rows, device=device)
    for bound in (448.0, 7.0, 448 * 2.0**9):
        scales = head_scales([bound] * 2, torch.float16, device)
        blocks = torch.zeros(2, 1, rows * 256, dtype=torch.uint8, device=device)
        slots = blocks.view(2, rows, 256)
        cache = LayerCache(blocks, slots[:1], slots[1:], scales)
        rotate_and_store(qkv, None, EPS, tables, positions, order, queries, cache)
        # Values, which are stored as they are: a NaN makes another of what it is rotated with.
        codes = torch.empty_like(cache.values)
        narrow(numbers.view(1, rows, 256).clone().to(device), scales.values[:1], codes)
        assert torch.equal(cache.values, codes)


@dataclass(frozen=True)
class Case:
    """A step's products and its places; the last row is padding."""

    model: ModelConfig
    qkv: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    tables: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor
    slots: torch.Tensor

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [heads, rows, head_dim] in float64."""
        heads = self.model.num_heads
        kv_heads = self.model.num_kv_heads
        rows = self.qkv.shape[0]
        head_dim = self.model.head_dim
        parts = self.qkv.cpu().double().view(rows, -1, head_dim).transpose(0, 1)
        queries, keys, values = parts.split([heads, kv_heads, kv_heads])
        if self.norms is not None:
            q_norm, k_norm = (norm.cpu().double() for norm in self.norms)
            queries = F.rms_norm(queries, (head_dim,), q_norm, EPS)
            keys = F.rms_norm(keys, (head_dim,), k_norm, EPS)
        cos, sin = (table.cpu().double()[self.positions.cpu()] for table in self.tables)
        return turned(queries, cos, sin), turned(keys, cos, sin), values


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def make_case(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    has_norms: bool,
) -> Case:
    model = ModelConfig(
        architecture="qwen3", layers=(LayerSpec(),), hidden=64, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, intermediate=1, vocab=1, max_position=64,
        rope_theta=1e4, rms_eps=EPS, tied=True,
    )  # fmt: skip
    tables = torch.empty(2, 64, head_dim)
    fill_tables(model, *tables)
    slots = torch.randperm(SLOTS)[:rows]
    slots[-1] = -1
    norms = torch.rand(2, head_dim).to(dtype).to(device) + 0.5
    return Case(
        model=model,
        qkv=torch.randn(rows, model.qkv_width).to(dtype).to(device),
        norms=(norms[0], norms[1]) if has_norms else None,
        tables=(tables[0].to(dtype).to(device), tables[1].to(dtype).to(device)),
        positions=torch.randint(0, 64, (rows,), dtype=torch.int32, device=device),
        slots=slots.to(device),
    )


def empty_cache(case: Case, is_fp8: bool) -> LayerCache:
    """Pages of what is no number."""
    kv_heads = case.model.num_kv_heads
    head_dim = case.model.head_dim
    shape = (2 * kv_heads, SLOTS // 16, 16 * head_dim)
    device = case.qkv.device
    if is_fp8:
        bounds = [448 * 2.0 ** (head % 5 - 6) for head in range(2 * kv_heads)]
        scales = head_scales(bounds, case.qkv.dtype, device)
        blocks = torch.full(shape, 0x7F, dtype=torch.uint8, device=device)
    else:
        scales = None
        blocks = torch.full(shape, torch.nan, dtype=case.qkv.dtype, device=device)
    slots = blocks.view(2 * kv_heads, SLOTS, head_dim)
    return LayerCache(blocks, slots[:kv_heads], slots[kv_heads:], scales)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rows"),
    [(4, 2, 16, 5), (9, 3, 64, 3), (8, 1, 128, 2), (3, 3, 256, 7)],
)
def test_queries_keys_and_values_reach_their_places(
    heads: int,
    kv_heads: int,
    head_dim: int,
    rows: int,
    has_norms: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    from ullage_engine.kernels.triton.layer import rotate_and_store

    case = make_case(heads, kv_heads, head_dim, rows, dtype, device, has_norms)
    queries = torch.full((heads + 1, rows, head_dim), torch.nan, dtype=dtype, device=device)
    places = (case.positions, case.slots, queries[:heads])
    exact_queries, keys, values = case.exact()
    plain = empty_cache(case, is_fp8=False)
    small = empty_cache(case, is_fp8=True)
    for cache in (plain, small):
        rotate_and_store(case.qkv, case.norms, EPS, case.tables, *places, cache)
    assert_rounded(queries[:heads], exact_queries)
    assert queries[heads].isnan().all()

    stored = case.slots[:-1]
    assert_rounded(plain.keys[:, stored], keys[:, :-1])
    assert torch.equal(plain.values[:, stored].cpu().double(), values[:, :-1])

    # Codes are those of the numbers that plain pages hold.
    assert small.scales is not None
    for codes, numbers, scales in (
        (small.keys, plain.keys, small.scales.values[:kv_heads]),
        (small.values, plain.values, small.scales.values[kv_heads:]),
    ):
        wanted = torch.empty_like(codes[:, stored])
        narrow(numbers[:, stored].clone(), scales, wanted)
        if device.type == "cpu":
            assert torch.equal(codes[:, stored], wanted)
        # Two compiled kernels may differ in a number's last bit, and so in the code next to it.
        apart = codes[:, stored].int() - wanted.int()
        assert apart.abs().max() <= 1

    others = torch.ones(SLOTS, dtype=torch.bool)
    others[stored.cpu()] = False
    assert plain.blocks.view(-1, SLOTS, head_dim)[:, others].isnan().all()
    assert small.blocks.view(-1, SLOTS, head_dim)[:, others].eq(0x7F).all()
