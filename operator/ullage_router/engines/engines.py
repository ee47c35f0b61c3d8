"""Tracks the engines of all pools and their models, and provides snapshots for decisions."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import grpc
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import BreakerSection, PoolSection, large_pool
from ullage_common.wire.channels import open_channel
from ullage_common.wire.fingerprint import (
    UNKNOWN,
    Differences,
    Fingerprint,
    describe,
    differences,
    num_kinds,
)
from ullage_common.wire.request_fields import known_fields, router_fields, set_fields
from ullage_router.background import failures_logged
from ullage_router.engines.discovery import PoolLookups
from ullage_router.engines.engine import Engine
from ullage_router.engines.model_cache import ModelCache
from ullage_router.engines.roster import NONE, Roster
from ullage_router.errors import no_engine, unknown_model
from ullage_router.policy.circuit_breaker import held_back
from ullage_router.policy.facts import EngineState, EngineView, Side, engine_key
from ullage_router.tokenizer.model import Model

RESOLVE_INTERVAL_S = 3.0
LEAST_RESOLVE_INTERVAL_S = 0.2
FIRST_RESOLVE_S = 2.0
"""Maximum seconds that startup waits for the first DNS look-ups."""

Dialer = Callable[[str], grpc.aio.Channel]

log = logging.getLogger(__name__)


class Engines:
    """Discovers the engines of all pools through DNS, follows their state, and indexes them.

    DNS provides only the engines' addresses. Each engine's state comes from its headroom reports.
    An engine is removed once it has left DNS, has fallen silent and has no more requests.

    Args:
        pools: the pools in order of preference.
        model_name: the model that engines must serve.
        on_change: called when the memory or state of any engine may have changed.
        breaker: settings of the engines' circuit breakers.
        dialer: opens channels with credentials, or None for plaintext.
        accepts_plaintext: whether to connect to engines without TLS in plaintext, even if there are
            credentials.
        trusts_special_tokens: see `ModelCache`.
        reasoning: see `ModelCache`.
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
        reasoning: str = "auto",
    ) -> None:
        self._pools = tuple(pools)
        self._large_pool = large_pool(self._pools)
        self._model_name = model_name
        self._on_change = on_change
        self._breaker = breaker
        self._dialer = dialer
        self._accepts_plaintext = accepts_plaintext
        self.on_forgotten: Callable[[str], None] = lambda _: None
        """Called with the key of an engine that has lost its cached prefixes."""

        # Discovery
        self._lookups = PoolLookups(self._pools)
        self._task: asyncio.Task[None] | None = None
        self._relist = asyncio.Event()
        """Event that is set to request a DNS look-up soon."""
        self._resolved = asyncio.Event()
        """Event that is set when the first DNS look-up has finished."""

        # The engines
        self._engines: dict[str, Engine] = {}
        """All current engines, by key."""
        self._last: dict[str, Engine] = {}
        """The last engine that was removed from each pool.

        It stands in for the pool while the pool is scaled to zero.
        """
        self._models = ModelCache(trusts_special_tokens, reasoning, self._fingerprints)
        self._declared_adapters: frozenset[str] | None = None
        """Adapters that engines will serve once their pool is woken, or None if not declared."""
        self._logged_values: dict[str, frozenset[str]] = {}
        """For each numerics setting that differed when last logged, the engines' values."""

        self._closing: set[asyncio.Task[None]] = set()
        """Tasks that close the connections of removed engines."""

        # Derived from the engines, for decisions
        self._roster: Roster | None = None
        """The cached roster, or None if engines were added or removed, or changed their state."""
        self._max_model_len: int | None = None
        self._expected_outputs: dict[Engine, int] = {}
        """Expected number of output tokens per answer, from each engine's last report."""
        self._ejected: set[Engine] = set()
        """Engines whose circuit breaker is not closed, and some whose breaker closed recently."""

        # Counts of engines that are gone, so that counters never fall
        self._ejections = 0
        self._missed = 0
        self._preemptions = 0
        self._lost = dict.fromkeys(Side, 0)

    # The engines

    async def start(self) -> None:
        """Start DNS look-ups in the background, and wait briefly for the first results."""
        self._task = asyncio.create_task(self._keep_resolving(), name="resolve engines")
        with contextlib.suppress(TimeoutError):  # a silent name server must not delay the start
            async with asyncio.timeout(FIRST_RESOLVE_S):
                await self._resolved.wait()

    async def close(self) -> None:
        """Stop DNS look-ups, and close the connections to all engines."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._lookups.close()
        closing = (*(engine.close() for engine in self._engines.values()), *self._closing)
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("an engine's connection was not closed", exc_info=result)

    def all(self) -> list[Engine]:
        """Return all engines, in any state."""
        return list(self._engines.values())

    @property
    def num_engines(self) -> int:
        """Number of engines in any state."""
        return len(self._engines)

    @property
    def is_ready(self) -> bool:
        """Whether any engine, stable or canary, accepts requests."""
        return bool(self.roster.ready_sides)

    def at(self, key: str) -> Engine:
        """Return the engine with the given key, which must exist."""
        return self._engines[key]

    def get(self, key: str) -> Engine | None:
        """Return the engine with the given key, or None if it does not exist."""
        return self._engines.get(key)

    def last(self, pool: str) -> Engine | None:
        """Return one of the pool's engines, or the last one that was removed if none remain.

        Engines that have not described their model are ignored. The result is None if no engine of
        the pool is known.
        """
        return next((e for e in self._known() if e.pool == pool and e.model), None)

    def _known(self) -> list[Engine]:
        """Return all current engines, plus the last removed engine of each pool without engines."""
        present = {engine.pool for engine in self._engines.values() if engine.model}
        return self.all() + [e for pool, e in self._last.items() if pool not in present]

    def set_canary(self, pools: tuple[PoolSection, ...]) -> None:
        """Discover canary engines at the DNS targets of the given pools.

        If no pools are given, there is no canary.
        """
        names = {pool.name for pool in self._pools}
        for pool in pools:
            if pool.name not in names:  # the file may be newer than this router's configuration
                log.warning("canary's pool ignored", extra={"pool": pool.name})
        self._lookups.set_canary(pool for pool in pools if pool.name in names)
        self._relist.set()

    def resolve_soon(self) -> None:
        """Request a DNS look-up, to start as soon as LEAST_RESOLVE_INTERVAL_S allows."""
        self._relist.set()

    def reconnect(self, grace_s: float) -> None:
        """Replace all channels, but let answers on old channels finish within `grace_s` seconds."""
        for engine in self._engines.values():
            engine.reconnect(grace_s)

    # The model and its adapters

    @property
    def model(self) -> Model | None:
        """The model of the stable engines, or None if no engine has described it."""
        return self.model_of(Side.STABLE)

    def model_of(self, side: Side) -> Model | None:
        """Return one side's model, preferably from a ready engine, or None if no model is known.

        If no engine of that side has described a model, use the other side's model.
        """
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
        """Names of all adapters that are served now, or will be served once pools are woken."""
        declared = self._declared_adapters
        if declared is None:
            return NONE.union(*(engine.adapters for engine in self._known()))
        may_sleep = (pool.name for pool in self._pools if pool.sleeps)
        sleeping = {pool for pool in may_sleep if not self.is_awake(pool)}
        awake = (engine.adapters for engine in self._known() if engine.pool not in sleeping)
        return NONE.union(*awake, declared if sleeping else ())

    def declare_adapters(self, names: Iterable[str] | None) -> None:
        """Declare which adapters engines will serve once their pool is woken.

        Args:
            names: names of the adapters, or None to assume the adapters of each pool's last engine.
        """
        self._declared_adapters = None if names is None else frozenset(names)

    def adapter_of(self, name: str, allowed: Collection[str] = ()) -> str:
        """Return the adapter that a request's model name refers to (empty for the base model).

        Until an engine has described its model, every name other than the base model's is taken for
        an adapter.

        Args:
            allowed: names that the tenant may use and that errors may mention, or empty for all.

        Raises:
            ServiceError: no engine has the adapter, or the tenant may not use it.
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
        """Return the model that one side of the rollout serves.

        Args:
            name: the model or adapter that the request names.
            allowed: names that the tenant may use and that errors may mention, or empty for all.

        Raises:
            ServiceError: the name is not served, or no engine has described the model yet.
        """
        self.adapter_of(name, allowed)
        model = self.model_of(side)
        if model is None:
            raise no_engine()
        return model

    def describe(self, name: str, allowed: Collection[str] = ()) -> inference_pb2.GetModelResponse:
        """Return the served model's description, limited to what the tenant may see.

        The description lists the served adapters that the tenant may use. If the tenant may not use
        the base model, its name is omitted. Unless the tenant may use every name, the details of
        the numerics fingerprint are also omitted, because they name other adapters.

        Args:
            name: the model or adapter that the request names, or empty for the served model.
            allowed: names that the tenant may use, or empty for all.

        Raises:
            ServiceError: the name is not served, the tenant may not use it, or no engine has
                described the model yet.
        """
        if name and allowed and name not in allowed:
            raise unknown_model(name, self._model_name, self.adapters, allowed)
        response = inference_pb2.GetModelResponse()
        response.CopyFrom(self.served_model(name, allowed=allowed).description)
        response.request_fields[:] = router_fields(self.roster.unknown_fields)

        if numerics := list(self.numerics().values()):
            common = numerics[0] if num_kinds(numerics) == 1 else UNKNOWN
            response.fingerprint = common.digest
            response.fingerprint_facts.clear()
            response.fingerprint_facts.update(common.facts)
        if allowed:  # the facts also name adapters of other tenants
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

    @property
    def max_model_len(self) -> int:
        """The largest context length of all engines, in tokens."""
        if self._max_model_len is None:
            described = [e.description for e in self._known() if e.description]
            self._max_model_len = max((d.max_model_len for d in described), default=0)
        return self._max_model_len

    @property
    def expected_output(self) -> int:
        """The highest estimate, among all engines, of the number of output tokens per answer."""
        present = self._expected_outputs.values()
        return max(present or (e.expected_output for e in self._known()), default=0)

    def route(self, pool: str) -> str:
        """Return the pool's label in headers, logs and metrics (`route_of`).

        If the pool has never had an engine, the label is the pool's name.
        """
        engine = self.last(pool)
        return engine.route if engine else pool

    def is_awake(self, pool: str) -> bool:
        """Return whether any engine of the pool accepts requests."""
        return any(
            engine.pool == pool and engine.model and engine.standing is EngineState.USABLE
            for engine in self._engines.values()
        )

    # The numerics

    def numerics(self, pool: str = "") -> dict[str, Fingerprint]:
        """Return the numerics fingerprints of the serving engines, by engine name.

        Engines with the same fingerprint produce bit-identical results from the same tokens, unless
        the fingerprint is unknown (an empty digest).

        Args:
            pool: the pool whose engines to include, or empty for all pools.
        """
        return {
            engine.id: engine.numerics
            for engine in self._engines.values()
            if engine.has_numerics and pool in ("", engine.pool)
        }

    def differences(self) -> Differences:
        """Return the facts in which the numerics of serving engines differ.

        For each fact, the engines' names are grouped by the value of the fact.
        """
        return differences(self.numerics())

    # Views for decisions

    @property
    def roster(self) -> Roster:
        """The index of engines by their current state, rebuilt first if it is out of date."""
        now = time.monotonic()
        if self._roster is None or now > self._roster.until:
            self._roster = Roster(sorted(self._engines.values(), key=self._place), now)
        return self._roster

    def _place(self, engine: Engine) -> tuple[int, str]:
        """Return a sort key that orders engines by pool, then by engine key."""
        order = [pool.name for pool in self._pools]
        return order.index(engine.pool), engine.key

    def _drop_roster(self) -> None:
        self._roster = None
        self._max_model_len = None

    def is_ready_on(self, side: Side, adapter: str = "", needed: frozenset[str] = NONE) -> bool:
        """Return whether the stable or canary side has a ready engine.

        If an adapter or request fields are given, only engines that have them count.
        """
        return self.roster.is_ready(side, adapter, needed)

    def needed_fields(self, asked: Callable[[], inference_pb2.GenerateRequest]) -> frozenset[str]:
        """Return the paths of a request's fields that at least one engine does not know.

        Args:
            asked: returns the request as an engine gets it. It is called only if some engine lacks
                fields, as during an upgrade.
        """
        unknown = self.roster.unknown_fields
        return set_fields(asked(), unknown) if unknown else NONE

    def without_fields(self, needed: Iterable[str]) -> frozenset[str]:
        """Return the keys of the engines that do not know all of the request fields."""
        paths = frozenset(needed)
        if paths <= known_fields() and paths.isdisjoint(self.roster.unknown_fields):
            return NONE
        return frozenset(engine.key for engine in self.all() if not engine.knows(paths))

    def unknown_to_all(self, needed: frozenset[str]) -> frozenset[str]:
        """Return those of the request fields that no engine knows."""
        described = (engine.unknown_fields for engine in self._known() if engine.description)
        return needed.intersection(*described)

    def have_all(self, adapter: str) -> bool:
        """Return whether every usable engine has the adapter.

        If no engine is usable, it suffices that one of the engines that may come back has it. An
        empty name means that no adapter is needed, so the result is True.
        """
        return not adapter or adapter in self.roster.common_adapters

    def claimed(self, claims: Mapping[tuple[str, str], int]) -> Mapping[str, int]:
        """Return the bytes to leave free on each engine for queued requests, by engine key.

        If several entries of `claims` apply to an engine, the smallest one is used.

        Args:
            claims: bytes that queued requests for an adapter need, by pool and adapter. An entry
                applies to the engines in the pool that have the adapter.
        """
        sizes: dict[str, int] = {}
        for (pool, adapter), size in claims.items():
            for engine in self._engines.values():
                if engine.pool == pool and adapter in engine.adapters:
                    sizes[engine.key] = min(size, sizes.get(engine.key, size))
        return sizes

    def views(
        self,
        model: Model,
        side: Side = Side.STABLE,
        adapter: str = "",
        needed: frozenset[str] = NONE,
        *,
        with_trials: bool = True,
    ) -> list[EngineView]:
        """Return views of all engines that have described their model, ordered by pool.

        An engine is marked as unusable if it has another model, lacks the adapter or a request
        field, or is held back by its circuit breaker. If the given side has a ready engine, all
        engines of the other side are also marked as unusable.

        Args:
            model: the model that engines must serve.
            side: the side of the rollout.
            adapter: the adapter that engines must have, or empty for none.
            needed: paths of the request fields that engines must know.
            with_trials: whether engines that failed recently may get requests, up to their limits.
                Set this only for requests whose answers the router relays itself. Other requests do
                not show the router whether the engine works again.
        """
        now = time.monotonic()
        roster = self.roster
        held = self.held_back()
        has_choice = roster.is_ready(side, adapter, needed)
        views = []

        for engine in roster.engines:
            view = engine.view(now)
            if view is None:
                continue
            is_out = engine.key in held or engine.fingerprint != model.fingerprint
            is_out = is_out or (adapter != "" and adapter not in engine.adapters)
            is_out = is_out or not needed.isdisjoint(engine.unknown_fields)
            if is_out or (has_choice and engine.side is not side):
                view = replace(view, standing=EngineState.UNUSABLE)
            elif view.standing is EngineState.USABLE and (
                engine.is_at_limit or (engine.is_on_trial and not with_trials)
            ):
                # Requests wait for the engine's next success, rather than fail with it.
                breaker = engine.breaker.limit_facts(now)
                view = replace(view, standing=EngineState.RECOVERING, breaker=breaker)
            views.append(view)
        return views

    def sample(
        self,
        model: Model,
        side: Side,
        number: int,
        preferred: str,
        adapter: str = "",
        needed: frozenset[str] = NONE,
    ) -> list[EngineView]:
        """Return views of a few engines, among which most requests can be placed.

        The views show usable engines of the first pool and of the pool for large requests: some
        randomly chosen ones, and the preferred one. If none of them belong to the pool for large
        requests, one engine of that pool is added, marked as unusable.

        Args:
            number: a random number that determines the sample.
            preferred: key of the preferred engine, or empty if there is none.
            adapter: the adapter that engines must have, or empty for none.
            needed: paths of the request fields that engines must know.
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
            if needed:
                drawn = [engine for engine in drawn if needed.isdisjoint(engine.unknown_fields)]
            for engine in drawn:
                if engine.key in held or engine.is_at_limit:
                    continue
                if view := engine.view(now):
                    views.append(view)

        if len(keys) > 1 and not any(view.pool == self._large_pool for view in views):
            views += self._unusable(self._large_pool, now)
        return views

    def _unusable(self, pool: str, now: float) -> list[EngineView]:
        """Return a view of one of the pool's engines, marked as unusable, to represent the pool.

        The view is returned in a list, which is empty if no engine of the pool has described its
        model.
        """
        views = (e.view(now) for e in self.roster.engines if e.pool == pool)
        first = next((view for view in views if view), None)
        return [replace(first, standing=EngineState.UNUSABLE)] if first else []

    def nearest_two(self, side: Side, point: int) -> list[Engine]:
        """Return the first pool's two usable engines to which consistent hashing maps a request.

        Args:
            point: the request's point on the hash ring.
        """
        model = self.model_of(side)
        if model is None:
            return []
        key = (side, self._pools[0].name, model.fingerprint)
        return [self._engines[name] for name in self.roster.nearest_two(key, point)]

    def held_back(self) -> frozenset[str]:
        """Return the keys of engines to which circuit breakers allow no requests at present."""
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

    # Counts for metrics

    def breaker_limit(self, pool: str) -> int:
        """Return the lowest limit of a pool's circuit breakers, or 0 if none is in force."""
        limits = (e.breaker.limit for e in self.all() if e.pool == pool)
        return min((limit for limit in limits if limit is not None), default=0)

    def workers_lost(self, side: Side) -> int:
        """Return the number of unexpected worker and server exits on one side's engines."""
        present = (e.order.workers_lost for e in self.all() if e.side is side)
        return self._lost[side] + sum(present)

    def workers_lost_before(self, side: Side) -> int:
        """Return how many exits in `workers_lost` were on engines that are gone or draining."""
        ending = (e for e in self.all() if e.side is side and e.headroom and e.headroom.draining)
        return self._lost[side] + sum(e.order.workers_lost for e in ending)

    @property
    def ejections(self) -> int:
        """Number of times that circuit breakers have opened, including those of removed engines."""
        return self._ejections + sum(e.breaker.openings for e in self.all())

    @property
    def missed(self) -> int:
        """Number of reports that never arrived, including those from removed engines."""
        return self._missed + sum(e.order.missed for e in self.all())

    @property
    def preemptions(self) -> int:
        """Number of times that answers that ended were preempted, also on removed engines."""
        return self._preemptions + sum(e.preemptions for e in self.all())

    # Callbacks of engines (`EngineOwner`)

    @property
    def is_secure(self) -> bool:
        """Whether the router uses TLS for connections to engines."""
        return self._dialer is not None

    @property
    def is_mixed(self) -> bool:
        """Whether some engines may use TLS while others use plaintext."""
        return self.is_secure and self._accepts_plaintext

    def dial(self, address: str, is_plaintext: bool = False) -> grpc.aio.Channel:
        """Open a channel to an engine with the current credentials."""
        if self._dialer is None or (is_plaintext and self._accepts_plaintext):
            return open_channel(address)
        return self._dialer(address)

    async def load(self, described: inference_pb2.GetModelResponse) -> Model:
        """Return the model that an engine described.

        Each model is built only once, and shared between engines.

        Raises:
            ValueError: the model cannot be used.
        """
        return await self._models.load(described)

    def _fingerprints(self) -> set[str]:
        """Return the model fingerprints of current engines and of each empty pool's last engine."""
        return {engine.model.fingerprint for engine in self._known() if engine.model}

    def has_another(self, engine: Engine) -> bool:
        """Return whether there is a ready engine other than the given engine."""
        return any(e.state == "ready" for e in self._engines.values() if e is not engine)

    def equal_backlog_s(self, engine: Engine, adapter: str) -> float | None:
        """Return how long the prefill work of an engine with the same numerics takes, in seconds.

        This is the shortest time among the other engines that take requests, or None if none of
        them has the same numerics for the adapter.
        """
        numerics = engine.numerics_of(adapter)
        held = self.held_back()
        backlogs = (
            other.prefill_s(other.backlog_tokens)
            for other in self._engines.values()
            if other is not engine
            and other.state == "ready"
            and other.numerics_of(adapter) == numerics
            and other.key not in held
            and not other.breaker.is_at_limit
        )
        return min(backlogs, default=None) if numerics else None

    def on_change(self) -> None:
        """Notify the router that an engine's memory or state may have changed."""
        self._on_change()

    def on_loss(self, engine: Engine) -> None:
        """Request a DNS look-up, because a lost engine may come back at another address."""
        self._relist.set()

    def on_restart(self, engine: Engine) -> None:
        """Notify the router that the engine's caches are now empty."""
        self.on_forgotten(engine.key)

    def on_state_change(self, engine: Engine) -> None:
        """Invalidate the roster if the engine's state has changed."""
        if self._roster and not self._roster.is_right_about(engine):
            self._drop_roster()
        is_present = self._engines.get(engine.key) is engine  # a removed engine closes its stream
        if is_present and engine.headroom:
            self._expected_outputs[engine] = engine.expected_output

    def on_load_change(self, engine: Engine) -> None:
        """Update the engine's load in the roster."""
        if self._roster:
            self._roster.on_load_change(engine)

    def on_ejected(self, engine: Engine) -> None:
        """Stop sending requests to the engine while its circuit breaker is open."""
        self._ejected.add(engine)

    def on_numerics_change(self) -> None:
        """Log the facts in which the engines' numerics differ, unless they are as last logged."""
        differing = self.differences()
        values = {fact: frozenset(by_value) for fact, by_value in differing.items()}
        if values == self._logged_values:
            return
        self._logged_values = values
        if differing:
            extra = {"reason": describe(differing), "facts": sorted(differing)}
            log.warning("engines differ in their numerics", extra=extra)
        else:
            log.info("engines have the same numerics again")

    # Discovery

    async def _keep_resolving(self) -> None:
        while True:
            with failures_logged("look for engines"):
                await self._resolve()
            with failures_logged("compare numerics"):
                self.on_numerics_change()  # engines may have come or gone
            self._resolved.set()

            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_INTERVAL_S):
                    await self._relist.wait()
                    await asyncio.sleep(LEAST_RESOLVE_INTERVAL_S)
            self._relist.clear()

    async def _resolve(self) -> None:
        """Look up all pools, add newly listed engines, and close those that have disappeared."""
        async for side, pool, addresses, is_complete in self._lookups.answers():
            # A failing name server must not cost a working engine.
            if is_complete:
                self._set_listed(side, pool, addresses)
            self._add(side, pool, addresses)

        canary_pools = self._lookups.canary_pools
        for engine in self._engines.values():
            if engine.side is Side.CANARY and engine.pool not in canary_pools:
                engine.is_listed = False
        self._remove_gone()

    def _set_listed(self, side: Side, pool: str, addresses: set[str]) -> None:
        for engine in self._engines.values():
            if (engine.side, engine.pool) == (side, pool):
                engine.is_listed = engine.address in addresses

    def _add(self, side: Side, pool: str, addresses: set[str]) -> None:
        for address in sorted(addresses):
            key = engine_key(side, pool, address)
            if key not in self._engines:
                self._engines[key] = Engine(
                    address, pool, self._model_name, self._breaker, self, side
                )
                self._drop_roster()

    def _remove_gone(self) -> None:
        """Remove engines that have left DNS, are silent and have no more requests."""
        for key, engine in list(self._engines.items()):
            if not engine.is_over:
                continue
            del self._engines[key]
            self._expected_outputs.pop(engine, None)
            self._ejected.discard(engine)
            self._drop_roster()
            if engine.model:
                self._last[engine.pool] = engine
            self.on_forgotten(engine.key)

            self._ejections += engine.breaker.openings
            self._missed += engine.order.missed
            self._preemptions += engine.preemptions
            self._lost[engine.side] += engine.order.workers_lost

            closing = asyncio.create_task(engine.close(), name=f"close {engine.address}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._on_change()
