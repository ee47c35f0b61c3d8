"""Headroom in the status: summed by pool, and told only when it is news."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ullage_operator.headroom import Report, is_news, summed

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
REPORT = Report(
    ready=True,
    draining=False,
    health=1.0,
    free_bytes=600,
    total_bytes=1000,
    token_bytes=10,
    pressure_level=0,
)


def test_a_pools_headroom_is_the_sum_of_its_engines() -> None:
    pressed = replace(REPORT, free_bytes=95, pressure_level=2)
    pools = summed([("single", REPORT), ("single", pressed), ("large", REPORT)])
    assert pools["single"].status() == {
        "engines": 2,
        "freeBytes": 695,
        "totalBytes": 2000,
        "freeTokens": 69,
        "totalTokens": 200,
        "pressureLevel": 2,
    }
    assert pools["large"].free_tokens == 60


@pytest.mark.parametrize("change", [{"draining": True}, {"ready": False}])
def test_an_engine_that_takes_nothing_has_no_free_memory(change: dict[str, Any]) -> None:
    pool = summed([("single", replace(REPORT, **change))])["single"]
    assert (pool.free_bytes, pool.free_tokens, pool.total_bytes) == (0, 0, 1000)


def test_an_engine_that_knows_no_token_size_counts_in_bytes_only() -> None:
    pool = summed([("single", replace(REPORT, token_bytes=0))])["single"]
    assert (pool.free_bytes, pool.total_tokens) == (600, 0)


@pytest.mark.parametrize(
    ("change", "news"),
    [
        ({"free_bytes": 609}, False),
        ({"free_bytes": 610}, True),
        ({"free_bytes": 590}, True),
        ({"pressure_level": 1}, True),
        ({"total_bytes": 999}, True),
        ({"health": 0.1}, False),
    ],
)
def test_a_hundredth_of_the_whole_is_news(change: dict[str, Any], news: bool) -> None:
    before, now = summed([("a", REPORT)]), summed([("a", replace(REPORT, **change))])
    assert is_news(before, now) is news


def test_full_and_empty_are_always_told() -> None:
    nearly = summed([("a", replace(REPORT, free_bytes=995))])
    assert is_news(nearly, summed([("a", replace(REPORT, free_bytes=1000))]))
    low = summed([("a", replace(REPORT, free_bytes=5))])
    assert is_news(low, summed([("a", replace(REPORT, free_bytes=0))]))


def test_a_pool_that_comes_or_goes_is_news() -> None:
    one = summed([("a", REPORT)])
    assert is_news({}, one) and is_news(one, {})
    assert not is_news(one, one)
