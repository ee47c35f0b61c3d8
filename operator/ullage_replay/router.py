"""The router in virtual time: its real admission and view of engines, without a network."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import grpc

from ullage.headroom.v1 import headroom_pb2
from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import RouterConfig
from ullage_common.wire import memory_profile
from ullage_common.wire.request_fields import known_fields
from ullage_replay.engine import EngineServer
from ullage_replay.trace import TraceRequest
from ullage_router.admission.admission import Admission, AdmissionRequest
from ullage_router.admission.load_balancer import LoadBalancer
from ullage_router.admission.prefill_window import Reservation
from ullage_router.admission.queue import RequestQueue
from ullage_router.call import Call, deadline_of
from ullage_router.engines.connection import EngineConnection
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.policy.facts import Side, engine_key
from ullage_router.prompts.prompts import Prompt
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.account import shared_account
from ullage_router.tenants.session import TenantSession
from ullage_router.tokenizer.model import Model

_MODEL = "replayed"
"""Fingerprint of the model of all engines."""


class SimulatedRouter:
    """Admits requests to engines, as the router of a service does.

    Args:
        config: the router's configuration.
        servers: the engines of each pool, by pool.
    """

    def __init__(self, config: RouterConfig, servers: Mapping[str, list[EngineServer]]) -> None:
        self._config = config
        self.streaming = config.streaming
        self.queue = RequestQueue(config.routing.queue)
        self.engines = _Engines(config, servers, self.queue.wake)
        self._balancer = LoadBalancer(config.routing.placement, self.engines)
        self._admission = Admission(
            config, self.engines, self.queue, cast(TokenizerThreads, None), self._balancer
        )
        for server in self.engines.server_of.values():
            server.on_report = self._on_report
        self._account = shared_account()
        self._model = _model(config.model)

    async def close(self) -> None:
        """Stop following the engines."""
        await self.engines.close()

    def call(self, name: str, request: TraceRequest, token_ids: list[int]) -> Call:
        """Return a request's call, as it arrives now."""
        wanted = inference_pb2.GenerateRequest(
            request_id=name, session_id=request.session, priority=request.priority
        )
        if request.max_tokens is not None:
            wanted.stop.max_tokens = request.max_tokens
        limits = self._config.limits
        now = time.monotonic()
        record = RequestRecord(name, arrived=now, arrived_unix=now)
        return Call(
            wanted,
            record,
            TenantSession(self._account),
            deadline_of(wanted, record, limits.total_timeout, limits.request_timeout),
            prompt=Prompt(self._model, token_ids),
        )

    def on_request(self) -> None:
        """Count a request, which allows retries."""
        self._balancer.budget.on_request()

    async def admit(self, request: AdmissionRequest) -> Reservation:
        """Reserve memory for a request on an engine.

        Raises:
            ServiceError: the request is refused.
        """
        self.engines.catch_up()
        return await self._admission.admit(request)

    def _on_report(self) -> None:
        # If nobody waits, the next decision is the first to read the engines' reports.
        if len(self.queue) or len(self._admission.window):
            self.engines.catch_up()


class _Engines(Engines):
    """The router's engines, all of which are known from the start."""

    def __init__(
        self,
        config: RouterConfig,
        servers: Mapping[str, list[EngineServer]],
        on_change: Any,
    ) -> None:
        section = config.routing.placement.breaker
        super().__init__(config.pools, config.model, on_change, section)
        self._replayed = _model(config.model)
        self.server_of: dict[str, EngineServer] = {}
        """The engine's server by the key of the router's engine."""
        for pool, of_pool in servers.items():
            for server in of_pool:
                key = engine_key(Side.STABLE, pool, server.name)
                self.server_of[key] = server
                self._engines[key] = _Engine(server, pool, config, self)
        self._replayed_engines = [cast(_Engine, engine) for engine in self._engines.values()]

    def catch_up(self) -> None:
        """Take the reports into account that engines have sent since the last call."""
        for engine in self._replayed_engines:
            engine.catch_up()

    def dial(self, address: str, is_plaintext: bool = False) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, _NoChannel())

    async def load(self, described: inference_pb2.GetModelResponse) -> Model:
        return dataclasses.replace(self._replayed, description=described)


class _Engine(Engine):
    """The router's view of one engine, whose reports come from the engine's server directly."""

    def __init__(
        self, server: EngineServer, pool: str, config: RouterConfig, owner: "_Engines"
    ) -> None:
        breaker = config.routing.placement.breaker
        super().__init__(server.name, pool, config.model, breaker, owner)
        self._connection = cast(EngineConnection, _Connection(server))
        self._server = server
        self._num_reports = server.num_reports

    def catch_up(self) -> None:
        """Handle the reports since the last call. Only the latest one has to be read."""
        num_new = self._server.num_reports - self._num_reports
        if num_new and self.model is not None:
            self._num_reports += num_new
            for _ in range(num_new - 1):
                self._credit.on_report()
            self._on_report(self._server.headroom.report(self.order.sequence + 1))


class _NoChannel:
    """A channel from which stubs may be made, but which nobody calls."""

    def _multicallable(self, *args: object, **kwargs: object) -> None: ...

    unary_unary = unary_stream = stream_unary = stream_stream = _multicallable


class _Connection:
    """The router's connection to an engine, which is always open."""

    is_open = is_stream_open = True
    lacks_stream = False

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self.stub = self
        self.headroom_stub = self

    async def open_stream(self) -> None: ...

    async def close(self) -> None: ...

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, **options: object
    ) -> inference_pb2.GetModelResponse:
        hardware = self._server.hardware
        return inference_pb2.GetModelResponse(
            model=self._server.config.model.name,
            request_fields=sorted(known_fields()),
            max_model_len=hardware.max_model_len,
            profile=memory_profile.to_wire(hardware.profile),
        )

    async def WatchHeadroom(
        self, request: headroom_pb2.WatchHeadroomRequest, wait_for_ready: bool
    ) -> AsyncIterator[headroom_pb2.WatchHeadroomResponse]:
        """Yield the report by which the router finds the engine. `catch_up` handles the others."""
        report = self._server.headroom.report(1)
        yield headroom_pb2.WatchHeadroomResponse(headroom=report)
        await asyncio.Event().wait()


def _model(name: str) -> Model:
    """Return a model without a tokenizer, since prompts come as tokens."""
    return Model(
        name=name,
        fingerprint=_MODEL,
        tokenizer=cast(Any, None),
        encoder=cast(Any, None),
        template=None,
        affixes=cast(Any, None),
        chat_prefix=(),
        vocab_size=1 << 31,
        bound=cast(Any, None),
        guard=None,
        description=inference_pb2.GetModelResponse(model=name),
    )
