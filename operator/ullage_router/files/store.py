"""The store of uploaded files: the list of files together with their folder."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from ullage_common.config.router import FilesSection
from ullage_router.background import failures_logged
from ullage_router.errors import (
    file_store_closed,
    file_store_failed,
    file_too_large,
    unknown_file,
    uploads_full,
)
from ullage_router.files.catalog import FileCatalog, Order, Purpose, StoredFile
from ullage_router.files.folder import FileFolder, LockedElsewhere, write_all
from ullage_router.files.growing import GrowingFile
from ullage_router.files.text_check import TextCheck
from ullage_router.thread_pool import NoThread, ThreadPool

MAX_UPLOADS = 16
"""Maximum number of uploads at a time. One tenant gets at most half of them."""
WRITE_BYTES = 256 << 10
"""Bytes that are collected before they are written to the disk."""
READ_BYTES = 256 << 10
"""Bytes that are read from the disk at a time."""
RETRY_S = 1.0
"""Seconds between two attempts to open a store that another router uses or whose disk fails."""
SWEEP_S = 60.0
"""Seconds between two searches for files that have expired."""
FIRST_OPEN_S = 5.0
"""Maximum seconds that the router's start waits for the folder."""
CLOSE_S = 5.0
"""Maximum seconds that the router's end waits for the folder."""
CLOSE_POLL_S = 0.01
"""Seconds between two looks whether the threads have finished."""
DISK_THREADS = 8
"""Threads that work on the disk.

They are the store's own, so that a disk that hangs blocks nothing but the store.
"""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Resident(Protocol):
    """Objects that live in the store's folder beside the files."""

    def load(self) -> dict[str, str]:
        """Read the objects, and return the tenants of their unfinished files by id. This blocks.

        Raises:
            OSError: The folder cannot be read.
        """

    def on_open(self) -> None:
        """Begin to use the store, which is open now."""


