"""The few sizes that matrix products are given.

oneDNN prepares every shape anew, about a millisecond and 0.6 MB each, and keeps the latest hundred
(`ullage_engine.core.worker_env`). Sizes are rounded up to rungs, so that they seldom miss.
"""

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
others: a sigmoid may differ in the last bit (docs/decisions/0007-determinism.md)."""

SPAN_TOKENS = 256
"""Context that deterministic attention scores and sums by itself, counted from the first token."""


def unit_rows(rows: int) -> int:
    """Rows rounded up to whole units of a deterministic product."""
    return -(-rows // UNIT_ROWS) * UNIT_ROWS


def token_rung(tokens: int) -> int:
    """Rows of the layers' products for a step of `tokens`."""
    if tokens <= 64:
        return _ladder(tokens, 1)
    step = 64 if tokens <= 1024 else 512
    return -(-tokens // step) * step


def block_rung(blocks: int) -> int:
    """Blocks of context gathered for sequences of at most `blocks`."""
    return _ladder(blocks, MIN_BLOCKS)


def decode_rows(rows: int, most: int) -> tuple[int, int]:
    """How many of `rows` decodes to attend together, and how many rows that is with padding.

    Padded rows are a power of two, at most `most`.
    """
    above = 1 << (rows - 1).bit_length()
    if above <= most and (above - rows) <= MAX_ROW_WASTE * above:
        return rows, above
    taken = 1 << (min(rows, most).bit_length() - 1)
    return taken, taken


def tile_rows(blocks: int, block_tokens: int) -> int:
    """Prompt tokens scored at once against this many blocks of context."""
    affordable = SCORE_TOKENS // (blocks * block_tokens)
    return next((r for r in (128, 64) if r <= affordable), MIN_TILE_ROWS)


def row_rung(rows: int) -> int:
    """Rows of a prefill tile, padding included."""
    return max(MIN_TILE_ROWS, 1 << (rows - 1).bit_length())


def _ladder(size: int, smallest: int) -> int:
    """Rounds up to smallest * (1, 2, 3, 4, 6, 8, 12, 16, 24, ...)."""
    rung = smallest
    while rung < size:
        half_steps = rung + rung // 2
        if half_steps >= size and half_steps % smallest == 0:
            return half_steps
        rung *= 2
    return rung
