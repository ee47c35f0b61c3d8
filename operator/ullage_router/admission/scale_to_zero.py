"""Holds requests for pools that are scaled to zero until an engine starts.

The number of held requests is limited. While requests are held, the router reports demand for their
pools, which prompts the operator to start an engine.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import grpc
from msgspec.structs import replace

from ullage_common.config.router import RouterConfig, WakeSection
from ullage_common.wire.errors import ServiceError
from ullage_router.admission.admission import Admission, AdmissionRequest
from ullage_router.call import Call, Handler, ResponseStream
from ullage_router.engines.engines import Engines
from ullage_router.errors import draining, some_retry_after_s, unknown_model
from ullage_router.policy.facts import EngineState, EngineView, RequestFacts, RoutingPolicy
from ullage_router.policy.placement import home_of, is_large, room_of

RESOLVE_INTERVAL_S = 0.5
"""Seconds between DNS look-ups while requests are held."""
WANTED_S = 15.0
"""How long a request that could not be held counts as demand for its pool, in seconds."""


class ColdStartQueue:
    """Holds a limited number of requests for pools that are scaled to zero.

    Args:
        section: the limits on held requests.
        is_scaled_to_zero: returns whether a pool may be scaled to zero and has no ready engine.
        resolve_engines: requests a rate-limited DNS look-up of the engines.
    """

    def __init__(
        self,
        section: WakeSection,
        is_scaled_to_zero: Callable[[str], bool],
        resolve_engines: Callable[[], None],
    ) -> None:
        self._section = section
        self._is_scaled_to_zero = is_scaled_to_zero
        self._resolve_engines = resolve_engines
        self._held: dict[str, set[asyncio.Future[bool]]] = {}
        self._requested: dict[str, float] = {}
        """Time of the last request that could not be held, by pool."""
        self._changed = asyncio.Event()
        self._refusal: ServiceError | None = None
        """Error that all requests are refused with, or None while requests may be held."""
        self.is_closed = False
        """Whether the router is shutting down and therefore holds no new requests."""
        self.held_bytes = 0
        """Router memory in use by held requests, in bytes."""
        self.counts = {"held": 0, "woken": 0, "refused": 0, "expired": 0}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def held(self, pool: str) -> int:
        """Return the number of requests that are waiting for an engine in this pool to start."""
        return len(self._held.get(pool, ()))

    def request_wake(self, pool: str) -> None:
        """Signal that a pool needs an engine, for a request that is not held here.

        The signal counts as demand (`wanted`) for WANTED_S seconds.
        """
        self._requested[pool] = time.monotonic()
        self._notify()

    def wanted(self, pool: str) -> int:
        """Return the demand for a pool, which prompts the operator to start an engine there.

        This is the number of held requests. If there are none, it is 1 for WANTED_S seconds after
        the last `request_wake`, unless an engine becomes ready.
        """
        requested = self._requested.get(pool)
        is_recent = requested is not None and time.monotonic() - requested <= WANTED_S
        return self.held(pool) or int(is_recent and self._is_scaled_to_zero(pool))

    async def hold(self, pool: str, size: int, held_s: float) -> None:
        """Hold a request until an engine of the pool is ready.

        Args:
            size: router memory that the request uses, in bytes.
            held_s: how long the request has already been held, in seconds.

        Raises:
            ServiceError: too many requests are held, no engine started in time, or the router is
                shutting down.
        """
        self._check(pool, size)
        future = asyncio.get_running_loop().create_future()
        self._held.setdefault(pool, set()).add(future)
        self.held_bytes += size
        self.counts["held"] += 1
        self._notify()
        try:
            await self._wait(pool, future, self._section.timeout - held_s)
        finally:
            self._held[pool].discard(future)
            self.held_bytes -= size

    def on_engines_change(self) -> None:
        """Resume the held requests of pools that now have a ready engine."""
        for pool, futures in self._held.items():
            if futures and not self._is_scaled_to_zero(pool):
                _resolve(futures, True)

    def refuse_with(self, error: ServiceError | None) -> None:
        """Refuse all requests with this error, including held ones.

        If the error is None, accept requests again.
        """
        self._refusal = error
        if error:
            self._requested.clear()
            self.end()

    def close(self) -> None:
        """Refuse new requests, so that clients use another router. Held requests keep waiting."""
        self.is_closed = True
        self._notify()

    def end(self) -> None:
        """Refuse all requests that are still held."""
        for futures in self._held.values():
            _resolve(futures, False)

    async def wait_until_wanted(self, pools: Iterable[str], within_s: float) -> None:
        """Wait until there is demand for one of the pools, for at most `within_s` seconds.

        The wait also ends when the router shuts down.
        """
        end = time.monotonic() + within_s
        while not self.is_closed and not any(map(self.wanted, pools)):
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                return

    def as_json(self) -> Mapping[str, object]:
        """Return the numbers of held and refused requests, and the limits, for /stats."""
        return {
            "held": len(self),
            "held_bytes": self.held_bytes,
            "max_requests": self._section.max_requests,
            "max_bytes": self._section.max_bytes,
            "timeout": self._section.timeout,
            "counts": dict(self.counts),
        }

    def _check(self, pool: str, size: int) -> None:
        if self._refusal:
            raise self._refusal
        if self.is_closed:
            raise draining()
        is_full = len(self) >= self._section.max_requests
        if is_full or self.held_bytes + size > self._section.max_bytes:
            self.counts["refused"] += 1
            self.request_wake(pool)
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "WAKE_QUEUE_FULL",
                f"pool {pool} sleeps, and the queue for it is full; retry",
                retry_after_s=some_retry_after_s(),
            )

    async def _wait(self, pool: str, future: "asyncio.Future[bool]", within_s: float) -> None:
        end = time.monotonic() + within_s
        while not future.done():
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                self.counts["expired"] += 1
                raise ServiceError(
                    grpc.StatusCode.UNAVAILABLE,
                    "WAKING",
                    f"pool {pool} is being woken and takes longer than "
                    f"{self._section.timeout:g} s; retry",
                    retry_after_s=some_retry_after_s(),
                )
            self._resolve_engines()
            await asyncio.wait({future}, timeout=min(RESOLVE_INTERVAL_S, remaining_s))

        if not future.result():
            raise self._refusal or draining()
        self.counts["woken"] += 1

    def _notify(self) -> None:
        self._changed.set()


def _resolve(futures: "Iterable[asyncio.Future[bool]]", is_awake: bool) -> None:
    for future in futures:
        if not future.done():
            future.set_result(is_awake)


def empty_home(
    facts: RequestFacts,
    views: Sequence[EngineView],
    scaled_to_zero: frozenset[str],
    policy: RoutingPolicy,
) -> str:
    """Return the request's home pool if it is scaled to zero, or else an empty string.

    The home is the pool in which the request would normally run. The result is also empty if the
    request fits in no pool.

    Args:
        views: the running engines, and the last known engine of each empty pool.
        scaled_to_zero: the pools without a ready engine. If this router has never seen an engine of
            such a pool, there is no view of one, and the request is assumed to fit there.
    """
    able = [view for view in views if room_of(facts, view) >= facts.min_tokens]
    unknown = [pool for pool in scaled_to_zero if not any(view.pool == pool for view in views)]
    pools = [p for p in policy.pools if p in unknown or any(v.pool == p for v in able)]
    if not pools:
        return ""  # the request fits nowhere, and `decide` refuses it

    home = home_of(facts, able, policy)[0] if able else pools[0]
    if unknown and not (able and is_large(facts, able[0], policy)):
        home = pools[0]
    elif policy.large_pool in unknown:
        home = policy.large_pool
    return home if home in scaled_to_zero else ""


class ScaleToZero:
    """Holds requests for pools without engines, and remembers each pool's last engine.

    Args:
        config: the pools that may be scaled to zero, and the limits on held requests.
        engines: the engines of all pools.
        admission: predicts how much memory requests need.
    """

    def __init__(self, config: RouterConfig, engines: Engines, admission: Admission) -> None:
        self._model_name = config.model
        self._engines = engines
        self._admission = admission
        self.pools = tuple(pool.name for pool in config.pools if pool.sleeps)
        """Pools that may be scaled to zero, in order of preference."""
        self.queue = ColdStartQueue(
            config.routing.wake, self.is_scaled_to_zero, engines.resolve_soon
        )

    @property
    def scaled_to_zero(self) -> frozenset[str]:
        """The pools that may be scaled to zero and have no ready engine."""
        return frozenset(filter(self.is_scaled_to_zero, self.pools))

    def is_scaled_to_zero(self, pool: str) -> bool:
        """Return whether the pool may be scaled to zero and has no ready engine."""
        return pool in self.pools and not self._engines.is_awake(pool)

    async def wait_for_model(self, call: Call) -> None:
        """Hold the request until an engine has described the model.

        Until then, the router has no tokenizer for the request.

        Raises:
            ServiceError: see `ColdStartQueue.hold`.
        """
        size = call.request.ByteSize()
        while self._engines.model is None and (empty := self.scaled_to_zero):
            adapters = self._engines.adapters
            if call.adapter and call.adapter not in adapters:  # an unknown name must wake no engine
                allowed = call.tenant.rules.models
                raise unknown_model(call.adapter, self._model_name, adapters, allowed)
            await self._hold(next(pool for pool in self.pools if pool in empty), size, call)

    async def wait_for_pool(self, call: Call, proceed: Handler) -> ResponseStream:
        """Hold the request until its pool has an engine, and then run it.

        If the pool loses its engine before the request starts, hold the request once more.

        Raises:
            ServiceError: see `ColdStartQueue.hold`.
        """
        await self._wait_for_pool(call)
        try:
            return await proceed(call)
        except ServiceError as error:
            if error.reason != "NO_ENGINE" or not await self._wait_for_pool(call):
                raise
        return await proceed(call)

    def request_wake(self) -> None:
        """Signal demand for the first pool that is scaled to zero.

        This is for a request that cannot be held.
        """
        for pool in self.pools:
            if self.is_scaled_to_zero(pool):
                self.queue.request_wake(pool)
                return

    def as_json(self) -> dict[str, object]:
        """Return the empty pools, each pool's demand and the state of the queue, for /stats."""
        wanted = {pool: self.queue.wanted(pool) for pool in self.pools}
        return {"asleep": sorted(self.scaled_to_zero), "wanted": wanted, **self.queue.as_json()}

    async def _wait_for_pool(self, call: Call) -> bool:
        """Hold the request until its pool has an engine, unless another pool can serve the request.

        Returns:
            Whether the request was held.
        """
        was_held = False
        policy = self._admission.policy
        while empty := self.scaled_to_zero:
            facts = self._admission.facts(AdmissionRequest(call))
            model = call.prompt.model
            running = [view for view in self._engines.views(model) if view.pool not in empty]
            views = [*running, *self._remembered(empty)]
            home = empty_home(facts, views, empty, policy)
            if not home:
                break

            if "route" in policy.ladder and any(
                view.standing is EngineState.USABLE and room_of(facts, view) >= facts.min_tokens
                for view in running
            ):
                self.queue.request_wake(home)
                break

            await self._hold(home, call.prompt.memory_bytes, call)
            was_held = True
        return was_held

    def _remembered(self, empty: frozenset[str]) -> list[EngineView]:
        """Return views of engines that stand in for the empty pools, which have no ready engine.

        Each view shows the pool's last known engine as it would be after a restart: recovering, and
        with all of its memory free.
        """
        now = time.monotonic()
        last = (self._engines.last(pool) for pool in empty)
        views = [engine.view(now) for engine in last if engine]
        return [
            replace(view, standing=EngineState.RECOVERING, available=view.capacity)
            for view in views
            if view
        ]

    async def _hold(self, pool: str, size: int, call: Call) -> None:
        call.decisions.add_step("hold", "ASLEEP", action="queue", reason="ASLEEP")
        call.end_turn()
        with call.deadline.paused():
            await self.queue.hold(pool, size, call.deadline.held_s)
