"""Random weights whose seed varies from run to run and is printed when a test fails."""

import random
from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def seed() -> int:
    value = random.SystemRandom().randrange(1 << 31)
    print("seed", value)
    return value


@pytest.fixture
def new_weights(seed: int) -> Callable[..., torch.Tensor]:
    """Weights of rows that differ much in size, as those of models do."""
    generator = torch.Generator().manual_seed(seed)

    def make(rows: int, columns: int) -> torch.Tensor:
        sizes = torch.rand(rows, 1, generator=generator) * 3 - 2
        return torch.randn(rows, columns, generator=generator) * 10**sizes

    return make
