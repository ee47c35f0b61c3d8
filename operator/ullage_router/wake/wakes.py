"""Whether a request's pool sleeps; and if so, its wait for an engine."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ullage_router.answer import Answer
from ullage_router.config import LARGE_POOL, RouterConfig
from ullage_router.decide import home_of, is_large, room_of
from ullage_router.engines import Engines
from ullage_router.stats import Record
from ullage_router.tokenize import Model
from ullage_router.views import EngineView, Facts, Policy, Standing
from ullage_router.wake.holding import Holding
from ullage_rpc.errors import ServiceError


def sleeping_home(
    facts: Facts,
    views: Sequence[EngineView],
    asleep: frozenset[str],
    policy: Policy,
) -> str:
    """The pool that sleeps and would have the request; empty: its pool is awake.

    Args:
        views: engines of pools that are awake, and what is remembered of those that sleep.
        asleep: pools that sleep; of some nothing may be known.
    """
    able = [view for view in views if room_of(facts, view) >= facts.min_tokens]
    unknown = [pool for pool in asleep if not any(view.pool == pool for view in views)]
    pools = [p for p in policy.pools if p in unknown or any(v.pool == p for v in able)]
    if not pools:
        return ""  # it fits nowhere, and is told so
    home = home_of(facts, able, policy)[0] if able else pools[0]
    if unknown and not (able and is_large(facts, able[0], policy)):
        home = pools[0]
    elif LARGE_POOL in unknown:
        home = LARGE_POOL
    return home if home in asleep else ""


class Wakes:
    """Holds requests for pools without engines, and remembers what these were like.

    Args:
        config: which pools may sleep, and the bounds.
        engines: tell what is awake.
    """

    def __init__(self, config: RouterConfig, engines: Engines, policy: Policy) -> None:
        self._engines = engines
        self._policy = policy
        self.sleepy = tuple(pool.name for pool in config.pools if pool.sleeps)
        """Pools that may sleep, in order of preference."""
        self.holding = Holding(config.routing.wake, self.is_asleep, engines.look)

    @property
    def asleep(self) -> frozenset[str]:
        return frozenset(filter(self.is_asleep, self.sleepy))

    def is_asleep(self, pool: str) -> bool:
        """Whether the pool may sleep and no engine of it takes requests."""
        return pool in self.sleepy and not any(
            engine.pool == pool and engine.model and engine.standing is Standing.USABLE
            for engine in self._engines.all()
        )

    async def introduced(self, record: Record, size: int) -> None:
        """Returns when the model is known: nothing can be priced without its tokenizer.

        Args:
            size: bytes of the request.

        Raises:
            ServiceError: see `Holding.hold`.
        """
        while self._engines.model is None and (asleep := self.asleep):
            pool = next(name for name in self.sleepy if name in asleep)
            await self._hold(pool, size, record)

    async def awake(self, facts: Facts, model: Model, record: Record, size: int) -> bool:
        """Returns when the request's pool is awake, or another one may serve it meanwhile.

        Returns:
            Whether it was held.

        Raises:
            ServiceError: see `Holding.hold`.
        """
        was_held = False
        while asleep := self.asleep:
            views = self._engines.views(model)
            there = [view for view in views if view.pool not in asleep]
            home = sleeping_home(
                facts, [*there, *self._remembered(asleep, model)], asleep, self._policy
            )
            if not home:
                break
            if "route" in self._policy.ladder and any(
                view.standing is Standing.USABLE and room_of(facts, view) >= facts.min_tokens
                for view in there
            ):
                self.holding.want(home)
                break
            await self._hold(home, size, record)
            was_held = True
        return was_held

    async def served(
        self, begin: Callable[[], Awaitable[Answer]], wait: Callable[[], Awaitable[bool]]
    ) -> Answer:
        """What `begin` makes; once more, if the last engine went away under it.

        Args:
            wait: holds the request, and says whether that was needed.
        """
        try:
            return await begin()
        except ServiceError as error:
            if error.reason != "NO_ENGINE" or not await wait():
                raise
        return await begin()

    def want(self) -> None:
        """A request that cannot be held found no engine."""
        for pool in self.sleepy:
            if self.is_asleep(pool):
                self.holding.want(pool)
                return

    def as_json(self) -> dict[str, object]:
        wanted = {pool: self.holding.wanted(pool) for pool in self.sleepy}
        return {"asleep": sorted(self.asleep), "wanted": wanted, **self.holding.as_json()}

    def _remembered(self, asleep: frozenset[str], model: Model) -> list[EngineView]:
        """An empty engine of each pool that sleeps, as the last one there was."""
        last = (self._engines.last(pool) for pool in asleep)
        views = [engine.view(model.fingerprint, False) for engine in last if engine]
        return [
            replace(view, standing=Standing.RECOVERING, available=view.capacity)
            for view in views
            if view
        ]

    async def _hold(self, pool: str, size: int, record: Record) -> None:
        record.action, record.reason = "queue", "ASLEEP"
        record.step("hold", "ASLEEP")
        patience = record.patience
        with patience.stopped():
            await self.holding.hold(pool, size, patience.held_s)
