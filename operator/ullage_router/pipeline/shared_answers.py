"""Answers by key as files that all processes of a router have: whichever gets a request, the answer
is generated once.

The first process to get a request with a key generates the answer and appends each event to the
key's file. All others read it from there, from its beginning, while it grows and afterwards. Two
locks (flock), which the kernel releases when a process dies, say who is there: the writer holds
that of the file, so that readers know when no more can come; readers hold that of a second file, so
that the writer goes on when its own client has left.

A file has the digest of its request and the number of its writer, then records: the decision,
Accepted, and the events; at last the mark that nothing is missing.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import struct
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.call import Event, ResponseStream
from ullage_router.policy.decision import Decision

POLL_S = 0.02
"""Seconds between two looks for more of an answer that another process generates."""
MAX_ANSWER_BYTES = 1 << 20
"""Most bytes of an answer that is kept when it is finished."""
_HEADER = struct.Struct("=16sB")
_LENGTH = struct.Struct("=I")
_END = _LENGTH.pack((1 << 32) - 1)
_READERS = ".readers"

log = logging.getLogger(__name__)


class AnswerLost(Exception):
    """The process that generated the answer has ended or given it up."""


class OtherRequest(Exception):
    """The key was sent with another request."""


class _Kept(NamedTuple):
    """A finished answer of this process.

    until: Unix time at which it is forgotten
    identity: of its file, as the key's next answer has the same path
    """

    size: int
    until: float
    identity: tuple[int, int]


class AnswerFolder:
    """The answers that a router's processes share, one file a key.

    Args:
        path: the folder; made if it is missing.
        index: of this process.
        ttl_s: how long finished answers are kept.
        max_bytes: most bytes of finished answers that this process keeps.
        clock: Unix time, seconds.
    """

    def __init__(
        self,
        path: Path,
        index: int,
        ttl_s: float,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._index = index
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self.most_bytes = min(MAX_ANSWER_BYTES, max_bytes)
        """Bytes of the longest answer that is kept."""
        self._kept: OrderedDict[Path, _Kept] = OrderedDict()
        """The first to end first."""
        self.size = 0
        """Bytes of all of them."""
        path.mkdir(mode=0o700, exist_ok=True)
        for file in list(path.iterdir()):
            if file.suffix != _READERS:
                self._adopt(file)
        self._kept = OrderedDict(sorted(self._kept.items(), key=lambda item: item[1].until))

    def claim(self, tenant: str, key: str, digest: bytes) -> "AnswerWriter | AnswerReader":
        """Return the writer of a key's answer, or a reader where it has one already; where no file
        can be written, as on a full disk, the writer of an answer that others do not get.

        Args:
            digest: 16 bytes that say which request it is.
        """
        self._expire()
        name = hashlib.blake2b(f"{tenant}\0{key}".encode(), digest_size=16).hexdigest()
        path = self._path / name
        claim: AnswerWriter | AnswerReader | None = None
        try:
            while claim is None:
                claim = self._open_answer(path, digest)
        except OSError as error:
            _log_unshared(error)
            claim = AnswerWriter(self, path, None)
        return claim

    def _open_answer(self, path: Path, digest: bytes) -> "AnswerWriter | AnswerReader | None":
        """Return None where another answer took the path's place, or must now."""
        with contextlib.ExitStack() as opened:
            readers = _open(path.with_suffix(_READERS))
            opened.callback(os.close, readers)
            fcntl.flock(readers, fcntl.LOCK_SH)
            file = _open(path)
            opened.callback(os.close, file)
            is_free = _try_lock(file, fcntl.LOCK_EX)
            if not (_is_at(file, path) and _is_at(readers, path.with_suffix(_READERS))):
                return None
            if is_free and os.fstat(file).st_size == 0:
                try:
                    _write(file, _HEADER.pack(digest, self._index))
                except OSError:
                    _remove(path)
                    raise
                opened.pop_all()
                os.close(readers)
                return AnswerWriter(self, path, file)
            if not is_free or self._until(file) > self._clock():
                if is_free:
                    fcntl.flock(file, fcntl.LOCK_UN)
                opened.pop_all()
                return AnswerReader(file, readers, digest)
            _remove(path)  # expired, or of a process that died
            return None

    def keep(self, path: Path, file: int) -> None:
        """Keep an answer that this process has finished, of at most `most_bytes`."""
        if path in self._kept:
            self.size -= self._kept.pop(path).size
        self._keep_until(path, file, self._clock() + self._ttl_s)
        while self.size > self._max_bytes:
            self._drop_oldest()

    def _keep_until(self, path: Path, file: int, until: float) -> None:
        size = os.fstat(file).st_size
        self._kept[path] = _Kept(size, until, _identity(file))
        self.size += size

    def _until(self, file: int) -> float:
        """Return when a finished answer ends; 0 where it is not finished."""
        stat = os.fstat(file)
        is_finished = os.pread(file, len(_END), max(0, stat.st_size - len(_END))) == _END
        return stat.st_mtime + self._ttl_s if is_finished else 0.0

    def _adopt(self, path: Path) -> None:
        """Keep what a process of this number had finished when it died, and remove the rest."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # another process has removed it
            return
        try:
            header = os.pread(file, _HEADER.size, 0)
            is_own = len(header) == _HEADER.size and header[-1] == self._index
            if not (is_own and _try_lock(file, fcntl.LOCK_EX) and _is_at(file, path)):
                return
            until = self._until(file)
            if until > self._clock():
                self._keep_until(path, file, until)
            else:
                _remove(path)
        finally:
            os.close(file)

    def _expire(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        path, kept = self._kept.popitem(last=False)
        self.size -= kept.size
        with contextlib.suppress(OSError):  # as where another process has removed it
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _identity(file) == kept.identity:
                    fcntl.flock(file, fcntl.LOCK_EX)  # of a finished answer: had in a moment
                    if _is_at(file, path):
                        _remove(path)
            finally:
                os.close(file)


class AnswerWriter:
    """The file of an answer that this process generates.

    Args:
        file: None: others do not get the answer.
    """

    def __init__(self, folder: AnswerFolder, path: Path, file: int | None) -> None:
        self._folder = folder
        self._path = path
        self._file = file
        """None after the end, too."""

    def append(self, record: bytes) -> None:
        """Add a record. Where the disk is full the answer goes on, and is given up for others."""
        self._add(_LENGTH.pack(len(record)) + record)

    def finish(self) -> None:
        """Mark the answer as whole, and keep it if it is not too long."""
        self._add(_END)
        if self._file is None:
            return
        if os.fstat(self._file).st_size <= self._folder.most_bytes:
            self._folder.keep(self._path, self._file)
        else:
            _remove(self._path)
        os.close(self._file)
        self._file = None

    def give_up(self) -> None:
        """Remove an answer that is not whole; nothing where it is."""
        if self._file is not None:
            _remove(self._path)
            os.close(self._file)
            self._file = None

    def _add(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            _write(self._file, data)
        except OSError as error:
            _log_unshared(error)
            self.give_up()

    def has_readers(self) -> bool:
        """Whether another process reads the answer."""
        if self._file is None:
            return False
        try:
            readers = os.open(self._path.with_suffix(_READERS), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _try_lock(readers, fcntl.LOCK_EX)
        finally:
            os.close(readers)


class AnswerReader:
    """The file of an answer that is generated once, read from its beginning."""

    def __init__(self, file: int, readers: int, digest: bytes) -> None:
        self._file = file
        self._readers = readers
        self._digest = digest
        self._place = _HEADER.size
        self._is_closed = False

    async def begin(self) -> bytes:
        """Wait for the first record.

        Raises:
            AnswerLost: it will not come.
            OtherRequest: the key is another request's.
        """
        if not (await self._read(0, _HEADER.size)).startswith(self._digest):
            raise OtherRequest
        first = await self.next()
        if first is None:
            raise AnswerLost
        return first

    async def next(self) -> bytes | None:
        """Wait for the next record; None after the last.

        Raises:
            AnswerLost: it will not come.
        """
        head = await self._read(self._place, _LENGTH.size)
        if head == _END:
            return None
        record = await self._read(self._place + _LENGTH.size, *_LENGTH.unpack(head))
        self._place += _LENGTH.size + len(record)
        return record

    async def _read(self, place: int, size: int) -> bytes:
        """Wait for these bytes of the file.

        Raises:
            AnswerLost: they will not come.
        """
        is_over = False
        while True:
            data = os.pread(self._file, size, place)
            if len(data) == size:
                return data
            if is_over:
                raise AnswerLost
            # Once more after its writer has gone: what it wrote last may have come in between.
            is_over = _try_lock(self._file, fcntl.LOCK_SH)
            if is_over:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            else:
                await asyncio.sleep(POLL_S)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self._file)
            os.close(self._readers)


class RecordedAnswer:
    """An answer that this process generates and others read."""

    def __init__(self, answer: ResponseStream, decision: Decision, writer: AnswerWriter) -> None:
        self.accepted = answer.accepted
        self._answer = answer
        self._writer = writer
        writer.append(msgspec.msgpack.encode(decision))
        writer.append(answer.accepted.SerializeToString())

    @property
    def output_tokens(self) -> int:
        return self._answer.output_tokens

    async def events(self) -> AsyncGenerator[Event, None]:
        events = self._answer.events()
        try:
            async for event in events:
                self._writer.append(event.SerializeToString())
                if event.HasField("finished"):
                    self._writer.finish()
                yield event
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    def close(self) -> None:
        self._writer.give_up()
        self._answer.close()


class ReplayedAnswer:
    """An answer that another process generates, or has generated.

    Args:
        accepted: the second record, after the decision.
        reader: at the records behind it.
    """

    def __init__(self, accepted: bytes, reader: AnswerReader) -> None:
        self.accepted = inference_pb2.Accepted.FromString(accepted)
        self.output_tokens = 0
        self._reader = reader

    async def events(self) -> AsyncGenerator[Event, None]:
        with contextlib.suppress(AnswerLost):
            while (record := await self._reader.next()) is not None:
                event = Event.FromString(record)
                self.output_tokens += event.delta.num_tokens
                yield event
            return
        raise ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            "ANSWER_LOST",
            "the process of the router that generated the answer has ended; send it again",
            retry_after_s=1,
        )

    def close(self) -> None:
        self._reader.close()


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _write(file: int, data: bytes) -> None:
    """Raise OSError where not all of it was written."""
    if os.write(file, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _log_unshared(error: OSError) -> None:
    log.warning("answer not shared", extra={"reason": error.strerror})


def _identity(file: int) -> tuple[int, int]:
    """Return what tells a finished file from later ones, which may get its number again."""
    stat = os.fstat(file)
    return stat.st_ino, stat.st_mtime_ns


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is the one at the path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _remove(path: Path) -> None:
    """Remove an answer; those that read it keep its file. Only who has the lock of the file at the
    path may, or it could be another answer by then.

    The answer goes last: who opens the two files in between finds it locked, or gone.
    """
    path.with_suffix(_READERS).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
