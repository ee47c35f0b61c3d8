"""The store of files: limits, tenants, crashes at every point, and a disk that fails."""

import asyncio
import errno
import io
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ullage_testing.thread_limit import no_new_threads

from ullage_common.config.router import FilesSection
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import http_status
from ullage_router.files import store as store_module
from ullage_router.files.catalog import StoredFile
from ullage_router.files.folder import FileFolder, LockedElsewhere
from ullage_router.files.store import FileStore
from ullage_router.thread_pool import ThreadPool


class Crash(BaseException):
    """The process ends here."""


def section(path: Path, **limits: Any) -> FilesSection:
    return FilesSection(dir=str(path), **limits)


async def opened(path: Path, **limits: Any) -> FileStore:
    store = FileStore(section(path, **limits))
    await store.start()
    assert store.is_open
    return store


async def until_gone(store: FileStore) -> None:
    """Wait until no upload is left, although its client may not wait for it any more."""
    async with asyncio.timeout(20):
        while store.uploads:  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.01)


async def put(store: FileStore, data: bytes, tenant: str = "", ttl: float = 3600) -> StoredFile:
    upload = await store.begin_upload(tenant)
    try:
        upload.begin("notes.txt")
        for start in range(0, len(data), 1000):
            await upload.write(data[start : start + 1000])
        return await upload.finish("user_data", ttl)
    finally:
        await upload.abort()


def on_disk(path: Path) -> set[str]:
    return {each.name for each in (path / "files").iterdir()}


def test_a_file_survives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        file = await put(store, b"x" * 600_000, "alice")
        assert await store.read(file) == b"x" * 600_000
        await store.close()

        again = await opened(tmp_path)
        assert again.find("alice", file.id) == file
        assert b"".join([chunk async for chunk in again.chunks(file)]) == b"x" * 600_000
        with pytest.raises(ServiceError, match=file.id) as error:
            again.find("bob", file.id)
        assert http_status(error.value) == 404
        await again.delete("alice", file.id)
        assert on_disk(tmp_path) == set()
        assert (again.catalog.num_bytes, again.catalog.num_files) == (0, 0)
        await again.close()

    asyncio.run(scenario())


def test_two_routers_never_share_the_folder(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = await opened(tmp_path)
        file = await put(first, b"kept")
        second = FileStore(section(tmp_path))
        await second.start()
        with pytest.raises(ServiceError, match="another router") as error:
            second.find("", file.id)
        assert http_status(error.value) == 503

        await first.close()
        async with asyncio.timeout(10):
            while not second.is_open:  # noqa: ASYNC110 - it tries once a second
                await asyncio.sleep(0.05)
        assert second.find("", file.id) == file
        await second.close()

    asyncio.run(scenario())


def test_a_folder_that_cannot_be_made_is_named_until_it_can(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "taken").write_text("no folder")
        store = FileStore(section(tmp_path / "taken"))
        await store.start()
        with pytest.raises(ServiceError, match="taken: "):
            await store.begin_upload("")
        (tmp_path / "taken").unlink()
        async with asyncio.timeout(10):
            while not store.is_open:  # noqa: ASYNC110 - it tries once a second
                await asyncio.sleep(0.05)
        await store.close()

    asyncio.run(scenario())


def test_a_disk_that_hangs_blocks_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        file = await put(store, b"x")
        data = store.folder.data(file.id)
        data.unlink()
        os.mkfifo(data)  # whoever opens it waits for a writer
        reads = [asyncio.create_task(store.read(file)) for _ in range(64)]
        try:
            await asyncio.sleep(0)
            async with asyncio.timeout(20):
                assert await asyncio.to_thread(lambda: "other work") == "other work"
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            writer = os.open(data, os.O_RDWR)
            data.unlink()
            os.close(writer)
        await store.close()

    asyncio.run(scenario())


def test_a_disk_that_hangs_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "FIRST_OPEN_S", 0.05)
    responds = threading.Event()

    async def scenario() -> None:
        store = FileStore(section(tmp_path))
        open_folder = store.folder.open

        def hang() -> None:
            assert responds.wait(30)
            open_folder()

        monkeypatch.setattr(store.folder, "open", hang)
        try:
            async with asyncio.timeout(20):
                await store.start()
            with pytest.raises(ServiceError, match="does not respond") as error:
                await store.begin_upload("")
            assert http_status(error.value) == 503
        finally:
            responds.set()
        async with asyncio.timeout(20):
            while not store.is_open:  # noqa: ASYNC110 - it opens by itself
                await asyncio.sleep(0.01)
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("limits", "field"),
    [({"max_bytes": 3000}, "maxBytes"), ({"max_files": 3}, "maxFiles")],
)
def test_a_full_store_refuses_and_keeps_what_it_has(
    tmp_path: Path, limits: dict[str, int], field: str
) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path, **limits)
        files = [await put(store, bytes([65 + i]) * 1000) for i in range(3)]
        with pytest.raises(ServiceError, match=f"spec.router.files.{field}") as error:
            await put(store, b"x")
        assert http_status(error.value) == 507
        assert [await store.read(file) for file in files] == [b"A" * 1000, b"B" * 1000, b"C" * 1000]
        await store.delete("", files[0].id)
        await put(store, b"x" * 1000)
        await store.close()

    asyncio.run(scenario())


