"""Assembles the router's components, and reports their state."""

import asyncio
import logging
import socket
import time

from ullage.headroom.v1 import headroom_pb2
from ullage_common.config.router import RouterConfig
from ullage_common.process.logs import MORE_FIELDS
from ullage_common.process.tracing import start_tracing
from ullage_common.wire.fingerprint import num_kinds
from ullage_router import metric_names as names
from ullage_router.admission.admission import Admission
from ullage_router.admission.load_balancer import LoadBalancer
from ullage_router.admission.queue import RequestQueue
from ullage_router.admission.scale_to_zero import ScaleToZero
from ullage_router.batches.batch import STATUSES
from ullage_router.batches.runner import REQUEST_STATES, BatchRunner
from ullage_router.cascade.cascade import Cascade
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.errors import stopped
from ullage_router.files.store import FileStore
from ullage_router.intake import IntakeThread
from ullage_router.pipeline.coalesce import Coalescer
from ullage_router.pipeline.generate import EngineSender
from ullage_router.pipeline.idempotency import IdempotencyKeys
from ullage_router.pipeline.pipeline import OptionalStages, RequestPipeline, RequestStages
from ullage_router.pipeline.replace import Replacer
from ullage_router.policy.cascade import ServiceLoad
from ullage_router.policy.circuit_breaker import CircuitBreaker
from ullage_router.prompts.prompts import PromptBuilder
from ullage_router.prompts.summarize import HistorySummarizer
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.rollout.outcomes import TrialCollector
from ullage_router.rollout.replay import AnswersCollector, Replayer
from ullage_router.rollout.stages import Rollout
from ullage_router.server.load_report import LoadReporter
from ullage_router.server.tls import RouterTLS
from ullage_router.telemetry.metrics import Metrics, TenantMetrics, largest
from ullage_router.telemetry.record import RequestRecord, Stats
from ullage_router.tenants.account import ANONYMOUS
from ullage_router.tenants.registry import Tenants
from ullage_router.tickets.issuer import TicketIssuer
from ullage_router.tickets.signing import TicketSigner

log = logging.getLogger(__name__)


