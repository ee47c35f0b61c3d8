"""The thread in which bodies are read: tenants take turns, and nothing is lost."""

import asyncio
import threading
import weakref
from functools import partial

import pytest
from ullage_testing.thread_limit import no_new_threads

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import http_status
from ullage_router.intake import INLINE_BYTES, IntakeThread

LONG = INLINE_BYTES + 1


def test_little_work_stays_on_the_loop() -> None:
    async def scenario() -> None:
        intake = IntakeThread()
        here = threading.current_thread()
        assert await intake.run(INLINE_BYTES, "", threading.current_thread) is here
        assert await intake.run(LONG, "", threading.current_thread) is not here
        intake.close()

    asyncio.run(scenario())


def test_tenants_take_turns() -> None:
    async def scenario() -> None:
        intake = IntakeThread()
        begun = threading.Event()
        go_on = threading.Event()
        order: list[str] = []

        def block() -> None:
            begun.set()
            go_on.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(intake.run(LONG, "first", block))
            await asyncio.to_thread(begun.wait)
            for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
                append = [order.append, name]
                group.create_task(intake.run(LONG, name[0], lambda a=append: a[0](a[1])))
            await asyncio.sleep(0)
            go_on.set()
        assert order == ["a1", "b1", "c1", "a2", "c2", "a3"]
        intake.close()

    asyncio.run(scenario())


def test_clients_that_went_cost_their_tenant_no_turn() -> None:
    async def scenario() -> None:
        intake = IntakeThread()
        begun = threading.Event()
        go_on = threading.Event()
        order: list[str] = []

        def block() -> None:
            begun.set()
            go_on.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(intake.run(LONG, "first", block))
            await asyncio.to_thread(begun.wait)
            tasks = [
                group.create_task(intake.run(LONG, name[0], partial(order.append, name)))
                for name in ("a1", "a2", "a3", "a4", "b1", "b2", "b3")
            ]
            await asyncio.sleep(0)
            for task in tasks[:3]:
                task.cancel()
            await asyncio.wait(tasks[:3])
            go_on.set()
        assert order == ["a4", "b1", "b2", "b3"]
        intake.close()

    asyncio.run(scenario())


def test_an_error_is_its_own_and_a_client_that_went_is_skipped() -> None:
    async def scenario() -> None:
        intake = IntakeThread()
        begun = threading.Event()
        go_on = threading.Event()
        done: list[str] = []

        def block() -> None:
            begun.set()
            go_on.wait()

        running = asyncio.create_task(intake.run(LONG, "a", block))
        await asyncio.to_thread(begun.wait)
        gone = asyncio.create_task(intake.run(LONG, "a", lambda: done.append("gone")))
        fails = asyncio.create_task(intake.run(LONG, "a", lambda: 1 // 0))
        last = asyncio.create_task(intake.run(LONG, "a", lambda: done.append("last")))
        await asyncio.sleep(0)
        gone.cancel()
        running.cancel()
        go_on.set()
        await last
        with pytest.raises(ZeroDivisionError):
            await fails
        assert gone.cancelled() or gone.done()
        assert done == ["last"]
        intake.close()

    asyncio.run(scenario())


class Work:
    """Work that holds a body."""

    def __call__(self) -> None:
        raise AssertionError("its client has gone")


def test_a_client_that_went_leaves_no_body_in_the_queue() -> None:
    async def scenario() -> None:
        intake = IntakeThread()
        begun = threading.Event()
        go_on = threading.Event()

        def block() -> None:
            begun.set()
            go_on.wait()

        running = asyncio.create_task(intake.run(LONG, "a", block))
        await asyncio.to_thread(begun.wait)
        works = [Work() for _ in range(3)]
        bodies = [weakref.ref(work) for work in works]
        clients = [asyncio.create_task(intake.run(LONG, "a", work)) for work in works]
        del works
        await asyncio.sleep(0)
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        assert [body() for body in bodies] == [None] * 3
        go_on.set()
        await running
        intake.close()

    asyncio.run(scenario())


def test_a_body_for_which_there_is_no_thread_is_refused_and_later_ones_are_read() -> None:
    done: list[str] = []

    async def scenario() -> None:
        intake = IntakeThread()
        with no_new_threads():
            for tenant in ("a", "b"):
                with pytest.raises(ServiceError, match="can't start new thread") as error:
                    await intake.run(LONG, tenant, lambda: done.append("refused"))
                assert http_status(error.value) == 503
                assert error.value.retry_after_s
        async with asyncio.timeout(20):
            await intake.run(LONG, "a", lambda: done.append("read"))
        assert done == ["read"]
        intake.close()

    asyncio.run(scenario())
