"""The stages of a request, from the first checks to the first token of its answer.

`RequestStages` calls the stages in order. The order matters for two reasons. A request is charged
only after the router has determined where it may run. It may share a generation only after its
quota and prompt have been checked. The stages of disabled features are skipped.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from msgspec.structs import replace

from ullage_common.config.router import RouterConfig
from ullage_common.process.tracing import Tracer
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import check_task, validate_request
from ullage_router import errors
from ullage_router.admission.scale_to_zero import ScaleToZero
from ullage_router.call import (
    Call,
    CountedPrompt,
    Handler,
    ResponseStream,
    asked_tokens,
    num_samples,
)
from ullage_router.cascade.cascade import Cascade
from ullage_router.engines.engines import Engines
from ullage_router.pipeline.coalesce import Coalescer
from ullage_router.pipeline.generate import EngineSender
from ullage_router.pipeline.idempotency import IdempotencyKeys
from ullage_router.pipeline.replace import Replacer
from ullage_router.policy.cascade import estimated_tokens
from ullage_router.policy.facts import Side
from ullage_router.prompts.prompts import Prompt, PromptBuilder
from ullage_router.rollout.stages import Rollout
from ullage_router.telemetry.record import RequestRecord, cached_tokens
from ullage_router.telemetry.spans import begin_span, end_span
from ullage_router.tenants.session import TenantSession

_CANCELLED = (asyncio.CancelledError, GeneratorExit)


class OptionalStages(msgspec.Struct, frozen=True):
    """The stages of optional features. A stage is None if its feature is disabled."""

    replacer: Replacer | None = None
    idempotency: IdempotencyKeys | None = None
    cascade: Cascade | None = None
    rollout: Rollout | None = None
    scale_to_zero: ScaleToZero | None = None
    coalescer: Coalescer | None = None


class RequestStages:
    """Runs the stages of every request up to the first token of its answer.

    Each stage method receives the call with the results of earlier stages, adds its own results,
    and passes the call on to the next method.

    Args:
        config: the configured model name and limits.
        engines: provides the models, and the engines' estimates of output tokens.
        prompts: renders prompts.
        sender: sends requests to engines.
        optional: the stages of optional features.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        prompts: PromptBuilder,
        sender: EngineSender,
        optional: OptionalStages,
    ) -> None:
        self._config = config
        self._engines = engines
        self._prompts = prompts
        self._optional = optional
        self._generate: Handler = sender.generate
        if rollout := optional.rollout:
            self._generate = partial(
                rollout.try_canary, proceed=sender.generate, once=sender.try_once
            )

    async def begin(self, call: Call) -> ResponseStream:
        """Start the request, and return its answer once the first token has arrived.

        Raises:
            ServiceError: the request is refused, or fails before its first token.
        """
        if replacer := self._optional.replacer:
            return await replacer.replace_earlier(call, self._in_time)
        return await self._in_time(call)

    async def _in_time(self, call: Call) -> ResponseStream:
        """Run the request, enforcing the time limit for its first token."""
        deadline = call.deadline
        try:
            async with asyncio.timeout(max(0.0, deadline.first_token_remaining_s)) as timeout:
                with deadline.pauses(timeout):
                    return await self._opened(replace(call, adapter=self._open(call)))
        except TimeoutError as error:
            raise errors.deadline(deadline.token_timeout_s) from error

    async def _opened(self, call: Call) -> ResponseStream:
        """Answer the request, or share the answer of an earlier one with the same idempotency key.

        The request goes to the cascade if one is configured, or else to this service's engines.
        """
        optional = self._optional
        if optional.rollout:
            optional.rollout.refuse_when_stopped()
        if call.counts_only:
            return await self._counted(call)
        run = self._in_cascade if optional.cascade else self._on_own_engines
        if optional.idempotency:
            return await optional.idempotency.repeat(call, run)
        return await run(call)

    async def _counted(self, call: Call) -> ResponseStream:
        """Count the tokens of the prompt for this service's own model. No tokens are charged."""
        if self._optional.scale_to_zero:
            await self._optional.scale_to_zero.wait_for_model(call)
        prompt = await self._render(call, Side.STABLE)
        return CountedPrompt(len(prompt.token_ids), prompt.ignored)

    async def _in_cascade(self, call: Call) -> ResponseStream:
        """Run the cascade, whose steps may include this service's own engines.

        The tenant is charged an estimate, because the request's tokens may be counted by another
        service.
        """
        assert self._optional.cascade
        call.tenant.charge(estimated_tokens(call.request), self._expected_output(call))
        return await self._optional.cascade.run(call, self._on_own_engines)

    async def _on_own_engines(self, call: Call) -> ResponseStream:
        """Answer the request on this service's own engines.

        This chooses a side of the rollout (stable or canary) and renders the prompt for its model.
        """
        scale_to_zero = self._optional.scale_to_zero
        rollout = self._optional.rollout
        if scale_to_zero:
            await scale_to_zero.wait_for_model(call)
        side = rollout.draw_side(call) if rollout else Side.STABLE
        prompt = await self._render(call, side)
        rendered = replace(call, side=side, prompt=prompt)
        if scale_to_zero:
            return await scale_to_zero.wait_for_pool(rendered, self._charged)
        return await self._charged(rendered)

    async def _charged(self, call: Call) -> ResponseStream:
        """Charge the tenant, then start a generation or join one for an identical request."""
        call.tenant.charge(len(call.prompt.token_ids), self._expected_output(call))
        coalescer = self._optional.coalescer
        if coalescer is not None:
            return await coalescer.share(call, self._generate)
        return await self._generate(call)

    def _open(self, call: Call) -> str:
        """Check the request and the tenant's permissions, and count the request against the quota.

        Returns:
            The adapter that the request names (empty for the base model).

        Raises:
            ServiceError: the request is invalid or over quota.
        """
        model = self._config.model
        request = call.request
        tenant = call.tenant
        # The check comes first, so that a tenant cannot probe for other models' names.
        tenant.check_model(request.model or model)
        adapter = self._engines.adapter_of(request.model, tenant.rules.models)
        validate_request(request)
        tenant.open_request(request, model, is_handed_on=bool(call.path))
        return adapter

    async def _render(self, call: Call, side: Side) -> Prompt:
        """Render the prompt for the model of one side of the rollout.

        Raises:
            ServiceError: no model is known, or the input is invalid.
        """
        request = call.request
        tenant = call.tenant
        model = self._engines.served_model(request.model, side, tenant.rules.models)
        # Errors from here on are logged with the model's name.
        name = call.adapter or self._config.model
        call.decisions.change(model=name)
        check_task(request, model.description.task, name)

        began = time.monotonic()
        prompt = await self._prompts.build(model, request, tenant.name)
        call.release_body()
        num_tokens = len(prompt.token_ids)
        call.record.note("tokenised", time.monotonic() - began, prompt_tokens=num_tokens)
        call.decisions.change(degraded=prompt.degraded)
        return prompt

    def _expected_output(self, call: Call) -> int:
        """Return the total number of output tokens to charge in advance for all answers."""
        if call.request.embed:
            return 0
        limits = (asked_tokens(call.request), call.tenant.rules.max_tokens)
        most = min(n for n in (*limits, self._config.limits.max_output_tokens) if n)
        return min(most, self._engines.expected_output) * num_samples(call.request.samples)


