"""Asks routers for their measures and decides from them: one task for each service that scales.

Services that do not scale cost nothing. A service is asked every `INTERVAL_S`; while a pool of it
sleeps, its routers are asked to answer as soon as somebody wants it.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import aiohttp

from ullage_operator.autoscale import Decision, History, Policy, decide
from ullage_operator.loads import Report, is_wanted, load_of, parse
from ullage_operator.measures import metrics_url, running
from ullage_operator.scaling import NOTHING, Change, Decided

Key = TypeVar("Key", bound=Hashable)

INTERVAL_S = 10.0
LEAST_INTERVAL_S = 1.0
"""Between two questions, also while a pool wakes."""
_ASK = aiohttp.ClientTimeout(total=5)
_WAIT = aiohttp.ClientTimeout(total=20, connect=5)
"""Routers answer after 10 s at the latest."""
_MAX_BODY_BYTES = 1 << 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Followed:
    """A service as far as its scaling goes."""

    policies: Mapping[str, Policy]
    """Of the pools that the operator scales."""
    routers: tuple[str, ...]
    """`http://host:port` of each router's measures."""
    leaving: tuple[str, ...] = ()
    """Of routers that end: they are asked, for they may hold requests, and need not answer."""

    @property
    def asked(self) -> tuple[str, ...]:
        return self.routers + self.leaving


@dataclass(slots=True)
class _Service:
    followed: Followed
    current: dict[str, int]
    """Engines that each pool is to have."""
    task: "asyncio.Task[None] | None" = None
    decided: Decided = NOTHING
    histories: dict[str, History] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Other routers may be asked."""


class Scaler(Generic[Key]):
    """Of all services.

    Args:
        on_change: called with a service of which something else is decided.
        interval_s: between two questions.
    """

    def __init__(self, on_change: Callable[[Key], None], interval_s: float = INTERVAL_S) -> None:
        self._on_change = on_change
        self._interval_s = interval_s
        self._services: dict[Key, _Service] = {}
        self._session: aiohttp.ClientSession | None = None

    def follow(self, key: Key, followed: Followed, current: Mapping[str, int]) -> Decided:
        """Scales these pools from now on; answers what is decided.

        Args:
            current: engines of each pool, which only counts for pools that are new here.
        """
        if not followed.policies:
            self.forget(key)
            return NOTHING
        service = self._services.get(key)
        if service is None:
            service = self._services[key] = _Service(followed, {})
            service.task = asyncio.create_task(self._keep(key, service), name=f"scale {key}")
        if followed.asked != service.followed.asked:
            service.news.set()
        service.followed = followed
        for pool in service.current.keys() - followed.policies.keys():
            del service.current[pool]
            service.histories.pop(pool, None)
        for pool in followed.policies:
            service.current.setdefault(pool, current[pool])
        return service.decided

    def forget(self, key: Key) -> None:
        service = self._services.pop(key, None)
        if service and service.task:
            service.task.cancel()

    def drop(self) -> None:
        """Forgets all: what another operator decides meanwhile is not known here."""
        for key in list(self._services):
            self.forget(key)

    async def close(self) -> None:
        tasks = [service.task for service in self._services.values() if service.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._services.clear()
        if self._session:
            await self._session.close()

    async def _keep(self, key: Key, service: _Service) -> None:
        while True:
            began = time.monotonic()
            try:
                service.news.clear()
                waits = bool(service.histories) and not all(service.current.values())
                reports, problem = await self._asked(service.followed.asked, waits)
                self._take(key, service, reports, problem)
            except Exception:  # a bug must not end the scaling of a service
                _logger.exception("scaling %s failed", key)
            pause_s = self._pause_s(service)
            left_s = began + pause_s * random.uniform(0.9, 1.1) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await service.news.wait()
                    await asyncio.sleep(LEAST_INTERVAL_S)

    def _pause_s(self, service: _Service) -> float:
        """Soon again while a pool sleeps, whose routers answer late by themselves."""
        if not all(service.current.values()) and not service.decided.problem:
            return LEAST_INTERVAL_S
        # A pool that may soon sleep is looked at in time for that.
        idle_s = [p.idle_s for p in service.followed.policies.values() if not p.min_replicas]
        return max(LEAST_INTERVAL_S, min([self._interval_s, *(idle / 4 for idle in idle_s)]))

    def _take(
        self, key: Key, service: _Service, reports: Mapping[str, list[Report]], problem: str
    ) -> None:
        """Decides anew, and says so where it makes a difference."""
        before = service.decided
        if not reports:
            service.decided = Decided(before.pools, problem, before.changes)
        else:
            flat = [report for told in reports.values() for report in told]
            is_partial = not reports.keys() >= {*service.followed.routers}
            made, changes = dict[str, Decision](), dict(before.changes)
            for pool, policy in service.followed.policies.items():
                made[pool], service.histories[pool] = decide(
                    policy,
                    service.histories.get(pool, History()),
                    load_of(pool, flat, is_partial),
                    service.current[pool],
                    time.monotonic(),
                )
                if made[pool].replicas != service.current[pool]:
                    _logger.info("%s: pool %s: %s", key, pool, made[pool])
                    changes[pool] = Change(datetime.now(UTC), made[pool])
                service.current[pool] = made[pool].replicas
            service.decided = Decided(made, changes=changes)
        if _essence(before) != _essence(service.decided):
            self._on_change(key)

    async def _asked(
        self, routers: tuple[str, ...], waits: bool
    ) -> tuple[dict[str, list[Report]], str]:
        """The reports of the routers that answer, and what the last other one said instead.

        Waiting, one that wants a pool awake is enough.
        """
        reports, problem = dict[str, list[Report]](), ""
        if not routers:
            return reports, "no router runs that could be asked"
        page = "/measures/wait" if waits else "/measures"

        async def told_by(url: str) -> tuple[str, list[Report]]:
            return url, await self._ask(f"{url}{page}", waits)

        tasks = [asyncio.create_task(told_by(url)) for url in routers]
        try:
            for finished in asyncio.as_completed(tasks):
                try:
                    url, told = await finished
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    problem = f"no measures from a router: {str(error) or type(error).__name__}"
                    continue
                reports[url] = told
                if waits and is_wanted(told):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return reports, problem

    async def _ask(self, url: str, waits: bool) -> list[Report]:
        if self._session is None:
            # Every service that sleeps holds a question at each of its routers.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        async with self._session.get(url, timeout=_WAIT if waits else _ASK) as response:
            response.raise_for_status()
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _MAX_BODY_BYTES:
                    raise ValueError(f"more than {_MAX_BODY_BYTES} bytes")
            return parse(bytes(body))


def router_addresses(
    pods: Iterable[Mapping[str, Any]],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`http://host:port` of routers that run, and of those among them that end."""
    found: tuple[set[str], set[str]] = (set(), set())
    for pod in running(pods):
        if url := metrics_url(pod):
            found["deletionTimestamp" in pod["metadata"]].add(url.removesuffix("/metrics"))
    return tuple(sorted(found[0])), tuple(sorted(found[1]))


def _essence(decided: Decided) -> tuple[object, ...]:
    """What a service's objects and conditions depend on."""
    sizes = {pool: each.replicas for pool, each in decided.pools.items()}
    return sizes, decided.problem
