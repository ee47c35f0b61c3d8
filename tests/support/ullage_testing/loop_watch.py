"""Measures how long an event loop serves nobody, in CPU time, so that a busy machine fails no test.

A loop stands still while a callback computes, and while a thread keeps the interpreter's lock.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator

MOST_S = 0.05
"""Longest time that the loop's own thread may compute for clients at a time."""
MOST_HELD_S = 0.25
"""Longest that threads may seem to keep the lock. It is 0.05 where the machine has nothing else to
do. The loop may wait for a core as well while a thread computes, which looks the same."""
TICK_S = 0.001


class LoopWatch:
    """The longest times between two turns of a timer.

    turn_s
        CPU seconds of the loop's own thread
    stall_s
        CPU seconds of all threads of the process. Never more than passed on the clock
    """

    def check(self) -> None:
        """Assert that others were served all the time."""
        assert self.turn_s <= MOST_S, f"the loop computed for {self.turn_s:.3f} s"
        assert self.stall_s <= MOST_HELD_S, f"threads kept the lock for {self.stall_s:.3f} s"

    def __init__(self) -> None:
        self.turn_s = 0.0
        self.stall_s = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            began = time.monotonic()
            thread_s = time.thread_time()
            process_s = time.process_time()
            await asyncio.sleep(TICK_S)
            passed_s = time.monotonic() - began
            self.turn_s = max(self.turn_s, time.thread_time() - thread_s)
            self.stall_s = max(self.stall_s, min(passed_s, time.process_time() - process_s))


@contextlib.asynccontextmanager
async def watched_loop() -> AsyncIterator[LoopWatch]:
    """Watch the running loop within the block.

    As in the servers, a search for garbage leaves out the objects that were there before. A process
    with many tests has so many of them that the search alone takes 0.1 s.
    """
    gc.collect()
    gc.freeze()
    watch = LoopWatch()
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(5 * TICK_S)
    try:
        yield watch
        await asyncio.sleep(5 * TICK_S)
    finally:
        task.cancel()
        gc.unfreeze()
