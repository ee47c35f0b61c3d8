"""Products with experts' weights equal a product for each row with its expert's."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from ullage_engine.kernels.triton import Format

Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]
RandomWeights = Callable[[Format, int, int], Weights]

COLUMNS = 40
DEPTH = 128
EXPERTS = 5


def of_all(parts: Weights) -> Weights:
    """One matrix of all experts' columns, as one for each expert."""
    packed, scales, zeros, wanted = parts
    shape = (EXPERTS, COLUMNS, -1)
    return (
        packed.view(shape),
        None if scales is None else scales.view(shape),
        None if zeros is None else zeros.view(shape),
        wanted.view(shape),
    )


def expected(x: torch.Tensor, experts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (wanted[experts] @ x.double().cpu()[:, :, None])[..., 0]


@pytest.mark.parametrize("counts", [[3, 0, 40, 1, 0], [0, 0, 0, 0, 2], [130, 1, 17, 0, 20]])
def test_sorted_rows(
    counts: list[int], random_weights: RandomWeights, device: torch.device
) -> None:
    from ullage_engine.kernels.triton.matmul import grouped_matmul

    packed, scales, zeros, wanted = of_all(random_weights("int8", EXPERTS * COLUMNS, DEPTH))
    rows = sum(counts)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(device)
    experts = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    x = torch.randn(rows + 3, DEPTH, device=device)
    out = torch.full((rows + 3, COLUMNS), torch.nan, device=device)
    grouped_matmul(x, ends, packed, scales, zeros, out, "int8")
    product = expected(x[:rows], experts, wanted)
    torch.testing.assert_close(out[:rows].cpu().double(), product, rtol=1e-5, atol=2e-3)
    assert out[rows:].isnan().all(), "rows of no expert are left alone"


@pytest.mark.parametrize("format", get_args(Format))
def test_formats(format: Format, random_weights: RandomWeights, device: torch.device) -> None:
    """Sorted rows, and the same rows picked one by one."""
    from ullage_engine.kernels.triton.matmul import grouped_matmul, picked_matmul

    packed, scales, zeros, wanted = of_all(random_weights(format, EXPERTS * COLUMNS, DEPTH))
    experts = torch.tensor([0, 0, 1, 3, 3, 3])
    ends = torch.tensor([2, 3, 3, 6, 6], dtype=torch.int32, device=device)
    x = torch.randn(6, DEPTH, device=device)
    product = expected(x, experts, wanted)
    out = torch.full((6, COLUMNS), torch.nan, device=device)
    grouped_matmul(x, ends, packed, scales, zeros, out, format)
    torch.testing.assert_close(out.cpu().double(), product, rtol=1e-5, atol=2e-3)
    order = torch.randperm(6)
    picked_matmul(x[order], experts[order].to(device), packed, scales, zeros, out, format)
    torch.testing.assert_close(out.cpu().double(), product[order], rtol=1e-5, atol=2e-3)


def test_pairs_of_a_token_share_its_row(
    random_weights: RandomWeights, device: torch.device
) -> None:
    from ullage_engine.kernels.triton.matmul import picked_matmul

    packed, scales, zeros, wanted = of_all(random_weights("mxfp4", EXPERTS * COLUMNS, DEPTH))
    chosen = torch.tensor([[4, 1], [2, 4], [0, 3]])
    x = torch.randn(3, DEPTH, device=device)
    out = torch.empty(6, COLUMNS, device=device)
    picked_matmul(x, chosen.flatten().to(device), packed, scales, zeros, out, "mxfp4")
    product = expected(x.repeat_interleave(2, 0), chosen.flatten(), wanted)
    torch.testing.assert_close(out.cpu().double(), product, rtol=1e-5, atol=2e-3)
