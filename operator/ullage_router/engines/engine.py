"""One engine as the router sees it: its channel, its reports in their order, and its credit."""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Iterable
from typing import Literal, Protocol

import grpc

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.config.router import BreakerSection
from ullage_common.request_cost import MemoryProfile
from ullage_common.wire import memory_profile
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.fingerprint import UNKNOWN, Fingerprint, adapter_key, with_adapter
from ullage_common.wire.tls import speaks_tls
from ullage_router.engines.flow_control import FlowControl, Source, StreamWatchdog
from ullage_router.engines.multiplex import ConnectionBroken, Metadata, Multiplexer
from ullage_router.errors import is_engine_fault, no_stream, silent_engine
from ullage_router.policy.circuit_breaker import CircuitBreaker
from ullage_router.policy.credit import Credit, CreditBook, Held
from ullage_router.policy.decision import route_of
from ullage_router.policy.facts import WELL, EngineState, EngineView, Release, Side, engine_key
from ullage_router.tokenizer import Model

ReportKind = Literal["next", "gap", "old", "restart"]


class ReportSequence:
    """Checks the epoch and the sequence number of every report.

    Sequence numbers grow by one a push of one stream; an epoch is one life of an engine's server.

    Args:
        counts_earlier: whether workers lost before the first report count. A canary's do: it lives
            for its trial only, and may fall before a router hears of it. Those of a stable engine
            may be weeks old.
    """

    def __init__(self, counts_earlier: bool = False) -> None:
        self.epoch: int | None = None
        self.sequence = 0
        self.missed = 0
        """Number of reports that never came."""
        self.old = 0
        """Number of reports that came twice or too late, and were ignored."""
        self.restarts = 0
        """Number of restarts of the engine's server."""
        self.workers_lost = 0
        """Number of times that its workers or its server ended unexpectedly."""
        self._counts_earlier = counts_earlier
        self._reported_restarts: int | None = None

    def on_connect(self) -> None:
        """Start a new sequence: a new stream's numbers do not continue the last one's."""
        self.sequence = 0

    def take(self, epoch: int, sequence: int) -> ReportKind:
        """Classifies a report; all but `old` are used, for each has the whole state."""
        if epoch != self.epoch:
            return self._restart(epoch, sequence)
        if self.sequence and sequence <= self.sequence:
            self.old += 1
            return "old"
        missed = sequence - self.sequence - 1 if self.sequence else 0
        self.missed += missed
        self.sequence = sequence
        return "gap" if missed else "next"

    def on_worker_restarts(self, worker_restarts: int) -> None:
        """Count the worker restarts that an accepted report names.

        Args:
            worker_restarts: since the start of the server.
        """
        if self._reported_restarts is not None:  # what was before is another's count
            self.workers_lost += max(0, worker_restarts - self._reported_restarts)
        self._reported_restarts = worker_restarts

    def _restart(self, epoch: int, sequence: int) -> ReportKind:
        kind: ReportKind = "next" if self.epoch is None else "restart"
        self.restarts += kind == "restart"
        self.workers_lost += kind == "restart"
        self._reported_restarts = 0 if kind == "restart" or self._counts_earlier else None
        self.epoch = epoch
        self.sequence = sequence
        return kind


HEARTBEAT_S = 1.0
STALE_AFTER_S = 3 * HEARTBEAT_S
HOPELESS_AFTER_S = 10 * HEARTBEAT_S
# Memory that nobody knows to be free is wasted, but every report costs the router time.
MIN_REPORT_INTERVAL_MS = 20
MAX_REPORT_INTERVAL_MS = 200
MAX_REPORTS_PER_S = 500
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
GET_MODEL_TIMEOUT_S = 30.0
_REFUSALS = ("handshake failed", "Verification Check failed")
"""Parts of gRPC's messages when one side refuses the other's certificate."""

log = logging.getLogger(__name__)