def test_a_tenant_gets_half(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path, max_bytes=3000)
        await put(store, b"x" * 1500, "alice")
        with pytest.raises(ServiceError, match="your half"):
            await put(store, b"x", "alice")
        await put(store, b"x" * 1500, "bob")
        await store.close()

    asyncio.run(scenario())


def test_expired_files_leave_but_not_while_a_batch_reads_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [1e9]
        store = FileStore(section(tmp_path), clock=lambda: now[0])
        await store.start()
        gone, pinned = [await put(store, b"x") for _ in range(2)]
        store.catalog.pin(pinned.id, "batch_1")
        store.catalog.pin(pinned.id, "batch_0")
        store.catalog.unpin(pinned.id, "batch_0")
        now[0] = float(gone.expires_at)
        with pytest.raises(ServiceError):
            store.find("", gone.id)
        assert store.find("", pinned.id) == pinned
        with pytest.raises(ServiceError, match="batch_1") as error:
            await store.delete("", pinned.id)
        assert http_status(error.value) == 409
        await store.sweep()
        assert on_disk(tmp_path) == {f"{pinned.id}.json", f"{pinned.id}.data"}
        store.catalog.unpin(pinned.id, "batch_1")
        await store.sweep()
        assert on_disk(tmp_path) == set()
        await store.close()

    asyncio.run(scenario())


def test_sweeps_at_the_same_time_remove_each_file_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        now = [1e9]
        store = FileStore(section(tmp_path), clock=lambda: now[0])
        await store.start()
        files = [await put(store, b"x") for _ in range(5)]
        now[0] = float(files[-1].expires_at)
        await asyncio.gather(*[store.sweep() for _ in range(4)])
        assert on_disk(tmp_path) == set()
        assert (store.catalog.num_bytes, store.catalog.num_files) == (0, 0)
        await store.close()

    asyncio.run(scenario())


def test_a_file_that_is_in_use_since_the_sweep_began_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        now = [1e9]
        store = FileStore(section(tmp_path), clock=lambda: now[0])
        await store.start()
        gone, pinned = [await put(store, b"x") for _ in range(2)]
        now[0] = float(max(gone.expires_at, pinned.expires_at))
        loop = asyncio.get_running_loop()
        remove = store.folder.remove

        def pin_and_remove(name: str) -> None:
            loop.call_soon_threadsafe(store.catalog.pin, pinned.id, "batch_1")
            remove(name)

        monkeypatch.setattr(store.folder, "remove", pin_and_remove)
        await store.sweep()
        assert on_disk(tmp_path) == {f"{pinned.id}.json", f"{pinned.id}.data"}
        await store.close()

    asyncio.run(scenario())


def test_a_bug_while_the_folder_is_read_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)

    def fail(*_: object) -> None:
        raise ValueError("a bug")

    async def scenario() -> None:
        store = FileStore(section(tmp_path))
        with monkeypatch.context() as broken:
            broken.setattr(store.folder, "load", fail)
            await store.start()
            with pytest.raises(ServiceError, match="a bug"):
                await store.begin_upload("")
        async with asyncio.timeout(20):
            while not store.is_open:  # noqa: ASYNC110 - it opens by itself
                await asyncio.sleep(0.01)
        await store.close()

    asyncio.run(scenario())


