"""The router's view of one engine: its last report, its state, and its reserved memory."""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Iterable
from typing import Protocol

import grpc

from ullage.headroom.v1 import headroom_pb2
from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import BreakerSection
from ullage_common.request_cost import MemoryProfile
from ullage_common.wire import memory_profile
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.fingerprint import UNKNOWN, Fingerprint, adapter_key, with_adapter
from ullage_common.wire.request_fields import known_fields, unknown_fields
from ullage_router.background import failures_logged
from ullage_router.engines.connection import EngineConnection
from ullage_router.engines.flow_control import FlowControl, Source, StreamWatchdog
from ullage_router.engines.multiplex import ConnectionBroken, Metadata
from ullage_router.engines.reports import ReportSequence, report_interval_ms
from ullage_router.errors import is_engine_fault, no_stream, recovering_engine, silent_engine
from ullage_router.policy.circuit_breaker import CircuitBreaker
from ullage_router.policy.credit import Credit, CreditBook, Held
from ullage_router.policy.decision import route_of
from ullage_router.policy.facts import WELL, EngineState, EngineView, Release, Side, engine_key
from ullage_router.tokenizer.model import Model

HEARTBEAT_S = 1.0
"""Maximum seconds between two headroom reports of a healthy engine."""
STALE_AFTER_S = 3 * HEARTBEAT_S
"""Seconds without a report after which an engine gets no new requests."""
HOPELESS_AFTER_S = 10 * HEARTBEAT_S
"""Seconds without a report after which requests stop waiting for the engine to come back."""
MOVE_AFTER_S = 2.0
"""Seconds without a worker after which an engine's answers move to another engine.

An answer moves at once if another engine can prefill its tokens before the next worker starts. If
not, and workers need longer than this to start, it waits as long as they need.
"""
SETTLE_S = 0.05
"""Seconds after the report of a lost worker at which the engine's answers may move."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
"""Maximum seconds between two attempts to reopen an engine's report stream."""
GET_MODEL_TIMEOUT_S = 30.0
_CERTIFICATE_REFUSALS = ("handshake failed", "Verification Check failed")
"""Substrings of gRPC error messages showing that one side rejected the other's certificate."""

log = logging.getLogger(__name__)


class EngineOwner(Protocol):
    """What an `Engine` calls on its owner, to open channels, load models and report changes."""

    @property
    def is_secure(self) -> bool:
        """Whether the router uses TLS for connections to engines."""

    @property
    def is_mixed(self) -> bool:
        """Whether some engines may use TLS while others use plaintext."""

    def on_change(self) -> None:
        """Handle a new report, the loss of an engine, or the release of a reservation."""

    def on_loss(self, engine: "Engine") -> None:
        """Handle the end of an engine's reports, after which it may return at another address."""

    def on_restart(self, engine: "Engine") -> None:
        """Handle the restart of an engine, which empties its caches."""

    def on_state_change(self, engine: "Engine") -> None:
        """Handle an event that may change whether an engine can accept requests."""

    def on_load_change(self, engine: "Engine") -> None:
        """Handle an engine that has become idle or busy."""

    def on_ejected(self, engine: "Engine") -> None:
        """Handle an engine whose circuit breaker has opened."""

    def on_numerics_change(self) -> None:
        """Handle a change in an engine's numerics fingerprint.

        Engines with the same fingerprint produce bit-identical results from the same tokens, unless
        the fingerprint is unknown (an empty digest).
        """

    @property
    def num_engines(self) -> int:
        """Number of engines that may send reports to this router."""

    def has_another(self, engine: "Engine") -> bool:
        """Return whether there is a ready engine other than the given engine."""

    def equal_backlog_s(self, engine: "Engine", adapter: str) -> float | None:
        """Return how long the prefill work of an engine with the same numerics takes, in seconds.

        This is the shortest time among the other engines that take requests, or None if none of
        them has the same numerics for the adapter.
        """

    def dial(self, address: str, is_plaintext: bool) -> grpc.aio.Channel:
        """Open a channel to an engine with the current credentials.

        Args:
            is_plaintext: whether to skip TLS even if the router has credentials.
        """

    async def load(self, described: inference_pb2.GetModelResponse) -> Model:
        """Build a Model from an engine's response to GetModel."""


