"""Files that a batch writes line by line, over hours and over restarts of the router."""

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ullage_router.errors import file_store_failed
from ullage_router.files.catalog import Purpose, StoredFile
from ullage_router.files.folder import write_all

if TYPE_CHECKING:
    from ullage_router.files.store import FileStore


class GrowingFile:
    """A file that grows by whole lines, and that clients see once it is complete.

    A file without lines does not exist, and takes no room in the store.

    Args:
        store: The store.
        tenant: The tenant that will own the file.
        name: The id of the file.
        num_bytes: Bytes that the file already has on the disk, which the store counts, or None if
            the file does not exist.
    """

    def __init__(
        self, store: "FileStore", tenant: str, name: str, num_bytes: int | None = None
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._name = name
        self._num_bytes = num_bytes or 0
        self._is_counted = num_bytes is not None
        self._file: BinaryIO | None = None
        self._lock = asyncio.Lock()

    @property
    def path(self) -> Path | None:
        """The path of the lines, or None if there are none."""
        return self._store.folder.data(self._name) if self._num_bytes else None

    async def append(self, lines: bytes) -> None:
        """Add whole lines, either all of them or none.

        Raises:
            ServiceError: The store or the disk is full, or the disk failed.
        """
        await _to_the_end(self._append(lines))

    async def finish(self, purpose: Purpose, filename: str, now: int, ttl: int) -> bool:
        """Complete the file, and return whether it has lines. A second call has no effect.

        Args:
            purpose: The purpose of the file.
            filename: The name of the file.
            now: Unix time in seconds.
            ttl: Seconds after which the file expires.

        Raises:
            ServiceError: The disk is full or failed.
        """
        if not self._num_bytes or self._store.catalog.has(self._name):
            return self._num_bytes > 0
        file = StoredFile(
            id=self._name,
            tenant=self._tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=self._num_bytes,
            created_at=now,
            expires_at=now + ttl,
        )
        await _to_the_end(self._finish(file))
        return True

    def close(self) -> None:
        """Close the file on the disk."""
        if self._file:
            self._store.close_soon(self._file, self._name)
            self._file = None
        if self._is_counted and not self._num_bytes:  # the disk took no line
            self._store.catalog.give_back(self._tenant, 0)
            self._is_counted = False

    async def _append(self, lines: bytes) -> None:
        async with self._lock:
            self._store.require_open()
            catalog = self._store.catalog
            if not self._is_counted:
                catalog.take_file(self._tenant)
                self._is_counted = True
            catalog.take_bytes(self._tenant, len(lines))
            try:
                await self._store.on_disk(self._write, lines)
            except OSError as error:
                catalog.return_bytes(self._tenant, len(lines))
                raise file_store_failed(error) from error
            self._num_bytes += len(lines)

    async def _finish(self, file: StoredFile) -> None:
        async with self._lock:
            try:
                await self._store.on_disk(self._sync_and_describe, file)
            except OSError as error:
                raise file_store_failed(error) from error
            self._store.catalog.add(file)

    def _write(self, lines: bytes) -> None:
        if self._file is None:
            self._file = self._store.folder.open_growing(self._name)
        try:
            write_all(self._file, lines)
        except OSError:
            self._file.truncate(self._num_bytes)
            raise

    def _sync_and_describe(self, file: StoredFile) -> None:
        with self._store.folder.open_growing(self._name) as data:
            os.fsync(data.fileno())
        self._store.folder.describe(file)


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Do work that goes on to its end even if the caller is cancelled."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
