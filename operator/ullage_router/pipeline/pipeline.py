"""A request's way through the router: a chain of stages, built once of the features that are on.

    replace_earlier   a later request with the same x-ullage-replace ends it     routing.replace
    open              checked against bounds, deadline and quota
    refuse_when_stopped   a stopped service refuses all requests                 rollout_file
    repeat            the same Idempotency-Key gets the same answer              routing.idempotency
    charge_estimate   an estimate of its tokens is charged                       cascade
    run               the steps of the cascade; own engines are the chain below  cascade
    wait_for_model    held until an engine has described its model               pools that sleep
    draw_side         the stable engines or a canary                             rollout_file
    render            its prompt becomes token ids, a long conversation is summarised
    wait_for_pool     held until its pool has an engine                          pools that sleep
    charge            its tokens are charged
    share             identical deterministic requests share one generation      routing.coalesce
    try_canary        a canary has one try at once                               rollout_file
    generate          admission and an engine's first token; another engine where one fails

The right column names the features that switch a stage on. Each stage is called with the request
and the handler of the rest of the chain. The order matters: a request is charged once the router
knows where it may run, and may share a generation only after its own quota and prompt are checked.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType

from msgspec.structs import replace

from ullage_common.config.router import RouterConfig
from ullage_common.process.tracing import Tracer
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import check_task, validate_request
from ullage_router import errors
from ullage_router.call import Call, Handler, ResponseStream, Stage, asked_tokens, num_samples
from ullage_router.engines.engines import Engines
from ullage_router.policy.cascade import estimated_tokens
from ullage_router.prompts.prompts import PromptBuilder
from ullage_router.telemetry.record import RequestRecord, cached_tokens
from ullage_router.telemetry.spans import begin_span, end_span
from ullage_router.tenants.session import TenantSession

_CANCELLED = (asyncio.CancelledError, GeneratorExit)


def chain(stages: Sequence[Stage], last: Handler) -> Handler:
    """Return one handler that goes through the stages in their order."""
    handler = last
    for stage in reversed(stages):
        handler = partial(stage, proceed=handler)
    return handler


class RequestPipeline:
    """Serves requests of either protocol.

    Args:
        handler: the chain.
        on_end: called with every record once its request is over.
        tracer: makes the spans of requests; None where tracing is off.

    inflight
        requests that are being served
    is_draining
        new requests are refused
    """

    def __init__(
        self,
        handler: Handler,
        on_end: Callable[[RequestRecord], None],
        tracer: Tracer | None = None,
    ) -> None:
        self._handler = handler
        self._on_end = on_end
        self._tracer = tracer
        self.inflight = 0
        self.is_draining = False

    def drain(self) -> None:
        """Refuse new requests; those that have begun go on."""
        self.is_draining = True

    def serve(self, call: Call) -> AbstractAsyncContextManager[ResponseStream]:
        """Open an answer that has its first token; leaving the block ends it.

        Raises:
            ServiceError: the request is refused or failed before the first token.
        """
        if self._tracer:
            call.span = begin_span(self._tracer, call.record, call.metadata, call.request)
            call.metadata = call.span.metadata
        return _Serving(self, self._handler, self._on_end, call)

    def refuse(
        self,
        record: RequestRecord,
        error: ServiceError,
        tenant: TenantSession | None = None,
        trace: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Count a request that was refused before it became a Call.

        Args:
            tenant: the tenant's session; None where the tenant is not known.
            trace: the client's trace context (`trace_context`).
        """
        _copy_error(record, error)
        if tenant:
            record.tenant = tenant.name
            record.limits = tenant.limit_headers
            tenant.count_refusals(record.status, 1)
        record.ended = time.monotonic()
        if self._tracer:
            end_span(begin_span(self._tracer, record, trace), record)
        self._on_end(record)