class WrongModel(Exception):
    """Raised if an engine serves a different model, or a model that the router cannot use."""


class Engine:
    """Follows one engine's headroom reports, and tracks its state and reserved memory.

    Args:
        address: the engine's address, as `ip:port`.
        pool: the configured pool to which the engine belongs.
        model_name: the model that the engine must serve.
        breaker: settings of the engine's circuit breaker.
        owner: the object to notify when the engine changes.
        side: whether the engine is a stable or a canary engine in a rollout.
    """

    unknown_fields: frozenset[str] = frozenset()
    """Paths of the request fields that this router knows and the engine does not."""
    preemptions: int = 0
    """Number of times that the engine preempted the answers that it has ended."""

    def __init__(
        self,
        address: str,
        pool: str,
        model_name: str,
        breaker: BreakerSection,
        owner: EngineOwner,
        side: Side = Side.STABLE,
    ) -> None:
        self.address = address
        self.side = side
        self.pool = pool
        self.key = engine_key(side, pool, address)
        self.is_listed = True
        """Whether DNS still lists the engine's address."""
        self._model_name = model_name
        self._owner = owner

        # The model
        self.description: inference_pb2.GetModelResponse | None = None
        self.route = pool
        """The pool's label in headers and metrics (`route_of`), initially the pool's name."""
        self.model: Model | None = None
        self._described_epoch: int | None = None
        """The epoch of the engine's server when the engine last described its model.

        Each restart of the server starts a new epoch. None until the engine has described its
        model.
        """
        self._profile = MemoryProfile(1, ())
        self.adapters: frozenset[str] = frozenset()
        """Names of the adapters that the engine serves."""
        self.described_adapters: tuple[inference_pb2.Adapter, ...] = ()
        """The full descriptions of the adapters that the engine serves."""
        self._adapter_keys: dict[str, str] = {}
        """Keys that identify the exact version of each adapter, by adapter name."""
        self._reported_adapters: list[headroom_pb2.AdapterState] | None = None
        """Adapters in the last report, or None if no report has listed any adapters yet.

        Engines with a fixed set of adapters do not list them in their reports.
        """

        # The last report
        self.headroom: headroom_pb2.Headroom | None = None
        self.order = ReportSequence(side is Side.CANARY)
        self.numerics: Fingerprint = UNKNOWN
        """Fingerprint of all settings that affect the engine's exact numerical results."""
        self.lost_unix = time.time()
        """Unix time of the last event that may have interrupted answers on this engine.

        Initially, this is the time at which the engine was discovered.
        """
        self._reported_at = 0.0
        self._is_connected = False
        self._loss = ""
        """Why the engine's reports have stopped arriving (empty while they arrive)."""
        self._worker_lost_at = math.inf
        """Monotonic time of the first report without a worker, or infinity while it is ready."""
        self._releases: tuple[Release, ...] = ()
        self._step_seconds: tuple[float, ...] = ()
        self._reported_backlog = 0
        """Number of prompt tokens that were waiting for prefill in the last report."""
        self._reported_load = 0
        """Number of running and waiting requests in the last report."""

        # The requests in flight
        self.breaker = CircuitBreaker(breaker)
        self.watchdog = StreamWatchdog(self._loss_error, self._delay_error)
        self._credit = CreditBook()

        # The view, which is computed when a decision asks for it
        self._view: EngineView | None = None
        """The cached view of the engine for decisions, or None if it must be rebuilt."""
        self._standing: EngineState | None = None
        """The cached result of `standing`, or None if it must be recomputed."""
        self._standing_until = 0.0
        """Time at which the cached standing expires, unless a report arrives first."""
        self._is_idle = False
        """The value of `is_idle` that was last reported to the owner."""

        self._connection = EngineConnection(
            address, owner.dial, self._on_stream_change, self._on_state_change
        )
        self._task = self._start_following()

    def _start_following(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._follow(), name=f"follow {self.address}")

    def reconnect(self, grace_s: float) -> None:
        """Replace the channel, but let answers on the old channel finish within `grace_s` seconds.

        The last report remains valid in the meantime, because the new channel delivers a new report
        within milliseconds.
        """
        self._task.cancel()
        self._connection.replace(grace_s, starts_stream=self.description is not None)
        self._task = self._start_following()

    async def close(self) -> None:
        """Stop following the engine's reports, and close the connection to the engine."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._connection.close()

    @property
    def id(self) -> str:
        """The engine's name, or its address until the name is known."""
        return self.headroom.engine if self.headroom else self.address

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the engine's model (empty until the engine has described its model)."""
        return self.model.fingerprint if self.model else ""

    @property
    def has_numerics(self) -> bool:
        """Whether the engine's numerics fingerprint can be compared with those of other engines.

        Equal fingerprints mean bit-identical results from the same tokens, unless they are unknown
        (an empty digest). The comparison requires that the engine has been ready at some point, and
        that it is neither connecting nor gone now.
        """
        if self.headroom is None or self.model is None or self.state in ("connecting", "gone"):
            return False
        # A ready engine without a digest has an earlier release.
        return bool(self.numerics.digest) or self.headroom.ready

    @property
    def health(self) -> float:
        """The engine's health in its last report, from 0 to 1."""
        return self.headroom.health if self.headroom else 0.0

    @property
    def load(self) -> int:
        """Number of requests that are running or waiting on the engine, or on their way to it."""
        return self._reported_load + self._credit.uncounted

    @property
    def is_on_trial(self) -> bool:
        """Whether the engine gets only a few requests at once, because it failed recently."""
        return self.breaker.limit is not None

    @property
    def is_at_limit(self) -> bool:
        """Whether the engine failed recently, and has reached its temporary limit on requests."""
        return self.breaker.is_at_limit

    @property
    def expected_output(self) -> int:
        """Expected number of output tokens per answer, as estimated by the engine."""
        return self.headroom.expected_output_tokens if self.headroom else 0

    @property
    def reports(self) -> int:
        """Number of reports received so far. Callers compare it to detect a new report."""
        return self._credit.reports

    @property
    def age_s(self) -> float:
        """Seconds since the engine's last report."""
        return time.monotonic() - self._reported_at

    @property
    def state(self) -> str:
        """The engine's state: connecting, loading, ready, draining, stale or gone."""
        report = self.headroom
        if report is None or not self._is_connected or self._connection.lacks_stream:
            return "connecting" if self.is_listed else "gone"
        if time.monotonic() - self._reported_at > STALE_AFTER_S:
            return "stale"
        if report.draining:
            return "draining"
        return "ready" if report.ready and self.model and self._connection.is_open else "loading"

    @property
    def trouble(self) -> str:
        """Why the router sends the engine no requests (empty if nothing is wrong)."""
        lack = "serves no Multiplex stream; update the engine"
        out = self.headroom.not_ready_reason if self.headroom else ""
        return self._loss or out or (lack if self._connection.lacks_stream else "")

    @property
    def is_silent(self) -> bool:
        """Whether the engine has missed its heartbeats, for example because it exited or hangs."""
        return self.age_s > STALE_AFTER_S

    def _loss_error(self) -> ServiceError | None:
        """Return an error if the engine is silent and another one can take its answers."""
        is_lost = self.is_silent and self._owner.has_another(self)
        return silent_engine(self.id, self.age_s) if is_lost else None

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds that an engine like this one needs to prefill `tokens` tokens.

        The result is 0 until the engine has measured its speed.
        """
        speed = self.headroom.prefill_tokens_per_second if self.headroom else 0.0
        return tokens / speed if speed else 0.0

    def _delay_error(self, tokens: int, adapter: str) -> ServiceError | None:
        """Return an error if another engine continues an answer sooner, in the same words.

        An engine continues its answers itself when its next worker is ready.

        Args:
            tokens: number of tokens that the other engine must prefill.
            adapter: name of the answer's adapter (empty for the base model).
        """
        lost_s = time.monotonic() - self._worker_lost_at
        if lost_s < 0:
            return None
        backlog_s = self._owner.equal_backlog_s(self, adapter)
        if backlog_s is None:
            return None
        start_s = self.headroom.worker_start_s if self.headroom else 0.0
        is_sooner = backlog_s + self.prefill_s(tokens) < start_s
        patience_s = 0.0 if is_sooner else max(MOVE_AFTER_S, start_s)
        return recovering_engine(self.id, lost_s) if lost_s >= patience_s else None

    @property
    def is_over(self) -> bool:
        """Whether the engine can be removed: it has left DNS, is silent and has no requests."""
        # A canary that left DNS need not fall silent: its address may soon be a stable engine's.
        is_stable = self.side is Side.STABLE
        is_reporting = is_stable and self._is_connected and self.age_s <= HOPELESS_AFTER_S
        return not (self.is_listed or is_reporting or self._credit.inflight)

    @property
    def credit_bytes(self) -> int:
        """Bytes reserved for requests that the engine's reports may not reflect yet."""
        return self._credit.total

    @property
    def inflight(self) -> int:
        """Number of requests that were sent to the engine and have not finished yet."""
        return self._credit.inflight

    @property
    def available(self) -> int:
        """Reported headroom in bytes, minus reservations that the report may not reflect yet."""
        return (self.headroom.headroom_bytes if self.headroom else 0) - self._credit.total

    @property
    def backlog_tokens(self) -> int:
        """Number of prompt tokens that the engine must prefill before it can start a new prompt."""
        return self._reported_backlog + self._credit.tokens

    @property
    def is_idle(self) -> bool:
        """Whether the engine is healthy and has no prompts waiting for prefill."""
        return not self.backlog_tokens and self.health >= WELL

    @property
    def _prefill_pairs(self) -> int:
        return round(self._credit.prefill_pairs(self._reported_backlog))

    def prefill_work(self, mlp_products: int) -> int:
        """Return the prefill work queued ahead of a new prompt, measured in query-key pairs.

        For prompts from other routers, only the total number of tokens is known. Their attention
        cost is therefore not included.
        """
        return self._prefill_pairs + mlp_products * self.backlog_tokens

    @property
    def standing(self) -> EngineState:
        """Whether the engine can take requests now, may be able to soon, or cannot take any.

        An engine that fell silent only recently may be able to soon.
        """
        match self.state:
            case "ready":
                return EngineState.USABLE
            case "loading":
                return EngineState.RECOVERING
            case "stale" if self.age_s <= HOPELESS_AFTER_S:
                return EngineState.RECOVERING
            case _:
                return EngineState.UNUSABLE

    def state_until(self, now: float) -> float:
        """Return the time at which the state will change if no report arrives before.

        The result is infinity if the state will not change.

        Args:
            now: current time on the monotonic clock.
        """
        ends = (self._reported_at + STALE_AFTER_S, self._reported_at + HOPELESS_AFTER_S)
        return next((end for end in ends if end >= now), math.inf)

    def view(self, now: float) -> EngineView | None:
        """Return a snapshot of the engine for `decide`, or None until it has described its model.

        Args:
            now: current time on the monotonic clock.
        """
        standing = self._standing
        if standing is None or now > self._standing_until:
            standing = self._standing = self.standing
            self._standing_until = self.state_until(now)
            self._view = None
        if self._view is None:
            self._view = self._new_view(standing)
        return self._view

    def _new_view(self, standing: EngineState) -> EngineView | None:
        report = self.headroom
        model_info = self.description
        if report is None or model_info is None or self.model is None:
            return None
        return EngineView(
            id=self.key,
            pool=self.pool,
            standing=standing,
            available=self.available,
            capacity=report.kv_pool_bytes or model_info.profile.kv_pool_bytes,
            profile=self._profile,
            expected_output=report.expected_output_tokens,
            max_model_len=model_info.max_model_len,
            health=report.health,
            load=self.load,
            backlog_tokens=self.backlog_tokens,
            prefill_pairs=self._prefill_pairs,
            prefill_speed=report.prefill_tokens_per_second,
            decode_speed=report.decode_tokens_per_second,
            step_seconds=self._step_seconds,
            # The engine reports the step limit of other routers' requests.
            step_limit_s=min(self._credit.step_limit_s, report.step_limit_s or math.inf),
            max_sequences=report.max_sequences,
            releases=self._releases,
            unreported=self._credit.total,
        )

    def _on_state_change(self) -> None:
        self._view = self._standing = None
        self._owner.on_state_change(self)

    def _on_load_change(self) -> None:
        self._view = None
        if self._is_idle != self.is_idle:
            self._is_idle = not self._is_idle
            self._owner.on_load_change(self)

    def _on_stream_change(self) -> None:
        if not self._connection.is_stream_open:
            self.lost_unix = time.time()
        self._on_state_change()
        self._owner.on_change()

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float,
        metadata: Metadata,
        flow: FlowControl,
    ) -> Source:
        """Send a request, and return the stream of its responses.

        If the engine fails, reading from the stream raises the error.

        Raises:
            ServiceError: the connection to the engine has just been lost.
        """
        call = self._connection.call(request, timeout_s, metadata, flow)
        if call is None:
            raise no_stream(self.id)
        return call

    def held(self, holder: str) -> tuple[Held, Held]:
        """Return how much is reserved for unpaid tickets of one caller, and of all callers.

        A caller of `Pick` gets tickets, for which memory is reserved on this engine. The two totals
        are used to limit the tickets of callers that do not pay. Each reservation counts only until
        the engine's reports include its request.

        Args:
            holder: the caller, as in `reserve`.
        """
        return self._credit.held(holder), self._credit.held_by_all

    def reserve(
        self, size: int, tokens: int, step_limit_s: float = math.inf, holder: str = ""
    ) -> Credit:
        """Reserve memory and prefill work for a request that is about to be sent.

        Args:
            size: bytes to reserve.
            tokens: number of prompt tokens.
            step_limit_s: longest decoding step, in seconds, that still lets the request meet its
                deadline.
            holder: the caller of `Pick` for whom the memory is reserved without charge. Empty if a
                tenant is charged or if this router sends the request.
        """
        credit = self._credit.reserve(size, tokens, step_limit_s, holder)
        self._on_load_change()
        first_token_s = self.prefill_s(self.backlog_tokens) if self.is_on_trial else 0.0
        self.breaker.on_sent(credit, time.monotonic(), first_token_s)
        return credit

    def on_accepted(self, credit: Credit) -> None:
        """Record that the engine has accepted the request."""
        self._credit.on_accepted(credit)

    def on_first_token(self, credit: Credit) -> None:
        """Record that the request's first token has arrived."""
        self._credit.on_first_token(credit)
        self._on_load_change()
        limit = self.breaker.limit
        self.breaker.on_first_token(credit)
        if self.breaker.limit != limit:  # the engine may get the next requests
            self._owner.on_change()

    def release(self, *credits: Credit) -> None:
        """Release the reservations of requests that have ended, whether or not they succeeded."""
        for credit in credits:
            self._credit.release(credit)
            self.breaker.on_end(credit)
        self._on_load_change()
        self._owner.on_change()

    def on_failure(self, credit: Credit, error: ServiceError) -> None:
        """Record that the request failed on this engine.

        The loss of a stream counts as a single failure, no matter how many requests the stream
        carried. Requests that the breaker ignores do not use it up.
        """
        loss = error.loss if isinstance(error, ConnectionBroken) else None
        is_told = loss is not None and self.breaker.is_closed and self.breaker.counts(credit)
        if loss and is_told and not loss.is_first("breaker"):
            return
        if is_engine_fault(error) and self.breaker.on_failure(credit, time.monotonic()):
            about = {"engine": self.id, "failures": self.breaker.failures, "reason": error.reason}
            log.warning("engine ejected", extra=about)
            self._owner.on_ejected(self)

    async def _follow(self) -> None:
        """Follow the engine's reports, reconnecting if necessary, until the task is cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            before = self.reports
            try:
                if self._owner.is_mixed:
                    await self._connection.match_transport(self.description is not None)
                await self._watch()
            except grpc.aio.AioRpcError as error:
                self._log_loss(error.details() or error.code().name)
            except WrongModel as error:
                self._loss = str(error)
                log.error("engine not usable", extra={"engine": self.id, "reason": str(error)})
            except Exception:  # a bug here must not stop following a working engine
                log.exception("engine lost", extra={"engine": self.id})

            self._is_connected = False
            self.lost_unix = time.time()
            with failures_logged("report the loss of an engine"):
                self._on_state_change()
                self._owner.on_loss(self)
                self._owner.on_change()

            backoff_s = FIRST_BACKOFF_S if self.reports != before else 2 * backoff_s
            await asyncio.sleep(min(backoff_s, MAX_BACKOFF_S))

    def _log_loss(self, reason: str) -> None:
        """Log why the engine was lost, unless the same reason has just been logged."""
        if reason != self._loss:
            is_refusal = any(words in reason for words in _CERTIFICATE_REFUSALS)
            level = logging.ERROR if is_refusal else logging.INFO
            log.log(level, "engine lost", extra={"engine": self.id, "reason": reason})
        self._loss = reason

    async def _watch(self) -> None:
        """Read and apply the engine's reports until the stream of reports ends."""
        interval_ms = report_interval_ms(self._owner.num_engines)
        request = headroom_pb2.WatchHeadroomRequest(min_interval_ms=interval_ms)

        # A call that waits for the connection starts as soon as the engine is back. But only a call
        # that does not wait gets the error of a refused certificate.
        waits = not self._owner.is_secure
        self.order.on_connect()
        stub = self._connection.headroom_stub
        async for push in stub.WatchHeadroom(request, wait_for_ready=waits):
            report = push.headroom
            # A loading engine cannot describe its model yet, but its reports count.
            if report.ready and report.epoch != self._described_epoch:
                await self._fetch_model()
                self._described_epoch = report.epoch
                log.info("engine found", extra={"engine": report.engine, "pool": self.pool})
            self._on_report(report)

    def _on_report(self, headroom: headroom_pb2.Headroom) -> None:
        match self.order.take(headroom.epoch, headroom.sequence):
            case "old":
                return
            case "gap":
                log.info("reports missed", extra={"engine": self.id, "missed": self.order.missed})
            case "restart":
                self._owner.on_restart(self)

        self._loss = ""
        workers_lost = self.order.workers_lost
        self.order.on_worker_restarts(headroom.worker_restarts)
        if self.order.workers_lost > workers_lost:
            self.lost_unix = time.time()

        has_lost_worker = not headroom.ready and bool(self.headroom and self.headroom.ready)
        if headroom.ready:
            self._worker_lost_at = math.inf
        elif has_lost_worker:
            self._worker_lost_at = time.monotonic()

        self.headroom = headroom
        self._releases = tuple(Release(r.after_ms / 1000, r.bytes) for r in headroom.releases)
        self._step_seconds = tuple(headroom.step_seconds)
        self._reported_backlog = headroom.prefill_backlog_tokens
        self._reported_load = headroom.requests_running + headroom.requests_waiting
        self._reported_at = time.monotonic()
        self._is_connected = True

        # The credit must count the report before the owner is notified, which reads `available`.
        self._credit.on_report()
        self._on_state_change()
        self._on_load_change()
        self._owner.on_change()
        if has_lost_worker:
            # A router that was paused may have the report of the next worker already.
            asyncio.get_running_loop().call_later(SETTLE_S, self.watchdog.check)

        if headroom.adapters or self._reported_adapters is not None:
            self._on_adapters(list(headroom.adapters))
        if headroom.fingerprint != self.numerics.digest:
            facts = dict(headroom.fingerprint_facts)
            self.numerics = Fingerprint(headroom.fingerprint, facts)
            self._owner.on_numerics_change()

    def _on_adapters(self, states: list[headroom_pb2.AdapterState]) -> None:
        """Record the adapters listed in a report, if they have changed."""
        if states == self._reported_adapters:
            return
        self._reported_adapters = states
        served = [state for state in states if state.served]
        self._adapter_keys = {each.name: adapter_key(each.name, each.digest) for each in served}
        self._set_adapters(inference_pb2.Adapter(name=e.name, rank=e.rank) for e in served)
        self._on_state_change()
        self._owner.on_change()

    def _set_adapters(self, adapters: Iterable[inference_pb2.Adapter]) -> None:
        self.described_adapters = tuple(adapters)
        self.adapters = frozenset(adapter.name for adapter in self.described_adapters)

    def numerics_of(self, adapter: str) -> str:
        """Return the engine's numerics fingerprint for the base model or for an adapter.

        Engines with the same fingerprint produce bit-identical results from the same tokens. An
        adapter's fingerprint also identifies the exact version of the adapter. The result is empty
        if the fingerprint is unknown.

        Args:
            adapter: name of the adapter, or empty for the base model.
        """
        return with_adapter(self.numerics.digest, self._adapter_keys.get(adapter, ""))

    def knows(self, fields: frozenset[str]) -> bool:
        """Return whether the engine has announced the request fields.

        A client may name fields that this router does not know, since the client may be newer.
        """
        announced = self.description.request_fields if self.description else ()
        return fields <= (known_fields() - self.unknown_fields) or fields.issubset(announced)

    async def _fetch_model(self) -> None:
        """Fetch the engine's description of its model, and load the model.

        Raises:
            WrongModel: the model does not belong to this service, or cannot be loaded.
        """
        request = inference_pb2.GetModelRequest()
        described = await self._connection.stub.GetModel(request, timeout=GET_MODEL_TIMEOUT_S)
        if described.model != self._model_name:
            raise WrongModel(f"serves {described.model!r}, wanted {self._model_name!r}")
        try:
            model = await self._owner.load(described)
        except ValueError as error:
            raise WrongModel(str(error)) from error

        # Described engines get requests, so the stream must be open first. Nobody may see a model
        # without its description, whose context length would count as 0.
        await self._connection.open_stream()
        self.model = model
        self.description = described
        self._set_adapters(described.adapters)
        self._reported_adapters = None
        self.unknown_fields = unknown_fields(described.request_fields)

        tensor = 1 + max((rank.tensor_rank for rank in described.ranks), default=0)
        pipeline = 1 + max((rank.stage for rank in described.ranks), default=0)
        self.route = route_of(self.pool, tensor, pipeline)
        self._profile = _shared(memory_profile.from_wire(described.profile))
        self._on_state_change()


@functools.lru_cache(maxsize=64)
def _shared(profile: MemoryProfile) -> MemoryProfile:
    """Return the same object for all profiles that are equal.

    Decisions can then compare the profiles of engines by identity.
    """
    return profile
