"""Asks a service's routers what they count, at a bounded rate. The pods' metrics port is plaintext
and open to nobody's key, whatever TLS and keys the service asks of its clients."""

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import aiohttp

from ullage_operator import naming
from ullage_operator.loads import parse
from ullage_operator.store import ServiceKey
from ullage_operator.trials import Trial, read
from ullage_operator.trouble import is_ready, is_router, parse_time

LEAST_INTERVAL_S = 5.0
FRESH_S = 30.0
"""A router that runs for less may not have found all engines yet."""
MAX_BYTES = 8 << 20
_TIMEOUT = aiohttp.ClientTimeout(total=5.0, connect=2.0)

Pod = Mapping[str, Any]
log = logging.getLogger(__name__)


class Measures:
    """What routers told last, by service."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._told: dict[ServiceKey, tuple[float, tuple[Trial, ...]]] = {}

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    def forget(self, key: ServiceKey) -> None:
        self._told.pop(key, None)

    def drop(self) -> None:
        self._told.clear()

    async def trials(self, key: ServiceKey, pods: Iterable[Pod]) -> tuple[Trial, ...]:
        """The trials of all routers that answer; asked again only after some seconds."""
        known = self._told.get(key)
        if known and time.monotonic() - known[0] < LEAST_INTERVAL_S:
            return known[1]
        urls = [url for url in map(metrics_url, running(pods)) if url]
        answers = await asyncio.gather(*map(self._ask, urls))
        found = tuple(trial for text in answers for trial in read(text))
        self._told[key] = time.monotonic(), found
        return found

    async def cut_off(
        self, pods: Iterable[Pod], pools: Iterable[str], now: datetime
    ) -> frozenset[str]:
        """Of these pools, those of which no router has a ready engine.

        Routers that are not ready are asked too, for one that never had an engine is not; they need
        not answer. None where it is not certain: a router has only just started and may not have
        found the engines yet, a ready one does not answer, or none does.

        Args:
            now: in UTC.
        """
        routers = [pod for pod in running(pods) if metrics_url(pod)]
        if any(_runs_s(pod, now) < FRESH_S for pod in routers):
            return frozenset()
        pages = [metrics_url(pod).removesuffix("/metrics") + "/measures" for pod in routers]
        answers = await asyncio.gather(*map(self._ask, pages))
        is_mute = any(
            is_ready(pod) and not text for pod, text in zip(routers, answers, strict=True)
        )
        if is_mute or not any(answers):
            return frozenset()
        try:
            reports = [report for text in filter(None, answers) for report in parse(text.encode())]
        except ValueError as error:
            log.warning("measures that are none: %s", error)
            return frozenset()
        reached = {pool for report in reports for pool, seen in report.items() if seen.ready}
        return frozenset(pools) - reached

    async def _ask(self, url: str) -> str:
        if self._session is None:  # a connection that is waited for counts as one that fails
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector)
        try:
            async with self._session.get(url) as response:
                response.raise_for_status()
                chunks = b""
                async for chunk in response.content.iter_chunked(1 << 16):
                    chunks += chunk
                    if len(chunks) > MAX_BYTES:
                        raise ValueError(f"more than {MAX_BYTES} bytes")
                return chunks.decode()
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            log.warning("cannot ask %s: %s", url, error or type(error).__name__)
            return ""


def running(pods: Iterable[Pod]) -> Iterator[Pod]:
    """Those whose containers run, also while they end."""
    return (pod for pod in pods if pod.get("status", {}).get("phase") == "Running")


def _runs_s(pod: Pod, now: datetime) -> float:
    """Seconds since its youngest container started; endless where the API does not say."""
    states = (each.get("state", {}) for each in pod["status"].get("containerStatuses", ()))
    started = (parse_time(state.get("running", {}).get("startedAt")) for state in states)
    return min(((now - at).total_seconds() for at in started if at), default=math.inf)


def metrics_url(pod: Pod) -> str:
    """Of a router's pod that has an address; empty for any other."""
    address = pod.get("status", {}).get("podIP", "")
    if not address or not is_router(pod):
        return ""
    host = f"[{address}]" if ":" in address else address
    ports = [
        port["containerPort"]
        for container in pod.get("spec", {}).get("containers", ())
        for port in container.get("ports", ())
        if port.get("name") == "metrics"
    ]
    return f"http://{host}:{(ports or [naming.METRICS_PORT])[0]}/metrics"
