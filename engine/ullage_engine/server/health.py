"""Health of the engine and its worker: the present status, who is told of it, hang detection and
restarts.

`HangDetector` is pure, so that every case can be tested without waiting for it; `ProcStats` is what
/proc says of a worker and of the ranks it started.
"""

import asyncio
import bisect
import contextlib
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from ullage.headroom.v1 import headroom_pb2 as headroom_pb
from ullage.headroom.v1 import headroom_pb2_grpc as headroom_rpc
from ullage_common.config.engine import EngineConfig
from ullage_common.request_cost import MemoryProfile
from ullage_engine.protocol.messages import Ready
from ullage_engine.protocol.worker_state import WorkerState
from ullage_kv import TierStats


@dataclass(frozen=True)
class RestartPolicy:
    """Limits of the supervisor; all times are seconds."""

    first_backoff_s: float = 0.5
    """Seconds before the second restart in a row; the first is immediate, the later ones double
    it."""
    max_backoff_s: float = 10.0
    max_failures: int = 8
    """Workers in a row that may die without having served before the engine gives up."""
    stable_after_s: float = 30.0
    """Age in seconds at which an idle worker counts as having served."""
    max_unproven: int = 3
    """Starts in a row that fail their proof after which the engine stays out."""
    max_deaths: int = 3
    """Workers that may have died of a request since its last decode before it is given up. In all
    but one of these deaths nothing else can have been the cause."""
    trial_s: float = 5.0
    """Seconds from a worker's start for which requests that the last one may have died of are tried
    alone, one after the other. A request that two may have died of is tried as long as it takes."""
    step_deadline_s: float = 30.0
    """Seconds after which a worker that has work and finishes no step hangs, whatever it does."""
    load_silence_s: float = 600.0
    """Seconds after which a worker that is loading and reports no progress hangs."""
    standby_import_s: float = 120.0
    """Seconds in which a worker that stands by has to import its libraries."""
    slow_steps: float = 20.0
    """Multiple of its slowest step after which a worker that uses no processor time hangs."""
    min_suspect_s: float = 2.0
    """Least seconds without processor time after which a worker hangs, however short its steps."""
    long_steps: float = 3.0
    """Multiple of its longest step after which a worker hangs, by the processor time that its
    busiest thread has had: neighbours on the same cores do not count."""
    min_busy_s: float = 8.0
    """Least seconds of that processor time, however short its steps."""
    slow_start_steps: int = 16
    """Steps after which a worker is as fast as it gets; before, it has twice the time."""
    stopped_after_s: float = 1.0
    """Seconds after which a worker that a signal has stopped hangs, working or not."""
    stop_grace_s: float = 3.0
    """Seconds between asking a worker to stop and killing it."""

    def backoff(self, num_failures: int) -> float | None:
        """Return the seconds before the next start after so many failures in a row (at least 1).

        None: the budget is spent.
        """
        if num_failures > self.max_failures:
            return None
        if num_failures == 1:
            return 0.0
        return min(self.max_backoff_s, self.first_backoff_s * 2.0 ** (num_failures - 2))

    def runs_alone(self, deaths: int, serving_s: float) -> bool:
        """Return whether a request runs alone until a worker has survived a decode of it.

        Args:
            deaths: workers that may have died of it since its last decode.
            serving_s: seconds for which the present worker has been ready.
        """
        return deaths > 1 or (deaths == 1 and serving_s < self.trial_s)

    def is_given_up(self, deaths: int, lone_deaths: int, *, is_short: bool = False) -> bool:
        """Return whether a request ends.

        Args:
            deaths: workers that may have died of it since its last decode.
            lone_deaths: those of them that nothing else can have died of.
            is_short: whether the last one died since others had taken its memory; the request is
                not to blame then, and may be sent again.
        """
        return deaths >= self.max_deaths and (is_short or lone_deaths >= self.max_deaths - 1)

    def is_last_chance(self, num_failures: int) -> bool:
        """Whether one more failure in a row ends the engine: a new pod is likelier to help."""
        return num_failures >= self.max_failures

    def busy_after_s(self, longest_step_s: float, num_steps: int) -> float:
        """Return the seconds of computing without an end of its step after which a worker hangs.

        Args:
            longest_step_s: its longest step; 0: unknown, so that only the deadline holds.
            num_steps: steps that it has done.
        """
        if longest_step_s <= 0.0:
            return self.step_deadline_s

        threshold_s = max(self.min_busy_s, self.long_steps * longest_step_s)
        return min(threshold_s * self._slow_start(num_steps), self.step_deadline_s)

    def suspect_after_s(
        self, slowest_step_s: float | None, longest_step_s: float, num_steps: int
    ) -> float:
        """Return the seconds without processor time after which a worker with work hangs.

        clamp(slow_steps * slowest recent step, min_suspect_s, busy_after_s); with no step known
        yet the latter.
        """
        busy_after_s = self.busy_after_s(longest_step_s, num_steps)
        if slowest_step_s is None:
            return busy_after_s
        threshold_s = max(self.min_suspect_s, self.slow_steps * slowest_step_s)
        return min(threshold_s * self._slow_start(num_steps), busy_after_s)

    def _slow_start(self, num_steps: int) -> float:
        return 2.0 if num_steps < self.slow_start_steps else 1.0


