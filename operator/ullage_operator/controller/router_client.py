"""Reads request counts and load reports from a service's routers over HTTP, with a rate limit."""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ullage_common.process.addresses import joined
from ullage_operator.api import naming
from ullage_operator.conditions.pods import is_ready, is_router, parse_time
from ullage_operator.kube.cache import ServiceKey
from ullage_operator.kube.pod_http import PodHttp, PodUnavailable
from ullage_operator.planning.model_caches import parse_progress
from ullage_operator.policy.pool_load import parse_reports
from ullage_operator.rollout.analysis import CanarySample, parse_samples

MIN_INTERVAL_S = 5.0
"""Minimum number of seconds between requests to a service's routers."""
SETTLED_AFTER_S = 30.0
"""Maximum number of seconds that a router needs to discover all engines after it starts."""
MAX_BYTES = 8 << 20
TIMEOUT_S = 5.0
CONNECT_S = 2.0

Pod = Mapping[str, Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterSamples:
    """The request counts of a canary and its baseline, from the routers of a service."""

    samples: tuple[CanarySample, ...] = ()
    unanswered: tuple[str, ...] = ()
    """Addresses of the routers that did not respond, each with the reason."""


class RouterClient:
    """Reads request counts and load reports from the routers of all services.

    Request counts are cached briefly.
    """

    def __init__(self) -> None:
        self._http = PodHttp()
        self._samples: dict[ServiceKey, tuple[float, RouterSamples]] = {}

    async def close(self) -> None:
        await self._http.close()

    def forget(self, key: ServiceKey) -> None:
        self._samples.pop(key, None)

    def drop(self) -> None:
        self._samples.clear()

    async def canary_samples(self, key: ServiceKey, pods: Iterable[Pod]) -> RouterSamples:
        """Return the canary's request counts from all responding routers, cached briefly."""
        asked_at, answers = self._samples.get(key, (-math.inf, RouterSamples()))
        if time.monotonic() - asked_at < MIN_INTERVAL_S:
            return answers

        urls = [url for url in map(metrics_url, running(pods)) if url]
        pages = await asyncio.gather(*map(self._page, urls))
        samples = tuple(sample for page, _ in pages for sample in parse_samples(page))
        unanswered = tuple(
            f"{url.split('/')[2]}: {problem}"
            for url, (_, problem) in zip(urls, pages, strict=True)
            if problem
        )
        answers = RouterSamples(samples, unanswered)
        self._samples[key] = time.monotonic(), answers
        return answers

    async def fetch_progress(self, pods: Iterable[Pod]) -> dict[str, dict[str, Any]]:
        """Return the download progress of all running pods that fetch models, by Job name."""
        urls = {_job_of(pod): url for pod in running(pods) if (url := _progress_url(pod))}
        pages = await asyncio.gather(*map(self._ask, urls.values()))
        return {job: parse_progress(page) for job, page in zip(urls, pages, strict=True) if page}

    async def unreachable_pools(
        self, pods: Iterable[Pod], pools: Iterable[str], now: datetime
    ) -> frozenset[str]:
        """Return the pools in which no router can reach a ready engine.

        The result is empty if this is uncertain: if a router has just started and may not have
        discovered the engines yet, if a ready router does not respond, or if no router responds.
        Unready routers are queried too, because having no engines makes a router unready, but they
        need not respond.

        Args:
            pods: the pods of the service.
            pools: the pools to check.
            now: the current time, in UTC.
        """
        routers = [pod for pod in running(pods) if metrics_url(pod)]
        if any(_runs_s(pod, now) < SETTLED_AFTER_S for pod in routers):
            return frozenset()

        urls = [metrics_url(pod).removesuffix("/metrics") + "/measures" for pod in routers]
        pages = await asyncio.gather(*map(self._ask, urls))
        is_mute = any(is_ready(pod) and not page for pod, page in zip(routers, pages, strict=True))
        if is_mute or not any(pages):
            return frozenset()

        try:
            reports = [
                report for page in filter(None, pages) for report in parse_reports(page.encode())
            ]
        except ValueError as error:
            log.warning("a router's load report cannot be read: %s", error)
            return frozenset()

        reached = {pool for report in reports for pool, load in report.items() if load.ready}
        return frozenset(pools) - reached

    async def _ask(self, url: str) -> str:
        """Fetch a URL, and return the response text (empty if the request fails)."""
        page, _ = await self._page(url)
        return page

    async def _page(self, url: str) -> tuple[str, str]:
        """Fetch a URL, and return the response text and the error (empty on success)."""
        try:
            body = await self._http.get(
                url, timeout_s=TIMEOUT_S, connect_s=CONNECT_S, max_bytes=MAX_BYTES
            )
            return body.decode(), ""
        except (PodUnavailable, UnicodeDecodeError) as error:
            log.warning("cannot read %s: %s", url, error)
            return "", str(error)


def running(pods: Iterable[Pod]) -> Iterator[Pod]:
    """Return the pods in phase Running, including terminating pods."""
    return (pod for pod in pods if pod.get("status", {}).get("phase") == "Running")


def _runs_s(pod: Pod, now: datetime) -> float:
    """Return the seconds since a pod's latest container start (infinite if unknown)."""
    states = (each.get("state", {}) for each in pod["status"].get("containerStatuses", ()))
    started = (parse_time(state.get("running", {}).get("startedAt")) for state in states)
    return min(((now - at).total_seconds() for at in started if at), default=math.inf)


def metrics_url(pod: Pod) -> str:
    """Return the metrics URL of a router pod (empty for a pod without an address)."""
    address = pod.get("status", {}).get("podIP", "")
    if not address or not is_router(pod):
        return ""
    return f"http://{joined(address, _port(pod, 'metrics', naming.METRICS_PORT))}/metrics"


def _port(pod: Pod, name: str, otherwise: int) -> int:
    """Return the port number of a pod's named port, or `otherwise` if the pod has no such port."""
    ports = [
        port["containerPort"]
        for container in pod.get("spec", {}).get("containers", ())
        for port in container.get("ports", ())
        if port.get("name") == name
    ]
    return int((ports or [otherwise])[0])


def _job_of(pod: Pod) -> str:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((str(each["name"]) for each in owners if each["kind"] == "Job"), "")


def _progress_url(pod: Pod) -> str:
    """Return the progress URL of a pod that fetches a model (empty if it has no address)."""
    address = pod.get("status", {}).get("podIP", "")
    return f"http://{joined(address, _port(pod, 'probe', naming.PROBE_PORT))}/progress" * bool(
        address
    )


def router_addresses(
    pods: Iterable[Mapping[str, Any]],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the URLs (`http://host:port`) of running and, separately, of terminating routers."""
    staying: set[str] = set()
    leaving: set[str] = set()
    for pod in running(pods):
        if url := metrics_url(pod):
            urls = leaving if "deletionTimestamp" in pod["metadata"] else staying
            urls.add(url.removesuffix("/metrics"))
    return tuple(sorted(staying)), tuple(sorted(leaving))
