"""One engine's files in the file tier: a table of contents, and slots that hold the blocks.

    PATH/NAMESPACE/N/table     a header page, then one entry per slot
    PATH/NAMESPACE/N/blocks    the slots, each at a multiple of 4 KiB

A table entry is cleared before its slot is overwritten, and rewritten once the block is complete.
A killed process therefore leaves no partial blocks behind. Writes are not synced to the device.
Instead, each entry has a checksum of its block, so that reads detect blocks that a power failure
left incomplete. Each folder has a single writer, which holds a lock on the table.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import operator
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from ullage_kv.arena import PAGE_BYTES
from ullage_kv.keys import KEY_BYTES

log = logging.getLogger(__name__)

_MAGIC = b"ullagekv"
_VERSION = 1
_HEADER = struct.Struct(f"<8sQ{KEY_BYTES}sQ")
"""Layout of the header: magic, version, namespace, bytes per block. Its checksum follows."""
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s16sQ")
"""Layout of an entry: key, parent key or zeros, xxh3_128 of block, save counter, then checksum."""
_ENTRY_BYTES = 128
_EXTENT_BYTES = 64 << 20
"""Number of bytes by which the slot file grows at a time."""
_GRACE_S = 600.0
"""Seconds for which a stopped engine's folder is kept even if other engines need the space."""
_LOCK_TRIES = 5
"""Number of attempts to lock a folder. Other engines hold the lock briefly to see if it is free."""
_LOCK_PAUSE_S = 0.01
"""Seconds between attempts to lock a folder."""
_NAMESPACE = re.compile("[0-9a-f]{16}")
FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}
"""Error numbers that indicate a full device or an exhausted quota."""
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
"""Error numbers that indicate that the file system does not support O_DIRECT or fallocate."""


class FileTierError(Exception):
    """Raised if the file tier cannot use its folder. The message names the folder and a remedy."""


class Calls(NamedTuple):
    """The file system calls to use. Tests replace them with calls that fail or hang."""

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate


class TableEntry(NamedTuple):
    """A block's entry in the table of contents."""

    slot: int
    key: bytes
    parent: bytes | None
    digest: bytes


class StoredBlock(NamedTuple):
    """A block that an earlier process left in a slot."""

    slot: int
    key: bytes
    parent: bytes | None
    digest: bytes
    sequence: int


