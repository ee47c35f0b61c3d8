"""Runs work in daemon threads, which do not delay process exit."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_daemon(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` as `asyncio.to_thread` would, but in a daemon thread that does not delay exit."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(result)
