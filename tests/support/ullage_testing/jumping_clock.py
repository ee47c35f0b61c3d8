"""An event loop whose clock a test sets forward, so that minutes of waiting take no time."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock is the real one and what was jumped over."""

    jumped_s = 0.0

    def time(self) -> float:
        return super().time() + self.jumped_s

    async def jump(self, seconds: float) -> None:
        """Sets the clock forward when tasks have begun what they wait for, and lets everything that
        is due by then happen."""
        await _turns()
        self.jumped_s += seconds
        await _turns()


class StandingLoop(JumpingLoop):
    """Its clock stands still but for what was jumped over, so that no tick comes between two lines
    of a test."""

    def time(self) -> float:
        return 1000.0 + self.jumped_s


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(scenario: Coroutine[Any, Any, None], loop: type[JumpingLoop] = JumpingLoop) -> None:
    """Runs a scenario on such a loop."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario)


def clock() -> JumpingLoop:
    """The running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    return loop
