"""Headroom in the status: summed by pool, and told only when it is news."""

from datetime import UTC, datetime
from typing import Any

import pytest

from ullage.headroom.v1.headroom_pb2 import Headroom
from ullage_operator.healing import headroom_by_pool, is_worth_reporting

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
REPORT = Headroom(
    ready=True,
    draining=False,
    health=1.0,
    headroom_bytes=600,
    kv_pool_bytes=1000,
    kv_bytes_per_token=10,
    pressure_level=0,
)


def changed(**fields: Any) -> Headroom:
    """The report with other fields."""
    given = {descriptor.name: value for descriptor, value in REPORT.ListFields()}
    return Headroom(**given | fields)


def test_a_pools_headroom_is_the_sum_of_its_engines() -> None:
    pressed = changed(headroom_bytes=95, pressure_level=2)
    pools = headroom_by_pool([("single", REPORT), ("single", pressed), ("large", REPORT)])
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
    pool = headroom_by_pool([("single", changed(**change))])["single"]
    assert (pool.free_bytes, pool.free_tokens, pool.total_bytes) == (0, 0, 1000)


def test_an_engine_that_knows_no_token_size_counts_in_bytes_only() -> None:
    pool = headroom_by_pool([("single", changed(kv_bytes_per_token=0))])["single"]
    assert (pool.free_bytes, pool.total_tokens) == (600, 0)


@pytest.mark.parametrize(
    ("change", "news"),
    [
        ({"headroom_bytes": 609}, False),
        ({"headroom_bytes": 610}, True),
        ({"headroom_bytes": 590}, True),
        ({"pressure_level": 1}, True),
        ({"kv_pool_bytes": 999}, True),
        ({"health": 0.1}, False),
    ],
)
def test_a_hundredth_of_the_whole_is_news(change: dict[str, Any], news: bool) -> None:
    before, now = (
        headroom_by_pool([("a", REPORT)]),
        headroom_by_pool([("a", changed(**change))]),
    )
    assert is_worth_reporting(before, now) is news


def test_full_and_empty_are_always_told() -> None:
    nearly = headroom_by_pool([("a", changed(headroom_bytes=995))])
    assert is_worth_reporting(nearly, headroom_by_pool([("a", changed(headroom_bytes=1000))]))
    low = headroom_by_pool([("a", changed(headroom_bytes=5))])
    assert is_worth_reporting(low, headroom_by_pool([("a", changed(headroom_bytes=0))]))


def test_a_pool_that_comes_or_goes_is_news() -> None:
    one = headroom_by_pool([("a", REPORT)])
    assert is_worth_reporting({}, one) and is_worth_reporting(one, {})
    assert not is_worth_reporting(one, one)
