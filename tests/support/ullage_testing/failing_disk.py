"""A disk that cannot be read for a while."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class FailingDisk:
    """Fails to open files of one folder, as often as it is told to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_failures_left = 0
        self._folder = folder
        self._open: Callable[..., Any] = Path.open
        monkeypatch.setattr(Path, "open", lambda path, *given, **more: self.open(path, given, more))

    def open(self, path: Path, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
        mode = more.get("mode") or (given[0] if given else "r")
        if path.parent == self._folder and "r" in mode and self.num_failures_left:
            self.num_failures_left -= 1
            raise OSError(errno.EIO, "Input/output error")
        return self._open(path, *given, **more)
