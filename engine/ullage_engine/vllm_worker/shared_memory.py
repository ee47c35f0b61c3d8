"""Removes shared-memory files that killed vLLM ranks have left behind.

Each ring buffer between ranks takes 240 MiB once it is used, and is charged to the pod's memory
until the pod terminates. The file names (`psm_1a2b3c4d`) do not reveal their owner. An engine with
several ranks therefore records, in the same folder, which files its own processes have mapped. The
next startup of the same engine removes only recorded files that no process maps any longer.
"""

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from ullage_common.config.engine import ServerSection

log = logging.getLogger("ullage.engine.vllm")

FOLDER = Path("/dev/shm")
PROCESSES = Path("/proc")

_NAMES = ("psm_*", "sem.mp-*", "vllm_*", "nccl-*")
"""Patterns of the shared-memory files that Python, vLLM's CPU ranks and NCCL create."""

_SHORTEST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_PAUSE_SHARE = 1 / 8
"""Pause between two updates of the record, as a fraction of the engine's uptime.

The pause grows, because most files are created during startup.
"""


class _File(msgspec.Struct, frozen=True, array_like=True):
    name: str
    inode: int
    """Inode, which distinguishes the file from a later file with the same name."""


class _Record(msgspec.Struct, frozen=True):
    """Shared-memory files that the processes of one engine run have mapped."""

    pid: int
    created: float
    """Start time of the process, which distinguishes it from a later process with the same id."""
    files: list[_File]


class SharedMemory:
    """Tracks the shared-memory files that one engine's processes on this node have mapped."""

    def __init__(self, engine: str, folder: Path = FOLDER, processes: Path = PROCESSES) -> None:
        """Create one engine's tracker.

        Args:
            engine: name of the engine, unique among the engines that use the folder.
            folder: folder of shared-memory files, such as /dev/shm.
            processes: folder with the kernel's process information, such as /proc.
        """
        self._prefix = f"ullage-ranks-{hashlib.sha256(engine.encode()).hexdigest()[:16]}-"
        self._folder = folder
        self._processes = processes
        self._process = psutil.Process()
        self._path = folder / f"{self._prefix}{self._process.pid}"
        self._files: set[_File] = set()
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="shared-memory", daemon=True)

    def sweep(self) -> list[str]:
        """Remove files left behind by exited processes of this engine, and return their names."""
        records = dict(self._records())
        recorded = {file for record in records.values() for file in record.files}
        present = {file for file in recorded if self._inode(self._folder / file.name) == file.inode}
        used = _mapped(self._processes.glob("[0-9]*"), self._folder) if present else set()
        removed = sorted(file.name for file in present if file.inode not in used)
        for name in removed:
            (self._folder / name).unlink(missing_ok=True)

        for path, record in records.items():
            if not any(file in present and file.inode in used for file in record.files):
                path.unlink(missing_ok=True)
        if removed:
            log.info("removed %d files that ended ranks left in %s", len(removed), self._folder)
        return removed

    def note(self) -> None:
        """Record the files that this process and its children currently map."""
        pids = [self._process.pid, *(each.pid for each in self._process.children(recursive=True))]
        used = _mapped((self._processes / str(pid) for pid in pids), self._folder)
        paths = {path for name in _NAMES for path in self._folder.glob(name)} if used else set()
        mapped = {_File(path.name, inode) for path in paths if (inode := self._inode(path)) in used}
        if mapped <= self._files:
            return

        self._files |= mapped
        files = sorted(self._files, key=lambda file: file.name)
        record = _Record(self._process.pid, self._process.create_time(), files)
        part = self._path.with_name(f".{self._path.name}")
        part.write_bytes(msgspec.json.encode(record))
        part.replace(self._path)

    def watch(self) -> None:
        """Keep the record up to date in a background thread until `close` is called."""
        self._watcher.start()

    def close(self) -> None:
        """Stop the background thread, and delete the record.

        If some of the recorded files still exist, the record is kept, so that the next startup can
        remove them.
        """
        self._is_closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
        if not any(self._inode(self._folder / file.name) == file.inode for file in self._files):
            self._path.unlink(missing_ok=True)

    def _watch(self) -> None:
        began = time.monotonic()
        pause = _SHORTEST_PAUSE_S
        while not self._is_closed.wait(pause):
            try:
                self.note()
            except (OSError, psutil.Error) as error:
                log.warning("cannot record the files of ranks in %s: %s", self._folder, error)
            age = time.monotonic() - began
            pause = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, age * _PAUSE_SHARE))

    def _records(self) -> Iterator[tuple[Path, _Record]]:
        """Yield the path and content of each record of this engine whose process has exited."""
        for path in self._folder.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if path.is_symlink() or path.stat().st_uid != os.geteuid():
                    continue
                record = msgspec.json.decode(path.read_bytes(), type=_Record)
                names = [file.name for file in record.files]
                if not _is_running(record) and all(name == Path(name).name for name in names):
                    yield path, record

    def _inode(self, path: Path) -> int | None:
        """Return the inode of a file that is owned by this user, or None for any other file."""
        try:
            stat = path.lstat()
        except FileNotFoundError:
            return None
        return stat.st_ino if stat.st_uid == os.geteuid() else None


def shared_memory_of(server: ServerSection, node: int = 0) -> SharedMemory:
    """Return the tracker of an engine's shared-memory files on the node with index `node`."""
    return SharedMemory(f"{server.run_dir}\0{server.engine_id}\0{node}")


def _is_running(record: _Record) -> bool:
    """Return whether the recorded process still runs. A zombie has exited and maps nothing."""
    try:
        process = psutil.Process(record.pid)
        is_same = process.create_time() == record.created
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _mapped(processes: Iterable[Path], folder: Path) -> set[int]:
    """Return the inodes on the folder's file system that are mapped by this user's processes.

    Paths cannot identify the files, because a semaphore is created and mapped under a temporary
    name.
    """
    device = folder.stat().st_dev
    own = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_bytes().splitlines():
                # Fields: address, permissions, offset, device, inode, path.
                fields = line.split(None, 5)
                if fields[3] == own:
                    inodes.add(int(fields[4]))
    return inodes