class HealthScore:
    """A score from 0 to 1 (healthy): each fault multiplies it, and the loss decays with time."""

    def __init__(self, recovery_s: float = 60.0) -> None:
        self._recovery_s = recovery_s
        self._loss = 0.0
        self._since = 0.0

    def value(self, now: float) -> float:
        """Return 1 - loss * e^(-t / recovery), t seconds after the last fault."""
        return 1.0 - self._loss * math.exp(-(now - self._since) / self._recovery_s)

    def fault(self, now: float, factor: float = 0.5) -> None:
        self._loss = 1.0 - self.value(now) * factor
        self._since = now


@dataclass(frozen=True, slots=True)
class ProcStats:
    """What the kernel says of one process, over all its threads, or of several together."""

    is_stopped: bool
    """Whether a signal has stopped it: it goes on only when another one says so."""
    is_waiting: bool
    """Whether every thread sleeps until something happens; none runs, waits for a core or for a
    disk."""
    cpu_ticks: int
    """Processor time so far, in ticks of the kernel (10 ms), that of its ended children
    included."""
    thread_ticks: Mapping[int, int] = field(default_factory=dict)
    """Processor time so far of each thread, by its id."""


def read_proc_stats(pid: int) -> ProcStats | None:
    """Read the stats of a process and its children as one; None when it is gone.

    A rank waits for the others most of the time, so one that sleeps means nothing by itself; and
    one that is stopped stops them all.
    """
    own = _read(pid)
    if own is None:
        return None
    group = [own, *(stats for child in _children(pid) if (stats := _read(child)) is not None)]
    return ProcStats(
        is_stopped=any(each.is_stopped for each in group),
        is_waiting=all(each.is_waiting for each in group),
        cpu_ticks=sum(each.cpu_ticks for each in group),
        thread_ticks={tid: ticks for each in group for tid, ticks in each.thread_ticks.items()},
    )


def _read(pid: int) -> ProcStats | None:
    try:
        process = _fields(Path(f"/proc/{pid}/stat"))
        tasks = Path(f"/proc/{pid}/task").iterdir()
        threads = {int(path.name): _fields(path / "stat") for path in tasks}
    except (FileNotFoundError, ProcessLookupError):
        return None
    states = {fields[0] for fields in threads.values()}
    return ProcStats(
        is_stopped=states == {"T"},
        is_waiting=states <= {"S", "I", "T"},
        cpu_ticks=_ticks(process[11:15]),
        thread_ticks={tid: _ticks(fields[11:13]) for tid, fields in threads.items()},
    )


def _ticks(fields: list[str]) -> int:
    return sum(int(each) for each in fields)


def _children(pid: int) -> list[int]:
    """List the children of the main thread, which starts all ranks."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _fields(path: Path) -> list[str]:
    """Return a stat file's fields from the third, the state, on; the second may hold blanks."""
    return path.read_text().rpartition(")")[2].split()