class _Serving:
    """One request while it is served, from its beginning to the end of its answer."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        handler: Handler,
        on_end: Callable[[RequestRecord], None],
        call: Call,
    ) -> None:
        self._pipeline = pipeline
        self._handler = handler
        self._on_end = on_end
        self._call = call
        self._stream: ResponseStream | None = None

    async def __aenter__(self) -> ResponseStream:
        call = self._call
        pipeline = self._pipeline
        record = call.record
        record.tenant = call.tenant.name
        pipeline.inflight += 1
        try:
            if pipeline.is_draining:
                raise errors.draining()
            stream = self._stream = await self._handler(call)
            record.ttft_s = time.monotonic() - record.arrived
            record.note("first_token")
            record.cached = cached_tokens(stream.accepted)
            _copy_decision(call)
        except BaseException as error:
            self._end(error)
            raise
        return stream

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        call = self._call
        stream = self._stream
        record = call.record
        if error is None:
            record.status = 200
        else:
            _copy_decision(call)
            record.is_cancelled = isinstance(error, _CANCELLED)
            _copy_error(record, (record.is_cancelled and call.ended_by) or error)

        try:
            if stream:
                record.output_tokens = stream.output_tokens
                stream.close()
        finally:
            self._pipeline.inflight -= 1
            record.ended = time.monotonic()
            call.tenant.close_request(record)
            # Observers run after the answer's last bytes, which leave at the end of this turn.
            loop = asyncio.get_running_loop()
            loop.call_soon(self._on_end, record)
            if call.span:
                loop.call_soon(end_span, call.span, record, call.request)


def _copy_decision(call: Call) -> None:
    record = call.record
    record.decision = call.decision
    record.limits = call.tenant.limit_headers
    record.priority = call.request.priority
    record.held_s = call.deadline.held_s


def _copy_error(record: RequestRecord, error: BaseException) -> None:
    """Copy the client's error into the record."""
    if isinstance(error, ServiceError):
        record.status = errors.http_status(error)
        record.error = error.reason
        record.retry_after_s = errors.retry_after_s(error)
    elif isinstance(error, _CANCELLED):
        record.status = errors.CLIENT_CLOSED
        record.error = "CANCELLED"
    else:
        record.status = 500
        record.error = "INTERNAL"


class CommonStages:
    """The stages of every request before an engine is chosen.

    Args:
        config: the model's name, and limits.
        engines: know the models and their expected output.
        prompts: renders prompts.
    """

    def __init__(self, config: RouterConfig, engines: Engines, prompts: PromptBuilder) -> None:
        self._config = config
        self._engines = engines
        self._prompts = prompts

    async def open(self, call: Call, proceed: Handler) -> ResponseStream:
        """Check the request, count it in its tenant's quota, and bound the time to its first token.

        Raises:
            ServiceError: the request is wrong, over quota, or out of time.
        """
        try:
            async with asyncio.timeout(max(0.0, call.deadline.first_token_remaining_s)) as timeout:
                with call.deadline.pauses(timeout):
                    # The check comes first, so that a tenant cannot find out other models' names.
                    call.tenant.check_model(call.request.model or self._config.model)
                    call.adapter = self._engines.adapter_of(
                        call.request.model, call.tenant.rules.models
                    )
                    validate_request(call.request)
                    call.tenant.open_request(
                        call.request, self._config.model, is_handed_on=bool(call.path)
                    )
                    return await proceed(call)
        except TimeoutError as error:
            raise errors.deadline(call.token_timeout_s) from error

    async def charge_estimate(self, call: Call, proceed: Handler) -> ResponseStream:
        """Charge the tenant an estimate, since another service may count the request's tokens."""
        call.tenant.charge(estimated_tokens(call.request), self._expected_output(call))
        return await proceed(call)

    async def render(self, call: Call, proceed: Handler) -> ResponseStream:
        """Render the prompt.

        Raises:
            ServiceError: no model is known, or the input is wrong.
        """
        model = self._engines.served_model(call.request.model, call.side, call.tenant.rules.models)
        # Records of errors from here on have the model's name.
        name = call.adapter or self._config.model
        call.decision = replace(call.decision, model=name)
        check_task(call.request, model.description.task, name)
        began = time.monotonic()
        call.prompt = await self._prompts.build(model, call.request, call.tenant.name, call.path)
        call.release_body()
        num_tokens = len(call.prompt.token_ids)
        call.record.note("tokenised", time.monotonic() - began, prompt_tokens=num_tokens)
        call.decision = replace(call.decision, degraded=call.prompt.degraded)
        return await proceed(call)

    async def charge(self, call: Call, proceed: Handler) -> ResponseStream:
        """Charge the tenant for the prompt and the expected output.

        Raises:
            ServiceError: the tenant's tokens do not suffice.
        """
        call.tenant.charge(len(call.prompt.token_ids), self._expected_output(call))
        return await proceed(call)

    def _expected_output(self, call: Call) -> int:
        """Return the output tokens that are charged in advance for all answers together."""
        if call.request.embed:
            return 0
        limits = (asked_tokens(call.request), call.tenant.rules.max_tokens)
        most = min(n for n in (*limits, self._config.limits.max_output_tokens) if n)
        return min(most, self._engines.expected_output) * num_samples(call.request.samples)
