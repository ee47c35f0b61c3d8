"""Discovers the addresses of engines through DNS."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from ullage_common.config.router import PoolSection
from ullage_common.process.addresses import NO_RECORDS, by_best_family, is_ip
from ullage_router.policy.facts import Side

SLOW_RESOLVE_S = 1.0
"""Seconds after which a slow DNS look-up no longer delays the results of other look-ups."""

log = logging.getLogger(__name__)


class PoolAddresses(NamedTuple):
    """The addresses of a pool's engines, either stable or canary, from one DNS look-up."""

    side: Side
    pool: str
    addresses: set[str]
    """Address of each engine, as `ip:port` or `[ip]:port`."""
    is_complete: bool
    """Whether all look-ups succeeded. If not, engines may still exist at addresses missing here."""


class PoolLookups:
    """Looks up the DNS targets of all pools, with at most one running look-up per pool.

    Args:
        pools: the pools whose targets resolve to stable engines.
    """

    def __init__(self, pools: Iterable[PoolSection]) -> None:
        self._stable = tuple(pools)
        self._canary: tuple[PoolSection, ...] = ()
        self._running: dict[tuple[Side, PoolSection], asyncio.Task[tuple[set[str], bool]]] = {}
        """Look-ups that are still running or whose results have not been read yet."""

    @property
    def canary_pools(self) -> frozenset[str]:
        """Names of the pools for which canary targets are configured."""
        return frozenset(pool.name for pool in self._canary)

    def set_canary(self, pools: Iterable[PoolSection]) -> None:
        """Set where to look for canary engines.

        Args:
            pools: the pools whose targets resolve to canary engines (empty if there is no canary).
        """
        self._canary = tuple(pools)

    async def answers(self) -> AsyncIterator[PoolAddresses]:
        """Look up every pool, and yield the results that arrive within SLOW_RESOLVE_S seconds.

        A slower look-up keeps running, and a later call yields its result.
        """
        for side, pool in self._wanted():
            if (side, pool) not in self._running:
                self._running[side, pool] = asyncio.create_task(_resolve_all(pool.targets))
        await asyncio.wait(self._running.values(), timeout=SLOW_RESOLVE_S)

        for (side, pool), lookup in list(self._running.items()):
            if not lookup.done():
                continue
            del self._running[side, pool]
            if (side, pool) not in self._wanted():  # a canary that has ended
                continue
            try:
                addresses, is_complete = await lookup
            except Exception:  # one pool's failure must not hide the engines of others
                log.exception("cannot resolve", extra={"pool": pool.name})
                continue
            yield PoolAddresses(side, pool.name, addresses, is_complete)

    async def close(self) -> None:
        """Cancel the running look-ups."""
        for lookup in self._running.values():
            lookup.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _wanted(self) -> list[tuple[Side, PoolSection]]:
        stable = [(Side.STABLE, pool) for pool in self._stable]
        return stable + [(Side.CANARY, pool) for pool in self._canary]


async def _resolve_all(targets: Iterable[str]) -> tuple[set[str], bool]:
    """Return the addresses that all targets resolve to, and whether all look-ups succeeded."""
    answers = await asyncio.gather(*(resolve(target) for target in targets))
    addresses = {address for answer in answers if answer for address in answer}
    return addresses, all(answer is not None for answer in answers)


async def resolve(target: str) -> set[str] | None:
    """Return the addresses of a `host:port` target, or None if the look-up fails.

    A records yield `ip:port` addresses. AAAA records, which yield `[ip]:port` addresses, are used
    only if there are no A records, because an engine with both would otherwise appear twice.
    """
    host, _, port = target.rpartition(":")
    if is_ip(host):
        return {target}

    loop = asyncio.get_running_loop()
    try:
        records = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        if isinstance(error, socket.gaierror) and error.errno in NO_RECORDS:
            return set()
        log.warning("cannot resolve", extra={"target": target, "reason": error.strerror})
        return None
    except UnicodeError as error:  # such as an empty label, or one of more than 63 characters
        log.error("cannot resolve", extra={"target": target, "reason": str(error)})
        return None
    return by_best_family(records, port)