class SlotFile:
    """The slots and the table of contents in one process's own folder. Thread-safe.

    The caller must ensure that no slot is read and written concurrently.
    """

    def __init__(
        self, path: Path, space: bytes, block_bytes: int, max_bytes: int, calls: Calls
    ) -> None:
        """Lock an unused folder under `path`, preferably one that already contains blocks.

        Raises:
            FileTierError: the folder cannot be created, written or locked, or `max_bytes` is too
                small for a block.
        """
        self._space = space
        self._block_bytes = block_bytes
        self._calls = calls
        self.slot_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        self.max_slots = (max_bytes - PAGE_BYTES) // (self.slot_bytes + _ENTRY_BYTES)
        if self.max_slots < 1:
            raise FileTierError(f"{max_bytes} bytes of files hold no block of {block_bytes} bytes")
        self._lock = threading.Lock()
        self._keys: dict[int, bytes] = {}
        """Maps each slot that has a table entry to the key in this entry."""
        self._slots: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        fds = list[int]()
        # Closed only when no thread can use a descriptor any more, since another file may get its
        # number.
        self.close = weakref.finalize(self, _close, fds)
        try:
            self.folder, self._table = _take_folder(path / space.hex()[:16])
            fds.append(self._table)
            self.stored_blocks = self._open(fds)
        except OSError as error:
            self.close()
            raise FileTierError(
                f"{path} cannot keep KV: {error.strerror or error}; name a folder that this user "
                "may write to, on a file system with room and locks"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Combined current size of the table and blocks files, in bytes."""
        return PAGE_BYTES + self.max_slots * _ENTRY_BYTES + self.num_slots * self.slot_bytes

    @property
    def is_removed(self) -> bool:
        """Whether the files have been deleted, so that later processes cannot find their blocks."""
        try:
            return not all(os.fstat(fd).st_nlink for fd in (self._table, self._blocks))
        except OSError:  # ESTALE of a file server
            return True

    def has_entry(self, key: bytes) -> bool:
        """Return whether the block has a table entry, so that later processes can find it."""
        return key in self._slots

    def read(self, slot: int, buffer: memoryview) -> bool:
        """Read a slot into a buffer of the same size, and return whether its checksum is correct.

        Raises:
            OSError: the file system failed.
        """
        num_read = self._calls.preadv(self._blocks, [buffer], slot * self.slot_bytes)
        if num_read < self._block_bytes:
            return False
        payload = buffer[: self._block_bytes]
        return xxhash.xxh3_128_digest(payload) == self._digests.get(slot)

    def write(self, slot: int, memory: memoryview, buffer: memoryview) -> bytes:
        """Write a block to a slot, and return its digest, which must be passed to `enter`.

        Args:
            slot: the slot, whose table entry is cleared first.
            memory: the block's contents.
            buffer: page-aligned scratch memory as large as a slot, for the last partial page or for
                unaligned contents.

        Raises:
            OSError: the file system failed.
        """
        with self._lock:
            self._clear(slot)
        pages = self._pages(memory, buffer)
        digest = xxhash.xxh3_128_digest(memory)
        num_written = self._calls.pwritev(self._blocks, pages, slot * self.slot_bytes)
        if num_written != self.slot_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return digest

    def enter(self, entries: Sequence[TableEntry]) -> None:
        """Write table entries, so that the blocks can be read and later processes find them.

        Raises:
            OSError: the file system failed.
        """
        with self._lock:
            for slot, key, parent, digest in entries:
                if (earlier := self._slots.get(key)) is not None:
                    self._clear(earlier)
                entry = _ENTRY.pack(key, parent or bytes(KEY_BYTES), digest, next(self._sequence))
                self._write_entry(slot, entry + _check(entry, slot))
                self._keys[slot] = key
                self._slots[key] = slot
                self._digests[slot] = digest

    def _pages(self, memory: memoryview, buffer: memoryview) -> list[memoryview]:
        """Split a block into page-aligned buffers for O_DIRECT that together fill the slot.

        Whole pages are used in place if `memory` is page-aligned. The rest is copied to `buffer`.
        """
        source = np.frombuffer(memory, np.uint8)
        whole = source.nbytes // PAGE_BYTES * PAGE_BYTES
        if source.ctypes.data % PAGE_BYTES:
            whole = 0
        if rest := source.nbytes - whole:
            np.copyto(np.frombuffer(buffer, np.uint8, rest), source[whole:])
        pages = [memory[:whole], buffer[: self.slot_bytes - whole]]
        return [each for each in pages if each.nbytes]

    def clear(self, keys: Sequence[bytes]) -> None:
        """Clear the table entries of blocks, so that later processes do not find them."""
        with self._lock:
            for key in keys:
                if (slot := self._slots.get(key)) is not None:
                    self._clear(slot)

    def grow(self) -> int:
        """Grow the slot file by up to one increment, and return the number of new slots.

        The quota may allow fewer slots or none. If the device is nearly full, fewer are added.

        Raises:
            OSError: the file system failed, for example because the device is full.
        """
        num_more = min(max(1, _EXTENT_BYTES // self.slot_bytes), self.max_slots - self.num_slots)
        size = self.num_slots * self.slot_bytes
        while num_more:
            try:
                self._calls.fallocate(self._blocks, size, num_more * self.slot_bytes)
                break
            except OSError as error:
                if error.errno in _NOT_DIRECT:  # no fallocate
                    os.ftruncate(self._blocks, size + num_more * self.slot_bytes)
                    break
                os.ftruncate(self._blocks, size)
                if error.errno not in FULL_ERRORS or num_more == 1:
                    raise
                num_more //= 2
        self.num_slots += num_more
        return num_more

    def _clear(self, slot: int) -> None:
        if (key := self._keys.get(slot)) is not None:
            self._write_entry(slot, bytes(_ENTRY_BYTES))
            del self._keys[slot], self._slots[key]

    def _write_entry(self, slot: int, entry: bytes) -> None:
        os.pwrite(self._table, entry, PAGE_BYTES + slot * _ENTRY_BYTES)

    # opening -------------------------------------------------------------------------------------

    def _open(self, fds: list[int]) -> list[StoredBlock]:
        """Open the slot file, read the table, and return the blocks in it, oldest first."""
        # The table, and the header that it must begin with.
        table_bytes = PAGE_BYTES + self.max_slots * _ENTRY_BYTES
        table = _read_all(self._table, table_bytes)
        header = _HEADER.pack(_MAGIC, _VERSION, self._space, self._block_bytes)
        header = (header + _check(header, 0)).ljust(PAGE_BYTES, b"\0")
        is_usable = table.startswith(header)
        if not is_usable:
            if table:
                log.warning("%s begins empty, since its table is damaged or of another kind", self)
            os.ftruncate(self._table, 0)
        os.ftruncate(self._table, table_bytes)
        with contextlib.suppress(OSError):  # a full device is an error when the slots grow
            self._calls.fallocate(self._table, 0, table_bytes)
        self.is_direct = self._write_header(header)

        # The slots, cut to a whole number of them.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0)
        self._blocks = os.open(self.folder / "blocks", flags, 0o600)
        fds.append(self._blocks)
        size = os.fstat(self._blocks).st_size if is_usable else 0
        self.num_slots = min(size // self.slot_bytes, self.max_slots)
        os.ftruncate(self._blocks, self.num_slots * self.slot_bytes)
        return self._restore(table if is_usable else b"")

    def __str__(self) -> str:
        return str(self.folder)

    def _write_header(self, header: bytes) -> bool:
        """Write the header, and return whether the file system supports O_DIRECT."""
        page = mmap.mmap(-1, PAGE_BYTES)
        page.write(header)
        try:
            fd = os.open(self.folder / "table", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            try:
                # The test uses the header's own page, since a device may have no other room.
                is_direct = self._calls.pwritev(fd, [memoryview(page)], 0) == PAGE_BYTES
                read = memoryview(mmap.mmap(-1, PAGE_BYTES))
                is_direct = is_direct and self._calls.preadv(fd, [read], 0) == PAGE_BYTES
                if is_direct and read == header:
                    return True
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
        self._calls.pwritev(self._table, [memoryview(header)], 0)
        return False

    def _restore(self, table: bytes) -> list[StoredBlock]:
        newest: dict[bytes, StoredBlock] = {}
        useless = []
        num_entries = max(0, len(table) - PAGE_BYTES) // _ENTRY_BYTES
        for slot in range(num_entries):
            start = PAGE_BYTES + slot * _ENTRY_BYTES
            entry = table[start : start + _ENTRY.size]
            check = table[start + _ENTRY.size : start + _ENTRY.size + 8]
            if not any(entry):
                continue
            if check != _check(entry, slot) or slot >= self.num_slots:
                useless.append(slot)
                continue
            key, parent, digest, sequence = _ENTRY.unpack(entry)
            block = StoredBlock(slot, key, parent if any(parent) else None, digest, sequence)
            if (other := newest.get(key)) is not None:
                useless.append(min(block, other, key=_sequence).slot)
            newest[key] = max(block, other or block, key=_sequence)

        if useless:
            log.warning(
                "%s: %d entries of the table are damaged or have no slot, and are dropped",
                self,
                len(useless),
            )
        for slot in useless:  # else they would be found once the file has such a slot again
            self._write_entry(slot, bytes(_ENTRY_BYTES))

        blocks = sorted(newest.values(), key=_sequence)
        self._sequence = itertools.count(blocks[-1].sequence + 1 if blocks else 1)
        for block in blocks:
            self._keys[block.slot], self._slots[block.key] = block.key, block.slot
            self._digests[block.slot] = block.digest
        return blocks


_sequence = operator.attrgetter("sequence")


class Leftovers:
    """Removes folders of engines that are no longer running.

    A restarted engine can reuse the blocks in such a folder. Folders are therefore kept as long as
    they fit into one engine's quota. Beyond that, folders that no engine has used for ten minutes
    may be removed.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._since: dict[Path, float] = {}
        """Time at which this object first noticed that no engine was using each table."""

    def trim(self, own_bytes: int, max_bytes: int, needed_bytes: int = 0) -> int:
        """Remove unused folders until the remaining ones and the engine's own files fit its quota.

        The least recently written folders are removed first.

        Args:
            own_bytes: size of the engine's own files.
            max_bytes: the engine's quota.
            needed_bytes: minimum number of bytes to free if the device is full, or 0 otherwise.

        Returns:
            The number of bytes that were freed.
        """
        unheld = {table: _folder_bytes(table) for table in _tables(self._path) if _is_unheld(table)}
        now = self._clock()
        self._since = {table: self._since.get(table, now) for table in unheld}
        excess = max(own_bytes + sum(unheld.values()) - max_bytes, needed_bytes)
        freed = 0
        for table in sorted(unheld, key=_written_at):
            if freed < excess and now - self._since[table] >= _GRACE_S and _remove(table.parent):
                log.info("%s is removed: no engine has it, and room is needed", table.parent)
                freed += unheld[table]
        return freed


def _take_folder(base: Path) -> tuple[Path, int]:
    """Lock the first unused folder, creating one if necessary.

    Returns:
        The folder and its locked table.
    """
    for number in itertools.count():
        folder = base / str(number)
        for _ in range(_LOCK_TRIES):
            if (table := _lock_table(folder, make=True)) is not None:
                return folder, table
            time.sleep(_LOCK_PAUSE_S)
    raise AssertionError


def _lock_table(folder: Path, *, make: bool) -> int | None:
    """Open and lock a folder's table, and return its file descriptor.

    Return None if the table is missing, or if another process has locked or removed it.
    """
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        table = os.open(
            folder / "table", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o600
        )
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(table, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(table)
        return None
    except OSError:
        os.close(table)
        raise
    if os.fstat(table).st_nlink:
        return table
    os.close(table)
    return None


def _tables(path: Path) -> list[Path]:
    return [
        table
        for table in path.glob("*/*/table")
        if _NAMESPACE.fullmatch(table.parts[-3]) and table.parts[-2].isdecimal()
    ]


def _is_unheld(table: Path) -> bool:
    try:
        fd = _lock_table(table.parent, make=False)
    except OSError:  # of another user
        return False
    if fd is not None:
        os.close(fd)
    return fd is not None


def _remove(folder: Path) -> bool:
    """Remove Ullage's files in a folder, or return False if a process holds the folder's lock."""
    table = _lock_table(folder, make=False)
    if table is None:
        return False
    try:
        (folder / "blocks").unlink(missing_ok=True)
        (folder / "table").unlink()
        with contextlib.suppress(OSError):  # other files are in the folder
            folder.rmdir()
            folder.parent.rmdir()
    finally:
        os.close(table)
    return True


def _folder_bytes(table: Path) -> int:
    paths = [table, table.with_name("blocks")]
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())


def _written_at(table: Path) -> float:
    return table.stat().st_mtime


def _check(data: bytes, slot: int) -> bytes:
    """Return the checksum of a header or table entry, seeded with the slot number."""
    return xxhash.xxh3_64_digest(data, seed=slot)


def _read_all(fd: int, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes and (piece := os.pread(fd, num_bytes - len(data), len(data))):
        data += piece
    return bytes(data)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
