"""A pod's log file: bounded in size, and written only while its disk allows it."""

import contextlib
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path

MAX_BYTES = 64 << 20
"""Size at which a log file is rotated."""
TAIL_LINES = 5
"""Number of log lines to show in the error if a pod printed no error message itself."""


def rotated(path: Path) -> Path:
    """Return the path of the older log, which the last rotation of a log has made."""
    return path.with_name(f"{path.name}.1")


class PodLog:
    """Appends the lines of a pod to its log file, and keeps one older file.

    Lines are dropped while the file cannot be written, because a pod must not stop for its log.

    Args:
        path: the file. It is created with the first line.
        on_trouble: called with the reason when lines begin to be dropped.
    """

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        self._path = path
        self._on_trouble = on_trouble
        self._file: FileIO | None = None
        self._is_dropping = False
        self._recent: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> str:
        """The last TAIL_LINES lines, even if the file could not be written."""
        return "\n".join(self._recent)

    def write(self, line: str) -> None:
        """Append one line."""
        self._recent.append(line)
        try:
            self._append(f"{line}\n".encode())
        except OSError as error:
            self.close()
            if not self._is_dropping:
                self._is_dropping = True
                self._on_trouble(
                    f"its log {self._path} cannot be written: {error.strerror}; lines are dropped "
                    "until you make space there"
                )
        else:
            self._is_dropping = False

    def close(self) -> None:
        """Close the file. The next line opens it again."""
        file = self._file
        self._file = None
        if file is not None:
            with contextlib.suppress(OSError):  # a network disk may be full as late as here
                file.close()

    def _append(self, data: bytes) -> None:
        # Each line is written at once: the user may read along, and a crash must lose no line.
        if self._file is None:
            self._file = FileIO(self._path, "a")
        if self._is_dropping:
            data = b"\n" + data  # the line before may be incomplete

        size = self._file.tell()
        if size and size + len(data) > MAX_BYTES:
            self.close()
            self._path.replace(rotated(self._path))
            self._file = FileIO(self._path, "a")

        while data:
            data = data[self._file.write(data) or 0 :]
