"""Kernels run in Triton's interpreter, or compiled where there is a GPU (see tests/conftest.py)."""

import importlib.util
from collections.abc import Callable

import pytest
import torch

from ullage_engine.kernels.staging import Indices
from ullage_engine.kernels.triton import Put

Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/kernels/triton/" in item.path.as_posix():
            item.add_marker(needs_triton)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def put(device: torch.device) -> Put:
    """Brings an index array to the device at once."""

    def put(array: Indices) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return put


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    """Random numbers differ from run to run; pytest prints the seed of a test that fails."""


@pytest.fixture
def e2m1() -> torch.Tensor:
    """What the codes of a float4 stand for."""
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture
def random_weights(e2m1: torch.Tensor, device: torch.device) -> Callable[[str, int, int], Weights]:
    """Makes (packed, scales, zeros), and what they stand for in float64 [columns, depth]."""

    def make(format: str, columns: int, depth: int) -> Weights:
        if format == "plain":
            values = torch.randn(columns, depth)
            return values.to(device), None, None, values.double()
        if format in ("int8", "fp8"):
            scales = torch.rand(columns, 1) + 0.5
            values = torch.randint(-128, 128, (columns, depth), dtype=torch.int8)
            if format == "fp8":
                values = torch.randn(columns, depth).mul_(50).to(torch.float8_e4m3fn)
            return values.to(device), scales.to(device), None, values.float().double() * scales
        codes = torch.randint(0, 16, (columns, depth))
        packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8).to(device)
        if format == "mxfp4":
            exponents = torch.randint(120, 130, (columns, depth // 32), dtype=torch.uint8)
            steps = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
            return packed, exponents.to(device), None, e2m1[codes].double() * steps
        scales = torch.rand(columns, depth // 64)
        zeros = torch.randn(columns, depth // 64)
        wide = [part.double().repeat_interleave(64, 1) for part in (scales, zeros)]
        return packed, scales.to(device), zeros.to(device), (codes - 8) * wide[0] + wide[1]

    return make
