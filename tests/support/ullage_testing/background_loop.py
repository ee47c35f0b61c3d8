"""An event loop in a thread, for servers that are tested by clients which block."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import uvloop
from ullage_testing.loop_watch import LoopWatch

T = TypeVar("T")


class BackgroundLoop:
    """A loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()  # as the programs have it
        self._stack = contextlib.AsyncExitStack()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns that runs in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    def enter(self, manager: contextlib.AbstractAsyncContextManager[T]) -> T:
        """Enter a context manager and return its value. The context ends with the loop."""
        return self.run(self._stack.enter_async_context(manager))

    @contextlib.contextmanager
    def watching(self) -> Iterator[LoopWatch]:
        """Watch the loop within the block. Of what is seen `turn_s` counts, the loop's own time:
        clients in this process compute as well."""
        watch = LoopWatch()
        task = asyncio.run_coroutine_threadsafe(watch.run(), self._loop)
        try:
            yield watch
        finally:
            task.cancel()

    @property
    def num_tasks(self) -> int:
        """Number of tasks that are not done."""
        return len(asyncio.all_tasks(self._loop))

    def run_forever(self) -> None:
        self._loop.run_forever()

    async def close(self) -> None:
        await self._stack.aclose()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def end(self) -> None:
        self._loop.close()


@contextlib.contextmanager
def background_loop() -> Iterator[BackgroundLoop]:
    """Run a loop in a thread within the block."""
    loop = BackgroundLoop()
    thread = threading.Thread(target=loop.run_forever, name="background loop")
    thread.start()
    try:
        try:
            yield loop
        finally:
            loop.run(loop.close())
    finally:
        loop.stop()
        thread.join()
        loop.end()
