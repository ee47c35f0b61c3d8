"""Follows the headroom of engines: one stream a pod that has started, at a low rate.

Streams go to the port that probes use too, which tells health and headroom in plaintext and takes
nothing: so the operator needs no certificate, no ticket and no way to the port that serves.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage_operator.headroom import Headroom, Report, Vitals, is_news, summed
from ullage_rpc.channels import open_channel

Key = TypeVar("Key", bound=Hashable)

REPORT_INTERVAL_MS = 10_000
STATUS_INTERVAL_S = 10.0
"""A service's headroom is told anew at most this often."""
SILENT_S = 2.5 * REPORT_INTERVAL_MS / 1000
"""A stream that is silent for so long is worth a look at its service."""
TICK_S = 5.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """An engine to follow."""

    pool: str
    address: str
    min_health: float


@dataclass(slots=True)
class _Stream:
    target: Target
    task: asyncio.Task[None]
    since: float
    heard_at: float
    report: Report | None = None
    unhealthy_at: float | None = None
    is_silent: bool = False


class HeadroomStreams(Generic[Key]):
    """Of all services, by service and by the pods' uid.

    Args:
        on_news: called with a service whose headroom or health is worth a look.
    """

    def __init__(self, on_news: Callable[[Key], None]) -> None:
        self._on_news = on_news
        self._streams: dict[Key, dict[str, _Stream]] = {}
        self._told: dict[Key, tuple[float, Headroom]] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._clock_s = 0.0
        self._ticker = asyncio.create_task(self._tick(), name="headroom clock")

    def follow(self, key: Key, targets: Mapping[str, Target]) -> None:
        """From now on these pods of a service, by uid, and no others of it."""
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
            self._consider(key)

    def drop(self) -> None:
        """No pods of any service."""
        for key in list(self._streams):
            self.follow(key, {})

    def _forget(self, key: Key) -> None:
        del self._streams[key]
        self._told.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    def headroom(self, key: Key) -> Headroom:
        """By pool, as last told: it changes at most once in `STATUS_INTERVAL_S`."""
        return self._told[key][1] if key in self._told else {}

    def vitals(self, key: Key) -> dict[str, Vitals]:
        """By the pods' uid, as of now."""
        return {uid: self._vitals(each) for uid, each in self._streams.get(key, {}).items()}

    async def close(self) -> None:
        tasks = [s.task for streams in self._streams.values() for s in streams.values()]
        for timer in self._timers.values():
            timer.cancel()
        for task in (self._ticker, *tasks):
            task.cancel()
        await asyncio.gather(self._ticker, *tasks, return_exceptions=True)

    def _vitals(self, stream: _Stream) -> Vitals:
        unhealthy_at, now = stream.unhealthy_at, self._clock_s
        return Vitals(
            pool=stream.target.pool,
            report=stream.report,
            known_s=now - stream.since,
            silent_s=now - stream.heard_at,
            unhealthy_s=0.0 if unhealthy_at is None else now - unhealthy_at,
        )

    async def _keep(self, key: Key, uid: str, target: Target) -> None:
        """Follows one engine through every loss of its stream."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                async with open_channel(target.address) as channel:
                    stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
                    request = headroom_pb2.WatchHeadroomRequest(min_interval_ms=REPORT_INTERVAL_MS)
                    async for push in stub.WatchHeadroom(request):
                        self._heard(key, uid, _report(push.headroom))
                        backoff_s = FIRST_BACKOFF_S
            except grpc.aio.AioRpcError as error:
                _logger.debug("headroom of %s at %s: %s", uid, target.address, error.details())
            except Exception:  # a bug must not end the following of a working engine
                _logger.exception("headroom of %s at %s", uid, target.address)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    def _heard(self, key: Key, uid: str, report: Report) -> None:
        stream = self._streams[key][uid]
        stream.heard_at, stream.report = self._clock_s, report
        was_ill, was_silent = stream.unhealthy_at is not None, stream.is_silent
        is_ill = report.health < stream.target.min_health
        if not is_ill:
            stream.unhealthy_at = None
        elif not was_ill:
            stream.unhealthy_at = self._clock_s
        stream.is_silent = False
        if was_silent or is_ill != was_ill:
            self._on_news(key)
        self._consider(key)

    def _consider(self, key: Key) -> None:
        """Tells the service's headroom if it is news, now or when that is due."""
        at, told = self._told.get(key, (-STATUS_INTERVAL_S, {}))
        current = self._current(key)
        if key in self._timers or not is_news(told, current):
            return
        if (wait_s := at + STATUS_INTERVAL_S - asyncio.get_running_loop().time()) > 0:
            self._timers[key] = asyncio.get_running_loop().call_later(wait_s, self._due, key)
        else:
            self._tell(key, current)

    def _due(self, key: Key) -> None:
        del self._timers[key]
        current = self._current(key)
        if is_news(self._told[key][1], current):
            self._tell(key, current)

    def _tell(self, key: Key, current: Headroom) -> None:
        self._told[key] = (asyncio.get_running_loop().time(), current)
        self._on_news(key)

    def _current(self, key: Key) -> Headroom:
        streams = self._streams[key].values()
        return summed((s.target.pool, s.report) for s in streams if s.report and not s.is_silent)

    async def _tick(self) -> None:
        """Counts waking time: silence while this very process was stopped is nobody's."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(TICK_S)
            self._clock_s += min(loop.time() - before, 2 * TICK_S)
            for key, streams in list(self._streams.items()):
                fallen = [s for s in streams.values() if self._has_fallen_silent(s)]
                for stream in fallen:
                    stream.is_silent = True
                if fallen:
                    self._on_news(key)
                    self._consider(key)

    def _has_fallen_silent(self, stream: _Stream) -> bool:
        return not stream.is_silent and self._clock_s - stream.heard_at > SILENT_S


def _report(told: headroom_pb2.Headroom) -> Report:
    return Report(
        ready=told.ready,
        draining=told.draining,
        health=told.health,
        free_bytes=told.headroom_bytes,
        total_bytes=told.kv_pool_bytes,
        token_bytes=told.kv_bytes_per_token,
        pressure_level=told.pressure_level,
    )
