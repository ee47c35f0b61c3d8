"""The instruction sets that tests of the library's numbers are run with."""

from functools import cache

import pytest

from ullage_engine.layers import linear, native_decoder
from ullage_engine.native.library import Team, instruction_sets

MISSING = pytest.param(
    "", marks=pytest.mark.skip(reason="the library cannot be used here; its log says why")
)


@pytest.fixture(params=instruction_sets() or [MISSING])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has the library compute with each of the instruction sets that this processor has."""

    @cache
    def team(num_threads: int) -> Team:
        return Team(num_threads, request.param)

    for module in (linear, native_decoder):
        monkeypatch.setattr(module, "shared_team", team)
    return str(request.param)
