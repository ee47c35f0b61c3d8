"""Runs a command's coroutine so that SIGTERM interrupts it in the way that SIGINT does."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def raise_at_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, so that `with` blocks end kubectl and free resources."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine as `asyncio.run` does, and cancel it at the first SIGINT or SIGTERM.

    An exception in the middle of a callback would end the event loop, and leave tasks unfinished.
    Afterwards, SIGTERM raises KeyboardInterrupt.

    Raises:
        KeyboardInterrupt: a signal has interrupted the coroutine.
    """

    async def interruptible() -> ResultT:
        # The handler that asyncio has set for SIGINT cancels this task.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        return await coroutine

    try:
        return asyncio.run(interruptible())
    finally:
        raise_at_sigterm()
