"""The prefill window: which engines its requests may move to when it closes."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from ullage_common.config.router import BreakerSection, PrefillSection
from ullage_router.admission.prefill_window import PrefillWindow, Reservation
from ullage_router.policy.balance import work
from ullage_router.policy.circuit_breaker import CircuitBreaker
from ullage_router.policy.credit import Credit, CreditBook
from ullage_router.policy.facts import EngineState

NUM_REQUESTS = 20


class FakeEngine:
    """An engine with a circuit breaker, whose queued prompts have some tokens in all."""

    pool = "single"
    standing = EngineState.USABLE
    available = 10**9

    def __init__(self, key: str, backlog: int) -> None:
        self.key = key
        self.breaker = CircuitBreaker(BreakerSection(failures=1))
        self._backlog = backlog
        self._book = CreditBook()

    @property
    def is_on_trial(self) -> bool:
        return self.breaker.limit is not None

    def reserve(self, size: int, tokens: int, step_limit_s: float = math.inf) -> Credit:
        credit = self._book.reserve(size, tokens, step_limit_s)
        self.breaker.on_sent(credit, 2.0)
        return credit

    def release(self, credit: Credit) -> None:
        self._book.release(credit)
        self.breaker.on_end(credit)

    def prefill_work(self, mlp_products: int) -> int:
        return work(self._backlog + self._book.tokens, mlp_products)

    def fail(self) -> None:
        credit = self.reserve(1, 1)
        assert self.breaker.on_failure(credit, 0.0)
        self.release(credit)


async def settled(busy: FakeEngine, *others: FakeEngine) -> list[str]:
    """Return the engines to which a window's requests, reserved on a busy engine, are sent."""
    engines = {engine.key: engine for engine in (busy, *others)}
    owner: Any = SimpleNamespace(get=engines.get)
    window = PrefillWindow(PrefillSection(window=0.01), owner)
    choices = dict.fromkeys(engines, 1000)
    reservations = []
    for _ in range(NUM_REQUESTS):
        place: dict[str, Any] = {"engine": busy, "credit": busy.reserve(1000, 500)}
        reservations.append(
            Reservation(**place, prompt=None, max_tokens=10, choices=choices)  # type: ignore[arg-type]
        )
    await asyncio.gather(*(window.settle(reservation) for reservation in reservations))
    return [reservation.engine.key for reservation in reservations]


@pytest.mark.parametrize("is_at_limit", [True, False])
def test_no_burst_moves_to_an_engine_that_failed_recently(is_at_limit: bool) -> None:
    busy = FakeEngine("a", 20000)
    idle = FakeEngine("b", 0)
    failed = FakeEngine("c", 0)
    failed.fail()
    if is_at_limit:
        failed.reserve(1000, 500)
    keys = asyncio.run(settled(busy, idle, failed))
    assert set(keys) == {"b"}
    assert failed.breaker.num_trials == is_at_limit
    assert asyncio.run(settled(busy, failed)) == ["a"] * NUM_REQUESTS


def test_requests_may_leave_an_engine_that_failed_recently() -> None:
    failed = FakeEngine("a", 20000)
    idle = FakeEngine("b", 0)
    failed.fail()
    assert set(asyncio.run(settled(failed, idle))) == {"b"}
