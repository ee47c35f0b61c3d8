"""Asks routers for their measures and decides from them: one task for each service that scales.

Services that do not scale cost nothing. A service is asked every `INTERVAL_S`; while a pool of it
sleeps, its routers are asked to answer as soon as somebody wants it.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Generic, TypeVar

from ullage_operator.api.sections import AutoscalingSpec
from ullage_operator.kube.pod_http import PodHttp, PodUnavailable
from ullage_operator.policy.pool_load import RouterReport, is_wanted, parse_reports, pool_load
from ullage_operator.policy.pool_sizes import NO_DECISIONS, ScalingChange, ScalingDecisions
from ullage_operator.policy.scaling import ScalingDecision, ScalingHistory, decide_replicas

Key = TypeVar("Key", bound=Hashable)

INTERVAL_S = 10.0
MIN_INTERVAL_S = 1.0
"""Between two questions, also while a pool wakes."""
TIMEOUT_S = 5.0
WAIT_TIMEOUT_S = 20.0
"""Timeout of a question that routers answer when somebody wants a pool, after 10 s at the latest.
"""
_MAX_BODY_BYTES = 1 << 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScaledService:
    """A service as far as its scaling goes."""

    policies: Mapping[str, AutoscalingSpec]
    """Policies of the pools that the operator scales."""
    routers: tuple[str, ...]
    """`http://host:port` of each router's measures."""
    leaving: tuple[str, ...] = ()
    """URLs of routers that end: they are asked, for they may hold requests, and need not answer."""

    @property
    def asked(self) -> tuple[str, ...]:
        return self.routers + self.leaving


@dataclass(slots=True)
class _Service:
    followed: ScaledService
    current: dict[str, int]
    """Engines that each pool is to have."""
    task: "asyncio.Task[None] | None" = None
    decisions: ScalingDecisions = NO_DECISIONS
    histories: dict[str, ScalingHistory] = field(default_factory=dict)
    routers_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Other routers may be asked."""


class Autoscaler(Generic[Key]):
    """Decides the sizes of the pools of all services.

    Args:
        on_change: called with a service of which something else is decided.
        interval_s: between two questions.
    """

    def __init__(self, on_change: Callable[[Key], None], interval_s: float = INTERVAL_S) -> None:
        self._on_change = on_change
        self._interval_s = interval_s
        self._services: dict[Key, _Service] = {}
        self._http = PodHttp()

    def follow(
        self, key: Key, followed: ScaledService, current: Mapping[str, int]
    ) -> ScalingDecisions:
        """Scales these pools from now on; answers what is decided.

        Args:
            current: engines of each pool, which only counts for pools that are new here.
        """
        if not followed.policies:
            self.forget(key)
            return NO_DECISIONS
        service = self._services.get(key)
        if service is None:
            service = self._services[key] = _Service(followed, {})
            service.task = asyncio.create_task(self._keep(key, service), name=f"scale {key}")
        if followed.asked != service.followed.asked:
            service.routers_changed.set()
        service.followed = followed
        for pool in service.current.keys() - followed.policies.keys():
            del service.current[pool]
            service.histories.pop(pool, None)
        for pool in followed.policies:
            service.current.setdefault(pool, current[pool])
        return service.decisions

    def forget(self, key: Key) -> None:
        service = self._services.pop(key, None)
        if service and service.task:
            service.task.cancel()

    def drop(self) -> None:
        """Forget all services: what another operator decides meanwhile is not known here."""
        for key in list(self._services):
            self.forget(key)

    async def close(self) -> None:
        tasks = [service.task for service in self._services.values() if service.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._services.clear()
        await self._http.close()

    async def _keep(self, key: Key, service: _Service) -> None:
        while True:
            began = time.monotonic()
            try:
                service.routers_changed.clear()
                waits = bool(service.histories) and not all(service.current.values())
                reports, problem = await self._asked(service.followed.asked, waits)
                self._take(key, service, reports, problem)
            except Exception:  # a bug must not end the scaling of a service
                _logger.exception("scaling %s failed", key)
            pause_s = self._pause_s(service)
            left_s = began + pause_s * random.uniform(0.9, 1.1) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await service.routers_changed.wait()
                    await asyncio.sleep(MIN_INTERVAL_S)

    def _pause_s(self, service: _Service) -> float:
        """Soon again while a pool sleeps, whose routers answer late by themselves."""
        if not all(service.current.values()) and not service.decisions.problem:
            return MIN_INTERVAL_S
        # A pool that may soon sleep is looked at in time for that.
        idle_s = [p.idle_after for p in service.followed.policies.values() if not p.min_replicas]
        return max(MIN_INTERVAL_S, min([self._interval_s, *(idle / 4 for idle in idle_s)]))

    def _take(
        self, key: Key, service: _Service, reports: Mapping[str, list[RouterReport]], problem: str
    ) -> None:
        """Decide anew, and says so where it makes a difference."""
        before = service.decisions
        if not reports:
            service.decisions = ScalingDecisions(before.pools, problem, before.changes)
        else:
            flat = [report for answer in reports.values() for report in answer]
            is_partial = not reports.keys() >= {*service.followed.routers}
            decisions = dict[str, ScalingDecision]()
            changes = dict(before.changes)
            for pool, policy in service.followed.policies.items():
                decisions[pool], service.histories[pool] = decide_replicas(
                    policy,
                    service.histories.get(pool, ScalingHistory()),
                    pool_load(pool, flat, is_partial),
                    service.current[pool],
                    time.monotonic(),
                )
                if decisions[pool].replicas != service.current[pool]:
                    _logger.info("%s: pool %s: %s", key, pool, decisions[pool])
                    changes[pool] = ScalingChange(datetime.now(UTC), decisions[pool])
                service.current[pool] = decisions[pool].replicas
            service.decisions = ScalingDecisions(decisions, changes=changes)
        if _sizes_and_problem(before) != _sizes_and_problem(service.decisions):
            self._on_change(key)

    async def _asked(
        self, routers: tuple[str, ...], waits: bool
    ) -> tuple[dict[str, list[RouterReport]], str]:
        """The reports of the routers that answer, and what the last other one said instead.

        Waiting, one that wants a pool awake is enough.
        """
        reports = dict[str, list[RouterReport]]()
        problem = ""
        if not routers:
            return reports, "no router runs that could be asked"
        page = "/measures/wait" if waits else "/measures"

        async def reports_of(url: str) -> tuple[str, list[RouterReport]]:
            return url, await self._ask(f"{url}{page}", waits)

        tasks = [asyncio.create_task(reports_of(url)) for url in routers]
        try:
            for finished in asyncio.as_completed(tasks):
                try:
                    url, answer = await finished
                except (PodUnavailable, ValueError) as error:
                    problem = f"no measures from a router: {error}"
                    continue
                reports[url] = answer
                if waits and is_wanted(answer):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return reports, problem

    async def _ask(self, url: str, waits: bool) -> list[RouterReport]:
        body = await self._http.get(
            url,
            timeout_s=WAIT_TIMEOUT_S if waits else TIMEOUT_S,
            connect_s=TIMEOUT_S,
            max_bytes=_MAX_BODY_BYTES,
        )
        return parse_reports(body)


def _sizes_and_problem(decisions: ScalingDecisions) -> tuple[object, ...]:
    """What a service's objects and conditions depend on."""
    sizes = {pool: each.replicas for pool, each in decisions.pools.items()}
    return sizes, decisions.problem
