"""Blocks of GGUF are kept as the numbers that gguf's own reader makes of them."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from ullage_engine.quantization.gguf_blocks import block_encoding, read_blocks

ROWS = 5
COLUMNS = 512
KINDS = ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"]
HALVES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}


def random_rows(kind: str) -> np.ndarray:
    """Blocks of any bits, whose float16 numbers are finite."""
    elements, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (ROWS, COLUMNS // elements, size), dtype=np.uint8)
    count = HALVES.get(kind, 1)
    halves = generator.uniform(-0.1, 0.1, (*blocks.shape[:2], count)).astype(np.float16)
    start = size - 2 if kind == "Q6_K" else 0
    blocks[..., start : start + 2 * count] = halves.view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_block_is_the_files_numbers(kind: str) -> None:
    data = random_rows(kind)
    expected = torch.from_numpy(dequantize(data, Kind[kind]))
    kept = read_blocks(data, kind)
    assert torch.allclose(kept.dequantise(), expected, rtol=1e-5, atol=1e-5)
    assert kept.encoding == block_encoding(kind, (ROWS, COLUMNS))
    narrow = kept.format == "int4"
    assert narrow == kind.startswith("Q4")
    assert not narrow or (kept.values.min() >= -8 and kept.values.max() <= 7)


def test_other_kinds_are_not_kept() -> None:
    assert block_encoding("F16", (ROWS, COLUMNS)) is None
