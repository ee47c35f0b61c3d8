"""One engine as the router sees it: its channel, its last report, the credit given on it."""

import asyncio
import logging
import math
import time
from typing import Protocol

import grpc

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_router.breaker import Breaker, BreakerPolicy
from ullage_router.canary import Side
from ullage_router.credit import Credit, CreditBook
from ullage_router.errors import is_engine_fault, silent_engine
from ullage_router.flow import Flow, Source
from ullage_router.multiplex import Metadata, Multiplexer, Plain
from ullage_router.predict import Profile
from ullage_router.reports import ReportOrder
from ullage_router.silence import Waits
from ullage_router.tokenize import Model
from ullage_router.views import EngineView, Release, Standing
from ullage_rpc.errors import ServiceError

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
"""In what gRPC says when one side refuses the other's certificate."""

log = logging.getLogger(__name__)


class Owner(Protocol):
    """Whoever keeps the engines; told what happens to each."""

    @property
    def is_secure(self) -> bool:
        """Whether engines are spoken to over TLS."""

    def changed(self) -> None:
        """After every report, every loss and whenever credit comes back."""

    def lost(self, engine: "Engine") -> None:
        """Its reports ended; addresses may have changed."""

    def restarted(self, engine: "Engine") -> None:
        """It lives anew, with empty caches."""

    @property
    def num_engines(self) -> int:
        """How many share the router's attention."""

    def has_another(self, engine: "Engine") -> bool:
        """Whether another engine is ready."""

    def dial(self, address: str) -> grpc.aio.Channel:
        """A channel to an engine, with the credentials of this moment."""

    async def load(self, described: inference_pb2.GetModelResponse) -> Model:
        """A Model of what an engine answers to GetModel."""


class WrongModel(Exception):
    """The engine serves another model, or one that cannot be used."""


