"""The work queue: once a key, again after changes, again after failures, never two at a time."""

import asyncio
import contextlib
import logging

from ullage_operator.controller.controller import WorkQueue


async def until(ask, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not ask():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.005)


def test_many_events_of_a_key_are_one_run():
    runs = []

    async def work(key):
        runs.append(key)
        return 60.0

    async def scenario():
        queue = WorkQueue(work)
        for _ in range(10):
            queue.add("a")
        queue.add("b")
        await until(lambda: len(runs) == 2)
        await asyncio.sleep(0)
        await queue.close()

    asyncio.run(scenario())
    assert sorted(runs) == ["a", "b"]


def test_a_change_during_a_run_leads_to_one_more():
    runs = []
    gate = asyncio.Event()

    async def work(key):
        runs.append(key)
        await gate.wait()
        return 60.0

    async def scenario():
        queue = WorkQueue(work)
        queue.add("a")
        await until(lambda: len(runs) == 1)
        queue.add("a")
        queue.add("a")
        assert len(runs) == 1
        gate.set()
        await until(lambda: len(runs) == 2)
        await queue.close()

    asyncio.run(scenario())
    assert runs == ["a", "a"]


def test_a_key_runs_again_after_the_time_it_asked_for():
    runs = []

    async def work(key):
        runs.append(key)
        return 0.01

    async def scenario():
        queue = WorkQueue(work)
        queue.add("a")
        await until(lambda: len(runs) >= 3)
        await queue.close()

    asyncio.run(scenario())
    assert set(runs) == {"a"}


def test_a_key_that_asks_for_nothing_is_forgotten_and_may_come_back():
    runs = []

    async def work(key):
        runs.append(key)
        return

    async def scenario():
        queue = WorkQueue(work)
        queue.add("a")
        await until(lambda: runs and not queue.keys())
        queue.add("a")
        await until(lambda: len(runs) == 2)
        await queue.close()

    asyncio.run(scenario())
    assert runs == ["a", "a"]


def test_a_failing_run_is_reported_and_does_not_stop_others(caplog):
    runs = []

    async def work(key):
        runs.append(key)
        if key == "bad":
            raise ValueError("broken")
        return

    async def scenario():
        queue = WorkQueue(work)
        queue.add("bad")
        queue.add("good")
        await until(lambda: len(runs) == 2)
        queue.add("bad")
        await until(lambda: len(runs) == 3)
        await queue.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "reconciling bad failed" in caplog.text


def test_a_key_is_tried_again_after_more_failures_than_a_power_of_two_can_count(monkeypatch):
    for name in ("_GAP_S", "_BACKOFF_FIRST_S", "_BACKOFF_MOST_S"):
        monkeypatch.setattr(f"ullage_operator.controller.controller.{name}", 1e-6)
    runs = []

    async def work(key):
        runs.append(key)
        raise ValueError("broken")

    async def scenario():
        queue = WorkQueue(work)
        queue.add("a")
        await until(lambda: len(runs) > 1100)
        await queue.close()

    asyncio.run(scenario())
    assert set(runs) == {"a"}


def test_what_was_dropped_runs_no_more_though_it_missed_its_cancellation():
    runs = []

    async def work(key):
        runs.append(key)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return 0.01

    async def scenario():
        queue = WorkQueue(work)
        queue.add("a")
        await until(lambda: runs == ["a"])
        queue.drop()
        assert queue.keys() == []
        queue.add("a")
        await until(lambda: runs == ["a", "a"])
        await asyncio.sleep(0.5)
        await queue.close()
        await asyncio.sleep(0.5)

    asyncio.run(scenario())
    assert runs == ["a", "a"]


def test_not_more_than_a_few_keys_are_worked_on_at_once():
    running = set()
    most = []

    async def work(key):
        running.add(key)
        most.append(len(running))
        await asyncio.sleep(0)
        running.discard(key)

    async def scenario():
        queue = WorkQueue(work)
        for number in range(100):
            queue.add(number)
        await until(lambda: len(most) == 100)
        await queue.close()

    asyncio.run(scenario())
    assert 1 < max(most) <= 16
