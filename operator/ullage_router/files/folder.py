"""The folder of the store: its lock, its files, and its repair after a crash. All calls block.

The folder has these parts:

    lock             locked by the router that uses the folder
    uploads/         files that are being uploaded, and descriptions that are being written
    files/ID.data    the bytes of a file
    files/ID.json    its description (`StoredFile`), which is written last and removed first
    batches/ID.json  the state of a batch (`ullage_router.batches`)

A file exists if it has a description. Whatever a crash leaves behind besides is removed at the next
start.
"""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from ullage_router.files.catalog import StoredFile

BLOCK_BYTES = 64 << 10

log = logging.getLogger(__name__)


class LockedElsewhere(Exception):
    """Raised if another router uses the folder."""


class FileFolder:
    """The folder of the store.

    Args:
        path: The folder, which is made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = path / "files"
        self._uploads = path / "uploads"
        self._lock: int | None = None

    def open(self) -> None:
        """Lock the folder, and remove unfinished uploads.

        Raises:
            LockedElsewhere: Another router uses the folder.
            OSError: The folder cannot be made, locked or written.
        """
        self._files.mkdir(parents=True, exist_ok=True)
        self._uploads.mkdir(exist_ok=True)
        descriptor = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise LockedElsewhere from error
        except OSError:
            os.close(descriptor)
            raise
        self._lock = descriptor
        for path in self._uploads.iterdir():
            path.unlink()

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self, unfinished: Collection[str]) -> Iterator[StoredFile]:
        """Yield the files of the folder, and remove parts of files that do not exist.

        Args:
            unfinished: Ids of files without a description that are still being written.
        """
        described = set(unfinished)
        for path in sorted(self._files.glob("*.json")):
            file = self._described(path)
            if file is None:
                path.unlink()
            else:
                described.add(file.id)
                yield file
        for path in self._files.iterdir():
            if path.stem not in described:
                path.unlink()

    def _described(self, path: Path) -> StoredFile | None:
        """Return the file that a description describes, or None if the file is damaged."""
        try:
            file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
            size = self.data(path.stem).stat().st_size
        except (msgspec.MsgspecError, UnicodeDecodeError, FileNotFoundError) as error:
            log.error("removed a damaged file", extra={"file": path.stem, "reason": str(error)})
            return None
        if (file.id, file.num_bytes) != (path.stem, size):
            reason = f"has {size} bytes instead of {file.num_bytes}"
            log.error("removed a damaged file", extra={"file": path.stem, "reason": reason})
            return None
        return file

    def new_upload(self, name: str) -> BinaryIO:
        """Open a new file for an upload."""
        return open(self._uploads / f"{name}.data", "xb", buffering=0)

    def discard_upload(self, name: str) -> None:
        """Remove an upload that was not finished."""
        self._upload(name).unlink(missing_ok=True)

    def keep_upload(self, file: StoredFile) -> None:
        """Make an upload a file. Its bytes must be on the disk already.

        Raises:
            OSError: The description could not be written. The upload is then removed.
        """
        os.replace(self._upload(file.id), self.data(file.id))
        try:
            self.describe(file)
        except OSError:
            self.data(file.id).unlink()
            raise

    def describe(self, file: StoredFile) -> None:
        """Write the description of a file whose bytes are on the disk."""
        self.write_whole(self._files / f"{file.id}.json", msgspec.json.encode(file))

    def write_whole(self, path: Path, data: bytes) -> None:
        """Write a file so that a crash leaves either the old or the new content."""
        part = self._uploads / path.name
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def open_growing(self, name: str) -> BinaryIO:
        """Open a file that grows, at its end."""
        return open(self.data(name), "ab", buffering=0)

    def trim_growing(self, names: Iterable[str]) -> dict[str, int]:
        """Remove the last line of each growing file if a crash cut the line off.

        Returns:
            The bytes of the files that exist, by id.
        """
        sizes = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError), open(self.data(name), "rb+") as file:
                sizes[name] = _end_of_lines(file)
                file.truncate(sizes[name])
        for name in [name for name, size in sizes.items() if not size]:
            self.data(name).unlink()
            del sizes[name]
        return sizes

    def remove(self, name: str) -> None:
        """Remove a file."""
        (self._files / f"{name}.json").unlink(missing_ok=True)
        self.data(name).unlink(missing_ok=True)

    def data(self, name: str) -> Path:
        """Return the path of a file's bytes."""
        return self._files / f"{name}.data"

    def _upload(self, name: str) -> Path:
        return self._uploads / f"{name}.data"


def _end_of_lines(file: BinaryIO) -> int:
    """Return the position behind the last line break of a file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file.

    Raises:
        OSError: The disk is full or failed.
    """
    view = memoryview(data)
    while view:
        written = file.write(view)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
