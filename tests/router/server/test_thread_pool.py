"""Threads for blocking work: results, errors, and work that no thread can do."""

import asyncio
import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from ullage_testing.thread_limit import no_new_threads

from ullage_router.thread_pool import NoThread, ThreadPool

HANGS = """
import asyncio, threading
from ullage_router.thread_pool import ThreadPool

async def main():
    begun = threading.Event()
    pool = ThreadPool(2, "test")
    pool.start(lambda: (begun.set(), threading.Event().wait()))
    begun.wait()
    pool.close()

asyncio.run(main())
print("ended")
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - threads set no event of the loop
            await asyncio.sleep(0.001)


async def test_an_error_keeps_no_work_alive() -> None:
    """Work holds long bodies, for which nobody should wait until the garbage collector runs."""
    pool = ThreadPool(1, "test")
    gc.disable()
    try:
        work = functools.partial(int, "no")
        kept = weakref.ref(work)
        running = pool.start(work)
        del work
        with pytest.raises(ValueError, match="no"):
            await running
        await until(lambda: kept() is None)
    finally:
        gc.enable()
        pool.close()


async def test_work_that_was_refused_is_never_done() -> None:
    done: list[int] = []
    pool = ThreadPool(2, "test")
    with no_new_threads(), pytest.raises(NoThread, match="can't start new thread"):
        pool.start(lambda: done.append(1))
    await pool.start(lambda: done.append(2))
    assert done == [2]

    pool.close()
    with pytest.raises(NoThread):
        pool.start(lambda: done.append(3))
    assert done == [2]


async def test_work_that_waits_in_the_pool_can_be_cancelled() -> None:
    begun = threading.Event()
    go_on = threading.Event()
    done: list[int] = []

    def block() -> None:
        begun.set()
        assert go_on.wait(30)
        done.append(1)

    pool = ThreadPool(1, "test")
    first = pool.start(block)
    await until(begun.is_set)
    second = pool.start(lambda: done.append(2))
    second.cancel()
    third = pool.start(lambda: done.append(3))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, third)
    assert done == [1, 3]
    pool.close()


async def test_refused_work_is_freed_and_costs_no_thread_later() -> None:
    pool = ThreadPool(2, "test")
    work = functools.partial(int, "1")
    kept = weakref.ref(work)
    gc.disable()
    try:
        with no_new_threads():
            for _ in range(3):
                with pytest.raises(NoThread):
                    pool.start(work)
        del work
        assert kept() is None
    finally:
        gc.enable()

    assert pool.num_jobs == 0
    both = threading.Barrier(2, timeout=20)
    await pool.start(lambda: None)
    await asyncio.gather(pool.start(both.wait), pool.start(both.wait))
    pool.close()


async def test_one_thread_does_the_work_if_no_other_can_be_started() -> None:
    go_on = threading.Event()
    pool = ThreadPool(2, "test")
    first = pool.start(lambda: go_on.wait(20))
    with no_new_threads():
        second = pool.start(threading.get_ident)
        go_on.set()
        assert await first
        one = await second
    assert one != threading.get_ident()
    assert await pool.start(threading.get_ident) == one  # it is idle, so that no other is started
    pool.close()


def test_a_process_ends_though_its_thread_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


async def test_the_end_waits_for_work_that_runs() -> None:
    pool = ThreadPool(1, "test")
    ends = list[str]()
    is_running = threading.Event()

    def work() -> None:
        is_running.set()
        time.sleep(0.1)
        ends.append("work")

    pool.start(work)
    is_running.wait(20)
    pool.close(join_s=20)
    assert ends == ["work"]
