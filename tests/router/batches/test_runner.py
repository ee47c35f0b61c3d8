"""The runner of batches: cancellations at bad moments, damaged files, and races for its files."""

import asyncio
import errno
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.config.router import BatchLimits, FilesSection
from ullage_common.wire.errors import ServiceError
from ullage_router.batches import runner as runner_module
from ullage_router.batches.batch import Batch
from ullage_router.batches.lines import BatchReply
from ullage_router.batches.records import BatchRecords
from ullage_router.batches.runner import BatchRunner, surplus
from ullage_router.errors import http_status
from ullage_router.files import store as store_module
from ullage_router.files.catalog import StoredFile
from ullage_router.files.growing import GrowingFile
from ullage_router.files.store import FileStore
from ullage_router.thread_pool import ThreadPool

CHAT = "/v1/chat/completions"
OK = b'{"ok": true}'


async def answer(endpoint: str, tenant: str, body: bytes, request_id: str) -> BatchReply:
    return BatchReply(200, OK, request_id)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition belongs to others
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    path: Path, clock: Callable[[], float] = lambda: 1e9, **limits: Any
) -> AsyncIterator[tuple[FileStore, BatchRunner]]:
    store = FileStore(FilesSection(dir=str(path), **limits), clock)
    runner = BatchRunner(store.section.batches, store, clock)
    runner.send = answer
    await store.start()
    try:
        yield store, runner
    finally:
        await runner.close()
        await store.close()


async def upload(store: FileStore, data: bytes, tenant: str = "") -> StoredFile:
    uploaded = await store.begin_upload(tenant)
    uploaded.begin("in.jsonl")
    await uploaded.write(data)
    return await uploaded.finish("batch", 1e10)


def lines(*names: str) -> bytes:
    return b"".join(
        json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": {}}).encode() + b"\n"
        for name in names
    )


async def create(store: FileStore, runner: BatchRunner, data: bytes, tenant: str = "") -> Batch:
    file = await upload(store, data, tenant)
    return await runner.create(tenant, CHAT, file, None, 3600)


async def ended(batch: Batch) -> None:
    await until(lambda: batch.has_ended)


def stored(store: FileStore, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in store.folder.data(name).read_bytes().splitlines()]


def test_a_cancellation_at_any_moment_ends_the_batch(tmp_path: Path) -> None:
    """The batch is cancelled after each number of turns of the event loop, until it is complete."""

    async def scenario() -> None:
        async with running(tmp_path, batches=BatchLimits(max_concurrency=1)) as (store, runner):
            endings = set[str]()
            for turns in range(0, 60, 3):
                batch = await create(store, runner, lines("a", "b"))
                for _ in range(turns):
                    await asyncio.sleep(0.0005)
                if not batch.has_ended and batch.status != "finalizing":
                    await runner.cancel("", batch.id)
                await ended(batch)
                assert batch.status == ("cancelled" if batch.cancelling_at else "completed")
                endings.add(batch.status)
            assert "cancelled" in endings

    asyncio.run(scenario())


def test_a_cancellation_during_the_check_of_the_lines_ends_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (store, runner):
            write = store.folder.write_whole
            loop = asyncio.get_running_loop()
            cancelling = asyncio.Event()
            in_progress = asyncio.Event()

            def noted_write(path: Path, data: bytes) -> None:
                """Hold the record of the cancellation until the lines are checked."""
                if b'"status":"cancelling"' in data:
                    loop.call_soon_threadsafe(cancelling.set)
                    asyncio.run_coroutine_threadsafe(in_progress.wait(), loop).result(30)
                write(path, data)

            monkeypatch.setattr(store.folder, "write_whole", noted_write)
            checked = runner_module.check_file

            def held_check(*args: Any) -> Any:
                checker = checked(*args)
                asyncio.run_coroutine_threadsafe(cancelling.wait(), loop).result(30)
                return checker

            monkeypatch.setattr(runner_module, "check_file", held_check)
            batch = await create(store, runner, lines("a"))
            cancel = asyncio.create_task(runner.cancel("", batch.id))
            await cancelling.wait()
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert batch.in_progress_at is None
            in_progress.set()
            await cancel
            await ended(batch)
            assert batch.status == "cancelled"
            assert batch.in_progress_at is None

    asyncio.run(scenario())


def test_a_late_batch_that_waits_for_room_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "WINDOW_S", 1)
    data = lines("a")

    async def never(*_: Any) -> BatchReply:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        async with running(tmp_path, max_bytes=len(data)) as (store, runner):
            runner.send = never
            batch = await create(store, runner, data)
            await until(lambda: "a batch waits for room" in caplog.messages)
            await runner.cancel("", batch.id)
            await ended(batch)
            assert batch.status == "cancelled"

    asyncio.run(scenario())


