"""Every instruction set, number of threads and batch gives the same bits."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ullage_testing.native_models import (
    LIMITS,
    SHAPES,
    Shape,
    chunk,
    logits,
    make_model,
    make_runner,
    random_tokens,
    tiles,
)

from ullage_engine.layers.linear import NativeLinear, native_matrix, native_scratch_bytes
from ullage_engine.native.library import PORTABLE, Draw, Model, Team, instruction_sets
from ullage_engine.protocol.step_plan import Chunk
from ullage_engine.quantization.formats import TILE_GROUPS, Packed, pack, quantise

ComputeWith = Callable[[str], None]

COLUMNS = 160
ROWS = (1, 2, 3, 5, 6, 7, 10, 12, 13, 15, 16, 17, 40)
KV_FORMATS = ("bfloat16", "float32", "float8")

IS_USABLE = bool(instruction_sets())


def equal_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all numbers have the same bits, and NaN are in the same places."""
    is_nan = found.isnan()
    same = found.view(torch.int32) == wanted.view(torch.int32)
    return torch.equal(is_nan, wanted.isnan()) and bool((same | is_nan).all())


# ------------------------------------------------------------------ steps


def steps() -> list[list[Chunk]]:
    """Prompts and decodes, alone and together, over one span of context and over two."""
    long = random_tokens(300)
    short = random_tokens(40)
    return [
        [chunk(0, long, 0, 150), chunk(1, short, 0, 39)],
        [chunk(1, short, 39, 40), chunk(0, long, 150, 298)],
        [chunk(0, long, 298, 299)],
        [chunk(0, long, 299, 300), chunk(2, short, 0, 13)],
    ]


def computed(shape: Shape, kv: str, plan: list[list[Chunk]]) -> list[torch.Tensor]:
    """Compute the steps by a new runner; return their logits, and the cache as it is then."""
    torch.manual_seed(20_261)
    kv_type = torch.float32 if kv == "float32" else torch.bfloat16
    limits = replace(LIMITS, fp8_kv=kv == "float8")
    runner = make_runner(make_model(shape), kv_type=kv_type, limits=limits)
    found = [logits(runner, *each) for each in plan]
    return [*found, runner._kv.blocks.view(torch.uint8).int()]


@pytest.mark.usefixtures("seed")
@pytest.mark.parametrize("kv", KV_FORMATS)
def test_steps_have_the_bits_of_the_portable_set(
    vectors: str, kv: str, compute_with: ComputeWith, subtests: pytest.Subtests
) -> None:
    for shape in SHAPES if kv == "bfloat16" else (SHAPES[1], SHAPES[4], SHAPES[6]):
        plan = steps()
        answers = []
        for isa in (PORTABLE, vectors):
            compute_with(isa)
            answers.append(computed(shape, kv, plan))
        with subtests.test(shape=shape):
            assert answers[0][0].abs().max() > 1
            assert all(map(equal_bits, *answers))


@pytest.mark.usefixtures("seed", "isa")
def test_steps_have_the_same_bits_with_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    for shape in (SHAPES[1], SHAPES[2], SHAPES[6]):
        plan = steps()
        answers = []
        for num_threads in (1, 2, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda num=num_threads: num)
            answers.append(computed(shape, "bfloat16", plan))
        with subtests.test(shape=shape):
            assert all(all(map(equal_bits, answers[0], other)) for other in answers[1:])


# ------------------------------------------------------------------ products


def inputs(rows: int) -> torch.Tensor:
    """Rows of ordinary numbers, of huge and tiny ones, of none but zeros, and one with a NaN."""
    x = torch.randn(rows, COLUMNS)
    x[1::5] *= 1e30
    x[2::5] *= 1e-38
    x[3::5] = -0.0
    x[4::5, 7] = torch.nan
    return x


def product(packed: Packed, x: torch.Tensor, team: Team) -> torch.Tensor:
    size = native_scratch_bytes(packed.encoding.shape)
    matrix = NativeLinear(packed, torch.zeros(size, dtype=torch.uint8))
    matrix._team = team
    out = torch.empty(len(x), packed.encoding.shape[0])
    matrix.forward(x, out)
    return out


def matrices(size: float = 0.1, columns: int = COLUMNS) -> Iterator[Packed]:
    for format, group in itertools.product(("int4", "int8"), TILE_GROUPS):
        weights = torch.randn(48, columns) * size
        encoding = tiles(weights, format, group)
        yield Packed(
            encoding, pack(quantise(weights, encoding, torch.float32), encoding, torch.float32)
        )