class Owner(Protocol):
    """The owner of the engines, whose callbacks are called for each."""

    @property
    def is_secure(self) -> bool:
        """Whether the router speaks TLS to engines."""

    @property
    def is_mixed(self) -> bool:
        """Whether some engines may speak TLS and others plaintext."""

    def on_change(self) -> None:
        """Called after every report, every loss and whenever credit is given back."""

    def on_loss(self, engine: "Engine") -> None:
        """Called when an engine's reports ended; addresses may have changed."""

    def on_restart(self, engine: "Engine") -> None:
        """Called when an engine has restarted with empty caches."""

    def on_state_change(self, engine: "Engine") -> None:
        """Called when an engine may take requests now, or no longer."""

    def on_load_change(self, engine: "Engine") -> None:
        """Called when an engine has become idle, or busy."""

    def on_ejected(self, engine: "Engine") -> None:
        """Called when an engine's breaker has opened."""

    def on_numerics_change(self) -> None:
        """Called when an engine has reported another fingerprint of its numerics."""

    @property
    def num_engines(self) -> int:
        """Number of engines that report to this router."""

    def has_another(self, engine: "Engine") -> bool:
        """Whether another engine is ready."""

    def dial(self, address: str, is_plaintext: bool) -> grpc.aio.Channel:
        """Open a channel to an engine, with the present credentials.

        Args:
            is_plaintext: whether the engine speaks no TLS, though the router does.
        """

    async def load(self, described: inference_pb2.GetModelResponse) -> Model:
        """Build a Model from an engine's answer to GetModel."""


class WrongModel(Exception):
    """Raised when the engine serves another model, or one that cannot be used."""


