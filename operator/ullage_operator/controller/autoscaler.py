"""Polls routers for the load of each pool, and stores the scaling decisions.

`ullage_operator.policy.scaling` decides the pool sizes. Routers are polled every `INTERVAL_S`.
While a pool sleeps, the operator uses long polling: routers respond as soon as a request needs the
pool. Each service with autoscaling has its own task.
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
"""Polling interval in seconds."""
MIN_INTERVAL_S = 1.0
"""Minimum polling interval in seconds, even while a pool is waking up."""
TIMEOUT_S = 5.0
WAIT_TIMEOUT_S = 20.0
"""Timeout of a long poll in seconds. Routers respond to a long poll within 10 s."""
_MAX_BODY_BYTES = 1 << 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScaledService:
    """The autoscaled pools of a service, and the routers to poll."""

    policies: Mapping[str, AutoscalingSpec]
    """Autoscaling policies by pool, for the pools that the operator scales."""
    routers: tuple[str, ...]
    """URLs (`http://host:port`) at which the routers serve their load reports."""
    leaving: tuple[str, ...] = ()
    """URLs of terminating routers, which may still have requests but need not respond."""

    @property
    def asked(self) -> tuple[str, ...]:
        return self.routers + self.leaving


@dataclass(slots=True)
class _Service:
    followed: ScaledService
    current: dict[str, int]
    """Number of engines currently requested for each pool."""
    task: "asyncio.Task[None] | None" = None
    decisions: ScalingDecisions = NO_DECISIONS
    histories: dict[str, ScalingHistory] = field(default_factory=dict)
    routers_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the routers to poll have changed."""


class Autoscaler(Generic[Key]):
    """Makes and stores scaling decisions for the pools of all services.

    Args:
        on_change: called with a service whose decisions have changed.
        interval_s: seconds between polls of a service's routers.
    """

    def __init__(self, on_change: Callable[[Key], None], interval_s: float = INTERVAL_S) -> None:
        self._on_change = on_change
        self._interval_s = interval_s
        self._services: dict[Key, _Service] = {}
        self._http = PodHttp()

    def follow(
        self, key: Key, followed: ScaledService, current: Mapping[str, int]
    ) -> ScalingDecisions:
        """Start or continue scaling a service's pools, and return the current decisions.

        Args:
            key: the service.
            followed: the pools to scale, and the routers to poll.
            current: the current number of engines of each pool. It is used only for pools that are
                not being scaled yet.
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
        """Stop scaling all services, because another operator is the leader now."""
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

            # A change of the routers ends the pause early.
            pause_s = self._pause_s(service)
            left_s = began + pause_s * random.uniform(0.9, 1.1) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await service.routers_changed.wait()
                    await asyncio.sleep(MIN_INTERVAL_S)

    def _pause_s(self, service: _Service) -> float:
        """Return the seconds between polls of a service's routers."""
        # While a pool sleeps, long polls already delay the answer.
        if not all(service.current.values()) and not service.decisions.problem:
            return MIN_INTERVAL_S
        # A pool that may go to sleep is polled often enough to do so in time.
        idle_s = [p.idle_after for p in service.followed.policies.values() if not p.min_replicas]
        return max(MIN_INTERVAL_S, min([self._interval_s, *(idle / 4 for idle in idle_s)]))

    def _take(
        self, key: Key, service: _Service, reports: Mapping[str, list[RouterReport]], problem: str
    ) -> None:
        """Decide pool sizes from routers' reports. Call `on_change` if a decision changes."""
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
        """Poll routers for load reports.

        Args:
            routers: URLs of the routers.
            waits: whether to use a long poll, which ends when a router has a request for a sleeping
                pool.

        Returns:
            The reports by router, and the error of the last router that did not respond.
        """
        reports = dict[str, list[RouterReport]]()
        problem = ""
        if not routers:
            return reports, "no router runs, so the load of pools is unknown"
        page = "/measures/wait" if waits else "/measures"

        async def reports_of(url: str) -> tuple[str, list[RouterReport]]:
            return url, await self._ask(f"{url}{page}", waits)

        tasks = [asyncio.create_task(reports_of(url)) for url in routers]
        try:
            for finished in asyncio.as_completed(tasks):
                try:
                    url, answer = await finished
                except (PodUnavailable, ValueError) as error:
                    problem = f"a router did not report its load: {error}"
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
    """Return the pool sizes and any measurement problem.

    Other parts of the decisions may change without triggering a reconciliation.
    """
    sizes = {pool: each.replicas for pool, each in decisions.pools.items()}
    return sizes, decisions.problem
