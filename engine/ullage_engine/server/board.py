"""What is known of the engine at this moment, in one place, for whoever watches it."""

import asyncio
import time

from ullage_engine.messages import Profile, Ready, WorkerState
from ullage_engine.server.policy import HealthScore

_NO_PROFILE = Profile(
    block_tokens=16,
    groups=[],
    state_bytes_per_sequence=0,
    activation_bytes_per_token=0,
    sampler_bytes_per_sequence=0,
    prefill_chunk_tokens=0,
    kv_pool_bytes=0,
)


class Board:
    """The worker's last words and the engine's own condition.

    Written by the supervisor and by draining; every write wakes all watchers.
    """

    def __init__(self) -> None:
        self.epoch = time.time_ns()
        self.ready: Ready | None = None
        """Facts of the loaded model; kept while a worker is being replaced."""
        self.state: WorkerState | None = None
        self.serving = False
        """A worker is loaded and steps."""
        self.draining = False
        self.worker_restarts = 0
        """Workers that ended unasked."""
        self.live = True
        """False while starting one more worker is not expected to help."""
        self.created = int(time.time())
        self._health = HealthScore()
        self._changed = asyncio.Event()

    @property
    def health(self) -> float:
        return self._health.value(time.monotonic())

    @property
    def profile(self) -> Profile:
        return self.ready.profile if self.ready else _NO_PROFILE

    @property
    def headroom_bytes(self) -> int:
        """KV bytes a new request may take; none while no worker serves."""
        return self.state.headroom_bytes if self.state and self.serving else 0

    def worker_ready(self, ready: Ready) -> None:
        self.ready, self.state, self.serving, self.live = ready, ready.state, True, True
        self._wake()

    def set_live(self, live: bool) -> None:
        self.live = live
        self._wake()

    def worker_state(self, state: WorkerState) -> None:
        self.state = state
        self._wake()

    def worker_lost(self) -> None:
        self.serving = False
        self.worker_restarts += 1
        self.fault()

    def fault(self, factor: float = 0.5) -> None:
        """Lowers the health, which recovers with time."""
        self._health.fault(time.monotonic(), factor)
        self._wake()

    def drain(self) -> None:
        """From now on no new request is taken; there is no way back."""
        self.draining = True
        self._wake()

    async def changed(self, within_s: float) -> None:
        """Returns at the next change, or when the time is up."""
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()