# Steps are alike for a while: the slowest of so many bounds the next one's order of magnitude.
_RECENT_STEPS = 128
# Among so many there are long ones, too: with prompts, in a long context, beside busy neighbours.
_REMEMBERED_STEPS = 1024
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Time between two ticks counts no longer than this. When the detector itself could not run - it was
# stopped, its container was frozen, its core was taken - the worker's messages are still unread.
MAX_TICK_S = 0.5


class HangDetector:
    """Measures how long a worker has been silent, asleep, busy and without progress, from tick to
    tick.

    The longest step bounds the next one: what a worker measured at its start, or a longer one of
    those remembered. A worker whose busiest thread has computed many times as long hangs, whether
    neighbours took its cores meanwhile or not. A worker that measured nothing has the deadline.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._steps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._num_steps = 0
        self._measured_step_s = 0.0
        self._silent_s = 0.0
        self._still_s = 0.0
        self._stopped_s = 0.0
        self._waiting_s = 0.0
        self._cpu_ticks: int | None = None
        self._thread_ticks: Mapping[int, int] | None = None
        """Processor time of each thread when the worker was first looked at in its silence."""
        self._busy_s = 0.0
        """Processor time that the busiest thread has had since."""

    @property
    def is_suspect(self) -> bool:
        """Whether the worker is silent for longer than any healthy one, so that /proc is worth
        reading."""
        return self._silent_s > MAX_TICK_S

    @property
    def longest_step_s(self) -> float:
        """The longest step that is known; 0 where the worker measured none at its start."""
        if self._measured_step_s <= 0.0:
            return 0.0
        return max(self._measured_step_s, max(self._steps, default=0.0))

    def on_ready(self, longest_step_s: float) -> None:
        """Record the longest step as a worker measured it at its start; 0: it did not."""
        self._measured_step_s = longest_step_s
        self.on_progress()

    def on_message(self) -> None:
        """Records that the worker sent a message."""
        self._silent_s = self._still_s = self._stopped_s = self._busy_s = 0.0
        self._cpu_ticks = None
        self._thread_ticks = None

    def on_progress(self) -> None:
        """Record a finished step or a stage of loading. A heartbeat alone is no progress."""
        self._waiting_s = 0.0

    def on_step(self, seconds: float) -> None:
        """Record a finished step that took `seconds`."""
        self._steps.append(seconds)
        self._num_steps += 1
        self.on_progress()

    def tick(self, elapsed_s: float, *, is_loading: bool, has_work: bool) -> None:
        """Count the time since the last tick."""
        elapsed_s = min(elapsed_s, MAX_TICK_S)
        self._silent_s += elapsed_s
        # Without work a worker owes nothing: the time it takes counts from when it gets some.
        self._waiting_s = self._waiting_s + elapsed_s if is_loading or has_work else 0.0

    def observe(self, stats: ProcStats, elapsed_s: float) -> None:
        """Count the time since the last tick by what the kernel says of the worker."""
        elapsed_s = min(elapsed_s, MAX_TICK_S)
        is_still = stats.is_waiting and stats.cpu_ticks == self._cpu_ticks
        self._cpu_ticks = stats.cpu_ticks
        self._still_s = self._still_s + elapsed_s if is_still else 0.0
        self._stopped_s = self._stopped_s + elapsed_s if stats.is_stopped else 0.0

        before = self._thread_ticks
        if before is None:
            before = self._thread_ticks = stats.thread_ticks
        spent = (ticks - before.get(tid, ticks) for tid, ticks in stats.thread_ticks.items())
        self._busy_s = max(spent, default=0) / _TICKS_PER_S

    def reason(self, *, is_loading: bool) -> str:
        """Return why the worker counts as hung; empty while it does not."""
        policy = self._policy
        if self._stopped_s > policy.stopped_after_s:
            return "stopped by a signal"
        if is_loading:
            return "silent while loading" if self._waiting_s > policy.load_silence_s else ""
        if self._waiting_s > policy.step_deadline_s:
            return "no step within the deadline"

        longest_s = self.longest_step_s
        num_steps = self._num_steps
        recent = list(self._steps)[-_RECENT_STEPS:]
        suspect_s = policy.suspect_after_s(max(recent, default=None), longest_s, num_steps)
        if min(self._waiting_s, self._still_s) > suspect_s:
            return "asleep in a step"
        if longest_s > 0.0 and min(self._waiting_s, self._busy_s) > policy.busy_after_s(
            longest_s, num_steps
        ):
            return "busy in a step without an end"
        return ""


class StepLimits:
    """The longest steps that requests bear, in seconds, of those that are open."""

    def __init__(self) -> None:
        self._ordered: list[float] = []

    @property
    def shortest_s(self) -> float:
        """The shortest of them; 0 where there is none."""
        return self._ordered[0] if self._ordered else 0.0

    @contextlib.contextmanager
    def held(self, limit_s: float) -> Iterator[None]:
        """Keep a limit within the block; 0 is none."""
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
    """A wanted LoRA adapter."""

    name: str
    rank: int
    is_served: bool
    """Whether requests may name it."""
    digest: str
    """Digest of the files that are served; empty: none are."""
    error: str
    """Why its files cannot be served as they are wanted now; empty: they are, or will be."""


_OOM_FACTOR = 0.8
"""Share of the health that is left by a step that ran out of memory and was computed after all."""

_NO_PROFILE = MemoryProfile(block_tokens=16, groups=())


class EngineStatus:
    """The worker's latest report and the engine's own condition.

    Written by the supervisor and by draining; every write wakes all watchers.
    """

    def __init__(self) -> None:
        self.epoch = time.time_ns()
        self.ready: Ready | None = None
        """Facts of the loaded model; kept while a worker is being replaced."""
        self.state: WorkerState | None = None
        self.serving = False
        """Whether a worker is loaded and steps."""
        self.is_preparing = False
        """Whether the adapters that the engine starts with are not loaded yet."""
        self.adapters: tuple[AdapterState, ...] = ()
        self.draining = False
        self.worker_restarts = 0
        """Number of workers that ended unasked."""
        self.live = True
        """Whether one more worker may help; False when only a new pod can."""
        self.not_ready_reason = ""
        """Why no worker serves and none will be started; empty while one does or will."""
        self.created = int(time.time())
        self.step_limits = StepLimits()
        self.throttle_reasons: frozenset[str] = frozenset()
        """Why boost is off; empty while it is not."""
        self.tiers: Callable[[], list[TierStats]] = list
        """Returns the figures of KV tiers outside the device."""
        self._health = HealthScore()
        self._changed = asyncio.Event()

    @property
    def health(self) -> float:
        return self._health.value(time.monotonic())

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves all that it started with."""
        return self.serving and not self.is_preparing

    @property
    def profile(self) -> MemoryProfile:
        return self.ready.profile if self.ready else _NO_PROFILE

    @property
    def headroom_bytes(self) -> int:
        """Returns the KV bytes a new request may take; 0 while no worker serves."""
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
        """Take a worker's report; steps that ran out of memory since the last lower the health."""
        num_survived = state.num_oom_events - (self.state.num_oom_events if self.state else 0)
        self.state = state
        for _ in range(num_survived):
            self._health.fault(time.monotonic(), _OOM_FACTOR)
        self._wake()

    def set_throttle_reasons(self, reasons: frozenset[str]) -> None:
        self.throttle_reasons = reasons
        self._wake()

    def worker_lost(self) -> None:
        self.serving = False
        self.worker_restarts += 1
        self.fault()

    def fault(self, factor: float = 0.5) -> None:
        """Lowers the health, which recovers with time."""
        self._health.fault(time.monotonic(), factor)
        self._wake()

    def stay_out(self, reason: str) -> None:
        """Serve nothing from now on; there is no way back."""
        self.serving = False
        self.not_ready_reason = reason
        self._wake()

    def drain(self) -> None:
        """Refuse new requests from now on; there is no way back."""
        self.draining = True
        self._wake()

    async def changed(self, within_s: float) -> None:
        """Wait for the next change, or until the time is up."""
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        waiting = self._changed
        self._changed = asyncio.Event()
        waiting.set()