class Upload:
    """A file while it arrives. Call `abort` at the end, which has no effect after `finish`.

    Args:
        store: The store.
        tenant: The tenant that uploads the file.
        name: The id of the file.

    Attributes:
        filename: The name that the client gave the file.
        num_bytes: Bytes of the file so far.
    """

    def __init__(self, store: "FileStore", tenant: str, name: str) -> None:
        self._store = store
        self._tenant = tenant
        self._name = name
        self._file: BinaryIO | None = None
        self._check = TextCheck("")
        self._pieces: list[bytes] = []
        self._pending_bytes = 0
        self._running: asyncio.Task[None] | None = None
        """The latest work on the disk. It goes on after the client has disconnected."""
        self._discarding: asyncio.Task[None] | None = None
        self.filename = ""
        self.num_bytes = 0

    def begin(self, filename: str) -> None:
        """Set the name that the client gave the file. Call this before the first piece."""
        self.filename = filename
        self._check = TextCheck(filename)

    async def write(self, piece: bytes) -> None:
        """Add a piece to the file.

        Raises:
            ServiceError: The file is too large or is not text, the store is full, or the disk
                failed.
        """
        most = self._store.section.max_file_bytes
        if self.num_bytes + len(piece) > most:
            raise file_too_large(most)
        self._store.catalog.take_bytes(self._tenant, len(piece))
        self.num_bytes += len(piece)
        self._pieces.append(piece)
        self._pending_bytes += len(piece)
        if self._pending_bytes >= WRITE_BYTES:
            await self._run(self._write_pieces())

    async def finish(self, purpose: Purpose, ttl: float) -> StoredFile:
        """Complete the file, and return it.

        Args:
            purpose: The purpose of the file.
            ttl: Seconds after which the file expires.

        Raises:
            ServiceError: The file is not text, or the disk failed.
        """
        now = int(time.time())
        file = StoredFile(
            id=self._name,
            tenant=self._tenant,
            filename=self.filename,
            purpose=purpose,
            num_bytes=self.num_bytes,
            created_at=now,
            expires_at=now + int(ttl),
        )
        await self._run(self._keep(file))
        return file

    async def abort(self) -> None:
        """Remove the file unless it is complete.

        A disk that hangs is not waited for, or it would keep the router from ending.
        """
        self._discarding = asyncio.create_task(self._discard())
        await asyncio.wait([self._discarding], timeout=CLOSE_S)

    async def _run(self, work: Coroutine[None, None, None]) -> None:
        """Do work on the disk, which goes on even if the client disconnects meanwhile."""
        self._running = asyncio.create_task(work)
        try:
            await asyncio.shield(self._running)
        except OSError as error:
            raise file_store_failed(error) from error

    async def _write_pieces(self) -> None:
        await self._store.on_disk(self._write, self._take_pieces())

    async def _keep(self, file: StoredFile) -> None:
        await self._store.on_disk(self._write_and_keep, self._take_pieces(), file)
        del self._store.uploads[self._name]
        self._store.catalog.add(file)

    async def _discard(self) -> None:
        if self._running:
            await asyncio.gather(self._running, return_exceptions=True)
        if self._name not in self._store.uploads:
            return
        try:
            await self._store.clean_up(self._close_and_remove)
        except OSError as error:
            log.error("an upload was not removed", extra={"file": self._name, "reason": str(error)})
        finally:
            del self._store.uploads[self._name]
            self._store.catalog.give_back(self._tenant, self.num_bytes)

    def _take_pieces(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._pending_bytes = 0
        return data

    def _write(self, data: bytes) -> BinaryIO:
        self._check.add(data)
        if self._file is None:
            self._file = self._store.folder.new_upload(self._name)
        write_all(self._file, data)
        return self._file

    def _write_and_keep(self, data: bytes, file: StoredFile) -> None:
        written = self._write(data)
        self._check.end()
        os.fsync(written.fileno())
        written.close()
        self._store.folder.keep_upload(file)

    def _close_and_remove(self) -> None:
        try:
            if self._file:
                self._file.close()
        finally:
            self._store.folder.discard_upload(self._name)


class FileStore:
    """Stores files in a folder, which one router at a time uses.

    Args:
        section: The folder and the limits.
        clock: Returns Unix time in seconds.

    Attributes:
        section: The folder and the limits.
        catalog: The list of files.
        folder: The folder on the disk.
        uploads: The tenants of the uploads that run, by the id of the file.
        is_open: Whether this router uses the folder.
        resident: The other user of the folder: batches. Set it before the store is started.
    """

    def __init__(self, section: FilesSection, clock: Callable[[], float] = time.time) -> None:
        self.section = section
        self.catalog = FileCatalog(section)
        self.folder = FileFolder(Path(section.dir))
        self.uploads: dict[str, str] = {}
        self.is_open = False
        self._clock = clock
        self._threads = ThreadPool(DISK_THREADS, "files")
        self._problem = "the router is starting"
        self._unfinished: dict[str, int] = {}
        """Bytes of the files that batches had begun when the last router stopped, by id."""
        self.resident: Resident | None = None
        self._was_tried = asyncio.Event()
        """Event that is set after the first attempt to open the store."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the store now, or as soon as its folder can be used."""
        self._task = asyncio.create_task(self._maintain(), name="files")
        try:
            async with asyncio.timeout(FIRST_OPEN_S):
                await self._was_tried.wait()
        except TimeoutError:
            self._note_problem(f"{self.section.dir} does not respond")

    async def close(self) -> None:
        """Close the store, so that another router can use its folder.

        If the disk hangs, the folder stays locked until the process ends, because a write that
        hangs may still reach the disk.
        """
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.is_open = False
        self._problem = "this router is stopping"
        with contextlib.suppress(OSError, TimeoutError):  # the end of the process unlocks it, too
            async with asyncio.timeout(CLOSE_S):
                while self._threads.num_jobs:  # noqa: ASYNC110 - threads set no event of the loop
                    await asyncio.sleep(CLOSE_POLL_S)
                closing = self._threads.start(self.folder.close)
                self._threads.close()  # before anything else can begin to write
                await closing
        self._threads.close()

    async def on_disk(self, work: Callable[..., T], *args: object) -> T:
        """Call a function that blocks in one of the store's threads, and return its result.

        Raises:
            OSError: The disk failed, or no thread could be started (`NoThread`).
        """
        return await self._threads.start(partial(work, *args))

    def require_open(self) -> None:
        """Check that this router uses the folder.

        Raises:
            ServiceError: The folder cannot be used yet, or no more.
        """
        if not self.is_open:
            raise file_store_closed(self._problem)

    async def clean_up(self, work: Callable[[], None]) -> None:
        """Do work that may not be left out: in a thread, or here if no thread can be started.

        Raises:
            OSError: The disk failed.
        """
        try:
            await self.on_disk(work)
        except NoThread:
            work()

    def close_soon(self, data: BinaryIO, name: str) -> None:
        """Close a file in one of the store's threads, for a caller that cannot wait."""

        def close() -> None:
            try:
                data.close()
            except OSError as error:  # a network disk may refuse the last bytes as late as here
                log.error("a file was not closed", extra={"file": name, "reason": str(error)})

        try:
            self._threads.start(close)
        except NoThread:
            close()

    async def begin_upload(self, tenant: str) -> Upload:
        """Begin a file of a tenant.

        Raises:
            ServiceError: Too many uploads run, or the store has too many files.
        """
        self.require_open()
        await self.sweep()
        running = list(self.uploads.values())
        most = MAX_UPLOADS // 2 if tenant else MAX_UPLOADS
        if len(running) >= MAX_UPLOADS or running.count(tenant) >= most:
            raise uploads_full(most)
        self.catalog.take_file(tenant)
        name = new_id("file-")
        self.uploads[name] = tenant
        return Upload(self, tenant, name)

    def find(self, tenant: str, name: str) -> StoredFile:
        """Return a tenant's file.

        Raises:
            ServiceError: There is no such file.
        """
        self.require_open()
        file = self.get(tenant, name)
        if file is None:
            raise unknown_file(name)
        return file

    def get(self, tenant: str, name: str) -> StoredFile | None:
        """Return a tenant's file, or None if there is none."""
        return self.catalog.find(tenant, name, self._clock())

    def page(
        self, tenant: str, limit: int, *, purpose: str = "", after: str = "", order: Order = "desc"
    ) -> tuple[list[StoredFile], bool]:
        """Return up to `limit` files of a tenant, and whether more follow. See `FileCatalog`."""
        self.require_open()
        files = self.catalog.page(tenant, self._clock(), purpose=purpose, after=after, order=order)
        chosen: list[StoredFile] = []
        for file in files:
            if len(chosen) == limit:
                return chosen, True
            chosen.append(file)
        return chosen, False

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a tenant's file.

        Raises:
            ServiceError: There is no such file, a batch reads it, or the disk failed.
        """
        file = self.find(tenant, name)
        self.catalog.check_unused(name)
        # Removed from the list first, so that nobody begins to read the file in the meantime.
        self.catalog.remove(name)
        # A client that disconnects now must not leave the file on the disk, or it would come back.
        await asyncio.shield(asyncio.create_task(self._remove(file)))

    async def chunks(self, file: StoredFile) -> AsyncGenerator[bytes]:
        """Yield the bytes of a file. A file that is deleted meanwhile can be read to its end.

        Raises:
            ServiceError: The disk failed.
        """
        try:
            data: BinaryIO = await self.on_disk(open, self.folder.data(file.id), "rb")
        except OSError as error:
            raise file_store_failed(error) from error
        try:
            while chunk := await self.on_disk(data.read, READ_BYTES):
                yield chunk
        except OSError as error:
            raise file_store_failed(error) from error
        finally:
            self.close_soon(data, file.id)

    async def read(self, file: StoredFile) -> bytes:
        """Return the bytes of a file.

        Raises:
            ServiceError: The disk failed, or the file was deleted meanwhile.
        """
        try:
            return await self.on_disk(self.folder.data(file.id).read_bytes)
        except FileNotFoundError as error:
            raise unknown_file(file.id) from error
        except OSError as error:
            raise file_store_failed(error) from error

    def growing(self, tenant: str, name: str) -> GrowingFile:
        """Return a file that a batch writes, with the lines that it already has."""
        complete = self.catalog.find(tenant, name, 0.0)
        num_bytes = complete.num_bytes if complete else self._unfinished.pop(name, None)
        return GrowingFile(self, tenant, name, num_bytes)

    async def sweep(self) -> None:
        """Delete the files that have expired."""
        for file in self.catalog.expired(self._clock()):
            if not self.catalog.has_expired(file, self._clock()):
                continue  # another sweep or a client removed it meanwhile
            self.catalog.remove(file.id)
            with contextlib.suppress(Exception):  # it is logged, and the next sweep tries again
                await asyncio.shield(asyncio.create_task(self._remove(file)))

    def as_json(self) -> dict[str, object]:
        """Return the state of the store for /stats."""
        return {
            "open": self.is_open,
            "problem": None if self.is_open else self._problem,
            "files": self.catalog.num_files,
            "max_files": self.section.max_files,
            "bytes": self.catalog.num_bytes,
            "max_bytes": self.section.max_bytes,
            "uploads": len(self.uploads),
        }

    async def _remove(self, file: StoredFile) -> None:
        """Remove from the disk a file that is no longer in the list.

        Raises:
            ServiceError: The disk failed. The file is in the list again.
        """
        try:
            await self.on_disk(self.folder.remove, file.id)
        except OSError as error:
            self.catalog.restore(file)
            log.error("a file was not removed", extra={"file": file.id, "reason": str(error)})
            raise file_store_failed(error) from error
        except Exception:
            self.catalog.restore(file)
            log.exception("a file was not removed", extra={"file": file.id})
            raise

    async def _maintain(self) -> None:
        while True:
            with failures_logged("maintain the store of files"):
                await (self.sweep() if self.is_open else self._try_to_open())
            self._was_tried.set()
            await asyncio.sleep(SWEEP_S if self.is_open else RETRY_S)

    async def _try_to_open(self) -> None:
        try:
            await self.on_disk(self.folder.open)
            files, unfinished = await self.on_disk(self._load)
            self._list(files, unfinished)
        except LockedElsewhere:
            self._note_problem("another router uses its folder")
            return
        except OSError as error:
            self.folder.close()
            self._note_problem(f"{self.section.dir}: {error.strerror}")
            return
        except Exception as error:
            self.folder.close()  # or the next attempt would take its own lock for another router's
            self._note_problem(f"{self.section.dir}: {error!r}")
            raise
        self.is_open = True
        if self.resident:
            self.resident.on_open()
        log.info("files read", extra={"files": len(files), "bytes": self.catalog.num_bytes})

    def _list(self, files: list[StoredFile], unfinished: dict[str, str]) -> None:
        self.catalog.clear()  # of an attempt that failed half-way
        for file in files:
            self.catalog.restore(file)
        for name, tenant in unfinished.items():
            self.catalog.restore_unfinished(tenant, self._unfinished[name])

    def _load(self) -> tuple[list[StoredFile], dict[str, str]]:
        """Return the files of the folder, and the tenants of the unfinished ones by id."""
        growing = self.resident.load() if self.resident else {}
        files = list(self.folder.load(growing))
        for file in files:
            growing.pop(file.id, None)
        self._unfinished = self.folder.trim_growing(growing)
        return files, {name: growing[name] for name in self._unfinished}

    def _note_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("the store of files is not open", extra={"reason": problem})


def new_id(prefix: str) -> str:
    """Return a new id. It begins with the time in milliseconds, so that later ids sort last."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"
