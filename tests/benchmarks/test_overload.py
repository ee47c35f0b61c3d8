"""How the benchmark of overload compares variants, and what it takes for the time needed."""

import asyncio
from collections import Counter

import pytest
from benchmarks.overload import rounds
from benchmarks.overload.returning import Returning, Watch, needed_s
from benchmarks.overload.rounds import (
    Comparison,
    Measured,
    OthersCPU,
    alternate,
    most_ratio,
    only,
)


def seconds(*values: float) -> Measured:
    return Measured({"end": list(values)}, Counter({"200": len(values)}))


def test_variants_take_turns_and_each_round_has_the_opposite_order() -> None:
    order: list[str] = []

    def variant(name: str, takes: float) -> object:
        async def run(number: int) -> Measured:
            order.append(f"{name}{number}")
            return seconds(takes, takes * (number + 1))

        return run

    variants = {"a": variant("a", 1.0), "b": variant("b", 2.0)}
    comparison = asyncio.run(alternate(variants, 3, patience_s=0.0))  # type: ignore[arg-type]
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert comparison.quantiles("a", "end", 1.0) == [1.0, 2.0, 3.0]
    assert comparison.ratios("b", "a", "end", 1.0) == [2.0, 2.0, 2.0]
    assert comparison.outcomes() == {"200": 12}


def test_the_median_of_the_rounds_is_judged() -> None:
    one_slow_round = [1.0, 1.09, 1.5]
    assert most_ratio("", one_slow_round, 1.1).is_met
    assert not most_ratio("", [1.0, 1.11, 1.5], 1.1).is_met


def test_an_outcome_that_is_not_allowed_is_a_miss() -> None:
    both = {"a": [Measured({}, Counter({"200": 2})), Measured({}, Counter({"500": 1}))]}
    assert not only("", Comparison(both).outcomes(), {"200", "429"}).is_met


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores busy for a second: this process took half a core, and the rest is of others."""
    monkeypatch.setattr(rounds, "_busy_s", iter([100.0, 102.0]).__next__)
    monkeypatch.setattr(rounds, "_own_cpu", iter([{1: 5.0}, {1: 5.25, 2: 0.25}]).__next__)
    monkeypatch.setattr("time.monotonic", iter([10.0, 11.0]).__next__)
    assert OthersCPU().cores() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("queued_s", "free_since", "needed"),
    [(0.0, 109.0, 9.0), (0.0, 104.0, 4.0), (2.0, 104.0, 12.0), (0.0, 110.0, 10.0)],
    ids=["a second too late", "six seconds too late", "too early, queued", "in time"],
)
def test_the_time_needed(queued_s: float, free_since: float, needed: float) -> None:
    """A client that was refused at 100 and told ten seconds."""
    client = Returning(0, told_s=[10], returned_at=[110.0], request_id="r")
    watch = Watch(queued_s={"r": queued_s}, needed_bytes=5)
    watch.free = [(at / 10, 5 if at / 10 >= free_since else 4) for at in range(1000, 1101)]
    assert needed_s(client, watch) == pytest.approx(needed, abs=0.11)


def test_a_client_that_was_refused_again_needed_longer() -> None:
    client = Returning(0, told_s=[3, 4], returned_at=[103.0, 107.0], request_id="r")
    watch = Watch(queued_s={"r": 0.0}, needed_bytes=5)
    watch.free = [(106.0, 4), (106.9, 4)]
    assert needed_s(client, watch) == pytest.approx(7.0)