def test_a_damaged_output_file_fails_the_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, batches=BatchLimits(max_concurrency=1)) as (store, runner):
            held = asyncio.Event()

            async def answer_first(*args: Any) -> BatchReply:
                if args[3].endswith("_1"):
                    await held.wait()
                return await answer(*args)

            runner.send = answer_first
            batch = await create(store, runner, lines("a", "b"))
            await until(lambda: batch.completed == 1)
            output = store.folder.data(batch.output_name)
            output.write_bytes(b"?" * (output.stat().st_size - 1) + b"\n")
            await runner.cancel("", batch.id)
            await ended(batch)
            assert batch.status == "failed"
            assert [error.code for error in batch.errors] == ["internal_error"]

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["LineIndex", "check_file", "_numbers"])
def test_a_read_that_fails_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(runner_module, "DISK_WAIT_S", 0.01)
    read = getattr(runner_module, name)
    calls: list[object] = []

    def fail_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return read(*args)

    async def scenario() -> None:
        async with running(tmp_path) as (store, runner):
            monkeypatch.setattr(runner_module, name, fail_once)
            batch = await create(store, runner, lines("a", "b"))
            await ended(batch)
            assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 0)
            assert len(calls) > 1

    asyncio.run(scenario())


def test_an_old_batch_is_removed_though_its_client_disconnects(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [1e9]
        go_on = threading.Event()
        async with running(tmp_path, clock=lambda: now[0]) as (store, runner):
            old = await create(store, runner, lines("a"))
            await ended(old)
            await until(lambda: not runner._tasks)
            file = await upload(store, lines("b"))
            store._threads = ThreadPool(1, "one")
            waiting = store._threads.start(lambda: go_on.wait(20))
            now[0] += store.section.ttl + 1
            task = asyncio.create_task(runner.create("", CHAT, file, None, 3600))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            go_on.set()
            assert await waiting
        assert list((tmp_path / "batches").iterdir()) == []

    asyncio.run(scenario())


def test_a_disk_that_no_longer_gives_the_lines_fails_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "DISK_WAIT_S", 0.01)
    now = [1e9]

    def fail(*_: Any) -> Any:
        now[0] += 86_400
        raise OSError(errno.EIO, "Input/output error")

    async def scenario() -> None:
        async with running(tmp_path, clock=lambda: now[0]) as (store, runner):
            monkeypatch.setattr(runner_module, "LineIndex", fail)
            batch = await create(store, runner, lines("a"))
            await ended(batch)
            assert batch.status == "failed"

    asyncio.run(scenario())


def test_batches_created_at_the_same_time_sweep_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [1e9]
        async with running(tmp_path, lambda: now[0], ttl=3600.0) as (store, runner):
            for _ in range(5):
                await ended(await create(store, runner, lines("a")))
            files = [await upload(store, lines("a")) for _ in range(4)]
            now[0] += 3601
            created = await asyncio.gather(
                *[runner.create("", CHAT, file, None, 3600) for file in files]
            )
            for batch in created:
                await ended(batch)
            assert {batch.id for batch in runner.page("", 100, "")[0]} == {b.id for b in created}

    asyncio.run(scenario())


def test_a_tenant_cannot_displace_the_batches_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_KEPT", 6)

    async def scenario() -> None:
        now = [1e9]
        async with running(tmp_path, lambda: now[0]) as (store, runner):

            async def run(tenant: str) -> str:
                now[0] += 1
                batch = await create(store, runner, lines("a"), tenant)
                await ended(batch)
                return batch.id

            first = await run("bob")
            names = [await run("alice") for _ in range(8)]
            last = await run("bob")
            kept = [batch.id for batch in runner.page("alice", 100, "")[0]]
            assert kept == names[:-4:-1]
            assert [batch.id for batch in runner.page("bob", 100, "")[0]] == [last, first]

    asyncio.run(scenario())


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(1, 9))), st.integers(2, 9)
)
def test_the_surplus_is_the_oldest_of_the_largest_tenants(
    pairs: list[tuple[str, int]], most: int
) -> None:
    batches = [batch_of(str(i), tenant, at) for i, (tenant, at) in enumerate(pairs)]
    gone = {batch.id for batch in surplus(batches, most)}
    kept = [batch for batch in batches if batch.id not in gone]
    counts = Counter(batch.tenant for batch in kept)
    assert counts.total() <= most
    for tenant, before in Counter(batch.tenant for batch in batches).items():
        lost = [b.ended_at for b in batches if b.tenant == tenant and b.id in gone]
        rest = [b.ended_at for b in kept if b.tenant == tenant]
        assert not lost or not rest or max(lost) <= min(rest)
        assert not tenant or counts[tenant] <= most // 2
        if lost:  # nobody has much more than a tenant that lost some
            assert max(counts.values()) <= counts[tenant] + 1
        else:
            assert counts[tenant] == before