class Engine:
    """Follows one engine and remembers what it said last.

    Args:
        address: `ip:port`.
        pool: the configured pool it was found in.
        model_name: the model it must serve.
        breaker: when failures hold it back.
        owner: told what happens.
        side: of a rollout.
    """

    def __init__(
        self,
        address: str,
        pool: str,
        model_name: str,
        breaker: BreakerPolicy,
        owner: Owner,
        side: Side = Side.STABLE,
    ) -> None:
        self.address = address
        self.side = side
        self.pool = pool
        self.is_listed = True
        """The address is still in DNS."""
        self.headroom: headroom_pb2.Headroom | None = None
        self.description: inference_pb2.GetModelResponse | None = None
        self.model: Model | None = None
        self._model_name = model_name
        self._owner = owner
        self.breaker = Breaker(breaker)
        self.order = ReportOrder(side is Side.CANARY)
        self.waits = Waits(
            lambda: self.is_silent and owner.has_another(self),
            lambda: silent_engine(self.id, self.age_s),
        )
        self._introduced_in: int | None = None
        """The epoch in which the engine described its model."""
        self._heard_at = 0.0
        self._is_connected = False
        self._book = CreditBook()
        self.trouble = ""
        """Why its reports ended or never began; empty while they come."""
        self._closing: set[asyncio.Task[None]] = set()
        self._profile = Profile(1, 0)
        self._releases: tuple[Release, ...] = ()
        self._connect()

    def _connect(self) -> None:
        self._channel = self._owner.dial(self.address)
        self._headrooms = headroom_pb2_grpc.HeadroomServiceStub(self._channel)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._multiplexer = Multiplexer(self.stub, self.address)
        self._task = asyncio.create_task(self._follow(), name=f"follow {self.address}")

    def reconnect(self, grace_s: float) -> None:
        """Goes on with a new channel; answers on the old one have the grace to end.

        The engine stays as it was last heard: the new channel's first report is milliseconds away.
        """
        self._task.cancel()
        closing = asyncio.create_task(_retire(self._channel, self._multiplexer, grace_s))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        had_stream = self._multiplexer.is_open
        self._connect()
        if had_stream:
            self._multiplexer.start()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, *self._closing, return_exceptions=True)
        await self._multiplexer.close()
        await self._channel.close()

    @property
    def id(self) -> str:
        """The engine's own name, or its address until that is known."""
        return self.headroom.engine if self.headroom else self.address

    @property
    def reports(self) -> int:
        """Reports that arrived so far: tells whether there is news."""
        return self._book.reports

    @property
    def age_s(self) -> float:
        """Seconds since the last report."""
        return time.monotonic() - self._heard_at

    @property
    def state(self) -> str:
        """connecting, loading, ready, draining, stale or gone."""
        told = self.headroom
        if told is None or not self._is_connected:
            return "connecting" if self.is_listed else "gone"
        if time.monotonic() - self._heard_at > STALE_AFTER_S:
            return "stale"
        if told.draining:
            return "draining"
        return "ready" if told.ready and self.model else "loading"

    @property
    def is_silent(self) -> bool:
        """It missed its heartbeats: it is gone, stopped, or cut off."""
        return self.age_s > STALE_AFTER_S

    @property
    def is_over(self) -> bool:
        """Out of DNS, silent and without requests: nothing is lost by closing it."""
        # A canary's address may soon be a stable engine's.
        is_heard = (
            self._is_connected and self.age_s <= HOPELESS_AFTER_S and self.side is Side.STABLE
        )
        return not (self.is_listed or is_heard or self._book.inflight)

    @property
    def credit_bytes(self) -> int:
        return self._book.total

    @property
    def inflight(self) -> int:
        return self._book.inflight

    @property
    def available(self) -> int:
        """Reported headroom less the credit that the report cannot include, bytes."""
        return (self.headroom.headroom_bytes if self.headroom else 0) - self._book.total

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that are computed before a new request's."""
        told = self.headroom.prefill_backlog_tokens if self.headroom else 0
        return told + self._book.tokens

    @property
    def _prefill_pairs(self) -> int:
        told = self.headroom.prefill_backlog_tokens if self.headroom else 0
        return round(self._book.prefill_pairs(told))

    def prefill_work(self, mlp_products: int) -> int:
        """What the prompts before a new one cost (`prefill.work`).

        Of other routers' prompts only the tokens are known, not how long each is.
        """
        return self._prefill_pairs + mlp_products * self.backlog_tokens

    @property
    def standing(self) -> Standing:
        """What the state means for new requests: a silent engine is waited for a while."""
        match self.state:
            case "ready":
                return Standing.USABLE
            case "loading":
                return Standing.RECOVERING
            case "stale" if self.age_s <= HOPELESS_AFTER_S:
                return Standing.RECOVERING
            case _:
                return Standing.UNUSABLE

    def view(self, fingerprint: str, is_left_out: bool) -> EngineView | None:
        """What `decide` needs; None as long as the engine never introduced itself.

        Args:
            fingerprint: of the model whose token ids the request has; others cannot serve it.
            is_left_out: it gets nothing now, for its breaker's sake or the request's.
        """
        told, described = self.headroom, self.description
        if told is None or described is None or self.model is None:
            return None
        is_out = is_left_out or self.model.fingerprint != fingerprint
        return EngineView(
            id=self.address,
            pool=self.pool,
            standing=Standing.UNUSABLE if is_out else self.standing,
            available=self.available,
            capacity=told.kv_pool_bytes or described.profile.kv_pool_bytes,
            profile=self._profile,
            expected_output=told.expected_output_tokens,
            max_model_len=described.max_model_len,
            health=told.health,
            load=told.requests_running + told.requests_waiting + self._book.uncounted,
            backlog_tokens=self.backlog_tokens,
            prefill_pairs=self._prefill_pairs,
            prefill_speed=told.prefill_tokens_per_second,
            releases=self._releases,
        )

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float,
        metadata: Metadata,
        flow: Flow,
    ) -> Source:
        """Begins a call; failures come with its first read."""
        if self._multiplexer.is_open:
            return self._multiplexer.call(request, timeout_s, metadata, flow)
        return Plain(self.stub.Generate(request, timeout=timeout_s, metadata=metadata), flow)

    def reserve(self, size: int, tokens: int) -> Credit:
        """Credit of bytes and prompt tokens for a request that is about to be sent."""
        credit = self._book.reserve(size, tokens)
        self.breaker.sent(credit, time.monotonic())
        return credit

    def accepted(self, credit: Credit) -> None:
        """The engine answered Accepted to the request."""
        self._book.accepted(credit)

    def began(self, credit: Credit) -> None:
        """The request's first token came."""
        self._book.began(credit)
        self.breaker.began(credit)

    def release(self, *credits: Credit) -> None:
        """The requests ended, one way or another."""
        for credit in credits:
            self._book.release(credit)
            self.breaker.ended(credit)
        self._owner.changed()

    def failed(self, credit: Credit, error: ServiceError) -> None:
        """The request failed on it."""
        if is_engine_fault(error) and self.breaker.failed(credit, time.monotonic()):
            about = {"engine": self.id, "failures": self.breaker.failures, "reason": error.reason}
            log.warning("engine ejected", extra=about)

    async def _follow(self) -> None:
        """Follows the engine's reports for ever, through every loss of it."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            before = self.reports
            try:
                await self._watch()
            except grpc.aio.AioRpcError as error:
                self._lost(error.details() or error.code().name)
            except WrongModel as error:
                self.trouble = str(error)
                log.error("engine not usable", extra={"engine": self.id, "reason": str(error)})
            except Exception:  # a bug here must not end the watch of a working engine
                log.exception("engine lost", extra={"engine": self.id})
            self._is_connected = False
            self._owner.lost(self)
            self._owner.changed()
            backoff_s = FIRST_BACKOFF_S if self.reports != before else 2 * backoff_s
            await asyncio.sleep(min(backoff_s, MAX_BACKOFF_S))

    def _lost(self, reason: str) -> None:
        """Logs what is new: an engine that cannot be reached fails again and again."""
        if reason != self.trouble:
            is_refusal = any(words in reason for words in _REFUSALS)
            level = logging.ERROR if is_refusal else logging.INFO
            log.log(level, "engine lost", extra={"engine": self.id, "reason": reason})
        self.trouble = reason

    async def _watch(self) -> None:
        interval_ms = report_interval_ms(self._owner.num_engines)
        request = headroom_pb2.WatchHeadroomRequest(min_interval_ms=interval_ms)
        # Waiting for the connection, the call starts in the moment the engine is back; but of a
        # certificate that is refused only a call that does not wait is told.
        waits = not self._owner.is_secure
        self.order.connected()
        async for push in self._headrooms.WatchHeadroom(request, wait_for_ready=waits):
            told = push.headroom
            # An engine that loads cannot describe its model yet; its reports count all the same.
            if told.ready and told.epoch != self._introduced_in:
                await self._introduce()
                self._introduced_in = told.epoch
                log.info("engine found", extra={"engine": told.engine, "pool": self.pool})
            self._heard(told)

    def _heard(self, headroom: headroom_pb2.Headroom) -> None:
        match self.order.take(headroom.epoch, headroom.sequence):
            case "old":
                return
            case "gap":
                log.info("reports missed", extra={"engine": self.id, "missed": self.order.missed})
            case "restart":
                self._owner.restarted(self)
        self.trouble = ""
        self.order.lost(headroom.worker_restarts)
        self.headroom = headroom
        self._releases = tuple(Release(r.after_ms / 1000, r.bytes) for r in headroom.releases)
        self._heard_at = time.monotonic()
        self._is_connected = True
        self._book.reported()
        self._owner.changed()

    async def _introduce(self) -> None:
        """Asks the engine for its model, once an epoch."""
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
        self._profile = to_profile(described.profile)


def report_interval_ms(num_engines: int) -> int:
    """Least time between two reports of an engine: as fresh as a bounded sum of them allows."""
    wanted = math.ceil(1000 * num_engines / MAX_REPORTS_PER_S)
    return max(MIN_REPORT_INTERVAL_MS, min(MAX_REPORT_INTERVAL_MS, wanted))


def to_profile(wire: inference_pb2.MemoryProfile) -> Profile:
    """The profile as the predictor takes it."""
    per_token = sum(group.bytes_per_token for group in wire.groups)
    return Profile(max(1, wire.block_tokens), per_token)


async def _retire(channel: grpc.aio.Channel, multiplexer: Multiplexer, grace_s: float) -> None:
    """Closes a channel when its answers have ended, at most `grace_s` later."""
    multiplexer.retire()
    await channel.close(grace_s)
    await multiplexer.close()
