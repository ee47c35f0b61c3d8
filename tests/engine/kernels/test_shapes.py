"""Sizes that matrix products are given."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.arena import (
    MAX_ROW_WASTE,
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    SCORE_TOKENS,
    context_bucket,
    decode_rows,
    pad_to_bucket,
    tile_bucket,
    tile_rows,
)

sizes = st.integers(1, 20_000)


@settings(deadline=None)
@given(sizes)
def test_rungs_cover_and_waste_less_than_half(size: int) -> None:
    for bucket in (pad_to_bucket, context_bucket):
        assert bucket(size) >= size
        assert bucket(bucket(size)) == bucket(size)
        assert bucket(size) < 2 * max(size, 8)


def test_rungs_are_few() -> None:
    assert len({pad_to_bucket(size) for size in range(1, 577)}) <= 24
    assert len({context_bucket(size) for size in range(1, 513)}) <= 12


@settings(deadline=None)
@given(st.integers(1, 256), st.integers(1, 600))
def test_decode_rows_progress_within_the_workspace(rows: int, most: int) -> None:
    taken, padded = decode_rows(rows, most)
    assert 1 <= taken <= min(rows, padded)
    assert padded <= most
    assert padded & (padded - 1) == 0
    assert padded - taken <= MAX_ROW_WASTE * padded


@settings(deadline=None)
@given(st.integers(1, 1 << 17))
def test_tiles_bound_the_scores(blocks: int) -> None:
    rows = tile_rows(blocks, 16)
    assert MIN_TILE_ROWS <= rows <= MAX_TILE_ROWS
    assert tile_bucket(rows) == rows
    assert rows == MIN_TILE_ROWS or rows * blocks * 16 <= SCORE_TOKENS
