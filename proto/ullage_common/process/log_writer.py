"""Writes log lines without waiting for their reader.

A write to a full pipe blocks until the reader continues. A stalled `kubectl logs`, a stopped
terminal or a full disk on the node would then stop every request. Lines are therefore written
directly if the write cannot block, and otherwise by a thread. If too many lines are queued, further
lines are dropped, and the number of dropped lines is logged.
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
"""Maximum total bytes of queued lines. Further lines are dropped."""
FLUSH_S = 2.0
"""Maximum seconds to wait at process exit for the queued lines to be written."""
_AT_ONCE_BYTES = select.PIPE_BUF
"""Maximum bytes that a pipe accepts in one atomic write."""
DROPPED = "log lines were dropped, because nobody read them"


class LineWriter(logging.Handler):
    """Writes formatted log records to a file descriptor without blocking.

    Args:
        fd: file descriptor. It is never closed, and other writers may use it between two lines.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._direct_fd = _unblocked(fd)
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Empty the queue and forget the writer thread, as a child process must after a fork.

        The parent process still writes the lines that were queued before the fork.
        """
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        """Total bytes of the queued lines and of the line that is being written."""
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record, or queue the record if the write could block."""
        try:
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
            if not self._write_now(line):
                self._enqueue(line)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, but give up after FLUSH_S seconds if nobody reads them.

        `logging` calls this method at process exit.
        """
        until = time.monotonic() + FLUSH_S
        with self._changed:
            while self._waiting_bytes and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())

    def _write_now(self, line: bytes) -> bool:
        """Try to write a line directly, and return False if it must be queued instead.

        A line must be queued if other lines are queued, if it is too long for an atomic write, or
        if the write could block.
        """
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
            if self._thread is None:
                self._start_thread()
            is_full = self._waiting_bytes and self._waiting_bytes + len(line) > MAX_WAITING_BYTES
            # After a dropped line, drop all until the notice of the gap is written.
            if is_full or self._num_dropped:
                self._num_dropped += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._write_all, name="logs", daemon=True)
        # If no thread can be started now, the next line tries again.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def _write_all(self) -> None:
        """Write queued lines in an endless loop, as the body of the writer thread."""
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
    """Return a LineWriter for a stream, or a plain StreamHandler if it has no file descriptor."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError):
        return logging.StreamHandler(stream)
    return LineWriter(fd)


def _unblocked(fd: int) -> int | None:
    """Return a descriptor for non-blocking writes to the same file, or None if that is impossible.

    The given descriptor stays blocking, because other programs may share it and their writes would
    otherwise fail. A regular file never blocks, so its descriptor is returned as is. A socket
    cannot be reopened.
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
