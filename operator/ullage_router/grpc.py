"""The router's gRPC service, which uses the same request pipeline as HTTP."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any

import grpc

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.config.engine import RequestLimits
from ullage_common.tickets.tickets import TICKET_KEY
from ullage_common.wire.errors import SLOW_CLIENT_GRACE_S, ServiceError, abort, slow_client
from ullage_common.wire.limits import MAX_REQUEST_ID_BYTES
from ullage_common.wire.request_guard import text_metadata
from ullage_router.call import Call, PausableDeadline, deadline_of
from ullage_router.cascade.peer import PATH_KEY
from ullage_router.engines.engines import Engines
from ullage_router.errors import draining, retry_after_s
from ullage_router.pipeline import idempotency
from ullage_router.pipeline.pipeline import RequestPipeline
from ullage_router.pipeline.replace import HEADER
from ullage_router.telemetry.record import RESUMED_INEXACT, RequestRecord
from ullage_router.telemetry.spans import trace_context
from ullage_router.tenants.registry import Tenants
from ullage_router.tenants.session import TenantSession
from ullage_router.tickets.issuer import TicketIssuer

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Response = inference_pb2.GenerateResponse


class CallGate:
    """Authenticates each RPC before any of its messages are received.

    Args:
        tenants: Looks up tenants by API key.
        pipeline: Counts requests that are refused.
    """

    def __init__(self, tenants: Tenants, pipeline: RequestPipeline) -> None:
        self._tenants = tenants
        self._pipeline = pipeline

    def admit(self, method: str, metadata: Mapping[str, str]) -> str | None:
        """Return an RPC's tenant, or None for health and reflection, which need no key.

        Args:
            method: The full name of the method, such as `/ullage.inference.v1.Service/Method`.
            metadata: The RPC's metadata.

        Raises:
            ServiceError: The key is missing or invalid.
        """
        service, _, name = method.removeprefix("/").partition("/")
        if service != SERVICE:
            return None

        try:
            return self._tenants.open_session(metadata.get("authorization")).name
        except ServiceError as error:
            if name == "Generate":
                record = RequestRecord(uuid.uuid4().hex)
                self._pipeline.refuse(record, error, trace=trace_context(metadata))
            raise


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Implements the RPCs Generate, Pick and GetModel.

    Args:
        pipeline: Serves requests.
        engines: Describes the served model.
        tenants: Looks up tenants by API key.
        issuer: Issues tickets with which clients send requests directly to engines.
        limits: Time limits for requests. A client may set an earlier deadline.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        engines: Engines,
        tenants: Tenants,
        issuer: TicketIssuer,
        limits: RequestLimits,
    ) -> None:
        self._engines = engines
        self._pipeline = pipeline
        self._issuer = issuer
        self._tenants = tenants
        self._limits = limits

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Stream the answer to a request."""
        record = RequestRecord(_record_id(request.request_id))
        metadata = _text(context)
        tenant = await self._open_session(context, record, metadata)
        paid_by = self._issuer.prepay(request, metadata.get(TICKET_KEY), tenant)
        call = Call(
            request,
            record,
            tenant,
            deadline_of(request, record, self._limit_s(context), self._limits.request_timeout),
            trace_context(metadata),
            replace_key=metadata.get(HEADER, ""),
            idempotency_key=metadata.get(idempotency.HEADER, ""),
            authorization=metadata.get("authorization"),
            path=_path(metadata),
        )

        try:
            async with self._pipeline.serve(call) as stream:
                self._issuer.on_resumed(paid_by)
                if limits := tuple(record.limits.items()):
                    await _in_time(context.send_initial_metadata(limits), call.deadline)
                accepted = Response(accepted=stream.accepted)
                await _in_time(context.write(accepted), call.deadline)
                async for event in stream.events():
                    if event.finished.resumed_inexact:
                        context.set_trailing_metadata(((RESUMED_INEXACT, "true"),))
                    await _in_time(context.write(event), call.deadline)
        except ServiceError as error:  # last, since abort waits for a client that does not read
            error.retry_after_s = retry_after_s(error)
            error.metadata |= record.decision.explanation
            await abort(context, error)

    async def Pick(
        self, request: inference_pb2.PickRequest, context: Context
    ) -> inference_pb2.PickResponse:
        """Choose engines for requests that the client will send directly, and return tickets."""
        authorization = _text(context).get("authorization")
        try:
            if self._pipeline.is_draining:
                raise draining()
            tenant = self._tenants.open_session(authorization)
            return self._issuer.pick(request, tenant if tenant.name else None, context.peer())
        except ServiceError as error:
            error.retry_after_s = retry_after_s(error)
            await abort(context, error)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        """Describe the served model or one of its adapters."""
        try:
            tenant = self._tenants.open_session(_text(context).get("authorization"))
            return self._engines.describe(request.model, tenant.rules.models)
        except ServiceError as error:
            await abort(context, error)

    async def _open_session(
        self, context: Context, record: RequestRecord, metadata: Mapping[str, str]
    ) -> TenantSession:
        """Open the tenant's session, or abort the RPC.

        `CallGate` checked the key before the message arrived, but the key may have been removed
        since then.
        """
        try:
            return self._tenants.open_session(metadata.get("authorization"))
        except ServiceError as error:
            self._pipeline.refuse(record, error, trace=trace_context(metadata))
            await abort(context, error)

    def _limit_s(self, context: Context) -> float:
        limit_s = self._limits.total_timeout
        remaining_s = context.time_remaining()
        return limit_s if remaining_s is None else min(limit_s, remaining_s)


async def _in_time(sending: Awaitable[None], deadline: PausableDeadline) -> None:
    """Send a part of an answer, which the client may read until shortly after the time limit.

    Raises:
        ServiceError: the client did not read in time.
        asyncio.CancelledError: the client has disconnected.
    """
    try:
        async with asyncio.timeout(max(0.0, deadline.remaining_s) + SLOW_CLIENT_GRACE_S):
            await sending
    except TimeoutError as error:
        raise slow_client() from error
    except grpc.aio.InternalError as error:  # gRPC may say this before it cancels the task
        raise asyncio.CancelledError from error


def _record_id(request_id: str) -> str:
    """Return the client's request id, or a new id if it is empty or too long."""
    is_usable = 0 < len(request_id.encode()) <= MAX_REQUEST_ID_BYTES
    return request_id if is_usable else uuid.uuid4().hex


def _path(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the cascades that have forwarded the request so far, from its metadata.

    They are used to detect cascades that form a loop.
    """
    value = metadata.get(PATH_KEY)
    return tuple(value.split(",")) if value else ()


def _text(context: Context) -> dict[str, str]:
    """Return the RPC's metadata as text, without entries that have binary values."""
    return text_metadata(context.invocation_metadata())
