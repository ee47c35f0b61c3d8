"""Follows the health of the engines of all services, asks for nodes in doubt, and restarts pods.

One headroom stream goes to each engine pod that has started, at a low rate, to the port that probes
use too: it serves health and headroom in plaintext and takes no requests. So the operator needs no
certificate, no ticket and no way to the port that serves. `ullage_operator.healing` decides which
pods to restart.
"""

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

import grpc

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage_common.wire.channels import open_channel
from ullage_operator.api.errors import OperatorError
from ullage_operator.api.naming import NODE, POD
from ullage_operator.api.spec import Service
from ullage_operator.controller.plan import Observed
from ullage_operator.healing import (
    HOUR,
    SILENT_S,
    EngineHealth,
    EngineTarget,
    PressureLevels,
    Restart,
    RestartEvent,
    doubtful_nodes,
    is_lost,
    pressure_by_pool,
    restart_history,
    restart_note,
    stream_targets,
)
from ullage_operator.kube.cache import ServiceKey
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.events import EventRecorder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """How often the streams of headroom are looked at, in seconds."""

    status_interval_s: float = 10.0
    """A service's memory pressure is reported at most this often."""
    tick_s: float = 5.0
    """How finely the time that this process runs is counted."""


class Healer:
    """Watches over engine pods.

    Args:
        wake: called with a service that wants a look.
    """

    def __init__(
        self,
        cluster: Cluster,
        recorder: EventRecorder,
        wake: Callable[[ServiceKey], None],
        times: StreamTimes,
    ) -> None:
        self._cluster = cluster
        self._recorder = recorder
        self._streams: HeadroomStreams[ServiceKey] = HeadroomStreams(wake, times)
        self._events: dict[ServiceKey, list[RestartEvent]] = {}
        """What was done since the start: the status that is read may be older."""

    async def close(self) -> None:
        await self._streams.close()

    def forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._streams.follow(key, {})
        self._events.pop(key, None)

    def drop(self) -> None:
        """Forget all services; their restarts are in their status."""
        self._streams.drop()
        self._events.clear()

    async def observe(self, key: ServiceKey, service: Service, observed: Observed) -> Observed:
        """`observed` with the engines' memory pressure and health, and with nodes that are lost."""
        healing = service.spec.healing
        self._streams.follow(key, stream_targets(observed.pods, healing.min_health))
        return dataclasses.replace(
            observed,
            pressure_levels=self._streams.pressure_levels(key),
            engine_health=self._streams.engine_health(key),
            restarts=self._recent(key, observed),
            lost_nodes=await self._lost(doubtful_nodes(observed.pods, observed.now)),
        )

    def _recent(self, key: ServiceKey, observed: Observed) -> list[RestartEvent]:
        events = {(each.pod, each.at): each for each in restart_history(observed.status)}
        events |= {(each.pod, each.at): each for each in self._events.get(key, ())}
        recent = [each for each in events.values() if each.at > observed.now - HOUR]
        if key in self._events:
            self._events[key] = recent
        return sorted(recent, key=lambda each: each.at)

    async def _lost(self, nodes: Iterable[str]) -> frozenset[str]:
        """Return those of the nodes that are gone or do not answer; none where asking is
        forbidden."""
        return frozenset([name for name in nodes if await self._is_lost(name)])

    async def _is_lost(self, name: str) -> bool:
        try:
            return is_lost(await self._cluster.get(NODE, "", name))
        except OperatorError as error:
            _logger.debug("node %s: %s", name, error)
            return False

    async def restart_pods(
        self,
        key: ServiceKey,
        manifest: Mapping[str, Any],
        restarts: Iterable[Restart],
        now: datetime,
    ) -> None:
        """Delete pods, after the status that counts them has been written."""
        for restart in restarts:
            if not restart.by_force:
                whole_s = now.replace(microsecond=0)  # as the status has it
                event = RestartEvent(restart.pod.pool, restart.pod.name, restart.reason, whole_s)
                self._events.setdefault(key, []).append(event)
            meta = {"name": restart.pod.name, "namespace": key.namespace, "uid": restart.pod.uid}
            pod = {"apiVersion": POD.api_version, "kind": POD.name, "metadata": meta}
            await self._cluster.delete(pod, grace_s=restart.grace_s)
            _logger.warning(
                "%s: pod %s: %s: %s", key, restart.pod.name, restart.reason, restart.message
            )
            self._recorder.record(manifest, [restart_note(restart)])


Key = TypeVar("Key", bound=Hashable)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0


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
    """The headroom streams of all services, by service and by the pods' uid.

    Args:
        on_news: called with a service whose memory pressure or health is worth a look.
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
        """Follows these pods of a service, by uid, and stops following its others."""
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
        """No pods of any service."""
        for key in list(self._streams):
            self.follow(key, {})

    def _forget(self, key: Key) -> None:
        del self._streams[key]
        self._reported.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    def pressure_levels(self, key: Key) -> PressureLevels:
        """Return memory pressure by pool, as last reported: it changes at most once in
        `status_interval_s`."""
        return self._reported[key][1] if key in self._reported else {}

    def engine_health(self, key: Key) -> dict[str, EngineHealth]:
        """Return the present health of engines by the pods' uid."""
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
        """Follow one engine through every loss of its stream."""
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
            except Exception:  # a bug must not end the following of a working engine
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
        """Reports the service's memory pressure if it has changed, now or when that is due."""
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
        """Count the time that this process runs: silence while it was stopped is no engine's."""
        loop = asyncio.get_running_loop()
        tick_s = self._times.tick_s
        while True:
            before = loop.time()
            await asyncio.sleep(tick_s)
            self._clock_s += min(loop.time() - before, 2 * tick_s)
            for key, streams in list(self._streams.items()):
                fallen = [s for s in streams.values() if self._has_fallen_silent(s)]
                for stream in fallen:
                    stream.is_silent = True
                if fallen:
                    self._on_news(key)
                    self._report_if_due(key)

    def _has_fallen_silent(self, stream: _Stream) -> bool:
        return not stream.is_silent and self._clock_s - stream.reported_at > SILENT_S
