"""Puts the router's parts together and shows what they hold."""

import functools
import logging
import time

from ullage_router.admission import Admission
from ullage_router.breaker import Breaker
from ullage_router.cascade.plan import Load
from ullage_router.cascade.runner import Cascade
from ullage_router.certificates import RouterTLS
from ullage_router.condense import Condenser
from ullage_router.config import RouterConfig
from ullage_router.engine import Engine
from ullage_router.engines import Engines
from ullage_router.measures import Measures
from ullage_router.metrics import Metrics, TenantMetrics, largest
from ullage_router.outcomes import TrialCollector
from ullage_router.pick.picker import Picker
from ullage_router.pick.tickets import TicketOffice
from ullage_router.placement import Placement
from ullage_router.prompts import Prompts
from ullage_router.queue import WaitingRoom
from ullage_router.rollout import Rollout
from ullage_router.stats import Record, Stats, route_of
from ullage_router.stream import Pipeline
from ullage_router.tenants import ANONYMOUS, Tenants
from ullage_router.tokenize import TokenizerThreads
from ullage_router.wake.wakes import Wakes
from ullage_router.writer import Writer

log = logging.getLogger(__name__)


class RouterService:
    """Everything but the two protocols."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.stats = Stats()
        self.metrics = Metrics(self._named_tenants())
        self.room = WaitingRoom(config.routing.queue)
        placement = config.routing.placement
        self.tls = RouterTLS(config.tls, self._reconnect)
        self.engines = Engines(
            config.pools, config.model, self._engines_changed, placement.breaker, self.tls.dialer
        )
        self.placement = Placement(placement, self.engines)
        self.rollout = Rollout(config.rollout_file, self.engines)
        self.metrics.registry.register(TrialCollector(self.rollout.outcomes))
        self._threads = TokenizerThreads()
        compress = config.prompts.compress
        writer = Writer(lambda: self.pipeline, compress.timeout)
        self.condenser = Condenser(compress, self._threads, writer.write, self.metrics.condensed)
        cleanse, is_cascade = config.prompts.cleanse, config.cascade is not None
        prompts = Prompts(cleanse, self.condenser, self.engines, self._threads, is_cascade)
        self.tenants = Tenants(config.tenants, self._tenant_metrics())
        admission = Admission(config, self.engines, self.room, self._threads, self.placement)
        self.wakes = Wakes(config, self.engines, admission.policy)
        self.measures = Measures(config, self.engines, self.room, self.wakes)
        self.cascade = (
            Cascade(config.cascade, self._load, self.metrics.attempted) if config.cascade else None
        )
        self.window = admission.window
        self.office = TicketOffice(config.tickets) if config.tickets else None
        self.picker = Picker(
            config, self.engines, self.room, admission, self.office, self.wakes.want
        )
        self._is_leaving = self._has_served = False
        self.pipeline = Pipeline(
            config,
            self.engines,
            admission,
            prompts,
            self.wakes,
            self.placement,
            self._ended,
            self.rollout,
            self.cascade,
            self.office,
        )
        self._watch()

    async def read_secrets(self) -> None:
        """Reads certificates and keys; raises ConfigError when they cannot be used."""
        await self.tls.start()
        await self.tenants.start()

    async def start(self) -> None:
        self.picker.start()
        await self.rollout.canary.start()
        await self.engines.start()

    async def close(self) -> None:
        if self.cascade:
            await self.cascade.close()
        await self.picker.close()
        await self.rollout.canary.close()
        await self.engines.close()
        await self.tenants.close()
        await self.tls.close()
        self._threads.close()

    @property
    def is_ready(self) -> bool:
        """An engine takes or took requests, or can be woken, and this router is not stopping.

        One that lost its engines stays: requests wait for those that come back, go on to other
        steps of a cascade, or are told when to try again. Without a ready router nobody answers.
        """
        return (self._has_served or bool(self.wakes.asleep)) and not self.is_leaving

    @property
    def is_leaving(self) -> bool:
        """It ends soon, so that nobody should come any more."""
        return self._is_leaving or self.pipeline.is_draining

    def leave(self) -> None:
        """From now on not ready, while requests that come all the same are served."""
        self._is_leaving = True

    def snapshot(self) -> dict[str, object]:
        """The body of /stats."""
        queue = self.config.routing.queue
        return {
            "model": self.config.model,
            "ready": self.is_ready,
            "engines": [_engine_json(engine) for engine in self.engines.all()],
            "inflight": self.pipeline.inflight,
            "queue": {
                "waiting": len(self.room),
                "by_pool": dict(self.room.lengths()),
                "bytes": self.room.size,
                "bytes_by_tenant": dict(self.room.sizes()),
                "prompt_bytes": self.room.prompt_bytes,
                "max_requests": queue.max_requests,
                "max_bytes": queue.max_bytes,
                "max_prompt_bytes": queue.max_prompt_bytes,
                "timeout": queue.timeout,
            },
            "wake": self.wakes.as_json(),
            "compression": self.condenser.as_json(),
            "placement": self.placement.as_json(),
            "prefill": {
                "waiting": len(self.window),
                "waited": self.window.waited,
                "balanced": self.window.balanced,
            },
            "coalescing": {
                "joined": self.pipeline.coalescer.joined,
                "replaced": self.pipeline.replacer.replaced,
            },
            "memory": {
                "threshold": self.config.memory.threshold,
                "safety_reserve": self.config.memory.safety_reserve,
            },
            "decisions": self.stats.counts(),
            "rollout": self.rollout.as_json(),
            "picks": self.picker.as_json(),
            "cascade": self.cascade.snapshot() if self.cascade else [],
            "latest": self.stats.latest(),
            **self.tenants.snapshot(),
            **self.tls.snapshot(),
        }

    def _engines_changed(self) -> None:
        self._has_served = self._has_served or self.engines.is_ready
        self.room.wake()
        self.wakes.holding.changed()

    def _reconnect(self) -> None:
        """Engines are spoken to with the new certificate from now on."""
        self.engines.reconnect(self.config.limits.request_timeout)

    def _tenant_metrics(self) -> TenantMetrics | None:
        if self.config.tenants is None:
            return None
        return TenantMetrics(self.metrics.registry, self._named_tenants())

    def _named_tenants(self) -> tuple[str, ...]:
        """Tenants that metrics tell apart."""
        section = self.config.tenants
        return (ANONYMOUS, *(tenant.name for tenant in section.tenants)) if section else ("",)

    def _load(self) -> Load:
        ready = [e for e in self.engines.all() if e.state == "ready" and e.headroom]
        levels = (e.headroom.pressure_level for e in ready if e.headroom)
        return Load(min(levels, default=0), len(self.room))

    def _ended(self, record: Record) -> None:
        self.stats.ended(record)
        self.measures.ended(record)
        self.metrics.ended(record)
        if log.isEnabledFor(logging.INFO):
            decided = {"pred_kv_mb": record.predicted_mib, "admission_action": record.action}
            log.info("answered", extra=record.as_json() | decided)

    def _watch(self) -> None:
        all_engines, watch = self.engines.all, self.metrics.watch
        watch("inflight_requests", "Requests being served", lambda: self.pipeline.inflight)
        watch("open_picks", "Tickets given whose request has not ended", lambda: self.picker.open)
        for how, what in (
            ("placed", "Requests that Pick placed"),
            ("refused", "Requests that Pick refused"),
            ("expired", "Tickets that expired without a report of their request's end"),
        ):
            read = functools.partial(self.picker.counts.__getitem__, how)
            self.metrics.count(f"picks_{how}", what, read)
        watch("queue_requests", "Requests waiting for memory", lambda: len(self.room))
        watch("held_requests", "Requests held until a pool wakes", lambda: len(self.wakes.holding))
        self.metrics.wanted(self.wakes.sleepy, self.wakes.holding.wanted)
        watch("prefill_requests", "Requests in the prefill window", lambda: len(self.window))
        self.metrics.count(
            "prefill_waited",
            "Requests that waited in the prefill window",
            lambda: self.window.waited,
        )
        self.metrics.count(
            "prefill_balanced",
            "Requests that the prefill window moved to another engine",
            lambda: self.window.balanced,
        )
        watch("queue_bytes", "Predicted bytes that wait for memory", lambda: self.room.size)
        watch(
            "queue_prompt_bytes",
            "Memory of the router that waiting requests hold",
            lambda: self.room.prompt_bytes,
        )
        watch(
            "engines_ready",
            "Engines that take requests",
            lambda: sum(engine.state == "ready" for engine in all_engines()),
        )
        watch(
            "stale_engines",
            "Engines whose last report is too old",
            lambda: sum(engine.state == "stale" for engine in all_engines()),
        )
        watch(
            "headroom_age_seconds",
            "Age of the oldest last report among engines",
            lambda: largest(engine.age_s for engine in all_engines() if engine.headroom),
        )
        watch(
            "credit_bytes",
            "Bytes reserved for requests that no report includes yet",
            lambda: sum(engine.credit_bytes for engine in all_engines()),
        )
        watch(
            "ejected_engines",
            "Engines that get nothing because requests failed on them",
            lambda: len(self.engines.held_back()),
        )
        self._count()
        self._watch_secrets()

    def _watch_secrets(self) -> None:
        watch = self.metrics.watch
        watch(
            "key_problems",
            "Files of tenants' keys that cannot be read, while those before stay valid",
            lambda: len(self.tenants.problems),
        )
        watch(
            "certificate_problems",
            "Certificates that have expired, or whose newest files cannot be used",
            lambda: self.tls.num_problems,
        )
        watch(
            "certificate_expiry_timestamp_seconds",
            "When the first of the certificates ends; 0 without TLS",
            lambda: self.tls.expiry,
        )

    def _count(self) -> None:
        engines, placement, count = self.engines, self.placement, self.metrics.count
        count("ejections", "Times that a breaker opened", lambda: engines.ejections)
        count("reports_missed", "Headroom reports that never came", lambda: engines.missed)
        count("retries", "Requests sent to another engine", lambda: placement.budget.spent)
        count(
            "retries_refused",
            "Requests not retried, because the budget was spent",
            lambda: placement.budget.refused,
        )
        choices = placement.choices
        count("affinity_kept", "Requests on the engine of their caches", lambda: choices["kept"])
        count("affinity_yielded", "Requests sent elsewhere", lambda: choices["yielded"])


def _breaker_json(breaker: Breaker) -> dict[str, object]:
    state = breaker.state(time.monotonic())
    return {"state": state, "failures": breaker.failures, "openings": breaker.openings}


def _engine_json(engine: Engine) -> dict[str, object]:
    base: dict[str, object] = {
        "id": engine.id,
        "address": engine.address,
        "pool": engine.pool,
        "route": route_of(engine.pool),
        "side": engine.side.value,
        "state": engine.state,
        "trouble": engine.trouble,
        "inflight": engine.inflight,
        "credit_bytes": engine.credit_bytes,
        "breaker": _breaker_json(engine.breaker),
        "reports": {
            "received": engine.reports,
            "missed": engine.order.missed,
            "old": engine.order.old,
            "restarts": engine.order.restarts,
        },
    }
    told = engine.headroom
    if told is None:
        return base
    return base | {
        "headroom_age_s": round(engine.age_s, 3),
        "health": round(told.health, 4),
        "pressure_level": told.pressure_level,
        "headroom_bytes": told.headroom_bytes,
        "kv_pool_bytes": told.kv_pool_bytes,
        "kv_free_bytes": told.kv_free_bytes,
        "kv_reclaimable_bytes": told.kv_reclaimable_bytes,
        "kv_committed_bytes": told.kv_committed_bytes,
        "total_bytes": told.total_bytes,
        "requests_running": told.requests_running,
        "requests_waiting": told.requests_waiting,
        "expected_output_tokens": told.expected_output_tokens,
        "decode_tokens_per_second": round(told.decode_tokens_per_second, 2),
        "ledger": [
            {
                "name": line.name,
                "reserved_bytes": line.reserved_bytes,
                "allocated_bytes": line.allocated_bytes,
            }
            for line in told.ledger
        ],
    }
