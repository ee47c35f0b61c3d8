"""Requests that are held until the pool they want is awake, and what is told of them."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import grpc

from ullage_router.errors import draining
from ullage_router.wake.config import WakeSection
from ullage_rpc.errors import ServiceError

LOOK_S = 0.5
"""How often engines are looked for while something is held."""
WANTED_S = 15.0
"""A pool that a request asked for in vain is wanted for so long, so that it is seen."""
HELD_RETRY_S = 5.0


class Holding:
    """Holds requests for pools that sleep, within bounds.

    Args:
        section: the bounds.
        is_asleep: whether no engine of a pool takes requests.
        look: looks for engines at once.
    """

    def __init__(
        self, section: WakeSection, is_asleep: Callable[[str], bool], look: Callable[[], None]
    ) -> None:
        self._section = section
        self._is_asleep = is_asleep
        self._look = look
        self._held: dict[str, set[asyncio.Future[bool]]] = {}
        self._asked: dict[str, float] = {}
        self._news = asyncio.Event()
        self.is_closed = False
        """The router stops, and takes nobody more."""
        self.held_bytes = 0
        self.counts = {"held": 0, "woken": 0, "refused": 0, "expired": 0}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def held(self, pool: str) -> int:
        """Requests that wait for this pool to wake."""
        return len(self._held.get(pool, ()))

    def want(self, pool: str) -> None:
        """A request asked for the pool and was not held."""
        self._asked[pool] = time.monotonic()
        self._tell()

    def wanted(self, pool: str) -> int:
        """Requests that want the pool awake: held now, or one that asked a moment ago."""
        asked = self._asked.get(pool)
        is_recent = asked is not None and time.monotonic() - asked <= WANTED_S
        return self.held(pool) or int(is_recent and self._is_asleep(pool))

    async def hold(self, pool: str, size: int, held_s: float) -> None:
        """Returns when the pool is awake.

        Args:
            size: bytes of this process that the request takes.
            held_s: for how long it was held before.

        Raises:
            ServiceError: too many are held, it took too long, or the router stops.
        """
        self._check(pool, size)
        future = asyncio.get_running_loop().create_future()
        self._held.setdefault(pool, set()).add(future)
        self.held_bytes += size
        self.counts["held"] += 1
        self._tell()
        try:
            await self._wait(pool, future, self._section.timeout - held_s)
        finally:
            self._held[pool].discard(future)
            self.held_bytes -= size

    def changed(self) -> None:
        """Engines may have come: lets go of those whose pool is awake."""
        for pool, futures in self._held.items():
            if futures and not self._is_asleep(pool):
                _answer(futures, True)

    def close(self) -> None:
        """Sends everybody who comes to another router; who is held goes on to be."""
        self.is_closed = True
        self._tell()

    def end(self) -> None:
        """Nobody is waited for any more."""
        for futures in self._held.values():
            _answer(futures, False)

    async def news(self, pools: Iterable[str], within_s: float) -> None:
        """Returns when one of the pools is wanted, or the time is over."""
        end = time.monotonic() + within_s
        while not self.is_closed and not any(map(self.wanted, pools)):
            self._news.clear()
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    await self._news.wait()
            except TimeoutError:
                return

    def as_json(self) -> Mapping[str, object]:
        return {
            "held": len(self),
            "held_bytes": self.held_bytes,
            "max_requests": self._section.max_requests,
            "max_bytes": self._section.max_bytes,
            "timeout": self._section.timeout,
            "counts": dict(self.counts),
        }

    def _check(self, pool: str, size: int) -> None:
        if self.is_closed:
            raise draining()
        is_full = len(self) >= self._section.max_requests
        if is_full or self.held_bytes + size > self._section.max_bytes:
            self.counts["refused"] += 1
            self.want(pool)
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "WAKE_QUEUE_FULL",
                f"pool {pool} sleeps, and as many requests wait for it as may; retry",
                retry_after_s=HELD_RETRY_S,
            )

    async def _wait(self, pool: str, future: "asyncio.Future[bool]", within_s: float) -> None:
        end = time.monotonic() + within_s
        while not future.done():
            left_s = end - time.monotonic()
            if left_s <= 0:
                self.counts["expired"] += 1
                raise ServiceError(
                    grpc.StatusCode.UNAVAILABLE,
                    "WAKING",
                    f"pool {pool} is being woken and takes longer than "
                    f"{self._section.timeout:g} s; retry",
                    retry_after_s=HELD_RETRY_S,
                )
            self._look()
            await asyncio.wait({future}, timeout=min(LOOK_S, left_s))
        if not future.result():
            raise draining()
        self.counts["woken"] += 1

    def _tell(self) -> None:
        self._news.set()


def _answer(futures: "Iterable[asyncio.Future[bool]]", is_awake: bool) -> None:
    for future in futures:
        if not future.done():
            future.set_result(is_awake)