@pytest.mark.usefixtures("seed")
def test_products_have_the_bits_of_the_portable_set(
    vectors: str, subtests: pytest.Subtests
) -> None:
    for packed in matrices():
        for rows in ROWS:
            x = inputs(rows)
            wanted, found = (product(packed, x, Team(2, isa)) for isa in (PORTABLE, vectors))
            with subtests.test(encoding=packed.encoding, rows=rows):
                assert wanted.isfinite().any()
                assert equal_bits(found, wanted)


def whole_product(packed: Packed, x: torch.Tensor, team: Team) -> torch.Tensor:
    """Multiply all rows in one call, not in passes of some rows as `NativeLinear` does."""
    rows, columns = x.shape
    factors = rows * columns // packed.encoding.group
    scales = torch.zeros(factors)
    sums = torch.zeros(factors)
    rounded = torch.zeros(rows * columns, dtype=torch.int8)
    buffers = Model(
        rounded=rounded.data_ptr(), row_scales=scales.data_ptr(), row_sums=sums.data_ptr()
    )
    out = torch.empty(rows, packed.encoding.shape[0])
    team.multiply(native_matrix(packed), x, out, buffers)
    return out


@pytest.mark.usefixtures("seed")
def test_products_of_long_and_of_many_rows_have_the_bits_of_the_portable_set(
    vectors: str, subtests: pytest.Subtests
) -> None:
    for packed in matrices(columns=1_120):
        for rows in (8, 97, 210):
            x = torch.randn(rows, 1_120)
            wanted, found = (whole_product(packed, x, Team(2, isa)) for isa in (PORTABLE, vectors))
            with subtests.test(encoding=packed.encoding, rows=rows):
                assert wanted.isfinite().all()
                assert equal_bits(found, wanted)


@pytest.mark.usefixtures("seed")
def test_numbers_too_small_for_a_process_that_flushes_them_stay(isa: str) -> None:
    """torch.set_flush_denormal sets the processor's control register of the thread that calls."""
    packed = next(matrices(3e-7))
    x = torch.randn(8, COLUMNS) * 3e-30
    wanted = product(packed, x, Team(1, isa))
    assert (wanted != 0).all()
    try:
        assert torch.set_flush_denormal(True)
        flushed = [product(packed, x, Team(threads, isa)) for threads in (1, 2)]
        # The caller's own arithmetic stays as it was.
        assert float(np.float32(1e-30) * np.float32(1e-10)) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert all(equal_bits(each, wanted) for each in flushed)


# ------------------------------------------------------------------ sampling


def teams() -> list[Team]:
    return [Team(2, isa) for isa in instruction_sets()]


ALL_TEAMS = teams()


def tokens_of(team: Team, rows: torch.Tensor, params: list[dict[str, float]]) -> list[int]:
    return team.sample(rows, [Draw(**each) for each in params])


@pytest.mark.skipif(not IS_USABLE, reason="the library cannot be used here")
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([16, 208, 3008, 16_400]),
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    num_allowed=st.sampled_from([1, 3, 100, 20_000]),
    temperature=st.floats(0.05, 5.0),
    top_k=st.sampled_from([0, 2, 40, 2500]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_tokens_are_those_of_the_portable_set(
    seed: int,
    vocab: int,
    scale: float,
    num_allowed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, vocab, generator=draw) * scale
    if num_allowed < vocab:
        order = torch.rand(16, vocab, generator=draw).argsort(-1)
        logits.scatter_(1, order[:, num_allowed:], -torch.inf)
    noise = torch.rand(16, generator=draw, dtype=torch.float64).tolist()
    params = [
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "noise": each}
        for each in noise
    ]
    first, *others = ALL_TEAMS
    wanted = tokens_of(first, logits, params)
    assert all(token >= 0 for token in wanted)
    assert all(tokens_of(team, logits, params) == wanted for team in others)


@pytest.mark.skipif(not IS_USABLE, reason="the library cannot be used here")
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([16, 208, 3008, 49_152]),
    scale=st.sampled_from([0.0, 0.01, 3.0, 1e4]),
)
def test_log_masses_are_those_of_the_portable_set(seed: int, vocab: int, scale: float) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    wanted, *others = [team.log_masses(logits) for team in ALL_TEAMS]
    assert all(equal_bits(each, wanted) for each in others)
    exact = (logits.double() - logits.double().amax(-1, keepdim=True)).logsumexp(-1, keepdim=True)
    assert torch.allclose(wanted.double(), exact, rtol=1e-6, atol=1e-6)