class Engine:
    """Follows one engine and keeps its last report.

    Args:
        address: `ip:port`.
        pool: the configured pool it was found in.
        model_name: the model it must serve.
        breaker: when failures hold it back.
        owner: its callbacks are called.
        side: of a rollout.
    """

    def __init__(
        self,
        address: str,
        pool: str,
        model_name: str,
        breaker: BreakerSection,
        owner: Owner,
        side: Side = Side.STABLE,
    ) -> None:
        self.address = address
        self.side = side
        self.pool = pool
        self.key = engine_key(side, pool, address)
        self.is_listed = True
        """Whether the address is still in DNS."""
        self.headroom: headroom_pb2.Headroom | None = None
        self.description: inference_pb2.GetModelResponse | None = None
        self.route = pool
        """The pool's label; what the engine's own ranks are, once it has described them."""
        self.model: Model | None = None
        self.numerics: Fingerprint = UNKNOWN
        """What decides the bits of the engine's answers, as it reported last."""
        self._model_name = model_name
        self._owner = owner
        self.breaker = CircuitBreaker(breaker)
        self.order = ReportSequence(side is Side.CANARY)
        self.watchdog = StreamWatchdog(
            lambda: self.is_silent and owner.has_another(self),
            lambda: silent_engine(self.id, self.age_s),
        )
        self._described_epoch: int | None = None
        """The epoch in which the engine described its model."""
        self._reported_at = 0.0
        self.lost_unix = time.time()
        """When answers on it may last have broken off, Unix time; at first that of its finding."""
        self._is_connected = False
        self._credit = CreditBook()
        self._loss = ""
        """Why the engine's reports ended or never began; empty while they come."""
        self._closing: set[asyncio.Task[None]] = set()
        self.adapters: frozenset[str] = frozenset()
        """Names of the model's adapters that the engine serves."""
        self.described_adapters: tuple[inference_pb2.Adapter, ...] = ()
        """The same with what is known of each."""
        self._adapter_keys: dict[str, str] = {}
        """Versions of the adapters, by name."""
        self._reported_adapters: list[headroom_pb2.AdapterState] | None = None
        """What the last report said of adapters; None where no report says anything of them, as
        those of an engine whose adapters never change."""
        self._profile = MemoryProfile(1, ())
        self._view: EngineView | None = None
        """The engine as decisions see it; None after something has changed."""
        self._standing: EngineState | None = None
        """The engine's state in its view; None after that may have changed."""
        self._standing_until = 0.0
        self._releases: tuple[Release, ...] = ()
        self._step_seconds: tuple[float, ...] = ()
        self._reported_backlog = self._reported_load = 0
        """Prompt tokens to compute and requests, of the last report."""
        self._is_idle = False
        """Whether the engine had no prompts to compute when its owner heard last."""
        self._previous: Multiplexer | None = None
        """The multiplexer of the previous channel, until the present one's is open."""
        self._is_plaintext = False
        """Whether the engine answered in plaintext where that is allowed beside TLS."""
        self._open_channel()
        self._task = self._start_following()

    def _open_channel(self) -> None:
        self._channel = self._owner.dial(self.address, self._is_plaintext)
        self._headrooms = headroom_pb2_grpc.HeadroomServiceStub(self._channel)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._multiplexer = Multiplexer(self.stub, self.address, self._on_stream_change)

    def _start_following(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._follow(), name=f"follow {self.address}")

    def reconnect(self, grace_s: float) -> None:
        """Continue on a new channel; answers on the old one have the grace to end.

        The engine keeps its last report: the new channel's first one is milliseconds away. So is
        the new stream, until which requests take the old one.
        """
        self._task.cancel()
        self._replace_channel(grace_s)
        self._task = self._start_following()

    def _replace_channel(self, grace_s: float) -> None:
        channel = self._channel
        previous = self._multiplexer
        self._open_channel()
        if previous.is_open:
            self._previous = previous
        if self.description is not None:  # it is not described anew, which would open the stream
            self._multiplexer.start()
        self._on_state_change()
        closing = asyncio.create_task(self._retire(channel, previous, grace_s))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _retire(
        self, channel: grpc.aio.Channel, previous: Multiplexer, grace_s: float
    ) -> None:
        """Close a channel when its answers have ended, at most `grace_s` later."""
        if previous.is_open:
            await self._multiplexer.open()
        previous.retire()
        if self._previous is previous:
            self._previous = None
            self._on_state_change()
        await channel.close(grace_s)
        await previous.close()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, *self._closing, return_exceptions=True)
        await self._multiplexer.close()
        await self._channel.close()

    @property
    def id(self) -> str:
        """The engine's own name, or its address until the name is known."""
        return self.headroom.engine if self.headroom else self.address

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the engine's model; empty until the engine has described it."""
        return self.model.fingerprint if self.model else ""

    @property
    def has_numerics(self) -> bool:
        """Whether the engine has served and may serve again, so that its numerics count."""
        if self.headroom is None or self.model is None or self.state in ("connecting", "gone"):
            return False
        # One that is ready and reports none is of an earlier release.
        return bool(self.numerics.digest) or self.headroom.ready

    @property
    def health(self) -> float:
        return self.headroom.health if self.headroom else 0.0

    @property
    def load(self) -> int:
        """Number of requests that run, wait or are on their way."""
        return self._reported_load + self._credit.uncounted

    @property
    def expected_output(self) -> int:
        """Number of tokens that the engine expects of an answer."""
        return self.headroom.expected_output_tokens if self.headroom else 0

    @property
    def reports(self) -> int:
        """Number of reports that arrived so far: a larger one says that there is a new report."""
        return self._credit.reports

    @property
    def age_s(self) -> float:
        """Seconds since the last report."""
        return time.monotonic() - self._reported_at

    @property
    def state(self) -> str:
        """connecting, loading, ready, draining, stale or gone."""
        report = self.headroom
        if report is None or not self._is_connected or self._lacks_stream:
            return "connecting" if self.is_listed else "gone"
        if time.monotonic() - self._reported_at > STALE_AFTER_S:
            return "stale"
        if report.draining:
            return "draining"
        return "ready" if report.ready and self.model and self._has_stream else "loading"

    @property
    def trouble(self) -> str:
        """Why the engine gets no requests; empty while nothing is wrong."""
        lack = "serves no Multiplex stream; update the engine"
        out = self.headroom.not_ready_reason if self.headroom else ""
        return self._loss or out or (lack if self._lacks_stream else "")

    @property
    def _lacks_stream(self) -> bool:
        return self._multiplexer.is_missing and not self._has_stream

    @property
    def _has_stream(self) -> bool:
        previous = self._previous
        return self._multiplexer.is_open or (previous is not None and previous.is_open)

    @property
    def is_silent(self) -> bool:
        """Whether the engine missed its heartbeats: it is gone, stopped, or cut off."""
        return self.age_s > STALE_AFTER_S

    @property
    def is_over(self) -> bool:
        """Whether the engine is out of DNS, silent and without requests, so it may be closed."""
        # A canary's address may soon be a stable engine's.
        is_stable = self.side is Side.STABLE
        is_reporting = is_stable and self._is_connected and self.age_s <= HOPELESS_AFTER_S
        return not (self.is_listed or is_reporting or self._credit.inflight)

    @property
    def credit_bytes(self) -> int:
        return self._credit.total

    @property
    def inflight(self) -> int:
        return self._credit.inflight

    @property
    def available(self) -> int:
        """Reported headroom minus the credit that the report cannot include, bytes."""
        return (self.headroom.headroom_bytes if self.headroom else 0) - self._credit.total

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that are computed before those of a new request."""
        return self._reported_backlog + self._credit.tokens

    @property
    def is_idle(self) -> bool:
        """Whether the engine is well and has no prompts to compute."""
        return not self.backlog_tokens and self.health >= WELL

    @property
    def _prefill_pairs(self) -> int:
        return round(self._credit.prefill_pairs(self._reported_backlog))

    def prefill_work(self, mlp_products: int) -> int:
        """Work of the prompts before a new one (`balance.work`).

        Of other routers' prompts only the tokens are known, not how long each is.
        """
        return self._prefill_pairs + mlp_products * self.backlog_tokens

    @property
    def standing(self) -> EngineState:
        """Whether the engine takes new requests; a silent one counts as recovering for a while."""
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
        """Return when the state changes if no report comes; infinity where silence changes
        nothing."""
        ends = (self._reported_at + STALE_AFTER_S, self._reported_at + HOPELESS_AFTER_S)
        return next((end for end in ends if end >= now), math.inf)

    def view(self, now: float) -> EngineView | None:
        """Return the engine as `decide` sees it; None until the engine has described its model.

        Args:
            now: on the monotonic clock.
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
            # What other routers sent bears no longer steps either.
            step_limit_s=min(self._credit.step_limit_s, report.step_limit_s or math.inf),
            max_sequences=report.max_sequences,
            releases=self._releases,
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
        if not self._multiplexer.is_open:
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
        """Begin a call; failures of the engine are raised by its first read.

        Raises:
            ServiceError: the stream to the engine has just been lost.
        """
        if self._multiplexer.is_open:
            return self._multiplexer.call(request, timeout_s, metadata, flow)
        if self._previous and self._previous.is_open:
            return self._previous.call(request, timeout_s, metadata, flow)
        raise no_stream(self.id)

    def held(self, holder: str) -> tuple[Held, Held]:
        """Return the unpaid reservations of one holder, and of all holders."""
        return self._credit.held(holder), self._credit.held_by_all

    def reserve(
        self, size: int, tokens: int, step_limit_s: float = math.inf, holder: str = ""
    ) -> Credit:
        """Reserve bytes and prompt tokens for a request that is about to be sent, and keep steps
        as short as it needs them.

        Args:
            holder: the caller that pays nothing for them; empty: a request is sent, or paid.
        """
        credit = self._credit.reserve(size, tokens, step_limit_s, holder)
        self._on_load_change()
        self.breaker.on_sent(credit, time.monotonic())
        return credit

    def on_accepted(self, credit: Credit) -> None:
        """Records that the engine answered Accepted to the request."""
        self._credit.on_accepted(credit)

    def on_first_token(self, credit: Credit) -> None:
        """Record the request's first token."""
        self._credit.on_first_token(credit)
        self._on_load_change()
        self.breaker.on_first_token(credit)

    def release(self, *credits: Credit) -> None:
        """Give back the credit of requests that ended in any way."""
        for credit in credits:
            self._credit.release(credit)
            self.breaker.on_end(credit)
        self._on_load_change()
        self._owner.on_change()

    def on_failure(self, credit: Credit, error: ServiceError) -> None:
        """Records that the request failed on this engine; a lost stream counts once, however many
        requests it carried."""
        loss = error.loss if isinstance(error, ConnectionBroken) else None
        if loss and self.breaker.is_closed and not loss.is_first("breaker"):
            return
        if is_engine_fault(error) and self.breaker.on_failure(credit, time.monotonic()):
            about = {"engine": self.id, "failures": self.breaker.failures, "reason": error.reason}
            log.warning("engine ejected", extra=about)
            self._owner.on_ejected(self)

    async def _follow(self) -> None:
        """Follow the engine's reports until it is cancelled, through every lost connection."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            before = self.reports
            try:
                if self._owner.is_mixed:
                    await self._match_transport()
                await self._watch()
            except grpc.aio.AioRpcError as error:
                self._log_loss(error.details() or error.code().name)
            except WrongModel as error:
                self._loss = str(error)
                log.error("engine not usable", extra={"engine": self.id, "reason": str(error)})
            except Exception:  # a bug here must not end the watch of a working engine
                log.exception("engine lost", extra={"engine": self.id})
            self._is_connected, self.lost_unix = False, time.time()
            self._on_state_change()
            self._owner.on_loss(self)
            self._owner.on_change()
            backoff_s = FIRST_BACKOFF_S if self.reports != before else 2 * backoff_s
            await asyncio.sleep(min(backoff_s, MAX_BACKOFF_S))

    async def _match_transport(self) -> None:
        """Open another channel if the engine speaks TLS and this channel does not, or vice
        versa."""
        is_secure = await speaks_tls(self.address)
        if is_secure is None or is_secure is not self._is_plaintext:
            return
        self._is_plaintext = not is_secure
        self._replace_channel(0)

    def _log_loss(self, reason: str) -> None:
        """Log a loss once: an engine that cannot be reached fails again and again."""
        if reason != self._loss:
            is_refusal = any(words in reason for words in _REFUSALS)
            level = logging.ERROR if is_refusal else logging.INFO
            log.log(level, "engine lost", extra={"engine": self.id, "reason": reason})
        self._loss = reason

    async def _watch(self) -> None:
        interval_ms = report_interval_ms(self._owner.num_engines)
        request = headroom_pb2.WatchHeadroomRequest(min_interval_ms=interval_ms)
        # Waiting for the connection, the call starts in the moment the engine is back; but of a
        # certificate that is refused only a call that does not wait learns.
        waits = not self._owner.is_secure
        self.order.on_connect()
        async for push in self._headrooms.WatchHeadroom(request, wait_for_ready=waits):
            report = push.headroom
            # An engine that loads cannot describe its model yet; its reports count all the same.
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
        self.headroom = headroom
        self._releases = tuple(Release(r.after_ms / 1000, r.bytes) for r in headroom.releases)
        self._step_seconds = tuple(headroom.step_seconds)
        self._reported_backlog = headroom.prefill_backlog_tokens
        self._reported_load = headroom.requests_running + headroom.requests_waiting
        self._reported_at = time.monotonic()
        self._is_connected = True
        self._credit.on_report()
        self._on_state_change()
        self._on_load_change()
        self._owner.on_change()
        if headroom.adapters or self._reported_adapters is not None:
            self._on_adapters(list(headroom.adapters))
        if headroom.fingerprint != self.numerics.digest:
            facts = dict(headroom.fingerprint_facts)
            self.numerics = Fingerprint(headroom.fingerprint, facts)
            self._owner.on_numerics_change()

    def _on_adapters(self, states: list[headroom_pb2.AdapterState]) -> None:
        """Record the adapters of a report, since they come and go while an engine serves."""
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
        """Return the fingerprint of the engine's answers, with an adapter if one is named."""
        return with_adapter(self.numerics.digest, self._adapter_keys.get(adapter, ""))

    async def _fetch_model(self) -> None:
        """Fetch the engine's model once an epoch."""
        request = inference_pb2.GetModelRequest()
        described = await self.stub.GetModel(request, timeout=GET_MODEL_TIMEOUT_S)
        if described.model != self._model_name:
            raise WrongModel(f"serves {described.model!r}, wanted {self._model_name!r}")
        try:
            self.model = await self._owner.load(described)
        except ValueError as error:
            raise WrongModel(str(error)) from error
        await self._multiplexer.open()
        self.description = described
        self._set_adapters(described.adapters)
        self._reported_adapters = None
        tensor = 1 + max((rank.tensor_rank for rank in described.ranks), default=0)
        pipeline = 1 + max((rank.stage for rank in described.ranks), default=0)
        self.route = route_of(self.pool, tensor, pipeline)
        self._profile = _shared(memory_profile.from_wire(described.profile))
        self._on_state_change()


@functools.lru_cache(maxsize=64)
def _shared(profile: MemoryProfile) -> MemoryProfile:
    """Return the first one of equal profiles: engines of one kind are recognised by it."""
    return profile


def report_interval_ms(num_engines: int) -> int:
    """Return the least time between two reports of an engine: as short as the bound on reports of
    all engines allows."""
    interval_ms = math.ceil(1000 * num_engines / MAX_REPORTS_PER_S)
    return max(MIN_REPORT_INTERVAL_MS, min(MAX_REPORT_INTERVAL_MS, interval_ms))