HEARTBEAT_S = 1.0
DEFAULT_INTERVAL_S = 0.1
MAX_RELEASES = 32


class HeadroomService(headroom_rpc.HeadroomServiceServicer):
    """Streams the engine's free memory; every stream numbers its own pushes."""

    def __init__(self, config: EngineConfig, engine_status: EngineStatus) -> None:
        self._config = config
        self._engine_status = engine_status

    async def GetHeadroom(
        self,
        request: headroom_pb.GetHeadroomRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> headroom_pb.GetHeadroomResponse:
        return headroom_pb.GetHeadroomResponse(headroom=self._headroom(sequence=0))

    async def WatchHeadroom(
        self,
        request: headroom_pb.WatchHeadroomRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        interval_s = request.min_interval_ms / 1000 or DEFAULT_INTERVAL_S
        for sequence in itertools.count(1):
            pushed_at = time.monotonic()
            change = asyncio.ensure_future(self._engine_status.changed(HEARTBEAT_S))
            try:
                headroom = self._headroom(sequence)
                await context.write(headroom_pb.WatchHeadroomResponse(headroom=headroom))
                await change
            finally:
                change.cancel()
            await asyncio.sleep(pushed_at + interval_s - time.monotonic())

    def _headroom(self, sequence: int) -> headroom_pb.Headroom:
        engine_status = self._engine_status
        server = self._config.server
        headroom = headroom_pb.Headroom(
            engine=server.engine_id,
            epoch=engine_status.epoch,
            sequence=sequence,
            model=self._config.model.name,
            pool=server.pool,
            ready=engine_status.is_ready,
            draining=engine_status.draining,
            health=engine_status.health,
            worker_restarts=engine_status.worker_restarts,
            headroom_bytes=engine_status.headroom_bytes,
            max_sequences=self._config.batching.max_sequences,
            batch_share=1.0,
            throttle_reasons=sorted(engine_status.throttle_reasons),
            kv_bytes_per_token=engine_status.profile.growing_bytes_per_token,
            step_limit_s=engine_status.step_limits.shortest_s,
            not_ready_reason=engine_status.not_ready_reason,
        )
        if engine_status.state is not None:
            _fill(headroom, engine_status.state)
        if engine_status.ready is not None:
            fingerprint = engine_status.ready.fingerprint
            headroom.fingerprint = fingerprint.digest
            headroom.fingerprint_facts.update(fingerprint.facts)
        for adapter in engine_status.adapters:
            headroom.adapters.add(
                name=adapter.name,
                rank=adapter.rank,
                served=adapter.is_served,
                digest=adapter.digest,
                error=adapter.error,
            )
        for tier in engine_status.tiers():
            headroom.tiers.add(
                name=tier.name,
                backend=tier.backend,
                capacity_bytes=tier.capacity_bytes,
                used_bytes=tier.used_bytes,
                blocks=tier.num_blocks,
                hits=tier.hits,
                misses=tier.misses,
                queued=tier.queued,
            )
        return headroom


def _fill(headroom: headroom_pb.Headroom, state: WorkerState) -> None:
    headroom.total_bytes = state.total_bytes
    headroom.threshold = state.threshold
    headroom.kv_pool_bytes = state.kv_pool_bytes
    headroom.kv_free_bytes = state.kv_free_bytes
    headroom.kv_reclaimable_bytes = state.kv_reclaimable_bytes
    headroom.kv_committed_bytes = state.kv_committed_bytes
    headroom.requests_running = state.num_running
    headroom.requests_waiting = state.num_waiting
    headroom.expected_output_tokens = state.expected_output_tokens
    headroom.decode_tokens_per_second = state.decode_tokens_per_second
    headroom.prefill_backlog_tokens = state.prefill_backlog_tokens
    headroom.prefill_tokens_per_second = state.prefill_tokens_per_second
    headroom.step_seconds.extend(state.step_seconds)
    headroom.pressure_level = state.pressure_level
    headroom.batch_share = state.batch_share
    headroom.max_sequences = max(1, int(headroom.max_sequences * state.batch_share))
    soonest = sorted(state.releases, key=lambda release: release.after_s)[:MAX_RELEASES]
    for release in soonest:
        after_ms = max(0, round(release.after_s * 1000))
        headroom.releases.add(after_ms=after_ms, bytes=release.num_bytes)
    for line in state.ledger:
        headroom.ledger.add(
            name=line.name,
            reserved_bytes=line.reserved_bytes,
            allocated_bytes=line.allocated_bytes,
        )
