"""Content digests of files, used to tell whether two copies of a model are identical.

Each file is read once. Its digest is then cached in the weights folder, keyed by the file's path,
size, inode and timestamps, so that later starts take milliseconds. Checking a hub file against the
SHA-256 in its name always rereads the file, because bit rot changes none of these properties.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ullage_engine.model_loader.files import weight_files
from ullage_engine.model_loader.gguf_file import gguf_parts
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.protocol.errors import WeightsError

log = logging.getLogger("ullage.engine.weights")

_PIECE_BYTES = 4 << 20
_HEX_DIGITS = 64
_HUB_NAME = re.compile(r"[0-9a-f]{64}")
_THREADS = 4
"""Maximum number of files to read in parallel."""
_WAIT_S = 1.0


class Digests:
    """Computes digests of files, and caches each digest in a folder.

    Args:
        folder: the cache folder. If the folder is not writable, every start reads all files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_read = 0
        """Number of files that had to be read, for example because their digest was not cached."""

    def of_all(self, paths: Iterable[Path]) -> str:
        """Return a combined digest of several files, independent of their names and order.

        Raises:
            WeightsError: a file cannot be read.
        """
        pending = deque((path, Future[str]()) for path in paths)
        results = [result for _, result in pending]

        def read() -> None:
            while True:
                try:
                    path, result = pending.popleft()
                except IndexError:
                    return
                _settle(result, partial(self.of, path))

        for _ in range(min(_THREADS, len(results))):
            _start_thread(read)
        digests = sorted(result.result() for result in results)
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def of(self, path: Path, *, reads_again: bool = False) -> str:
        """Return the SHA-256 of a file in hexadecimal digits.

        Args:
            path: the file.
            reads_again: whether to reread the file even if its digest is cached, and replace the
                cached digest. This detects disk corruption, which does not change the file's
                timestamps.

        Raises:
            WeightsError: the file cannot be read.
        """
        try:
            kept = self._folder / f"{_key(path)}.digest"
            with self._reserved(kept):
                digest = "" if reads_again else _read_kept(kept)
                return digest or self._compute(path, kept)
        except OSError as error:
            raise WeightsError(
                f"{path}: {error.strerror or error}; check the file and its permissions"
            ) from error

    def _compute(self, path: Path, kept: Path) -> str:
        key = kept.stem
        began = time.monotonic()
        self.num_read += 1
        digest = hashlib.sha256()
        buffer = bytearray(_PIECE_BYTES)
        view = memoryview(buffer)
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                digest.update(view[:size])
        if _key(path) != key:
            raise WeightsError(f"{path}: the file changed while it was read; start again")
        log.info("%s was read for its digest in %.1f s", path, time.monotonic() - began)
        text = digest.hexdigest()
        with contextlib.suppress(OSError):
            partial = kept.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(text, encoding="ascii")
            partial.replace(kept)
        return text

    @contextlib.contextmanager
    def _reserved(self, kept: Path) -> Iterator[None]:
        """Lock the cache entry of a file's digest within the `with` block.

        Other engines then wait for the digest instead of computing it again. If the cache folder is
        not writable, nothing is locked.
        """
        with contextlib.ExitStack() as stack:
            # If the folder cannot be written and locked, each engine reads the file itself.
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(kept.with_suffix(".digest-lock").open("wb"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def model_digest(files: ModelFiles, folder: Path) -> str:
    """Return the digest of a model's weight files, and cache the digest in `folder`.

    Raises:
        WeightsError: a file is missing or cannot be read.
    """
    return Digests(folder).of_all(_weight_paths(files))


def damage_by_name(files: ModelFiles, folder: Path) -> str:
    """Return an error message if a hub file does not match the SHA-256 in its name, otherwise "".

    The hub client names large files by their SHA-256, but only verifies their sizes. This function
    therefore reads every such file, and caches the digests in `folder` for other callers.

    Raises:
        WeightsError: a file is missing or cannot be read.
    """
    named = [path for path in _weight_paths(files) if _HUB_NAME.fullmatch(path.resolve().name)]
    with ThreadPoolExecutor(_THREADS) as threads:
        digests = threads.map(partial(Digests(folder).of, reads_again=True), named)
        for path, digest in zip(named, digests, strict=True):
            if digest != path.resolve().name:
                return (
                    f"{path}: its SHA-256 is {digest}, but its name is {path.resolve()}; delete "
                    "that file and download the model again"
                )
    return ""


def _weight_paths(files: ModelFiles) -> list[Path]:
    if files.format == "gguf":
        return gguf_parts(files.path)
    if any(files.path.glob("*.safetensors")):
        return weight_files(files.path)
    # Older checkpoints, which vLLM reads, too.
    return sorted([*files.path.glob("*.bin"), *files.path.glob("*.pt")])


Wait = Callable[[Callable[[], None]], str]
"""Function that waits for a digest and returns it. While waiting, it calls its callback
argument about once per second."""


def begin(compute: Callable[[], str]) -> Wait:
    """Run `compute` in a background thread, and return a function that waits for its result.

    Digests of large files take a long time to compute, so the caller can do other work first. An
    error in `compute` is raised by the returned function.
    """
    result: Future[str] = Future()
    _start_thread(lambda: _settle(result, compute))

    def wait(on_wait: Callable[[], None]) -> str:
        while not result.done():
            with contextlib.suppress(TimeoutError):
                return result.result(_WAIT_S)
            on_wait()
        return result.result()

    return wait


def _start_thread(work: Callable[[], None]) -> None:
    # A process that ends early does not wait for a daemon thread, unlike the threads of a pool.
    threading.Thread(target=work, name="digest", daemon=True).start()


def _settle(result: Future[str], compute: Callable[[], str]) -> None:
    try:
        result.set_result(compute())
    except BaseException as error:  # raised again in the thread that waits for the result
        result.set_exception(error)


def _key(path: Path) -> str:
    """Compute a file's cache key from its path, size, inode and timestamps."""
    status = path.stat()
    text = (
        f"{path.resolve()} {status.st_size} {status.st_ino} {status.st_mtime_ns} "
        f"{status.st_ctime_ns}"
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_kept(kept: Path) -> str:
    """Read a digest from the cache file `kept`. Return "" if the file is missing or invalid."""
    try:
        text = kept.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if len(text) == _HEX_DIGITS else ""
