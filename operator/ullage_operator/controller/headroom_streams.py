"""Subscribes to the headroom reports of all engines, with one gRPC stream per engine.

Each stream connects to a started pod and receives reports at a low rate. The stream uses the probe
port, which serves health and headroom in plaintext and accepts no inference requests. The operator
therefore needs no certificate, no ticket and no access to the serving port.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage_common.wire.channels import open_channel
from ullage_operator.policy.engine_health import (
    SILENT_S,
    EngineHealth,
    EngineTarget,
    PressureLevels,
    pressure_by_pool,
)

Key = TypeVar("Key", bound=Hashable)
_logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """Intervals of the headroom streams, in seconds."""

    status_interval_s: float = 10.0
    """Minimum time between published changes of a service's memory pressure."""
    tick_s: float = 5.0
    """Tick interval of the clock that measures this process's running time, excluding suspends."""


@dataclass(slots=True)
class _Stream:
    target: EngineTarget
    task: asyncio.Task[None]
    since: float
    reported_at: float
    report: headroom_pb2.Headroom | None = None
    unhealthy_at: float | None = None
    is_silent: bool = False
    trouble: str = ""


class HeadroomStreams(Generic[Key]):
    """Maintains the headroom streams of all services, keyed by service and pod uid.

    Args:
        on_news: called with a service when its memory pressure or the health of its engines
            changes.
        times: intervals of the streams.
    """

    def __init__(self, on_news: Callable[[Key], None], times: StreamTimes) -> None:
        self._on_news = on_news
        self._times = times
        self._streams: dict[Key, dict[str, _Stream]] = {}
        self._reported: dict[Key, tuple[float, PressureLevels]] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._clock_s = 0.0
        self._ticker = asyncio.create_task(self._tick(), name="headroom clock")

    def follow(self, key: Key, targets: Mapping[str, EngineTarget]) -> None:
        """Subscribe to exactly the given engines of a service, and unsubscribe from all others.

        Args:
            key: the service.
            targets: the engines of the service, by pod uid.
        """
        streams = self._streams.get(key, {})
        if not streams and not targets:
            return

        self._streams[key] = streams
        for uid in [u for u, stream in streams.items() if targets.get(u) != stream.target]:
            streams.pop(uid).task.cancel()
        for uid in targets.keys() - streams.keys():
            target = targets[uid]
            task = asyncio.create_task(self._keep(key, uid, target), name=f"headroom {uid}")
            streams[uid] = _Stream(target, task, self._clock_s, self._clock_s)

        if not streams:
            self._forget(key)
        else:
            self._report_if_due(key)

    def drop(self) -> None:
        """Close the streams of all engines."""
        for key in list(self._streams):
            self.follow(key, {})

    def _forget(self, key: Key) -> None:
        del self._streams[key]
        self._reported.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    def pressure_levels(self, key: Key) -> PressureLevels:
        """Return the last published memory pressure by pool.

        The levels change at most once per `status_interval_s`.
        """
        return self._reported[key][1] if key in self._reported else {}

    def engine_health(self, key: Key) -> dict[str, EngineHealth]:
        """Return the current health of a service's engines, by pod uid."""
        return {uid: self._health_of(each) for uid, each in self._streams.get(key, {}).items()}

    async def close(self) -> None:
        tasks = [s.task for streams in self._streams.values() for s in streams.values()]
        for timer in self._timers.values():
            timer.cancel()
        for task in (self._ticker, *tasks):
            task.cancel()
        await asyncio.gather(self._ticker, *tasks, return_exceptions=True)

    def _health_of(self, stream: _Stream) -> EngineHealth:
        unhealthy_at = stream.unhealthy_at
        now = self._clock_s
        return EngineHealth(
            pool=stream.target.pool,
            report=stream.report,
            known_s=now - stream.since,
            silent_s=now - stream.reported_at,
            unhealthy_s=0.0 if unhealthy_at is None else now - unhealthy_at,
            trouble=stream.trouble,
        )

    async def _keep(self, key: Key, uid: str, target: EngineTarget) -> None:
        """Receive the reports of one engine, and reconnect whenever the stream breaks."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                async with open_channel(target.address) as channel:
                    stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
                    request = headroom_pb2.WatchHeadroomRequest(min_interval_ms=target.interval_ms)
                    async for push in stub.WatchHeadroom(request):
                        self._on_report(key, uid, push.headroom)
                        backoff_s = FIRST_BACKOFF_S
            except grpc.aio.AioRpcError as error:
                _logger.debug("headroom of %s at %s: %s", uid, target.address, error.details())
                self._on_trouble(key, uid, f"{target.address}: {error.details()}")
            except Exception:  # a bug must not stop the operator from following a working engine
                _logger.exception("headroom of %s at %s", uid, target.address)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    def _on_trouble(self, key: Key, uid: str, trouble: str) -> None:
        if stream := self._streams.get(key, {}).get(uid):
            stream.trouble = trouble

    def _on_report(self, key: Key, uid: str, report: headroom_pb2.Headroom) -> None:
        stream = self._streams[key][uid]
        before = stream.report
        has_new_restart = before is not None and before.worker_restarts < report.worker_restarts

        stream.reported_at = self._clock_s
        stream.report = report
        stream.trouble = ""

        has_boost_changed = bool(before and before.throttle_reasons) != bool(
            report.throttle_reasons
        )
        has_new_numerics = (before.fingerprint if before else "") != report.fingerprint

        was_ill = stream.unhealthy_at is not None
        was_silent = stream.is_silent
        is_ill = report.health < stream.target.min_health
        if not is_ill:
            stream.unhealthy_at = None
        elif not was_ill:
            stream.unhealthy_at = self._clock_s
        stream.is_silent = False

        have_adapters_changed = before is not None and (
            list(before.adapters) != list(report.adapters) or before.ready != report.ready
        )
        is_news = has_new_restart or has_boost_changed or has_new_numerics or have_adapters_changed
        if was_silent or is_ill != was_ill or is_news:
            self._on_news(key)
        self._report_if_due(key)

    def _report_if_due(self, key: Key) -> None:
        """Publish the memory pressure if it has changed, at most once per `status_interval_s`."""
        reported_at, reported = self._reported.get(key, (-self._times.status_interval_s, {}))
        current = self._current(key)
        if key in self._timers or reported == current:
            return

        loop = asyncio.get_running_loop()
        if (wait_s := reported_at + self._times.status_interval_s - loop.time()) > 0:
            self._timers[key] = loop.call_later(wait_s, self._on_timer, key)
        else:
            self._publish(key, current)

    def _on_timer(self, key: Key) -> None:
        del self._timers[key]
        current = self._current(key)
        if self._reported[key][1] != current:
            self._publish(key, current)

    def _publish(self, key: Key, current: PressureLevels) -> None:
        self._reported[key] = (asyncio.get_running_loop().time(), current)
        self._on_news(key)

    def _current(self, key: Key) -> PressureLevels:
        streams = self._streams[key].values()
        return pressure_by_pool(
            (s.target.pool, s.report) for s in streams if s.report and not s.is_silent
        )

    async def _tick(self) -> None:
        """Advance the clock that measures this process's running time.

        No reports can arrive while the process is suspended. The clock therefore excludes suspended
        time, which would otherwise make engines look silent.
        """
        loop = asyncio.get_running_loop()
        tick_s = self._times.tick_s
        while True:
            before = loop.time()
            await asyncio.sleep(tick_s)
            self._clock_s += min(loop.time() - before, 2 * tick_s)
            for key in list(self._streams):
                try:
                    self._check_silence(key)
                except Exception:  # a bug must not stop the clock, which healing needs
                    _logger.exception("checking the reports of %s failed", key)

    def _check_silence(self, key: Key) -> None:
        """Publish which engines of a service have fallen silent since the last check."""
        fallen = [s for s in self._streams[key].values() if self._has_fallen_silent(s)]
        for stream in fallen:
            stream.is_silent = True
        if fallen:
            self._on_news(key)
            self._report_if_due(key)

    def _has_fallen_silent(self, stream: _Stream) -> bool:
        return not stream.is_silent and self._clock_s - stream.reported_at > SILENT_S