class RouterService:
    """All components of the router except the HTTP and gRPC servers.

    observers
        functions that are called with each request's record when the request has ended
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        routing = config.routing
        self.stats = Stats()
        self.metrics = Metrics(self._named_tenants())
        self.queue = RequestQueue(routing.queue)
        self.tls = RouterTLS(config.tls, self._reconnect)
        self.engines = Engines(
            config.pools,
            config.model,
            self._on_engines_change,
            routing.placement.breaker,
            self.tls.dialer,
            accepts_plaintext=self.tls.accepts_plaintext,
            trusts_special_tokens=config.prompts.special_tokens == "trusted",
            reasoning=config.prompts.reasoning,
        )
        self.balancer = LoadBalancer(routing.placement, self.engines)

        self.intake = IntakeThread()
        self._threads = TokenizerThreads()
        self.summarizer = self._summarizer()
        self.prompts = PromptBuilder(
            config.prompts.cleanse,
            self.summarizer,
            self.engines,
            self._threads,
            self.intake,
            drops_turns="shrinkContext" in routing.ladder,
        )

        self.signer = TicketSigner(config.tickets) if config.tickets else None
        signer = self.signer if self.signer and self.signer.is_required else None
        sign = signer.sign_request if signer else None
        self.rollout = Rollout(
            config.rollout_file,
            self.engines,
            self.prompts,
            config.model,
            Replayer(self.engines, self.prompts, self.queue, sign),
            self._on_stop,
        )
        self.metrics.registry.register(TrialCollector(self.rollout.outcomes))
        self.metrics.registry.register(AnswersCollector(self.rollout.replayer))
        self.tenants = Tenants(config.tenants, self._tenant_metrics())
        self.files = FileStore(config.files) if config.files else None
        self.batches = (
            BatchRunner(config.files.batches, self.files) if config.files and self.files else None
        )

        self.admission = Admission(config, self.engines, self.queue, self._threads, self.balancer)
        self.scale_to_zero = ScaleToZero(config, self.engines, self.admission)
        self.load_reporter = LoadReporter(config, self.engines, self.queue, self.scale_to_zero)
        self.cascade = (
            Cascade(
                config.cascade, self._load, self.metrics.on_attempt, config.limits.total_timeout
            )
            if config.cascade
            else None
        )
        if self.cascade:
            self.tls.add(self.cascade.certificates)

        self.coalescer = Coalescer(routing.coalesce) if routing.coalesce.enabled else None
        self.replacer = Replacer() if routing.replace.enabled else None
        idempotency = routing.idempotency
        self.idempotency = IdempotencyKeys(idempotency) if idempotency.enabled else None

        self.issuer = TicketIssuer(
            config,
            self.engines,
            self.queue,
            self.admission.policy,
            self.balancer,
            self.signer,
            self.scale_to_zero.request_wake,
        )

        self.observers = [self.stats.on_end, self.load_reporter.on_end, self.metrics.on_end]
        self._is_leaving = False
        self._has_served = False

        identity = {"service.instance.id": socket.gethostname()}
        self.tracer = start_tracing(config.tracing, "ullage-router", identity)
        rollout = self.rollout if config.rollout_file else None
        self.optional_stages = OptionalStages(
            self.replacer,
            self.idempotency,
            self.cascade,
            rollout,
            self.scale_to_zero if self.scale_to_zero.pools else None,
            self.coalescer,
        )
        sender = EngineSender(
            config.streaming,
            config.limits,
            self.admission,
            self.balancer,
            self.signer,
            rollout,
            self.metrics.on_resumption,
        )
        stages = RequestStages(config, self.engines, self.prompts, sender, self.optional_stages)
        self.pipeline = RequestPipeline(stages.begin, self._on_end, self.tracer)
        self._watch()

    def _summarizer(self) -> HistorySummarizer | None:
        compress = self.config.prompts.compress
        if compress.method == "off":
            return None
        return HistorySummarizer(compress, self._threads, self.metrics.on_summary)

    async def read_secrets(self) -> None:
        """Read the router's certificates and API keys.

        Raises:
            ConfigError: a certificate or a key cannot be used.
        """
        await self.tls.start()
        await self.tenants.start()
        if self.cascade:
            await self.cascade.read_secrets()

    async def start(self) -> None:
        if self.files:
            await self.files.start()
        self.issuer.start()
        await self.rollout.canary.start()
        await self.engines.start()

    async def close(self) -> None:
        if self.cascade:
            await self.cascade.close()
        await self.issuer.close()
        await self.rollout.canary.close()
        await self.rollout.replayer.close()
        await self.engines.close()
        await self.tenants.close()
        if self.batches:
            await self.batches.close()
        if self.files:
            await self.files.close()
        await self.tls.close()
        self._threads.close()
        self.intake.close()
        if self.tracer:
            await asyncio.to_thread(self.tracer.close)

    @property
    def is_ready(self) -> bool:
        """Return whether this router can respond to requests and is not stopping.

        A router can respond once it has seen a ready engine, if a pool can be woken, or if the
        service was stopped intentionally. A router that has since lost its engines stays ready,
        because its requests still wait for engines, continue with the next cascade step, or get an
        error with Retry-After. Without any ready router, they would get no response at all.
        """
        answers = self._has_served or self.rollout.canary.is_stopped
        return (answers or bool(self.scale_to_zero.scaled_to_zero)) and not self.is_leaving

    @property
    def is_leaving(self) -> bool:
        """Return whether the router is about to stop, so that no new clients should connect."""
        return self._is_leaving or self.pipeline.is_draining

    def leave(self) -> None:
        """Mark the router as not ready, but keep serving requests that still come in."""
        self._is_leaving = True

    def snapshot(self) -> dict[str, object]:
        """Return the content of /stats, except for the latest requests."""
        queue = self.config.routing.queue
        waits = self.queue.waits().values()
        now = time.monotonic()
        return {
            "model": self.config.model,
            "ready": self.is_ready,
            "engines": [_engine_json(engine) for engine in self.engines.all()],
            "fingerprints": {
                "count": num_kinds(self.engines.numerics().values()),
                "differing": self.engines.differences(),
            },
            "objectives": {
                "ttft_p95_s": self.config.slo.ttft_p95,
                "e2e_p95_s": self.config.slo.e2e_p95,
            },
            "large_requests": {
                "prompt_tokens": self.config.routing.large_request_tokens,
                "kv_bytes": self.config.routing.large_request_kv,
            },
            "inflight": self.pipeline.inflight,
            "queue": {
                "waiting": len(self.queue),
                "by_pool": dict(self.queue.lengths()),
                "oldest_s": round(largest(now - arrival for _, _, arrival in waits), 3),
                "bytes": self.queue.size,
                "bytes_by_tenant": dict(self.queue.sizes()),
                "prompt_bytes": self.queue.prompt_bytes,
                "max_requests": queue.max_requests,
                "max_bytes": queue.max_bytes,
                "max_prompt_bytes": queue.max_prompt_bytes,
                "timeout": queue.timeout,
            },
            "wake": self.scale_to_zero.as_json(),
            "compression": self.summarizer.as_json() if self.summarizer else {},
            "placement": self.balancer.as_json(),
            "prefill": self.admission.window.as_json(),
            "coalescing": {
                "joined": self.coalescer.joined if self.coalescer is not None else 0,
                "replaced": self.replacer.replaced if self.replacer else 0,
                "repeated": self.idempotency.repeated if self.idempotency else 0,
            },
            "memory": {
                "threshold": self.config.memory.threshold,
                "safety_reserve": self.config.memory.safety_reserve,
            },
            "decisions": self.stats.counts(),
            "output_tokens": self.stats.output_tokens,
            "rollout": self.rollout.as_json(),
            "picks": self.issuer.as_json(),
            "cascade": self.cascade.snapshot() if self.cascade else [],
            **({"files": self.files.as_json()} if self.files else {}),
            **({"batches": self.batches.as_json()} if self.batches else {}),
            **self.tenants.snapshot(),
            **self.tls.snapshot(),
        }

    def _on_stop(self, is_stopped: bool) -> None:
        refusal = stopped(self.config.model) if is_stopped else None
        self.scale_to_zero.queue.refuse_with(refusal)
        self.issuer.refusal = refusal

    def _on_engines_change(self) -> None:
        self._has_served = self._has_served or self.engines.is_ready
        self.queue.wake()
        self.scale_to_zero.queue.on_engines_change()

    def _reconnect(self) -> None:
        """Reconnect to all engines after a certificate change."""
        self.engines.reconnect(self.config.limits.total_timeout)

    def _tenant_metrics(self) -> TenantMetrics | None:
        if self.config.tenants is None:
            return None
        return TenantMetrics(self.metrics.registry, self._named_tenants())

    def _named_tenants(self) -> tuple[str, ...]:
        """Return the names of the tenants that have their own label value in metrics."""
        section = self.config.tenants
        return (ANONYMOUS, *(tenant.name for tenant in section.tenants)) if section else ("",)

    def _load(self) -> ServiceLoad:
        ready = [e for e in self.engines.all() if e.state == "ready" and e.headroom]
        levels = (e.headroom.pressure_level for e in ready if e.headroom)
        return ServiceLoad(min(levels, default=0), len(self.queue))

    def _on_end(self, record: RequestRecord) -> None:
        for observe in self.observers:
            observe(record)
        if log.isEnabledFor(logging.INFO):
            decision = record.decision
            more = {
                "event": "refused" if record.error and record.ttft_s is None else "finished",
                "pred_kv_mb": decision.predicted_mib,
                "admission_action": decision.action,
            }
            log.info("answered", extra={MORE_FIELDS: record.as_json() | more})

    def _watch(self) -> None:
        watch = self.metrics.watch
        count = self.metrics.count
        issuer = self.issuer
        queue = self.queue
        window = self.admission.window
        watch(names.INFLIGHT, lambda: self.pipeline.inflight)
        count(names.OUTPUT_TOKENS, lambda: self.stats.output_tokens)
        watch(names.OPEN_PICKS, lambda: issuer.open)
        count(names.PICKS_PLACED, lambda: issuer.counts["placed"])
        count(names.PICKS_REFUSED, lambda: issuer.counts["refused"])
        count(names.PICKS_EXPIRED, lambda: issuer.counts["expired"])
        watch(names.QUEUE_REQUESTS, lambda: len(queue))
        watch(names.QUEUE_BYTES, lambda: queue.size)
        watch(names.QUEUE_PROMPT_BYTES, lambda: queue.prompt_bytes)
        count(names.QUEUE_PASSED, lambda: queue.passed)
        watch(names.HELD_REQUESTS, lambda: len(self.scale_to_zero.queue))
        pools = self.scale_to_zero.pools
        self.metrics.watch_each(names.WANTED_REQUESTS, pools, self.scale_to_zero.queue.wanted)
        watch(names.PREFILL_REQUESTS, lambda: len(window))
        count(names.PREFILL_WAITED, lambda: window.waited)
        count(names.PREFILL_BALANCED, lambda: window.balanced)
        if keys := self.idempotency:
            count(names.REPEATED, lambda: keys.repeated)
            watch(names.KEPT_ANSWERS, lambda: keys.size)
        watch(names.KEY_PROBLEMS, lambda: len(self.tenants.problems))
        watch(names.CERTIFICATE_PROBLEMS, lambda: self.tls.num_problems)
        watch(names.CERTIFICATE_EXPIRY, lambda: self.tls.expiry)
        self._watch_engines()
        if self.files:
            self._watch_files(self.files)
        if self.batches:
            self._watch_batches(self.batches)

    def _watch_engines(self) -> None:
        watch = self.metrics.watch
        count = self.metrics.count
        engines = self.engines
        balancer = self.balancer
        watch(names.ENGINES_READY, lambda: sum(each.state == "ready" for each in engines.all()))
        watch(names.STALE_ENGINES, lambda: sum(each.state == "stale" for each in engines.all()))
        self.metrics.watch_each(
            names.FINGERPRINTS,
            [pool.name for pool in self.config.pools],
            lambda pool: num_kinds(engines.numerics(pool).values()),
        )
        watch(names.EJECTED_ENGINES, lambda: len(engines.held_back()))
        self.metrics.watch_each(
            names.BREAKER_LIMIT, [pool.name for pool in self.config.pools], engines.breaker_limit
        )
        watch(
            names.HEADROOM_AGE,
            lambda: largest(each.age_s for each in engines.all() if each.headroom),
        )
        watch(names.CREDIT_BYTES, lambda: sum(each.credit_bytes for each in engines.all()))
        count(names.PREEMPTIONS, lambda: engines.preemptions)
        count(names.EJECTIONS, lambda: engines.ejections)
        count(names.REPORTS_MISSED, lambda: engines.missed)
        count(names.RETRIES, lambda: balancer.budget.spent)
        count(names.RETRIES_REFUSED, lambda: balancer.budget.refused)
        count(names.AFFINITY_KEPT, lambda: balancer.choices["kept"])
        count(names.AFFINITY_YIELDED, lambda: balancer.choices["yielded"])

    def _watch_files(self, files: FileStore) -> None:
        watch = self.metrics.watch
        watch(names.FILES, lambda: files.catalog.num_files)
        watch(names.FILE_BYTES, lambda: files.catalog.num_bytes)
        watch(names.FILES_LIMIT, lambda: files.section.max_files)
        watch(names.FILE_BYTES_LIMIT, lambda: files.section.max_bytes)
        watch(names.FILE_STORE_OPEN, lambda: files.is_open)
        watch(names.UPLOADS, lambda: len(files.uploads))

    def _watch_batches(self, batches: BatchRunner) -> None:
        metrics = self.metrics
        metrics.watch_each(names.BATCHES, STATUSES, batches.num_batches)
        metrics.watch_each(names.BATCH_REQUESTS, REQUEST_STATES, batches.num_requests)
        metrics.count_each(names.BATCH_REQUESTS_ENDED, lambda: batches.ended)
        metrics.count(names.BATCH_REQUESTS_SENT, lambda: batches.num_sent)


def _breaker_json(breaker: CircuitBreaker) -> dict[str, object]:
    state = breaker.state(time.monotonic())
    return {
        "state": state,
        "failures": breaker.failures,
        "openings": breaker.openings,
        "limit": breaker.limit,
        "trials": breaker.num_trials,
    }


def _engine_json(engine: Engine) -> dict[str, object]:
    base: dict[str, object] = {
        "id": engine.id,
        "address": engine.address,
        "pool": engine.pool,
        "route": engine.route,
        "side": engine.side.value,
        "state": engine.state,
        "trouble": engine.trouble,
        "inflight": engine.inflight,
        "credit_bytes": engine.credit_bytes,
        "breaker": _breaker_json(engine.breaker),
        "preemptions": engine.preemptions,
        "reports": {
            "received": engine.reports,
            "missed": engine.order.missed,
            "old": engine.order.old,
            "restarts": engine.order.restarts,
        },
    }
    report = engine.headroom
    if report is None:
        return base
    return base | {
        "headroom_age_s": round(engine.age_s, 3),
        "fingerprint": engine.numerics.digest,
        "fingerprint_facts": engine.numerics.facts,
        "health": round(report.health, 4),
        "pressure_level": report.pressure_level,
        "batch_share": round(report.batch_share, 4),
        "throttle_reasons": list(report.throttle_reasons),
        "headroom_bytes": report.headroom_bytes,
        "kv_pool_bytes": report.kv_pool_bytes,
        "kv_free_bytes": report.kv_free_bytes,
        "kv_reclaimable_bytes": report.kv_reclaimable_bytes,
        "kv_committed_bytes": report.kv_committed_bytes,
        "kv_peak_bytes": report.kv_peak_bytes,
        "total_bytes": report.total_bytes,
        "requests_running": report.requests_running,
        "requests_waiting": report.requests_waiting,
        "worker_restarts": report.worker_restarts,
        "worker_start_s": round(report.worker_start_s, 3),
        "expected_output_tokens": report.expected_output_tokens,
        "decode_tokens_per_second": round(report.decode_tokens_per_second, 2),
        "ledger": [
            {
                "name": line.name,
                "reserved_bytes": line.reserved_bytes,
                "allocated_bytes": line.allocated_bytes,
            }
            for line in report.ledger
        ],
        "kv_tiers": [_tier_json(tier) for tier in report.tiers],
    }


def _tier_json(tier: headroom_pb2.KvTier) -> dict[str, object]:
    return {
        "name": tier.name,
        "backend": tier.backend,
        "capacity_bytes": tier.capacity_bytes,
        "used_bytes": tier.used_bytes,
        "blocks": tier.blocks,
        "hits": tier.hits,
        "misses": tier.misses,
        "queued": tier.queued,
    }
