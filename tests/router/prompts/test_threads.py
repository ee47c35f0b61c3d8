"""Long texts share threads evenly, and are refused where too many wait."""

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator

import pytest
from ullage_testing.thread_limit import no_new_threads

from ullage_common.wire.errors import ServiceError
from ullage_router.policy.retry import UNKNOWN_RETRY_AFTER_S
from ullage_router.prompts.threads import (
    INLINE_CHARACTERS,
    LONG_CHARACTERS,
    MAX_WAITING_CHARACTERS,
    TokenizerThreads,
)

SHORT = INLINE_CHARACTERS + 1


class Gate:
    """Work that ends when it is let go; keeps the order in which it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._open = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self._open.wait(30)
            return name

        return run

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def threads() -> Iterator[TokenizerThreads]:
    made = TokenizerThreads()
    yield made
    made.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110 - threads set no event of the loop
            await asyncio.sleep(0.001)


async def test_a_short_text_stays_on_the_loop(threads: TokenizerThreads) -> None:
    here = threading.current_thread()
    assert await threads.run(INLINE_CHARACTERS, threading.current_thread) is here
    assert await threads.run(SHORT, threading.current_thread) is not here


async def test_tenants_have_their_turns_one_after_another(threads: TokenizerThreads) -> None:
    gate = Gate()
    free = Gate()
    running = [asyncio.create_task(threads.run(SHORT, gate.work("x"), "x")) for _ in range(2)]
    await until(lambda: len(gate.begun) == 2)
    order = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    free.open()
    waiting = [asyncio.create_task(threads.run(SHORT, free.work(name), name[0])) for name in order]
    await until(lambda: threads.waiting_characters == 7 * SHORT)
    gate.open()
    assert await asyncio.gather(*waiting) == order
    await asyncio.gather(*running)
    # Both threads take jobs at once, so of two neighbours either may have begun first.
    assert {*free.begun[:3]} == {"a1", "b1", "c1"}
    assert {*free.begun[3:5]} == {"a2", "b2"}


async def test_one_thread_is_kept_from_long_texts(threads: TokenizerThreads) -> None:
    gate = Gate()
    long = [
        asyncio.create_task(threads.run(LONG_CHARACTERS, gate.work("long"), name)) for name in "abc"
    ]
    await until(lambda: gate.begun == ["long"])
    assert await threads.run(SHORT, lambda: "short", "d") == "short"
    assert gate.begun == ["long"]
    gate.open()
    assert await asyncio.gather(*long) == ["long"] * 3


async def test_too_many_waiting_texts_are_refused(threads: TokenizerThreads) -> None:
    gate = Gate()
    half = MAX_WAITING_CHARACTERS // 2
    tasks = [asyncio.create_task(threads.run(half, gate.work("a"), "a"))]
    await until(lambda: gate.begun == ["a"])
    tasks.append(asyncio.create_task(threads.run(half, gate.work("a"), "a")))
    await until(lambda: threads.waiting_characters == half)
    with pytest.raises(ServiceError, match="retry") as refused:
        await threads.run(half, gate.work("a"), "a")
    assert refused.value.reason == "TEXTS_FULL"
    assert refused.value.retry_after_s in range(1, UNKNOWN_RETRY_AFTER_S + 1)

    tasks.append(asyncio.create_task(threads.run(half, gate.work("b"), "b")))
    await until(lambda: threads.waiting_characters == 2 * half)
    with pytest.raises(ServiceError):
        await threads.run(half, gate.work("c"), "c")
    gate.open()
    assert await asyncio.gather(*tasks) == ["a", "a", "b"]
    assert threads.waiting_characters == 0


async def test_a_text_that_nobody_waits_for_is_left_out(threads: TokenizerThreads) -> None:
    gate = Gate()
    tasks = [asyncio.create_task(threads.run(LONG_CHARACTERS, gate.work(n))) for n in "ab"]
    await until(lambda: gate.begun == ["a"])
    tasks[1].cancel()
    gate.open()
    assert await tasks[0] == "a"
    assert await threads.run(LONG_CHARACTERS, lambda: "c") == "c"
    assert gate.begun == ["a"]


async def test_texts_that_nobody_waits_for_take_no_room(threads: TokenizerThreads) -> None:
    gate = Gate()
    running = [asyncio.create_task(threads.run(SHORT, gate.work("x"), "x")) for _ in range(2)]
    await until(lambda: len(gate.begun) == 2)
    for _ in range(3):
        tasks = [
            asyncio.create_task(threads.run(MAX_WAITING_CHARACTERS // 2, gate.work("gone"), name))
            for name in "ab"
        ]
        await until(lambda: threads.waiting_characters == MAX_WAITING_CHARACTERS)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert threads.waiting_characters == 0
    gate.open()
    await asyncio.gather(*running)
    assert await threads.run(SHORT, lambda: "late", "a") == "late"
    assert gate.begun == ["x", "x"]


async def test_texts_that_nobody_waits_for_cost_their_tenant_no_turn(
    threads: TokenizerThreads,
) -> None:
    gate = Gate()
    free = Gate()
    running = [asyncio.create_task(threads.run(SHORT, gate.work("x"), "x")) for _ in range(2)]
    await until(lambda: len(gate.begun) == 2)
    gone = [asyncio.create_task(threads.run(SHORT, gate.work("gone"), "a")) for _ in range(5)]
    await until(lambda: threads.waiting_characters == 5 * SHORT)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    order = ["b1", "b2", "b3", "b4", "b5", "b6", "a1"]
    waiting = [asyncio.create_task(threads.run(SHORT, free.work(name), name[0])) for name in order]
    await until(lambda: threads.waiting_characters == 7 * SHORT)
    free.open()
    gate.open()
    await asyncio.gather(*running, *waiting)
    # It is the second to begin, give or take the other thread's.
    assert free.begun.index("a1") < 4


class Name(str):
    """A tenant's name that counts how often it is looked at."""

    __slots__ = ()
    num_looks = 0

    def __eq__(self, other: object) -> bool:
        Name.num_looks += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


async def test_a_job_costs_no_look_at_all_others(threads: TokenizerThreads) -> None:
    gate = Gate()
    count = 2000
    running = [asyncio.create_task(threads.run(SHORT, gate.work("x"), "x")) for _ in range(2)]
    await until(lambda: len(gate.begun) == 2)
    Name.num_looks = 0
    tasks = [
        asyncio.create_task(threads.run(SHORT, functools.partial(int, i), Name(f"t{i % 10}")))
        for i in range(count)
    ]
    await until(lambda: threads.waiting_characters == count * SHORT)
    gate.open()
    assert await asyncio.gather(*tasks) == list(range(count))
    await asyncio.gather(*running)
    assert threads.waiting_characters == 0
    assert Name.num_looks < 50 * count


async def test_an_error_is_the_callers(threads: TokenizerThreads) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await threads.run(SHORT, fail)
    assert await threads.run(SHORT, lambda: 1) == 1


async def test_a_text_for_which_there_is_no_thread_is_refused_and_later_ones_are_not(
    threads: TokenizerThreads,
) -> None:
    done: list[str] = []

    with no_new_threads():
        for size in (SHORT, LONG_CHARACTERS, SHORT, LONG_CHARACTERS):
            with pytest.raises(ServiceError, match="can't start new thread") as refused:
                await threads.run(size, lambda: done.append("refused"), "a")
            assert refused.value.reason == "NO_THREAD"
    assert threads.waiting_characters == 0
    async with asyncio.timeout(20):
        for size in (SHORT, LONG_CHARACTERS):
            await threads.run(size, lambda: done.append("run"), "b")
    assert done == ["run", "run"]
