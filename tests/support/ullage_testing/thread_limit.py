"""A limit on threads, as a container with few processes has it."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest


@contextlib.contextmanager
def no_new_threads() -> Iterator[None]:
    """Let every start of a thread fail in the `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        yield


def _refuse(thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")
