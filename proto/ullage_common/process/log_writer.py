"""Writes log lines without waiting for their reader.

A write to a full pipe blocks until the reader continues. One stalled `kubectl logs`, a stopped
terminal or a full disk of the node would stop every request. Lines are therefore written directly
if that cannot block, and otherwise by a thread. If too many lines wait, further ones are dropped
and counted, and the count is logged.
"""

import contextlib
import logging
import os
import select
import stat
import threading
import time
from collections import deque
from typing import TextIO

MAX_WAITING_BYTES = 1 << 20
"""Maximum bytes of waiting lines. Further lines are dropped."""
FLUSH_S = 2.0
"""Maximum seconds for which the end of the process waits for a reader."""
_AT_ONCE_BYTES = select.PIPE_BUF
"""Maximum bytes that a pipe takes atomically."""
DROPPED = "log lines were dropped, because nobody read them"


class LineWriter(logging.Handler):
    """Writes formatted records to a file descriptor without waiting.

    Args:
        fd: file descriptor, which stays open. Other writes to it may come between two lines.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._direct_fd = _unblocked(fd)
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Start with an empty queue and no thread, as after a fork.

        The queued lines belong to the parent.
        """
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        """Bytes of the queue and of the line that is being written."""
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or queue it if writing could block."""
        try:
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
            if not self._write_now(line):
                self._enqueue(line)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, but only for a short time if nobody reads them.

        `logging` calls it when the process ends.
        """
        until = time.monotonic() + FLUSH_S
        with self._changed:
            while self._waiting_bytes and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())

    def _write_now(self, line: bytes) -> bool:
        """Write a line at once if no other line is queued and the write does not block."""
        if self._direct_fd is None or self._waiting_bytes or len(line) > _AT_ONCE_BYTES:
            return False
        try:
            written = os.write(self._direct_fd, line)
        except BlockingIOError:
            return False
        except OSError:  # the reader has gone
            return True
        if written < len(line):
            self._enqueue(line[written:])
        return True

    def _enqueue(self, line: bytes) -> None:
        with self._changed:
            # A line may have any length if nothing waits, or it could never be written.
            is_full = self._waiting_bytes and self._waiting_bytes + len(line) > MAX_WAITING_BYTES
            # After a dropped line, drop all until the notice of the gap is written.
            if is_full or self._num_dropped:
                self._num_dropped += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="logs", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _write_all(self) -> None:
        """Write queued lines forever."""
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                line = self._waiting.popleft()
            _write_whole(self._fd, line)
            with self._changed:
                self._waiting_bytes -= len(line)
                if not self._waiting and self._num_dropped:
                    notice = self._notice(self._num_dropped)
                    self._num_dropped = 0
                    self._waiting.append(notice)
                    self._waiting_bytes += len(notice)
                self._changed.notify_all()

    def _notice(self, num_dropped: int) -> bytes:
        record = logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING"})
        record.name = __name__
        record.msg = DROPPED
        vars(record)["dropped"] = num_dropped
        return self.format(record).encode(errors="backslashreplace") + b"\n"


def new_handler(stream: TextIO) -> logging.Handler:
    """Return a handler for a stream: a LineWriter if the stream has a file descriptor."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError):
        return logging.StreamHandler(stream)
    return LineWriter(fd)


def _unblocked(fd: int) -> int | None:
    """Return a non-blocking descriptor of the same file, or None if that is impossible.

    Other programs may share the given descriptor, and their writes would fail if it did not block.
    A regular file never blocks, and a socket cannot be opened again.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return None
    with contextlib.suppress(OSError):
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return None


def _write_whole(fd: int, line: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader has gone
        while line:
            line = line[os.write(fd, line) :]
