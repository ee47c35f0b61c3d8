"""Products with weights in small formats equal products with the weights they stand for."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from ullage_engine.kernels.triton import Format, quantized_matmul

Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]
RandomWeights = Callable[[Format, int, int], Weights]


@pytest.mark.parametrize("format", get_args(Format))
@pytest.mark.parametrize("rows", [1, 37, 70])
def test_product(
    format: Format, rows: int, random_weights: RandomWeights, device: torch.device
) -> None:
    columns = 50
    depth = 192
    packed, scales, zeros, wanted = random_weights(format, columns, depth)
    x = torch.randn(rows, depth, device=device)
    product = x.double().cpu() @ wanted.t()
    out = torch.full((rows, columns), torch.nan, device=device)
    quantized_matmul(x, packed, scales, zeros, out, format)
    torch.testing.assert_close(out.cpu().double(), product, rtol=1e-5, atol=1e-3)
    quantized_matmul(x, packed, scales, zeros, out, format, adds=True)
    torch.testing.assert_close(out.cpu().double(), 2 * product, rtol=1e-5, atol=2e-3)


def test_depth_that_no_step_divides(random_weights: RandomWeights, device: torch.device) -> None:
    packed, scales, zeros, wanted = random_weights("int8", 20, 90)
    x = torch.randn(3, 90, device=device)
    out = torch.empty(3, 20, device=device)
    quantized_matmul(x, packed, scales, zeros, out, "int8")
    product = x.double().cpu() @ wanted.t()
    torch.testing.assert_close(out.cpu().double(), product, rtol=1e-5, atol=1e-3)


def test_every_code_is_read_exactly(e2m1: torch.Tensor, device: torch.device) -> None:
    """A product with the unit matrix shows what each code stands for."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    values = torch.cat([codes, codes[:2]]).view(torch.float8_e4m3fn).view(16, 16).to(device)
    out = torch.empty(16, 16, device=device)
    ones = torch.ones(16, 1, device=device)
    quantized_matmul(torch.eye(16, device=device), values, ones, None, out, "fp8")
    assert torch.equal(out.t().cpu(), values.cpu().float())
    nibbles = torch.arange(16, dtype=torch.uint8)
    packed = (nibbles | (nibbles.flip(0) << 4)).view(1, 16).to(device)
    scale = torch.tensor([[127]], dtype=torch.uint8, device=device)
    out = torch.empty(32, 1, device=device)
    quantized_matmul(torch.eye(32, device=device), packed, scale, None, out, "mxfp4")
    assert torch.equal(out[0::2, 0].cpu(), e2m1)
    assert torch.equal(out[1::2, 0].cpu(), e2m1.flip(0))


def test_halves(random_weights: RandomWeights, device: torch.device) -> None:
    """bfloat16 where it is compiled; the interpreter multiplies its bits as if they were integers
    (Triton 3.6 to 3.9), so float16 there."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    packed, scales, zeros, wanted = random_weights("int4", 32, 128)
    x = torch.randn(5, 128, device=device).to(dtype)
    out = torch.empty(5, 32, device=device, dtype=dtype)
    quantized_matmul(x, packed, scales, zeros, out, "int4")
    product = x.double().cpu() @ wanted.t()
    torch.testing.assert_close(out.cpu().double(), product, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("groups", [1, 3])
def test_bytes_with_zeros(groups: int, device: torch.device) -> None:
    """What 8-bit checkpoints of GPTQ hold."""
    values = torch.randint(-128, 128, (20, 96), dtype=torch.int8)
    scales = torch.rand(20, groups) + 0.5
    zeros = torch.randn(20, groups)
    wide = [part.double().repeat_interleave(96 // groups, 1) for part in (scales, zeros)]
    x = torch.randn(3, 96, device=device)
    out = torch.empty(3, 20, device=device)
    stored = [part.to(device) for part in (values, scales, zeros)]
    quantized_matmul(x, *stored, out, "int8")
    product = x.double().cpu() @ (values * wide[0] + wide[1]).t()
    torch.testing.assert_close(out.cpu().double(), product, rtol=1e-5, atol=1e-3)


def test_what_no_kernel_multiplies_is_refused(device: torch.device) -> None:
    x = torch.ones(1, 96)
    out = torch.empty(1, 4)
    packed = torch.zeros(4, 48, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2 groups of scales for 96 int4 weights"):
        quantized_matmul(x, packed, torch.ones(4, 2), None, out, "int4")
    with pytest.raises(ValueError, match="scales are missing"):
        quantized_matmul(x, packed, None, None, out, "mxfp4")
    with pytest.raises(ValueError, match="format w8a8 has no kernel; there are plain, int8"):
        quantized_matmul(x, packed, torch.ones(4, 1), None, out, "w8a8")
