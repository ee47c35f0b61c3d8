"""Decoding MXFP4 against a scalar implementation, and layers of packed experts."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.kernels.arena import mxfp4_scratch_bytes
from ullage_engine.layers.linear import PlainLinear
from ullage_engine.layers.moe import Experts, Mxfp4Decoder, Mxfp4Experts, Mxfp4Linear

RandomPacked = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def new_decoder(dtype: torch.dtype) -> Mxfp4Decoder:
    return Mxfp4Decoder(
        dtype, torch.empty(mxfp4_scratch_bytes("cpu", dtype.itemsize), dtype=torch.uint8)
    )


DECODER = new_decoder(torch.float32)


def scalar(code: int, scale: int) -> float:
    """One number by the specification: sign, two bits of exponent, one of mantissa."""
    if scale == 255:
        return math.nan
    sign = -1.0 if code & 8 else 1.0
    exponent = code >> 1 & 3
    mantissa = code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return sign * magnitude * 2.0 ** (scale - 127)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 255)), min_size=2, max_size=6
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_decodes_what_the_specification_says(
    rows: list[tuple[bytes, int]], dtype: torch.dtype
) -> None:
    blocks = torch.tensor([list(block) for block, _ in rows], dtype=torch.uint8)[:, None]
    scales = torch.tensor([[scale] for _, scale in rows], dtype=torch.uint8)
    expected = [
        [scalar(code, scale) for byte in block for code in (byte & 15, byte >> 4)]
        for block, scale in rows
    ]
    decoded = new_decoder(dtype).decode(blocks, scales)
    wanted = torch.tensor(expected, dtype=torch.float64).to(dtype)
    assert torch.equal(decoded.nan_to_num(7.5), wanted.nan_to_num(7.5))


def test_half_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.dtype float16 .* use bfloat16 or float32"):
        new_decoder(torch.float16)


def test_scratch_is_what_is_priced() -> None:
    held = [each for each in vars(DECODER).values() if isinstance(each, torch.Tensor)]
    large = [each for each in held if each.numel() > 256]
    assert sum(each.nbytes for each in large) == mxfp4_scratch_bytes("cpu", 4)
    assert len({each.untyped_storage().data_ptr() for each in large}) == 1


@pytest.mark.parametrize("out", [5, 96, 9000])
def test_a_matrix_multiplies_panel_by_panel(
    random_packed: RandomPacked, seed: int, out: int
) -> None:
    blocks, scales = random_packed(out, 4, seed=seed)
    matrix = Mxfp4Linear(blocks, scales, DECODER)
    assert matrix.shape == (128, out)
    plain = new_decoder(torch.float32)
    dense = torch.cat([plain.decode(*each).clone() for each in zip(blocks, scales, strict=True)])
    x = torch.randn(3, 128)
    result = torch.empty(3, out)
    matrix.forward(x, result)
    expected = x @ dense.view(out, 128).t()
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-4)
    matrix.forward_add(x, result)
    assert torch.allclose(result, 2 * expected, rtol=1e-5, atol=1e-4)


class Grouped(Mxfp4Experts):
    """What a GPU computes, on a CPU."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        self.forward_grouped(x, ends, pairs, out)


@pytest.mark.parametrize("kind", [Mxfp4Experts, Grouped])
@pytest.mark.parametrize("tokens", [1, 60])
@torch.inference_mode()
def test_packed_experts_are_what_decoded_ones_are(
    new_packable_layer: Callable[..., Any],
    random_packed: RandomPacked,
    build: Callable[..., Experts],
    seed: int,
    kind: type[Mxfp4Experts],
    tokens: int,
) -> None:
    layer = new_packable_layer()
    packed = {
        "gate_up": random_packed(8, 128, 2, seed=seed),
        "down": random_packed(8, 64, 2, seed=seed + 1),
    }
    gate_up, down = (DECODER.decode(*each).clone() for each in packed.values())
    x = torch.randn(tokens, 64)
    plain = torch.zeros_like(x)
    ours = torch.zeros_like(x)
    build(replace(layer, gate_up=gate_up, down=down), tokens).run(x, plain)
    stores = iter([kind(*each, DECODER) for each in packed.values()])
    build(layer, tokens, lambda weights: next(stores), PlainLinear).run(x, ours)
    assert float((ours - plain).abs().max() / plain.abs().max()) < 1e-5