class RequestPipeline:
    """Serves requests from HTTP and gRPC, and records how each request ends.

    Args:
        handler: starts answers (`RequestStages.begin`).
        on_end: called with each request's record when the request has ended.
        tracer: creates the requests' trace spans, or None if tracing is off.

    inflight
        number of requests that are being served
    is_draining
        whether new requests are refused
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
        """Refuse new requests, but let running requests continue."""
        self.is_draining = True

    @asynccontextmanager
    async def serve(
        self, call: Call, cancelled_by: Callable[[], ServiceError | None] = lambda: None
    ) -> AsyncIterator[ResponseStream]:
        """Serve a call, and yield its answer to the `with` block once the first token has arrived.

        The answer is closed when the block exits.

        Args:
            cancelled_by: returns the error if another request caused the cancellation, or None if
                the client disconnected.

        Raises:
            ServiceError: the request is refused or failed before the first token.
        """
        record = call.record
        record.tenant = call.tenant.name
        if self._tracer:
            span = begin_span(self._tracer, record, call.metadata, call.request)
            call = replace(call, span=span, metadata=span.metadata)

        stream: ResponseStream | None = None
        self.inflight += 1
        try:
            if self.is_draining:
                raise errors.draining()
            stream = await self._handler(call)
            record.ttft_s = time.monotonic() - record.arrived
            record.note("first_token")
            record.cached = cached_tokens(stream.accepted)
            record.ignored = (*record.ignored, *stream.accepted.ignored)
            _copy_decision(call)
            yield stream
            record.status = 200
        except BaseException as error:
            _copy_decision(call)
            record.is_cancelled = isinstance(error, _CANCELLED)
            _copy_error(record, (record.is_cancelled and cancelled_by()) or error)
            raise
        finally:
            self._end(call, stream)

    def refuse(
        self,
        record: RequestRecord,
        error: ServiceError,
        tenant: TenantSession | None = None,
        trace: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Record a request that was refused before a Call was created for it.

        Args:
            tenant: the tenant's session, or None if the tenant is unknown.
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

    def _end(self, call: Call, stream: ResponseStream | None) -> None:
        """Close the answer, and pass the request's record to the observers."""
        record = call.record
        try:
            if stream:
                record.output_tokens = stream.output_tokens
                stream.close()
        finally:
            self.inflight -= 1
            record.ended = time.monotonic()
            call.tenant.close_request(record)
            # Observers run after the answer's last bytes, which are sent at the end of this turn.
            loop = asyncio.get_running_loop()
            loop.call_soon(self._on_end, record)
            if call.span:
                loop.call_soon(end_span, call.span, record, call.request)


def _copy_decision(call: Call) -> None:
    record = call.record
    record.decision = call.decisions.latest
    record.limits = call.tenant.limit_headers
    record.priority = call.request.priority
    record.held_s = call.deadline.held_s


def _copy_error(record: RequestRecord, error: BaseException) -> None:
    """Copy the error that the client gets to the request's record."""
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