def test_a_sweep_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "SWEEP_S", 0.01)

    async def scenario() -> None:
        now = [1e9]
        store = FileStore(section(tmp_path), clock=lambda: now[0])
        await store.start()
        whole = store.folder
        store.folder = FailingFolder(tmp_path, "remove", ValueError("broken"))
        file = await put(store, b"x")
        now[0] = float(file.expires_at)
        async with asyncio.timeout(10):
            while "a file was not removed" not in caplog.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        store.folder = whole
        later = await put(store, b"x")
        now[0] = float(later.expires_at)
        async with asyncio.timeout(10):
            while f"{later.id}.json" in on_disk(tmp_path):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert f"{file.id}.json" not in on_disk(tmp_path)
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"%PDF-1.7 text", "is a PDF"),
        (b"{\\rtf1 text}", "is RTF"),
        (b"a" * 300_000 + b"\0", "zero byte at 300000"),
        (b"caf\xe9", "is not UTF-8"),
        ("é".encode()[:1], "is not UTF-8"),
    ],
)
def test_only_text_is_stored(tmp_path: Path, data: bytes, why: str) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        with pytest.raises(ServiceError, match=f"'notes.txt' .*{why}"):
            await put(store, data)
        assert on_disk(tmp_path) == set()
        assert (store.catalog.num_bytes, store.catalog.num_files) == (0, 0)
        await store.close()

    asyncio.run(scenario())


class FailingFolder(FileFolder):
    """A folder whose disk fails at one call."""

    def __init__(self, path: Path, call: str, error: BaseException) -> None:
        super().__init__(path)
        self._call = call
        self._error = error

    def _fail_at(self, call: str) -> None:
        if call == self._call:
            raise self._error

    def new_upload(self, name: str) -> BinaryIO:
        self._fail_at("new_upload")
        file = super().new_upload(name)
        if self._call == "write":
            file.close()
            return open("/dev/full", "wb", buffering=0)
        return file

    def keep_upload(self, file: StoredFile) -> None:
        self._fail_at("keep_upload")
        super().keep_upload(file)

    def describe(self, file: StoredFile) -> None:
        self._fail_at("describe")
        super().describe(file)

    def remove(self, name: str) -> None:
        self._fail_at("remove")
        super().remove(name)


@pytest.mark.parametrize("call", ["new_upload", "write", "describe"])
def test_a_full_disk_loses_nothing(tmp_path: Path, call: str) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        file = await put(store, b"kept")
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole = store.folder
        store.folder = FailingFolder(tmp_path, call, full)
        with pytest.raises(ServiceError, match="is full, and nothing was stored") as error:
            await put(store, b"lost" * 200_000)
        assert http_status(error.value) == 507
        assert (store.catalog.num_bytes, store.catalog.num_files) == (4, 1)
        assert on_disk(tmp_path) == {f"{file.id}.json", f"{file.id}.data"}
        assert list((tmp_path / "uploads").iterdir()) == []
        store.folder = whole
        await put(store, b"more")
        assert await store.read(file) == b"kept"
        await store.close()

    asyncio.run(scenario())


class FullAtClose(io.FileIO):
    """A file of a network disk, which refuses the bytes when the file is closed."""

    def close(self) -> None:
        if not self.closed:
            super().close()
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_disk_that_is_full_at_the_end_takes_no_place_of_an_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_finished: bool
) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        uploads = tmp_path / "uploads"
        monkeypatch.setattr(
            store.folder, "new_upload", lambda name: FullAtClose(uploads / f"{name}.data", "xb")
        )
        for _ in range(store_module.MAX_UPLOADS + 1):
            upload = await store.begin_upload("")
            upload.begin("notes.txt")
            await upload.write(b"x" * 300_000)
            if is_finished:
                with pytest.raises(ServiceError, match="is full, and nothing was stored"):
                    await upload.finish("user_data", 3600)
            await upload.abort()
        assert (store.catalog.num_bytes, store.catalog.num_files, store.uploads) == (0, 0, {})
        assert list(uploads.iterdir()) == []
        await store.close()

    asyncio.run(scenario())


def test_a_disk_that_is_full_at_the_end_leaves_a_growing_file_countable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        data = store.folder.data("file-1")
        monkeypatch.setattr(store.folder, "open_growing", lambda _: FullAtClose(data, "ab"))
        growing = store.growing("", "file-1")
        await growing.append(b"line\n")
        growing.close()
        async with asyncio.timeout(20):
            while "a file was not closed" not in caplog.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (store.catalog.num_bytes, store.catalog.num_files) == (5, 1)
        await store.close()

    asyncio.run(scenario())


