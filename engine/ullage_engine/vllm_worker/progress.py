"""A worker's startup progress, measured by the bytes that it has allocated or written."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ullage_engine.protocol.messages import Loading
from ullage_engine.worker.loop import Report

log = logging.getLogger("ullage.engine.vllm")

_PROGRESS_S = 1.0
"""Seconds between two progress reports of the same stage."""


class StartProgress:
    """Reports startup progress to the server, because vLLM reports none while loading."""

    def __init__(self, report: Report, used_bytes: Callable[[], int]) -> None:
        self._report = report
        self._used_bytes = used_bytes
        self._lock = threading.Lock()
        self._stage = ""
        self._total = 0
        """Number of bytes that the current stage is expected to allocate or write. 0 if unknown."""
        self._first = 0
        """Number of bytes that were in use when the current stage began."""
        self._most = 0
        """Highest number of bytes in use since the current stage began."""

    def begin(self, stage: str, total_bytes: int = 0) -> None:
        """End the current stage, and begin one that needs `total_bytes` bytes (0 if unknown)."""
        with self._lock:
            self._end()
            self._stage = stage
            self._total = total_bytes
            self._first = self._used_bytes()
            self._most = self._first
            self._send(0, total_bytes or 1)

    def repeat(self) -> None:
        """Resend the report of the current stage while this process waits for another process."""
        with self._lock:
            self._send(0, self._total or 1)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Report the current stage's progress inside the `with` block.

        A report is sent at most once per second, and only if more bytes are in use than before.
        """
        ended = threading.Event()

        def look() -> None:
            is_logged = False
            while not ended.wait(_PROGRESS_S):
                try:
                    self._look()
                except Exception:  # without reports, the server would take the worker for hung
                    if not is_logged:
                        log.exception("the progress of loading cannot be measured; retrying")
                    is_logged = True

        thread = threading.Thread(target=look, name="loading", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        self._end()

    def _look(self) -> None:
        with self._lock:
            used = self._used_bytes()
            if used > self._most and self._stage:
                self._most = used
                total = self._total or 1
                self._send(min(used - self._first, total - 1), total)

    def _end(self) -> None:
        if self._stage:
            self._send(self._total, self._total)

    def _send(self, done: int, total: int) -> None:
        self._report(Loading(stage=self._stage, done_bytes=done, total_bytes=total))