def batch_of(name: str, tenant: str, ended_at: int) -> Batch:
    return Batch(
        id=name,
        tenant=tenant,
        endpoint=CHAT,
        input_file_id="file-1",
        output_name="file-2",
        error_name="file-3",
        output_ttl=1,
        metadata=None,
        created_at=0,
        expires_at=1,
        status="completed",
        completed_at=ended_at,
    )


def test_the_input_of_a_batch_that_is_being_created_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        now = [1e9]
        async with running(
            tmp_path, lambda: now[0], ttl=3600.0, batches=BatchLimits(max_active=1)
        ) as (store, runner):
            await ended(await create(store, runner, lines("a")))
            file = await upload(store, lines("b"))
            now[0] += 3601
            loop = asyncio.get_running_loop()
            sweeping = asyncio.Event()
            deleted = asyncio.Event()
            remove = BatchRecords.remove

            def held_remove(self: BatchRecords, name: str) -> None:
                loop.call_soon_threadsafe(sweeping.set)
                asyncio.run_coroutine_threadsafe(deleted.wait(), loop).result(30)
                remove(self, name)

            monkeypatch.setattr(BatchRecords, "remove", held_remove)
            creating = asyncio.create_task(runner.create("", CHAT, file, None, 3600))
            await sweeping.wait()
            with pytest.raises(ServiceError, match=file.id) as error:
                await store.delete("", file.id)
            assert http_status(error.value) == 409
            deleted.set()
            batch = await creating
            await ended(batch)
            assert batch.status == "completed"
            await store.delete("", file.id)

    asyncio.run(scenario())


def test_a_batch_that_is_refused_lets_its_input_go(tmp_path: Path) -> None:
    async def never(*_: Any) -> BatchReply:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        async with running(tmp_path, batches=BatchLimits(max_active=1)) as (store, runner):
            runner.send = never
            await create(store, runner, lines("a"))
            file = await upload(store, lines("b"))
            with pytest.raises(ServiceError, match="maxActive"):
                await runner.create("", CHAT, file, None, 3600)
            await store.delete("", file.id)

    asyncio.run(scenario())


def test_a_request_that_is_lost_gets_an_error(tmp_path: Path) -> None:
    async def lose_second(*args: Any) -> BatchReply:
        if args[3].endswith("_1"):
            raise asyncio.CancelledError
        return await answer(*args)

    async def scenario() -> None:
        async with running(tmp_path) as (store, runner):
            runner.send = lose_second
            batch = await create(store, runner, lines("a", "b", "c"))
            await ended(batch)
            assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
            answers = stored(store, batch.output_name)
            assert sorted(each["custom_id"] for each in answers) == ["a", "c"]
            [lost] = stored(store, batch.error_name)
            assert (lost["custom_id"], lost["error"]["code"]) == ("b", "internal_error")

    asyncio.run(scenario())


def test_a_bug_at_the_end_fails_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> bool:
        raise ValueError("a bug")

    async def scenario() -> None:
        async with running(tmp_path) as (store, runner):
            with monkeypatch.context() as broken:
                broken.setattr(GrowingFile, "finish", fail)
                batch = await create(store, runner, lines("a"))
                await ended(batch)
            assert batch.status == "failed"
            assert [error.code for error in batch.errors] == ["internal_error"]
            await store.delete("", batch.input_file_id)

            later = await create(store, runner, lines("a"))
            await ended(later)
            assert later.status == "completed"

    asyncio.run(scenario())


def test_a_disk_that_hangs_does_not_stop_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "CLOSE_S", 0.05)
    monkeypatch.setattr(store_module, "CLOSE_S", 0.05)
    monkeypatch.setattr(store_module, "DISK_THREADS", 1)
    responds = threading.Event()
    writes = threading.Event()

    def hang(self: GrowingFile, lines: bytes) -> None:
        writes.set()
        assert responds.wait(60)

    monkeypatch.setattr(GrowingFile, "_write", hang)

    async def scenario() -> None:
        store = FileStore(FilesSection(dir=str(tmp_path)), lambda: 1e9)
        runner = BatchRunner(store.section.batches, store, lambda: 1e9)
        runner.send = answer
        await store.start()
        try:
            batch = await create(store, runner, lines("a"))
            await until(writes.is_set)
            async with asyncio.timeout(20):
                await runner.close()
                await store.close()
            assert "the disk of batches does not respond" in caplog.messages
            assert not batch.has_ended
        finally:
            responds.set()

    asyncio.run(scenario())
