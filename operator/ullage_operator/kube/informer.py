"""Keeps the cache in sync with the cluster: kopf lists and watches, and sweeps find deletions.

Each kind in each namespace is watched by its own kopf operator, whose handler (`on.event`) feeds
the cache. A kind that is denied, absent or failing therefore does not affect the other kinds. This
module extends kopf in three ways:

* A watch that ends for any reason is restarted, with a backoff while it fails.
* After a gap in the history, a list shows which objects exist, but not which were deleted. A sweep
  therefore compares names after each list and at intervals.
* A watch that dies silently is detected, because events, bookmarks and requests stop, or because a
  sweep lists objects that no event delivers.
"""

import asyncio
import contextlib
import functools
import logging
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never, cast

import aiohttp
import kopf
from prometheus_client import CollectorRegistry

from ullage_common.process.stacks import dump_loop_on_signal
from ullage_operator.api.errors import (
    ClusterDenied,
    ClusterForgets,
    ClusterUnavailable,
    KindAbsent,
    OperatorError,
    Temporary,
)
from ullage_operator.api.naming import Kind
from ullage_operator.kube.cache import Cache, Scope
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.connection import ApiConnection
from ullage_operator.metric_names import OBJECTS, WATCH_RESTARTS

_FIRST_S = 0.2
_MOST_S = 30.0
_FAILING = 3
"""Number of failures after which planning no longer waits for a kind that was never listed."""
_PAGE = 500
_REQUEST_S = 30
_CONNECT_S = 10
_WATCH_S = (240.0, 360.0)
"""Range of a watch's timeout in seconds, which ends watches silently dropped by a middlebox."""
_SILENT_S = 150.0
"""Seconds without data after which a watch is presumed dead and restarted.

This may restart a healthy watch: if etcd does not report progress, API servers send bookmarks only
for kinds that change.
"""
_SWEEP_S = 300.0
_LOOK_S = 1.0
_REASON = 256
"""Maximum number of characters of an error message that a condition quotes."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTimes:
    """Timeouts and intervals of a watch, in seconds."""

    recheck_s: float = 60.0
    """Time between checks of a kind that is absent or denied."""
    stale_s: float = 300.0
    """Time without any request, event or bookmark after which kopf is considered dead."""
    behind_s: float = 120.0
    """Time within which events must deliver the objects of a sweep."""


class Backoff:
    """Capped exponential backoff with jitter: a random factor between 0.5 and 1."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def next_s(self, at_least_s: float = 0.0) -> float:
        bound_s = self._next_s
        self._next_s = min(_MOST_S, 2 * self._next_s)
        return max(at_least_s, bound_s * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        self._next_s = _FIRST_S


class WatchMetrics:
    """Metrics of watch restarts and cached objects."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.restarts = WATCH_RESTARTS.register(registry)
        self._objects = OBJECTS.register(registry)

    def count(self, kinds: Iterable[str], counts: Callable[[], Mapping[str, int]]) -> None:
        """Export the number of cached objects of each kind."""
        for kind in kinds:
            self._objects.labels(kind=kind).set_function(functools.partial(_of, counts, kind))


def _of(counts: Callable[[], Mapping[str, int]], kind: str) -> float:
    return counts()[kind]


class Informers:
    """The informers of all scopes.

    Args:
        connection: the connection with which kopf logs in.
        cluster: the client for sweeps and permission checks.
        scopes: the scopes to watch.
        cache: the cache to fill.
        metrics: counts restarts of watches.
        stop: event to set on SIGINT and SIGTERM, whose handlers kopf would replace.
        times: timeouts and intervals of the watches.
    """

    def __init__(
        self,
        connection: ApiConnection,
        cluster: Cluster,
        scopes: Sequence[Scope],
        cache: Cache,
        metrics: WatchMetrics,
        stop: asyncio.Event,
        times: WatchTimes,
    ) -> None:
        make = functools.partial(Informer, connection, cluster, cache, metrics, stop, times)
        self._informers = {scope: make(scope) for scope in scopes}
        self._tasks: list[asyncio.Task[Never]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(informer.keep(), name=f"informer {scope.kind.qualified}")
            for scope, informer in self._informers.items()
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def sweep(self, kind: Kind, namespace: str) -> None:
        """Schedule a sweep of a kind, because a write found that one of its objects is missing."""
        for scope, informer in self._informers.items():
            if scope.kind == kind and scope.namespace in ("", namespace):
                informer.sweep()

    @property
    def silent_s(self) -> float:
        """Return for how many seconds the quietest watch has received no data."""
        return max((informer.silent_s for informer in self._informers.values()), default=0.0)


class Informer:
    """Keeps one scope of the cache up to date."""

    def __init__(
        self,
        connection: ApiConnection,
        cluster: Cluster,
        cache: Cache,
        metrics: WatchMetrics,
        stop: asyncio.Event,
        times: WatchTimes,
        scope: Scope,
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self._cache = cache
        self._metrics = metrics
        self._stop = stop
        self._times = times
        self._scope = scope
        self._path = scope.kind.path(scope.namespace)
        self._backoff = Backoff()
        self._failures = 0
        self._last_active_s: float | None = None
        """Time of kopf's last request, response, event or bookmark."""
        self._swept_s = 0.0
        self._has_listed = False
        """Whether kopf has listed the objects again since it last started a watch."""
        self._watches = 0
        """Number of watches that kopf has opened since it was started."""
        self._sweep_due = asyncio.Event()
        self._tls: tuple[object, ...] | None = None
        """TLS settings of kopf's session (None before it logs in)."""

    @property
    def silent_s(self) -> float:
        if self._last_active_s is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._last_active_s

    def sweep(self) -> None:
        self._sweep_due.set()

    async def keep(self) -> Never:
        """Watch the informer's scope until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            began_s = clock()
            try:
                await self._cluster.check(*self._scope)
                await self._watch()
            except Exception as error:
                reason, at_least_s = self._failed(error)
            # Some watches end as soon as they have begun, so only a long one counts as healthy.
            if clock() - began_s > _MOST_S:
                self._backoff.reset()
            self._last_active_s = None
            self._count(reason)
            await asyncio.sleep(self._backoff.next_s(at_least_s))

    async def _watch(self) -> Never:
        """Run kopf, and raise its error when it stops."""
        self._has_listed = False
        self._watches = 0
        self._tls = None
        self._mark_active()
        self._swept_s = self._last_active_s or 0.0
        kind, namespace = self._scope
        where: dict[str, Any] = {"namespaces": [namespace]} if namespace else {"clusterwide": True}
        tasks = {
            *await kopf.spawn_tasks(
                registry=self._registry(), settings=kopf_settings(kind), standalone=True, **where
            ),
            asyncio.create_task(self._keep_sweeping(), name=f"sweep {kind.qualified}"),
        }
        keep_signals(self._stop)
        try:
            while True:
                done, _ = await asyncio.wait(
                    tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    _raise_end(task)
                self._check_alive()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kind = self._scope.kind
        version = kind.api_version.rpartition("/")[2]
        kopf.on.login(registry=registry)(self._log_in)
        on_event = kopf.on.event(
            group=kind.group, version=version, plural=kind.plural, registry=registry
        )
        on_event(self._on_event)
        return registry

    async def _log_in(self, **_: Any) -> kopf.AiohttpSession:
        session = await self._connection.kopf_session(self._observe)
        self._tls = self._connection.tls
        return session

    async def _on_event(self, event: kopf.RawEvent, **_: Any) -> None:
        obj = cast(dict[str, Any], event["object"])
        if event["type"] == "DELETED":
            self._cache.deleted(self._scope, obj)
        else:
            self._cache.changed(self._scope, obj)

    # Observation of kopf's requests.

    async def _observe(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await send(request)
        if request.url.path.endswith(self._path):
            self._mark_active()
            if "watch" not in request.url.query:
                self._has_listed = True
            elif response.status == 200:
                self._on_watch()
                content = _ObservedStream(response.content, self._mark_active)
                response.content = cast(aiohttp.StreamReader, content)
        return response

    def _mark_active(self) -> None:
        self._last_active_s = asyncio.get_running_loop().time()

    def _on_watch(self) -> None:
        if self._watches:
            self._count("forgotten" if self._has_listed else "ended")
        if self._has_listed:
            self.sweep()
        self._watches += 1
        self._has_listed = False

    def _check_alive(self) -> None:
        """Check that kopf is still watching, with certificates that are valid.

        Raises:
            ClusterUnavailable: kopf must be started again.
        """
        now_s = asyncio.get_running_loop().time()
        if self.silent_s > self._times.stale_s:
            raise ClusterUnavailable(f"no data for {self.silent_s:.0f} s", 0.0)
        if self._tls not in (None, self._connection.tls):
            raise ClusterUnavailable("the certificates of the API server have changed", 0.0)
        behind_s = self._times.behind_s
        if self._cache.is_behind(self._scope) and now_s > self._swept_s + behind_s:
            message = f"no events for existing objects for {behind_s:.0f} s"
            raise ClusterUnavailable(message, 0.0)

    # Sweeps.

    async def _keep_sweeping(self) -> Never:
        backoff = Backoff()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S * random.uniform(0.8, 1.0)):
                    await self._sweep_due.wait()
            self._sweep_due.clear()
            if not self._watches:
                continue  # kopf has not listed the existing objects yet
            try:
                versions, revision = await self._cluster.versions(*self._scope)
            except (ClusterDenied, KindAbsent):
                raise
            except Temporary as error:
                _logger.warning("sweeping %s: %s", self._scope.kind.qualified, error)
                self.sweep()
                await asyncio.sleep(backoff.next_s(error.delay_s))
                continue

            if not self._cache.is_behind(self._scope):
                self._swept_s = asyncio.get_running_loop().time()
            is_restored = self._cache.swept(self._scope, versions, revision)
            backoff.reset()
            self._failures = 0
            if is_restored:
                raise ClusterForgets("versions have gone back, so all objects are listed again")

    # Failures.

    def _failed(self, error: Exception) -> tuple[str, float]:
        """Record a failed watch, and return a one-word reason and the retry delay in seconds."""
        kind, namespace = self._scope
        where = namespace or "all namespaces"
        match error:
            case KindAbsent():
                if self._cache.absent(self._scope) and not kind.optional:
                    _logger.warning("%s; will check again", error)
                return "absent", self._times.recheck_s
            case ClusterDenied():
                if self._cache.denied(self._scope, error.verb):
                    message = "missing permission: %s %s in %s; the operator goes on without it"
                    _logger.error(message, error.verb, kind.qualified, where)
                return "denied", self._times.recheck_s

        self._failures += 1
        if self._failures >= _FAILING and self._cache.failing(self._scope, str(error)[:_REASON]):
            _logger.error("%s in %s cannot be listed; the operator goes on", kind.qualified, where)

        match error:
            case Temporary():
                _logger.warning("watching %s in %s: %s", kind.qualified, where, error)
                return "unavailable", error.delay_s
            case OperatorError():
                _logger.error("watching %s in %s: %s", kind.qualified, where, error)
                return "refused", self._times.recheck_s
        # A bug must not end the watch of a kind for good.
        _logger.exception("watching %s in %s failed", kind.qualified, where, exc_info=error)
        return "bug", 10.0

    def _count(self, reason: str) -> None:
        self._metrics.restarts.labels(kind=self._scope.kind.name, reason=reason).inc()


class _NoDifferences(kopf.DiffBaseStorage):
    """Keeps kopf from comparing objects, because the handler uses every event unchanged.

    A comparison copies each object twice, which accounts for a third of the cost of an event.
    """

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def kopf_settings(kind: Kind) -> kopf.OperatorSettings:
    """Return the settings with which kopf watches one kind."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # needs the right to watch definitions and namespaces
    settings.posting.enabled = False
    settings.persistence.diffbase_storage = _NoDifferences()
    # This timeout would kill the process after kopf has ended, even if kopf was restarted.
    settings.process.ultimate_exiting_timeout = None
    settings.networking.request_timeout = _REQUEST_S
    settings.networking.connect_timeout = _CONNECT_S
    settings.networking.error_backoffs = (0.2, 0.5, 1.0)
    settings.networking.trust_env = True
    settings.watching.server_timeout = int(random.uniform(*_WATCH_S))
    settings.watching.client_timeout = _WATCH_S[1] + _REQUEST_S
    settings.watching.inactivity_timeout = _SILENT_S
    settings.watching.chunk_size = _PAGE
    settings.queueing.idle_timeout = 0.5  # time that each object's task and last event are kept
    settings.queueing.exit_timeout = 0.5
    if kind.selector:
        settings.watching.label_selectors[kind.plural] = kind.selector
    return settings


def keep_signals(stop: asyncio.Event) -> None:
    """Make SIGINT and SIGTERM set `stop`, although each kopf operator replaces their handlers."""
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        dump_loop_on_signal()


def _raise_end(task: asyncio.Task[Any]) -> Never:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, OperatorError):
        raise error
    raise ClusterUnavailable(f"kopf ended: {error or task.get_name()!r}", 0.0) from error


class _ObservedStream:
    """A response stream that invokes a callback whenever data arrives.

    kopf calls no handler for bookmarks. If a kind has no changes, only bookmarks show that its
    watch is alive.
    """

    def __init__(self, content: aiohttp.StreamReader, on_data: Callable[[], None]) -> None:
        self._content = content
        self._on_data = on_data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for chunk in self._content.iter_chunked(size):
            self._on_data()
            yield chunk
