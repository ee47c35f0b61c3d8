"""The engine's current status and its health score, which drops after each fault."""

import asyncio
import bisect
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ullage_common.request_cost import MemoryProfile
from ullage_engine.protocol.messages import Ready
from ullage_engine.protocol.worker_state import WorkerState
from ullage_kv import TierStats

_OOM_FACTOR = 0.8
"""Factor applied to the health score when a step runs out of memory but succeeds on retry."""

_NO_PROFILE = MemoryProfile(block_tokens=16, groups=())


class HealthScore:
    """Health score from 0 to 1 (healthy), which drops after each fault and recovers over time."""

    def __init__(self, recovery_s: float = 60.0) -> None:
        self._recovery_s = recovery_s
        self._loss = 0.0
        self._since = 0.0

    def value(self, now: float) -> float:
        """Return the score: 1 - loss * e^(-t / recovery), with t the time since the last fault."""
        return 1.0 - self._loss * math.exp(-(now - self._since) / self._recovery_s)

    def fault(self, now: float, factor: float = 0.5) -> None:
        self._loss = 1.0 - self.value(now) * factor
        self._since = now


class StepTolerances:
    """Step-time limits of the open requests, in seconds.

    A request's limit is the longest that steps may take if its answer is still to arrive in time.
    The engine reports the lowest limit, so that routers do not send it requests that would make its
    steps take longer.
    """

    def __init__(self) -> None:
        self._ordered: list[float] = []

    @property
    def shortest_s(self) -> float:
        """Return the lowest step-time limit of any open request in seconds, or 0 without limits."""
        return self._ordered[0] if self._ordered else 0.0

    @contextlib.contextmanager
    def held(self, limit_s: float) -> Iterator[None]:
        """Apply a step-time limit for the duration of a `with` block. 0 means no limit."""
        if limit_s <= 0.0:
            yield
            return
        bisect.insort(self._ordered, limit_s)
        try:
            yield
        finally:
            del self._ordered[bisect.bisect_left(self._ordered, limit_s)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """A configured LoRA adapter's state."""

    name: str
    rank: int
    is_served: bool
    """Whether requests may use the adapter."""
    digest: str
    """Digest of the served files, or "" if none are served."""
    error: str
    """Why the configured files cannot be served, or "" if they are served or still loading."""


class EngineStatus:
    """The worker's latest report and the engine's own status. Every change wakes all watchers."""

    def __init__(self) -> None:
        self.epoch = time.time_ns()
        self.ready: Ready | None = None
        """Description of the loaded model, kept while a worker is being replaced."""
        self.state: WorkerState | None = None
        self.serving = False
        """Whether a worker is loaded and accepts requests."""
        self.is_preparing = False
        """Whether adapters configured at startup are still loading."""
        self.adapters: tuple[AdapterState, ...] = ()
        self.draining = False
        self.worker_restarts = 0
        """Number of workers that exited unexpectedly."""
        self.worker_start_s = 0.0
        """Expected start time of the next worker, in seconds, or 0 if unknown."""
        self.live = True
        """Whether starting another worker may help. If not, only a new pod can help."""
        self.not_ready_reason = ""
        """Why this engine refuses requests and has stopped serving, or "" if it has not."""
        self.created = int(time.time())
        self.step_limits = StepTolerances()
        self.throttle_reasons: frozenset[str] = frozenset()
        """Reasons why GPU throttling has reduced the batch size. Empty while it is not reduced."""
        self.tiers: Callable[[], list[TierStats]] = list
        """Function that returns the statistics of KV tiers outside the device."""
        self._health = HealthScore()
        self._is_loss_counted = False
        """Whether the health score has fallen for a killed worker whose process may still run."""
        self._changed = asyncio.Event()

    @property
    def health(self) -> float:
        return self._health.value(time.monotonic())

    @property
    def is_ready(self) -> bool:
        """Whether a worker is serving and the initial adapters no longer delay readiness."""
        return self.serving and not self.is_preparing

    @property
    def profile(self) -> MemoryProfile:
        return self.ready.profile if self.ready else _NO_PROFILE

    @property
    def headroom_bytes(self) -> int:
        """Return the KV bytes that a new request may use, or 0 while no worker serves."""
        return self.state.headroom_bytes if self.state and self.serving else 0

    def worker_ready(self, ready: Ready) -> None:
        self.ready = ready
        self.state = ready.state
        self.serving = True
        self.live = True
        self._wake()

    def set_preparing(self, is_preparing: bool) -> None:
        if is_preparing != self.is_preparing:
            self.is_preparing = is_preparing
            self._wake()

    def set_adapters(self, adapters: tuple[AdapterState, ...]) -> None:
        if adapters != self.adapters:
            self.adapters = adapters
            self._wake()

    def set_live(self, live: bool) -> None:
        self.live = live
        self._wake()

    def worker_state(self, state: WorkerState) -> None:
        """Record a worker's report. Newly reported out-of-memory errors lower the health score."""
        num_survived = state.num_oom_events - (self.state.num_oom_events if self.state else 0)
        self.state = state
        for _ in range(num_survived):
            self._health.fault(time.monotonic(), _OOM_FACTOR)
        self._wake()

    def set_throttle_reasons(self, reasons: frozenset[str]) -> None:
        self.throttle_reasons = reasons
        self._wake()

    def worker_killed(self) -> None:
        """Record that the worker serves no longer, even if its process has not ended yet."""
        if self.serving:
            self.serving = False
            self._is_loss_counted = True
            self.fault()

    def worker_lost(self) -> None:
        """Record that the worker's process has ended. One worker counts as one fault."""
        self.serving = False
        self.worker_restarts += 1
        if not self._is_loss_counted:
            self.fault()
        self._is_loss_counted = False
        self._wake()

    def fault(self, factor: float = 0.5) -> None:
        """Lower the health score after a fault, by multiplying it by `factor`.

        The score recovers over time.
        """
        self._health.fault(time.monotonic(), factor)
        self._wake()

    def stay_out(self, reason: str) -> None:
        """Stop serving and refuse requests. Report `reason` as why the engine is not ready."""
        self.serving = False
        self.not_ready_reason = reason
        self._wake()

    def return_to_service(self) -> None:
        """Accept requests again after `stay_out`. The next worker will serve them."""
        self.not_ready_reason = ""
        self._wake()

    def drain(self) -> None:
        """Refuse new requests permanently, but let open requests finish."""
        self.draining = True
        self._wake()

    async def changed(self, within_s: float) -> None:
        """Wait up to `within_s` seconds for the next status change."""
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        waiting = self._changed
        self._changed = asyncio.Event()
        waiting.set()
