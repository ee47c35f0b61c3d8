"""Load that lasts: calls that threads make again and again."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def repeating(call: Callable[[], Any], times: int) -> Iterator[None]:
    """Calls from so many threads again and again, until the block ends."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            call()

    with concurrent.futures.ThreadPoolExecutor(times) as pool:
        done = [pool.submit(repeat) for _ in range(times)]
        try:
            yield
        finally:
            is_over.set()
    for each in done:
        each.result()
