"""The instruction sets that tests of the library's numbers are run with."""

from collections.abc import Callable
from functools import cache

import pytest

from ullage_engine.layers import linear, native_decoder
from ullage_engine.native.library import INSTRUCTION_SETS, PORTABLE, Team, instruction_sets

ComputeWith = Callable[[str], None]

MISSING = pytest.param(
    "", marks=pytest.mark.skip(reason="the library cannot be used here; its log says why")
)
SERVED = [isa for isa in instruction_sets() if isa != PORTABLE]


def or_skipped(isa: str) -> object:
    reason = f"this processor lacks {isa}: run the test on one that has it"
    return isa if isa in SERVED else pytest.param(isa, marks=pytest.mark.skip(reason=reason))


@pytest.fixture
def compute_with(monkeypatch: pytest.MonkeyPatch) -> ComputeWith:
    """Have the library compute with an instruction set from then on."""

    def choose(isa: str) -> None:
        @cache
        def team(num_threads: int) -> Team:
            return Team(num_threads, isa)

        for module in (linear, native_decoder):
            monkeypatch.setattr(module, "shared_team", team)

    return choose


@pytest.fixture(params=SERVED or [MISSING])
def isa(request: pytest.FixtureRequest, compute_with: ComputeWith) -> str:
    """Have the library compute with each of the instruction sets that this processor has."""
    compute_with(request.param)
    return str(request.param)


@pytest.fixture(params=map(or_skipped, INSTRUCTION_SETS[1:]))
def vectors(request: pytest.FixtureRequest) -> str:
    """Each instruction set of vectors, whose bits are those of the portable one."""
    return str(request.param)