def test_an_upload_is_removed_though_no_thread_can_be_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        upload = await store.begin_upload("")
        upload.begin("notes.txt")
        await upload.write(b"x" * 300_000)
        store._threads = ThreadPool(1, "none")
        with no_new_threads():
            with pytest.raises(ServiceError, match="allow its container more") as error:
                await upload.write(b"x" * 300_000)
            assert (http_status(error.value), error.value.reason) == (503, "NO_THREAD")
            await upload.abort()
        assert (store.catalog.num_bytes, store.catalog.num_files, store.uploads) == (0, 0, {})
        assert list((tmp_path / "uploads").iterdir()) == []
        await store.close()

    asyncio.run(scenario())


def test_a_disk_that_hangs_keeps_the_lock_but_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that hangs may still reach the disk, where another router would meet it."""
    monkeypatch.setattr(store_module, "CLOSE_S", 0.1)
    go_on = threading.Event()

    async def scenario() -> None:
        store = await opened(tmp_path)
        upload = await store.begin_upload("")
        upload.begin("notes.txt")
        monkeypatch.setattr(store_module, "write_all", lambda *_: go_on.wait(60))
        writing = asyncio.create_task(upload.write(b"x" * 300_000))
        await asyncio.sleep(0)
        writing.cancel()
        async with asyncio.timeout(20):
            await upload.abort()
            await store.close()
        with pytest.raises(LockedElsewhere):
            FileFolder(tmp_path).open()
        go_on.set()
        await until_gone(store)
        store.folder.close()

    try:
        asyncio.run(scenario())
    finally:
        go_on.set()


@pytest.mark.parametrize("is_expired", [False, True])
def test_a_file_is_removed_though_its_client_disconnects(tmp_path: Path, is_expired: bool) -> None:
    async def scenario() -> None:
        now = [1e9]
        store = FileStore(section(tmp_path), clock=lambda: now[0])
        await store.start()
        file = await put(store, b"x")
        store._threads = ThreadPool(1, "one")
        go_on = threading.Event()
        waiting = store._threads.start(lambda: go_on.wait(20))
        if is_expired:
            now[0] = float(file.expires_at)
        request = store.begin_upload("") if is_expired else store.delete("", file.id)
        task = asyncio.create_task(request)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        go_on.set()
        assert await waiting
        await store.close()
        assert on_disk(tmp_path) == set()

    asyncio.run(scenario())


def test_a_bug_while_files_are_listed_delays_the_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)

    async def scenario() -> None:
        store = await opened(tmp_path)
        await put(store, b"one")
        await put(store, b"two")
        await store.close()

        store = FileStore(section(tmp_path))
        restore = store.catalog.restore
        calls: list[StoredFile] = []

        def fail_at_the_second(file: StoredFile) -> None:
            calls.append(file)
            if len(calls) == 2:
                raise RuntimeError("a bug")
            restore(file)

        monkeypatch.setattr(store.catalog, "restore", fail_at_the_second)
        await store.start()
        async with asyncio.timeout(20):
            while not store.is_open:  # noqa: ASYNC110 - the store has no event for it
                await asyncio.sleep(0.01)
        assert (store.catalog.num_files, store.catalog.num_bytes, len(calls)) == (2, 6, 4)
        await store.close()

    asyncio.run(scenario())


def test_a_file_that_cannot_be_removed_stays_listed(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        file = await put(store, b"kept")
        whole = store.folder
        store.folder = FailingFolder(tmp_path, "remove", OSError(errno.EIO, "Input/output error"))
        with pytest.raises(ServiceError, match="Input/output error") as error:
            await store.delete("", file.id)
        assert http_status(error.value) == 503
        assert store.find("", file.id) == file
        store.folder = whole
        await store.delete("", file.id)
        await store.close()

    asyncio.run(scenario())


def crash_points() -> dict[str, Callable[[FileFolder, StoredFile], None]]:
    """Return the steps after which a crash may leave a half-written or half-removed file."""

    def renamed(folder: FileFolder, file: StoredFile) -> None:
        os.replace(folder._upload(file.id), folder.data(file.id))

    def half_described(folder: FileFolder, file: StoredFile) -> None:
        renamed(folder, file)
        (folder._uploads / f"{file.id}.json").write_text('{"id": "')

    def undescribed(folder: FileFolder, file: StoredFile) -> None:
        folder.keep_upload(file)
        (folder._files / f"{file.id}.json").unlink()

    return {"renamed": renamed, "half described": half_described, "half removed": undescribed}


@pytest.mark.parametrize("point", list(crash_points()))
def test_a_crash_leaves_nothing_behind(tmp_path: Path, point: str) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        kept = await put(store, b"kept")
        upload = await store.begin_upload("")
        upload.begin("lost.txt")
        await upload.write(b"x" * 300_000)
        lost = StoredFile("file-lost", "", "lost.txt", "batch", 300_000, 0, 1 << 40)
        os.replace(next((tmp_path / "uploads").iterdir()), tmp_path / "uploads" / f"{lost.id}.data")
        crash_points()[point](store.folder, lost)
        await store.close()
        await upload.abort()

        again = await opened(tmp_path)
        assert on_disk(tmp_path) == {f"{kept.id}.json", f"{kept.id}.data"}
        assert list((tmp_path / "uploads").iterdir()) == []
        assert [file.id for file in again.page("", 10)[0]] == [kept.id]
        assert again.catalog.num_bytes == 4
        await again.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["shorter", "no bytes", "no JSON"])
def test_a_damaged_file_is_not_listed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        file = await put(store, b"text")
        await store.close()
        data = tmp_path / "files" / f"{file.id}.data"
        if damage == "shorter":
            data.write_bytes(b"t")
        elif damage == "no bytes":
            data.unlink()
        else:
            data.with_suffix(".json").write_text("{")
        again = await opened(tmp_path)
        assert again.page("", 10) == ([], False)
        assert on_disk(tmp_path) == set()
        assert "removed a damaged file" in caplog.messages
        await again.close()

    asyncio.run(scenario())


def test_pages_follow_one_another_in_both_orders(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = await opened(tmp_path)
        ids = sorted([(await put(store, b"x")).id for _ in range(5)])
        await put(store, b"x", "bob")
        for order in ("asc", "desc"):
            seen: list[str] = []
            has_more = True
            while has_more:
                after = seen[-1] if seen else ""
                files, has_more = store.page("", 2, after=after, order=order)
                seen += [file.id for file in files]
            assert seen == (ids if order == "asc" else ids[::-1])
        assert store.page("", 10, purpose="batch") == ([], False)
        await store.close()

    asyncio.run(scenario())


Step = st.one_of(
    st.tuples(st.just("upload"), st.sampled_from(["", "a", "b"]), st.integers(0, 700)),
    st.tuples(st.just("delete"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("abort"), st.sampled_from(["", "a"]), st.integers(0, 700)),
    st.tuples(st.just("crash"), st.sampled_from(["", "a"]), st.integers(0, 700)),
    st.tuples(st.just("expire"), st.integers(0, 20), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(Step, max_size=20))
def test_limits_and_list_hold_after_any_history(steps: list[tuple[str, Any, int]]) -> None:
    """Whatever is uploaded, deleted, expired or cut off, list, limits and disk agree."""
    limits = {"max_bytes": 2000, "max_files": 6, "max_file_bytes": 600}

    async def scenario(path: Path) -> None:
        store = await opened(path, **limits)
        model: dict[str, tuple[str, bytes]] = {}
        for kind, argument, size in steps:
            if kind == "upload":
                data = b"x" * size
                try:
                    file = await put(store, data, argument)
                except ServiceError as error:
                    assert http_status(error) in (413, 507)
                else:
                    model[file.id] = (argument, data)
            elif kind in ("abort", "crash"):
                try:
                    upload = await store.begin_upload(argument)
                except ServiceError:
                    continue
                upload.begin("x")
                try:
                    await upload.write(b"x" * size)
                except ServiceError as error:
                    assert http_status(error) in (413, 507)
                if kind == "abort":
                    await upload.abort()
                    continue
                await store.close()
                store = await opened(path, **limits)
            elif model:
                name = sorted(model)[argument % len(model)]
                tenant, _ = model.pop(name)
                await store.delete(tenant, name)
            check(store, path, model)
        await store.close()

    def check(store: FileStore, path: Path, model: dict[str, tuple[str, bytes]]) -> None:
        for tenant in ("", "a", "b"):
            own = sorted(name for name, (owner, _) in model.items() if owner == tenant)
            assert [file.id for file in store.page(tenant, 99, order="asc")[0]] == own
            of_tenant = sum(len(data) for owner, data in model.values() if owner == tenant)
            assert not tenant or of_tenant <= limits["max_bytes"] // 2
        assert store.catalog.num_files == len(model) <= limits["max_files"]
        total = sum(len(data) for _, data in model.values())
        assert store.catalog.num_bytes == total <= limits["max_bytes"]
        parts = {f"{name}.{end}" for name in model for end in ("json", "data")}
        assert on_disk(path) == parts
        for name, (_, data) in model.items():
            assert (path / "files" / f"{name}.data").read_bytes() == data
            described = json.loads((path / "files" / f"{name}.json").read_bytes())
            assert described["bytes"] == len(data)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))
