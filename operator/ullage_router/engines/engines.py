"""All engines of all pools: found by DNS, followed one by one."""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterable

import grpc

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import BreakerSection, PoolSection
from ullage_common.wire.channels import open_channel
from ullage_router.engines.engine import Engine
from ullage_router.errors import no_engine, unknown_model
from ullage_router.policy.circuit_breaker import held_back
from ullage_router.policy.decision import EngineView, Side
from ullage_router.tokenizer import Model, fingerprint, load_model

RESOLVE_INTERVAL_S = 3.0
LEAST_RESOLVE_INTERVAL_S = 0.2
FIRST_RESOLVE_S = 2.0
MAX_IDLE_MODELS = 2
"""Number of models kept that no engine announces: one may come back, as a canary's does."""

Dialer = Callable[[str], grpc.aio.Channel]

log = logging.getLogger(__name__)


class Engines:
    """The engines behind the pools' targets.

    Args:
        pools: in order of preference.
        model_name: the model that engines must serve.
        on_change: called when any engine's memory or state may have changed.
        breaker: when and how many engines are held back for failures.
        dialer: opens channels with credentials; None: in plaintext.

    on_forgotten
        called with the address of an engine whose caches are gone
    """

    def __init__(
        self,
        pools: Iterable[PoolSection],
        model_name: str,
        on_change: Callable[[], None],
        breaker: BreakerSection = BreakerSection(),  # noqa: B008 - immutable
        dialer: Dialer | None = None,
    ) -> None:
        self._pools = tuple(pools)
        self._canary: tuple[PoolSection, ...] = ()
        self._model_name = model_name
        self._on_change = on_change
        self._breaker = breaker
        self._dialer = dialer
        self.on_forgotten: Callable[[str], None] = lambda _: None
        self._engines: dict[tuple[Side, str, str], Engine] = {}
        self._last: dict[str, Engine] = {}
        """The latest engine that is gone, by pool: it tells the properties of a pool that sleeps.
        """
        self._models: dict[str, Model] = {}
        self._loading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._relist, self._resolved = asyncio.Event(), asyncio.Event()
        self._ejections = self._missed = 0
        self._lost = dict.fromkeys(Side, 0)
        """Counts of engines that were forgotten, so that counters never fall."""

    async def start(self) -> None:
        """Starts resolving engines in the background, and waits a moment for the first answer."""
        self._task = asyncio.create_task(self._keep_resolving(), name="resolve engines")
        with contextlib.suppress(TimeoutError):  # a silent name server must not hold up the start
            async with asyncio.timeout(FIRST_RESOLVE_S):
                await self._resolved.wait()

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    def all(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def model(self) -> Model | None:
        """The model of the stable engines."""
        return self.model_of(Side.STABLE)

    def model_of(self, side: Side) -> Model | None:
        """Returns the model of the first engine of that side that is ready, or of any that
        described its model."""
        described = [engine for engine in self._known() if engine.model]
        if len(described) == 1:
            return described[0].model
        best = sorted(described, key=lambda e: (e.side is not side, e.state != "ready"))
        return best[0].model if best else None

    def check_name(self, name: str) -> None:
        """Raises ServiceError when a request names another model."""
        if name not in ("", self._model_name):
            raise unknown_model(name, self._model_name)

    def served_model(self, name: str, side: Side = Side.STABLE) -> Model:
        """The served model, of a side of the rollout.

        Raises:
            ServiceError: it has another name, or no engine has described it yet.
        """
        self.check_name(name)
        model = self.model_of(side)
        if model is None:
            raise no_engine()
        return model

    def set_canary(self, pools: tuple[PoolSection, ...]) -> None:
        """Follows other engines as the canary's from now on; without any there is no canary."""
        self._canary = pools
        self._relist.set()

    def is_ready_on(self, side: Side) -> bool:
        """Whether an engine of that side takes requests."""
        for engine in self._engines.values():
            if engine.side is side and engine.state == "ready":
                return True
        return False

    def workers_lost(self, side: Side) -> int:
        """Returns the number of workers and servers of that side that ended unexpectedly."""
        return self._lost[side] + sum(e.order.workers_lost for e in self.all() if e.side is side)

    @property
    def max_model_len(self) -> int:
        """The longest context of any engine, tokens."""
        return max((e.description.max_model_len for e in self._known() if e.description), default=0)

    @property
    def expected_output(self) -> int:
        """The largest number of tokens that an engine expects of an answer."""
        return max(
            (e.headroom.expected_output_tokens for e in self._known() if e.headroom), default=0
        )

    def _known(self) -> list[Engine]:
        """Returns all engines, and of a pool without any the last it had."""
        present = {engine.pool for engine in self._engines.values() if engine.model}
        return self.all() + [e for pool, e in self._last.items() if pool not in present]

    def last(self, pool: str) -> Engine | None:
        """Returns an engine that the pool has or had."""
        return next((e for e in self._known() if e.pool == pool and e.model), None)

    def route(self, pool: str) -> str:
        """Returns the label of a pool: that of an engine that it has or had, else its name."""
        engine = self.last(pool)
        return engine.route if engine else pool

    def resolve_soon(self) -> None:
        """Resolves engines as soon as the interval allows."""
        self._relist.set()

    @property
    def is_ready(self) -> bool:
        return any(engine.state == "ready" for engine in self._engines.values())

    def views(self, model: Model, side: Side = Side.STABLE) -> list[EngineView]:
        """Returns every engine that described its model, in order of the pools.

        Those of the other side cannot be used, unless no engine of this one is ready.
        """
        held, has_choice = self.held_back(), self.is_ready_on(side)
        views = [
            e.view(model.fingerprint, e.address in held or (has_choice and e.side is not side))
            for e in self._engines.values()
        ]
        described = [view for view in views if view]
        if len(described) > 1:
            order = [pool.name for pool in self._pools]
            described.sort(key=lambda v: (order.index(v.pool), v.id))
        return described

    def held_back(self) -> frozenset[str]:
        """Returns addresses of engines that get nothing because requests failed on them."""
        held = frozenset[str]()
        if all(engine.breaker.is_closed for engine in self._engines.values()):
            return held
        now, most_share = time.monotonic(), self._breaker.max_ejected_share
        for side, pool in self._sides():
            ready = [e for e in self.all() if (e.side, e.pool) == (side, pool.name)]
            ready = [e for e in ready if e.state == "ready"]
            held |= held_back(((e.address, e.breaker) for e in ready), most_share, now)
        return held

    @property
    def ejections(self) -> int:
        """Number of times that a breaker opened, those of forgotten engines included."""
        return self._ejections + sum(e.breaker.openings for e in self.all())

    @property
    def missed(self) -> int:
        """Number of reports that never came, those of forgotten engines included."""
        return self._missed + sum(e.order.missed for e in self.all())

    @property
    def is_secure(self) -> bool:
        return self._dialer is not None

    def dial(self, address: str) -> grpc.aio.Channel:
        return self._dialer(address) if self._dialer else open_channel(address)

    def reconnect(self, grace_s: float) -> None:
        """Opens all channels anew; answers on the old ones have the grace to end."""
        for engine in self._engines.values():
            engine.reconnect(grace_s)

    def on_change(self) -> None:
        """Wakes what waits, since an engine's memory or state may have changed."""
        self._on_change()

    def on_loss(self, engine: Engine) -> None:
        """Resolves engines at once: one that comes back may have another address."""
        self._relist.set()

    def on_restart(self, engine: Engine) -> None:
        self.on_forgotten(engine.address)

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    def has_another(self, engine: Engine) -> bool:
        return any(e.state == "ready" for e in self._engines.values() if e is not engine)

    def at(self, address: str) -> Engine:
        """Returns the engine of a view."""
        return next(e for e in self._engines.values() if e.address == address)

    async def _keep_resolving(self) -> None:
        while True:
            try:
                await self._resolve()
            except Exception:  # one failure must not end the search for engines
                log.exception("cannot look for engines; trying again")
            self._resolved.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_INTERVAL_S):
                    await self._relist.wait()
                    await asyncio.sleep(LEAST_RESOLVE_INTERVAL_S)
            self._relist.clear()

    def _sides(self) -> list[tuple[Side, PoolSection]]:
        stable = [(Side.STABLE, pool) for pool in self._pools]
        return stable + [(Side.CANARY, pool) for pool in self._canary]

    async def _resolve(self) -> None:
        for side, pool in self._sides():
            answers = await asyncio.gather(*(resolve(target) for target in pool.targets))
            addresses = {a for answer in answers if answer for a in answer}
            if all(answer is not None for answer in answers):
                self._update(side, pool.name, addresses)
            else:  # a name server in trouble must not cost a working engine
                self._add(side, pool.name, addresses)
        canaries = {pool.name for pool in self._canary}
        for (side, name, _), engine in self._engines.items():
            if side is Side.CANARY and name not in canaries:
                engine.is_listed = False
        await self._forget()

    def _update(self, side: Side, pool: str, addresses: set[str]) -> None:
        for (*place, address), engine in self._engines.items():
            if place == [side, pool]:
                engine.is_listed = address in addresses
        self._add(side, pool, addresses)

    def _add(self, side: Side, pool: str, addresses: set[str]) -> None:
        for address in sorted(addresses):
            if (side, pool, address) not in self._engines:
                self._engines[side, pool, address] = Engine(
                    address, pool, self._model_name, self._breaker, self, side
                )

    async def _forget(self) -> None:
        """Closes engines that left DNS and fell silent."""
        for key, engine in list(self._engines.items()):
            if engine.is_over:
                del self._engines[key]
                if engine.model:
                    self._last[engine.pool] = engine
                self.on_forgotten(engine.address)
                self._ejections += engine.breaker.openings
                self._missed += engine.order.missed
                self._lost[engine.side] += engine.order.workers_lost
                await engine.close()
                self._on_change()

    async def load(self, response: inference_pb2.GetModelResponse) -> Model:
        """Builds the model that an engine described, once for all engines."""
        key = fingerprint(response)
        async with self._loading:
            model = self._models.pop(key, None)
            if model is None:
                model = await asyncio.to_thread(load_model, response)
            self._models[key] = model  # the newest is last
            self._drop_models()
        return model

    def _drop_models(self) -> None:
        announced = {engine.model.fingerprint for engine in self._known() if engine.model}
        idle = [key for key in self._models if key not in announced]
        for key in idle[:-MAX_IDLE_MODELS]:
            del self._models[key]


async def resolve(target: str) -> set[str] | None:
    """Returns `ip:port` of every A record of a target; None if the name server does not answer."""
    host, _, port = target.rpartition(":")
    if _is_address(host):
        return {target}
    loop = asyncio.get_running_loop()
    try:
        records = await loop.getaddrinfo(host, int(port), family=socket.AF_INET)
    except socket.gaierror as error:
        # A headless Service without pods has no records, and that is an answer.
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            return set()
        log.warning("cannot resolve", extra={"target": target, "reason": error.strerror})
        return None
    return {":".join(map(str, address[:2])) for *_, address in records}


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
