"""Long bodies have turns: few at a time, tenants after one another, none lost."""

import asyncio

import pytest

from ullage_router.http import long_bodies
from ullage_router.http.long_bodies import MAX_LONG_BYTES, LongBodies
from ullage_router.http.messages import Limits

QUARTER = MAX_LONG_BYTES // 4


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_few_have_a_turn_and_tenants_follow_one_another() -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        order: list[str] = []

        async def take(tenant: str, number: int) -> None:
            await bodies.take(QUARTER, tenant)
            order.append(f"{tenant}{number}")

        names = [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("b", 2), ("c", 1)]
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(take(*name))
                await settled()
            assert order == ["a1", "a2", "b1", "b2"]
            bodies.give_back(QUARTER, "b")
            await settled()
            assert order[4:] == ["c1"]  # a has half of all
            bodies.give_back(QUARTER, "a")
            bodies.give_back(QUARTER, "a")
            await settled()
            assert order[5:] == ["a3", "a4"]

    asyncio.run(scenario())


def test_clients_without_a_name_may_have_all_turns() -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        async with asyncio.timeout(20):
            for _ in range(4):
                await bodies.take(QUARTER, "")
        waiting = asyncio.create_task(bodies.take(QUARTER, ""))
        await settled()
        assert not waiting.done()
        bodies.give_back(QUARTER, "")
        await waiting

    asyncio.run(scenario())


def test_who_goes_or_waits_too_long_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        for _ in range(4):
            await bodies.take(QUARTER, "")
        gone, last = (asyncio.create_task(bodies.take(QUARTER, "")) for _ in range(2))
        await settled()
        gone.cancel()
        await settled()
        bodies.give_back(QUARTER, "")
        await last
        both = asyncio.create_task(bodies.take(QUARTER, ""))
        await settled()
        bodies.give_back(QUARTER, "")
        both.cancel()  # its turn has come at this moment
        await settled()
        await bodies.take(QUARTER, "")
        monkeypatch.setattr(long_bodies, "TURN_TIMEOUT_S", 0.01)
        with pytest.raises(TimeoutError):
            await bodies.take(QUARTER, "")
        bodies.give_back(QUARTER, "")
        await bodies.take(QUARTER, "")

    asyncio.run(scenario())


def test_a_body_of_any_size_has_its_turn() -> None:
    async def scenario() -> None:
        bodies = LongBodies()
        await bodies.take(1, "a")
        await bodies.take(1, "")
        largest = asyncio.create_task(bodies.take(Limits().max_body_bytes, "a"))
        await settled()
        assert not largest.done()
        bodies.give_back(1, "a")
        await largest

    asyncio.run(scenario())
