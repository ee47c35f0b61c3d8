"""All engines of all pools: found by DNS, followed one by one."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import grpc
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import BreakerSection, PoolSection, large_pool
from ullage_common.wire.channels import NO_RECORDS, addresses, is_address, open_channel
from ullage_common.wire.fingerprint import (
    UNKNOWN,
    Differences,
    Fingerprint,
    describe,
    differences,
    num_kinds,
)
from ullage_router.engines.engine import Engine
from ullage_router.engines.roster import Roster
from ullage_router.errors import no_engine, unknown_model
from ullage_router.policy.circuit_breaker import held_back
from ullage_router.policy.facts import EngineState, EngineView, Side, engine_key
from ullage_router.tokenizer import Model, fingerprint, load_model

RESOLVE_INTERVAL_S = 3.0
LEAST_RESOLVE_INTERVAL_S = 0.2
FIRST_RESOLVE_S = 2.0
SLOW_RESOLVE_S = 1.0
"""Seconds after which a look-up no longer holds up what other pools' look-ups have said."""
MAX_IDLE_MODELS = 2
"""Number of models kept that no engine announces: one may come back, as a canary's does."""

NONE: frozenset[str] = frozenset()

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
        accepts_plaintext: whether engines that do not speak TLS are called in plaintext, though
            there are credentials.

    on_forgotten
        called with the key of an engine whose caches are gone
    """

    def __init__(
        self,
        pools: Iterable[PoolSection],
        model_name: str,
        on_change: Callable[[], None],
        breaker: BreakerSection = BreakerSection(),  # noqa: B008 - immutable
        dialer: Dialer | None = None,
        accepts_plaintext: bool = False,
        trusts_special_tokens: bool = False,
    ) -> None:
        self._pools = tuple(pools)
        self._canary: tuple[PoolSection, ...] = ()
        self._declared_adapters: frozenset[str] | None = None
        """Adapters of engines that are woken; None where nobody says which."""
        self._model_name = model_name
        self._on_change = on_change
        self._breaker = breaker
        self._dialer = dialer
        self._accepts_plaintext = accepts_plaintext
        self._trusts_special_tokens = trusts_special_tokens
        self.on_forgotten: Callable[[str], None] = lambda _: None
        self._engines: dict[str, Engine] = {}
        """Engines by key."""
        self._roster: Roster | None = None
        """None after an engine came, went or changed its state."""
        self._max_model_len: int | None = None
        self._expected_outputs: dict[Engine, int] = {}
        """Tokens of an answer by engine, as reported last."""
        self._ejected: set[Engine] = set()
        """Engines whose breakers are not closed, and some whose are."""
        self._large_pool = large_pool(self._pools)
        self._last: dict[str, Engine] = {}
        """The latest engine that is gone, by pool: it tells the properties of a pool that sleeps.
        """
        self._models: dict[str, Model] = {}
        self._lookups: dict[tuple[Side, PoolSection], asyncio.Task[tuple[set[str], bool]]] = {}
        """Look-ups that have not ended."""
        self._loading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._relist, self._resolved = asyncio.Event(), asyncio.Event()
        self._ejections = self._missed = 0
        self._lost = dict.fromkeys(Side, 0)
        """Counts of engines that were forgotten, so that counters never fall."""
        self._logged_values: dict[str, frozenset[str]] = {}
        """The differing facts of engines that were logged last, with their values."""

    async def start(self) -> None:
        """Start resolving engines in the background, and wait a moment for the first answer."""
        self._task = asyncio.create_task(self._keep_resolving(), name="resolve engines")
        with contextlib.suppress(TimeoutError):  # a silent name server must not hold up the start
            async with asyncio.timeout(FIRST_RESOLVE_S):
                await self._resolved.wait()

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for lookup in self._lookups.values():
            lookup.cancel()
        await asyncio.gather(*self._lookups.values(), return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    def all(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def model(self) -> Model | None:
        """The model of the stable engines."""
        return self.model_of(Side.STABLE)

    def numerics(self, pool: str = "") -> dict[str, Fingerprint]:
        """Return what decides the bits of answers, by the names of engines that serve.

        Args:
            pool: empty: all pools.
        """
        return {
            engine.id: engine.numerics
            for engine in self._engines.values()
            if engine.has_numerics and pool in ("", engine.pool)
        }

    def differences(self) -> Differences:
        """Return the facts by which engines that serve compute otherwise than one another."""
        return differences(self.numerics())

    def on_numerics_change(self) -> None:
        """Log how engines differ, once for each change of that."""
        differing = self.differences()
        values = {fact: frozenset(by_value) for fact, by_value in differing.items()}
        if values == self._logged_values:
            return
        self._logged_values = values
        if differing:
            extra = {"reason": describe(differing), "facts": sorted(differing)}
            log.warning("engines compute otherwise than one another", extra=extra)
        else:
            log.info("engines compute alike again")

    def model_of(self, side: Side) -> Model | None:
        """Return the model of the first engine of that side that is ready, or of any that
        described its model."""
        models = self.roster.models
        if side not in models:
            models[side] = self._model_of(side)
        return models[side]

    def _model_of(self, side: Side) -> Model | None:
        described = [engine for engine in self._known() if engine.model]
        if len(described) == 1:
            return described[0].model
        best = sorted(described, key=lambda e: (e.side is not side, e.state != "ready"))
        return best[0].model if best else None

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that any engine serves, or would if it were woken."""
        declared = self._declared_adapters
        if declared is None:
            return NONE.union(*(engine.adapters for engine in self._known()))
        asleep = {pool.name for pool in self._pools if pool.sleeps and not self.is_awake(pool.name)}
        awake = (engine.adapters for engine in self._known() if engine.pool not in asleep)
        return NONE.union(*awake, declared if asleep else ())

    def is_awake(self, pool: str) -> bool:
        """Whether an engine of the pool takes requests."""
        return any(
            engine.pool == pool and engine.model and engine.standing is EngineState.USABLE
            for engine in self._engines.values()
        )

    def adapter_of(self, name: str, allowed: Collection[str] = ()) -> str:
        """Return the adapter that a request names as its model; empty where it names the model.

        While no engine has described its model, it may have any adapter.

        Args:
            allowed: names that the tenant may use, and that an error may show; empty: all.

        Raises:
            ServiceError: no engine has it, or the tenant may not use it.
        """
        if name in ("", self._model_name):
            return ""
        adapters = self.adapters
        is_served = name in adapters and (not allowed or name in allowed)
        if not is_served and any(engine.description for engine in self._known()):
            raise unknown_model(name, self._model_name, adapters, allowed)
        return name

    def served_model(
        self, name: str, side: Side = Side.STABLE, allowed: Collection[str] = ()
    ) -> Model:
        """The served model, of a side of the rollout.

        Args:
            allowed: names that the tenant may use, and that an error may show; empty: all.

        Raises:
            ServiceError: it has another name, or no engine has described it yet.
        """
        self.adapter_of(name, allowed)
        model = self.model_of(side)
        if model is None:
            raise no_engine()
        return model

    def describe(self, name: str, allowed: Collection[str] = ()) -> inference_pb2.GetModelResponse:
        """Describe the served model, with the adapters that any engine serves and the tenant may
        use. A tenant that may not use the model does not get its name, and only tenants that may
        use everything get the facts of the fingerprint.

        Args:
            name: empty: the served model, whatever its name.
            allowed: names that the tenant may use; empty: all.

        Raises:
            ServiceError: it has another name, the tenant may not use that, or no engine has
                described it yet.
        """
        if name and allowed and name not in allowed:
            raise unknown_model(name, self._model_name, self.adapters, allowed)
        response = inference_pb2.GetModelResponse()
        response.CopyFrom(self.served_model(name, allowed=allowed).description)
        if numerics := list(self.numerics().values()):
            common = numerics[0] if num_kinds(numerics) == 1 else UNKNOWN
            response.fingerprint = common.digest
            response.fingerprint_facts.clear()
            response.fingerprint_facts.update(common.facts)
        if allowed:  # facts name adapters, those of other tenants, too
            response.fingerprint_facts.clear()
        if allowed and response.model not in allowed:
            response.model = ""
        del response.adapters[:]
        described = (adapter for engine in self._known() for adapter in engine.described_adapters)
        adapters = {adapter.name: adapter for adapter in described}
        for each in sorted(self.adapters):
            if not allowed or each in allowed:
                response.adapters.append(adapters.get(each) or inference_pb2.Adapter(name=each))
        return response

    def declare_adapters(self, names: Iterable[str] | None) -> None:
        """Says which adapters engines of pools that sleep have, once they are woken; None: those of
        the last engine of each."""
        self._declared_adapters = None if names is None else frozenset(names)

    def set_canary(self, pools: tuple[PoolSection, ...]) -> None:
        """Follows other engines as the canary's from now on; without any there is no canary."""
        names = {pool.name for pool in self._pools}
        for pool in pools:
            if pool.name not in names:  # the file may be newer than this router's configuration
                log.warning("canary's pool ignored", extra={"pool": pool.name})
        self._canary = tuple(pool for pool in pools if pool.name in names)
        self._relist.set()

    def have_all(self, adapter: str) -> bool:
        """Whether every engine that takes requests has the adapter, or while none does an engine
        that may come back; an empty one all have."""
        return not adapter or adapter in self.roster.common_adapters

    def claimed(self, claims: Mapping[tuple[str, str], int]) -> Mapping[str, int]:
        """Return the smallest claim on each engine, by key; engines without any are absent.

        Args:
            claims: bytes by pool and adapter, each on the pool's engines that have the adapter.
        """
        sizes: dict[str, int] = {}
        for (pool, adapter), size in claims.items():
            for engine in self._engines.values():
                if engine.pool == pool and adapter in engine.adapters:
                    sizes[engine.key] = min(size, sizes.get(engine.key, size))
        return sizes

    def is_ready_on(self, side: Side, adapter: str = "") -> bool:
        """Whether an engine of that side, with the adapter if one is named, takes requests."""
        return self.roster.is_ready(side, adapter)

    @property
    def roster(self) -> Roster:
        """The engines' present states."""
        now = time.monotonic()
        if self._roster is None or now > self._roster.until:
            self._roster = Roster(sorted(self._engines.values(), key=self._place), now)
        return self._roster

    def _place(self, engine: Engine) -> tuple[int, str]:
        """Orders engines by their pools."""
        order = [pool.name for pool in self._pools]
        return order.index(engine.pool), engine.key

    def on_state_change(self, engine: Engine) -> None:
        """Make the next decision read all engines again, if this engine's state has changed."""
        if self._roster and not self._roster.is_right_about(engine):
            self._forget_states()
        if engine.headroom:
            self._expected_outputs[engine] = engine.expected_output

    def on_load_change(self, engine: Engine) -> None:
        if self._roster:
            self._roster.on_load_change(engine)

    def workers_lost(self, side: Side) -> int:
        """Return the number of workers and servers of that side that ended unexpectedly."""
        present = (e.order.workers_lost for e in self.all() if e.side is side)
        return self._lost[side] + sum(present)

    def workers_lost_before(self, side: Side) -> int:
        """Return the same count for engines of that side that are gone or about to go."""
        ending = (e for e in self.all() if e.side is side and e.headroom and e.headroom.draining)
        return self._lost[side] + sum(e.order.workers_lost for e in ending)

    @property
    def max_model_len(self) -> int:
        """The longest context of any engine, tokens."""
        if self._max_model_len is None:
            described = [e.description for e in self._known() if e.description]
            self._max_model_len = max((d.max_model_len for d in described), default=0)
        return self._max_model_len

    @property
    def expected_output(self) -> int:
        """The largest number of tokens that an engine expects of an answer."""
        present = self._expected_outputs.values()
        return max(present or (e.expected_output for e in self._known()), default=0)

    def _known(self) -> list[Engine]:
        """Return all engines, and of a pool without any the last it had."""
        present = {engine.pool for engine in self._engines.values() if engine.model}
        return self.all() + [e for pool, e in self._last.items() if pool not in present]

    def last(self, pool: str) -> Engine | None:
        """Return an engine that the pool has or had."""
        return next((e for e in self._known() if e.pool == pool and e.model), None)

    def route(self, pool: str) -> str:
        """Return the label of a pool: that of an engine that it has or had, else its name."""
        engine = self.last(pool)
        return engine.route if engine else pool

    def resolve_soon(self) -> None:
        """Resolve engines as soon as the interval allows."""
        self._relist.set()

    @property
    def is_ready(self) -> bool:
        return bool(self.roster.ready_sides)

    def views(self, model: Model, side: Side = Side.STABLE, adapter: str = "") -> list[EngineView]:
        """Return every engine that described its model, in order of the pools.

        Those without the adapter that a request names cannot be used, nor those of the other side,
        unless no engine of this one is ready.
        """
        now = time.monotonic()
        roster = self.roster
        held = self.held_back()
        has_choice = roster.is_ready(side, adapter)
        views = []
        for engine in roster.engines:
            view = engine.view(now)
            if view is None:
                continue
            is_out = engine.key in held or engine.fingerprint != model.fingerprint
            is_out = is_out or (adapter != "" and adapter not in engine.adapters)
            if is_out or (has_choice and engine.side is not side):
                view = replace(view, standing=EngineState.UNUSABLE)
            views.append(view)
        return views

    def sample(
        self, model: Model, side: Side, number: int, preferred: str, adapter: str = ""
    ) -> list[EngineView]:
        """Return a few usable engines of the first pool and, if there is one, of the large pool:
        the preferred engine and random ones.

        Args:
            number: random.
            preferred: key of an engine; empty where there is none.
            adapter: engines without it are left out; empty: none are.
        """
        roster = self.roster
        now = time.monotonic()
        held = self.held_back() if self._ejected else NONE
        first = self._pools[0].name
        keys = [(side, first, model.fingerprint)]
        if self._large_pool and first != self._large_pool:
            keys.append((side, self._large_pool, model.fingerprint))
        favourite = self._engines.get(preferred) if preferred else None
        views: list[EngineView] = []
        for key in keys:
            drawn = roster.draw(key, number)
            if favourite and favourite not in drawn and roster.has(key, favourite):
                drawn.append(favourite)
            if adapter:
                drawn = [engine for engine in drawn if adapter in engine.adapters]
            for engine in drawn:
                if engine.key not in held and (view := engine.view(now)):
                    views.append(view)
        if len(keys) > 1 and not any(view.pool == self._large_pool for view in views):
            views += self._unusable(self._large_pool, now)
        return views

    def nearest_two(self, side: Side, point: int) -> list[Engine]:
        """Return the two usable engines of the first pool that requests of that place on the ring
        go to, or as many as there are."""
        model = self.model_of(side)
        if model is None:
            return []
        key = (side, self._pools[0].name, model.fingerprint)
        return [self._engines[name] for name in self.roster.nearest_two(key, point)]

    def _unusable(self, pool: str, now: float) -> list[EngineView]:
        """Return one engine of a pool of which none can be used, if one has described its
        model."""
        views = (e.view(now) for e in self.roster.engines if e.pool == pool)
        first = next((view for view in views if view), None)
        return [replace(first, standing=EngineState.UNUSABLE)] if first else []

    def held_back(self) -> frozenset[str]:
        """Return keys of engines that get nothing because requests failed on them."""
        self._ejected = {engine for engine in self._ejected if not engine.breaker.is_closed}
        if not self._ejected:
            return NONE
        now = time.monotonic()
        roster = self.roster
        held = NONE
        for side, pool in {(engine.side, engine.pool) for engine in self._ejected}:
            ejected = [e for e in self._ejected if (e.side, e.pool) == (side, pool)]
            breakers = [(e.key, e.breaker) for e in ejected if e.state == "ready"]
            most = int(self._breaker.max_ejected_share * roster.num_usable(side, pool))
            held |= held_back(breakers, most, now)
        return held

    def on_ejected(self, engine: Engine) -> None:
        self._ejected.add(engine)

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

    @property
    def is_mixed(self) -> bool:
        return self.is_secure and self._accepts_plaintext

    def dial(self, address: str, is_plaintext: bool = False) -> grpc.aio.Channel:
        if self._dialer is None or (is_plaintext and self._accepts_plaintext):
            return open_channel(address)
        return self._dialer(address)

    def reconnect(self, grace_s: float) -> None:
        """Open all channels anew; answer on the old ones have the grace to end."""
        for engine in self._engines.values():
            engine.reconnect(grace_s)

    def on_change(self) -> None:
        """Wake what waits, since an engine's memory or state may have changed."""
        self._on_change()

    def on_loss(self, engine: Engine) -> None:
        """Resolve engines at once: one that comes back may have another address."""
        self._relist.set()

    def on_restart(self, engine: Engine) -> None:
        self.on_forgotten(engine.key)

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    def has_another(self, engine: Engine) -> bool:
        return any(e.state == "ready" for e in self._engines.values() if e is not engine)

    def at(self, key: str) -> Engine:
        """Return the engine of a view."""
        return self._engines[key]

    def get(self, key: str) -> Engine | None:
        """Return the engine with a key; None when it is gone."""
        return self._engines.get(key)

    async def _keep_resolving(self) -> None:
        while True:
            try:
                await self._resolve()
            except Exception:  # one failure must not end the search for engines
                log.exception("cannot look for engines; trying again")
            self.on_numerics_change()  # engines may have come or gone
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
        """Resolve all pools, without waiting for those whose name server is slow: what it says is
        read in a later round."""
        for side, pool in self._sides():
            if (side, pool) not in self._lookups:
                self._lookups[side, pool] = asyncio.create_task(_resolve_all(pool.targets))
        await asyncio.wait(self._lookups.values(), timeout=SLOW_RESOLVE_S)
        for (side, pool), lookup in list(self._lookups.items()):
            if not lookup.done():
                continue
            del self._lookups[side, pool]
            if (side, pool) not in self._sides():  # a canary that is over
                continue
            addresses, is_complete = await lookup
            if is_complete:
                self._update(side, pool.name, addresses)
            else:  # a name server in trouble must not cost a working engine
                self._add(side, pool.name, addresses)
        canaries = {pool.name for pool in self._canary}
        for engine in self._engines.values():
            if engine.side is Side.CANARY and engine.pool not in canaries:
                engine.is_listed = False
        await self._forget()

    def _update(self, side: Side, pool: str, addresses: set[str]) -> None:
        for engine in self._engines.values():
            if (engine.side, engine.pool) == (side, pool):
                engine.is_listed = engine.address in addresses
        self._add(side, pool, addresses)

    def _add(self, side: Side, pool: str, addresses: set[str]) -> None:
        for address in sorted(addresses):
            key = engine_key(side, pool, address)
            if key not in self._engines:
                self._engines[key] = Engine(
                    address, pool, self._model_name, self._breaker, self, side
                )
                self._forget_states()

    def _forget_states(self) -> None:
        self._roster = self._max_model_len = None

    async def _forget(self) -> None:
        """Close engines that left DNS and fell silent."""
        for key, engine in list(self._engines.items()):
            if engine.is_over:
                del self._engines[key]
                self._expected_outputs.pop(engine, None)
                self._ejected.discard(engine)
                self._forget_states()
                if engine.model:
                    self._last[engine.pool] = engine
                self.on_forgotten(engine.key)
                self._ejections += engine.breaker.openings
                self._missed += engine.order.missed
                self._lost[engine.side] += engine.order.workers_lost
                await engine.close()
                self._on_change()

    async def load(self, response: inference_pb2.GetModelResponse) -> Model:
        """Build the model that an engine described, once for all engines."""
        key = fingerprint(response)
        async with self._loading:
            model = self._models.pop(key, None)
            if model is None:
                model = await asyncio.to_thread(load_model, response, self._trusts_special_tokens)
            self._models[key] = model  # the newest is last
            self._drop_models()
        return model

    def _drop_models(self) -> None:
        announced = {engine.model.fingerprint for engine in self._known() if engine.model}
        idle = [key for key in self._models if key not in announced]
        for key in idle[:-MAX_IDLE_MODELS]:
            del self._models[key]


async def _resolve_all(targets: Iterable[str]) -> tuple[set[str], bool]:
    """Return the addresses of all targets, and whether every name server answered."""
    answers = await asyncio.gather(*(resolve(target) for target in targets))
    addresses = {address for answer in answers if answer for address in answer}
    return addresses, all(answer is not None for answer in answers)


async def resolve(target: str) -> set[str] | None:
    """Return `ip:port` of every A record of a target, or `[ip]:port` of every AAAA record where
    there is no A record; None if the name server does not answer.

    An engine that has both is one engine, whose address of the first kind is taken.
    """
    host, _, port = target.rpartition(":")
    if is_address(host):
        return {target}
    loop = asyncio.get_running_loop()
    try:
        records = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in NO_RECORDS:
            return set()
        log.warning("cannot resolve", extra={"target": target, "reason": error.strerror})
        return None
    return addresses(records, port)
