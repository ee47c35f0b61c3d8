"""The last pipeline stage, which runs a request on an engine and fails over to other engines.

If an engine fails before the first token, the request is retried on another engine as long as a
retry may help. If the engine is lost after that, another engine resumes the answer (`resume.py`).
Memory is reserved anew on each engine, but quota, limits and metrics count the request only once.

An answer ends with the reason TIMEOUT if its next token does not arrive in time, or if the time
limit for the whole answer has passed.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from functools import partial

import grpc
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.config.engine import RequestLimits
from ullage_common.config.router import StreamingSection
from ullage_common.process.tracing import Span
from ullage_common.wire.continuation import (
    BREAKAGES,
    MAX_BREAKAGES,
    Progress,
    check_ending,
    write_cached,
)
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import is_growing
from ullage_router import errors
from ullage_router.admission.admission import Admission, AdmissionRequest
from ullage_router.admission.load_balancer import LoadBalancer
from ullage_router.admission.prefill_window import Reservation
from ullage_router.call import (
    Call,
    EngineStream,
    Event,
    ResponseStream,
    asked_of_engine,
    timed_out,
)
from ullage_router.engines.flow_control import (
    Source,
    flow_of,
    for_unary,
    rate_limited,
    without_stalls,
)
from ullage_router.engines.multiplex import ConnectionBroken
from ullage_router.pipeline.resume import ANOTHER_ENGINE_MAY, OnResumption, Resumer, Takeover
from ullage_router.prompts.tools.answers import read_calls
from ullage_router.rollout.stages import Rollout, Send
from ullage_router.tickets.signing import TicketSigner

MAX_ENGINE_FAILURES = 3
INLINE_TOKENS = 1024
"""Maximum number of tokens that are converted to text on the event loop."""
TOTAL_MARGIN_S = 0.5
"""Margin before a request's time limit, in seconds.

Engines end answers slightly early. An answer that ends with TIMEOUT within this margin has
therefore used up its time, whereas an earlier TIMEOUT means that the engine stalled.
"""
_NO_ENGINE = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, *errors.OF_THE_ROUTER}
)
"""Statuses of failed attempts that are not the request's fault. The client may retry."""


class EngineSender:
    """Sends requests to engines.

    Args:
        streaming: the flow control settings for tokens.
        limits: the maximum time between two tokens of an answer.
        admission: reserves memory on an engine.
        balancer: provides the retry budget.
        signer: signs requests for engines that require tickets, or None if no engine does.
        rollout: counts outcomes by side, or None if canaries are not configured.
        on_resumption: called whenever an engine is lost while it generates an answer.
    """

    def __init__(
        self,
        streaming: StreamingSection,
        limits: RequestLimits,
        admission: Admission,
        balancer: LoadBalancer,
        signer: TicketSigner | None,
        rollout: Rollout | None,
        on_resumption: OnResumption,
    ) -> None:
        self._admission = admission
        self._balancer = balancer
        self._signer = signer if signer and signer.is_required else None
        self._flow = flow_of(streaming, limits.request_timeout)
        self._unary_flow = for_unary(self._flow)
        self._send: Send = self._send_to_engine
        if rollout:
            self._send = partial(rollout.observe, send=self._send_to_engine)
        self._resumer = Resumer(admission, self._send, on_resumption)

    async def generate(self, call: Call) -> ResponseStream:
        """Run the request, trying other engines as long as another attempt may help.

        Raises:
            ServiceError: the request is refused or invalid, or the last attempt failed.
        """
        self._balancer.budget.on_request()
        refused_by: dict[str, int] = {}
        failures: list[ServiceError] = []
        while True:
            progress = Progress(call.request)
            progress.has_left_worker = any(map(errors.is_left_worker, failures))
            request = AdmissionRequest(call, progress, refused_by)
            reservation = await self._admission.admit(request)
            try:
                return await self._begin(call, reservation, progress)
            except ServiceError as refusal:
                error = reservation.prompt.tool_use.explain(refusal)
                if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    failures.append(error)
                if not self._may_retry(error, failures):
                    timeout_s = call.deadline.token_timeout_s
                    raise _final_error(error, timeout_s, len(failures)) from refusal

                engine = reservation.engine
                refused_by[engine.key] = engine.reports
                call.record.note("engine_failed", engine=engine.id, reason=error.reason)
                call.decisions.add_step("engine", error.reason, degraded=call.prompt.degraded)

    async def try_once(self, call: Call) -> ResponseStream:
        """Run the request on a canary engine if one has free memory now. Failures are not retried.

        Raises:
            ServiceError: the request is refused, or the engine failed.
            NotOnCanary: a stable engine should serve the request.
        """
        progress = Progress(call.request)
        request = AdmissionRequest(call, progress, is_trial=True)
        reservation = await self._admission.admit(request)
        return await self._begin(call, reservation, progress)

    async def _begin(
        self, call: Call, reservation: Reservation, progress: Progress
    ) -> "Generation":
        stream = await self._send(call, reservation, progress)
        return Generation(call, reservation, progress, stream, self._resumer)

    def _may_retry(self, error: ServiceError, failures: list[ServiceError]) -> bool:
        """Return whether to retry a failed request on another engine.

        If the failure was the engine's fault, the retry is charged to the retry budget.
        """
        breakages = sum(failure.reason in BREAKAGES for failure in failures)
        is_enough = len(failures) >= MAX_ENGINE_FAILURES or breakages >= MAX_BREAKAGES
        if error.code not in ANOTHER_ENGINE_MAY or is_enough:
            return False
        if not errors.is_engine_fault(error):
            return True
        is_paid = isinstance(error, ConnectionBroken) and not error.loss.is_first("retries")
        return is_paid or self._balancer.may_retry()

    async def _send_to_engine(
        self, call: Call, reservation: Reservation, progress: Progress
    ) -> EngineStream:
        """Send the request to the engine on which memory is reserved, and wait for its first token.

        Raises:
            ServiceError: the engine refused or failed.
        """
        engine = reservation.engine
        source = None
        span = None
        request = _engine_request(call, reservation, progress)
        call.record.note("sent", engine=engine.id)
        if call.span and call.span.is_recording:
            attributes = {
                "ullage.pool": engine.pool,
                "ullage.engine": engine.id,
                "server.address": engine.address,
            }
            span = call.span.child("engine", kind="client", attributes=attributes)

        try:
            source = self._open(call, reservation, request, span)
            engine.watchdog.watch(source, _tokens_to_move(reservation, progress), call.adapter)
            accepted = (await _expect(source)).accepted
            engine.on_accepted(reservation.credit)
            call.record.note("admitted", engine=engine.id)
            progress.on_accepted(accepted, request.stop.max_tokens)
            first = await _expect(source)
            if first.HasField("finished"):
                check_ending(first.finished)
        except BaseException as error:
            if source:
                engine.watchdog.forget(source)
                source.cancel()
            if isinstance(error, ServiceError):
                engine.on_failure(reservation.credit, error)
            engine.release(reservation.credit)
            if span:
                span.end(error=error.reason if isinstance(error, ServiceError) else "CANCELLED")
            raise

        engine.on_first_token(reservation.credit)
        if accepted.degraded:
            decisions = call.decisions
            decisions.adopt(decisions.latest.lowered(accepted.degraded))
        return _OnEngine(call, reservation, progress, source, accepted, first, span)

    def _open(
        self,
        call: Call,
        reservation: Reservation,
        request: inference_pb2.GenerateRequest,
        span: Span | None,
    ) -> Source:
        engine = reservation.engine
        flow = self._unary_flow
        if call.is_streamed:
            flow = rate_limited(self._flow, call.tenant.rules.tokens_per_second)
        if not is_growing(call.request):
            flow = without_stalls(flow)

        metadata = span.metadata if span else call.metadata
        if self._signer:
            metadata = (*metadata, self._signer.sign_request(engine.id, request))
        return engine.generate(request, max(0.001, call.deadline.remaining_s), metadata, flow)


class Generation:
    """An answer that has started. If its engine is lost, other engines may continue it."""

    def __init__(
        self,
        call: Call,
        reservation: Reservation,
        progress: Progress,
        stream: EngineStream,
        resumer: Resumer,
    ) -> None:
        self.accepted = _complete_acceptance(stream.accepted, call, reservation)
        self._call = call
        self._reservation = reservation
        self._progress = progress
        self._stream = stream
        self._resumer = resumer
        self._takeover: Takeover | None = None
        self._resumed_on: list[str] = []
        self._num_counted: int | None = None
        """Number of output tokens reported by the engine, or None until the answer has ended."""

    @property
    def output_tokens(self) -> int:
        return self._progress.num_tokens if self._num_counted is None else self._num_counted

    def events(self) -> AsyncGenerator[Event, None]:
        """Yield the answer's events from all of the engines that contribute to it.

        Raises:
            ServiceError: the answer was lost after tokens were sent.
        """
        tool_use = self._reservation.prompt.tool_use
        samples = self._call.request.samples
        events = self._events()
        return read_calls(events, tool_use, max(1, samples.n)) if tool_use.new_reader else events

    async def _events(self) -> AsyncGenerator[Event, None]:
        request = self._call.request
        if request.output.echo and not request.HasField("continuation"):
            text = await self._prompt_text()
            for sample in range(max(1, request.samples.n)):
                yield Event(delta=inference_pb2.Delta(text=text, sample=sample))

        # An answer that does not arrive token by token starts over after a loss, so its events are
        # held until the end.
        held: list[Event] | None = None if is_growing(request) else []
        scores = request.output.HasField("prompt_logprobs")
        while not self._stream.is_over:
            try:
                event = await self._stream.read()
            except ServiceError as error:
                try:
                    await self._resume(error)
                except ServiceError as failure:
                    if held is not None or not self._is_out_of_time(failure):
                        raise
                    yield self._cut_off(failure)
                    return
                if held:
                    held.clear()
                continue

            if self._stream.is_over:
                self._finish(event.finished)
            if scores and event.HasField("delta") and not self._progress.is_new(event.delta):
                continue
            if held is None:
                yield event
            else:
                held.append(event)

        for event in held or ():
            yield event

    def _is_out_of_time(self, failure: ServiceError) -> bool:
        """Return whether an answer that could not be resumed in time should end with a timeout.

        If so, the client keeps the tokens that were generated. Otherwise, the client gets an error.
        """
        has_tokens = self._progress.num_tokens > 0
        return has_tokens and failure.reason in (errors.ENGINE_LOST, errors.ENGINE_SILENT)

    def _cut_off(self, failure: ServiceError) -> Event:
        """Return the final event for an answer that no engine resumed in time."""
        event = timed_out(self.accepted, self._progress.num_tokens)
        event.finished.stop_string = failure.reason
        self._finish(event.finished)
        return event

    def _finish(self, finished: inference_pb2.Finished) -> None:
        self._num_counted = finished.usage.completion_tokens
        reason = inference_pb2.FinishReason.Name(finished.reason)
        self._call.record.finish = reason.removeprefix("FINISH_REASON_").lower()
        finished.resumes += len(self._resumed_on)
        finished.resumed_on.extend(self._resumed_on)
        finished.resumed_inexact |= self._progress.is_inexact
        if self._resumed_on:
            write_cached(finished.usage, self.accepted)

    async def _prompt_text(self) -> str:
        request = self._call.request
        prompt = self._reservation.prompt
        if request.text and not request.truncate_prompt_tokens:
            return request.text
        if len(prompt.token_ids) <= INLINE_TOKENS:
            return prompt.model.decode(prompt.token_ids)
        return await asyncio.to_thread(prompt.model.decode, prompt.token_ids)

    async def _resume(self, error: ServiceError) -> None:
        self._stream.close()
        if self._takeover is None:
            # The prompt may have been shortened for the first engine.
            call = replace(self._call, prompt=self._reservation.prompt)
            self._takeover = Takeover(self._resumer, call, self._progress)
        self._reservation, self._stream = await self._takeover.resume(self._reservation, error)
        self._resumed_on.append(self._reservation.engine.id)

    def close(self) -> None:
        """Cancel the generation of the answer if it is still running."""
        self._stream.close()


class _OnEngine:
    """The part of an answer that one engine generates, starting with that engine's first token."""

    def __init__(
        self,
        call: Call,
        reservation: Reservation,
        progress: Progress,
        source: Source,
        accepted: inference_pb2.Accepted,
        first: Event,
        span: Span | None,
    ) -> None:
        self.accepted = accepted
        self.is_over = False
        self.has_stalled = False
        self._progress = progress
        self._deadline = call.deadline
        output = call.request.output
        self._hides_ids = not (output.return_token_ids or output.delta_token_ids)
        self._reservation = reservation
        self._source = source
        self._first: Event | None = first
        self._is_closed = False
        self._span = span
        self._failure = ""

    async def read(self) -> Event:
        """Return the engine's next event. The last event is Finished.

        Raises:
            ServiceError: the engine failed.
        """
        try:
            event = self._first
            self._first = None
            if event is None:
                event = await self._source.read()
                if event is None:
                    raise errors.broken_stream("the engine ended the stream without a final event")
            if event.HasField("delta"):
                delta = event.delta
                self._progress.on_delta(delta)
                if self._hides_ids:
                    delta.ClearField("token_ids")
            else:
                self._take_ending(event)
        except ServiceError as error:
            self._failure = error.reason
            event = self._after(error)
        return event

    def _take_ending(self, event: Event) -> None:
        """Record that the answer or one of its samples has ended.

        Raises:
            ServiceError: the engine cut the answer short.
        """
        if event.HasField("sample_finished"):
            check_ending(event.sample_finished)
            self._progress.on_sample_finished(event.sample_finished)
        else:
            check_ending(event.finished)
            self.is_over = True
            self._note_ending(event.finished)

    def _note_ending(self, finished: inference_pb2.Finished) -> None:
        """Count preemptions, and report whether the engine completed the answer or stalled.

        Nothing is reported to the circuit breaker if the answer reached its total time limit.
        """
        engine = self._reservation.engine
        credit = self._reservation.credit
        engine.preemptions += finished.preemptions
        if finished.reason != inference_pb2.FINISH_REASON_TIMEOUT:
            engine.breaker.on_success(credit)
        elif self._deadline.remaining_s > TOTAL_MARGIN_S:
            self.has_stalled = True
            engine.on_failure(credit, errors.stalled(engine.id, self._deadline.token_timeout_s))

    def _after(self, error: ServiceError) -> Event:
        """Return the event that ends the answer after a read error, or raise an error.

        If the answer ran out of time on an engine that still responds, it ends with a timeout
        event, so that the client keeps the tokens that were generated.

        Raises:
            ServiceError: the engine failed or is silent.
        """
        engine = self._reservation.engine
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if not engine.is_silent:
                event = timed_out(self.accepted, self._progress.num_tokens)
                self._take_ending(event)
                return event
            error = errors.cut_off(engine.id, engine.age_s, self._deadline.token_timeout_s)
        engine.on_failure(self._reservation.credit, error)
        raise error

    def close(self) -> None:
        """Cancel the generation on the engine if it is still running."""
        if not self._is_closed:
            self._is_closed = True
            engine = self._reservation.engine
            engine.watchdog.forget(self._source)
            self._source.cancel()
            engine.release(self._reservation.credit)
            if self._span:
                self._span.end(error="" if self.is_over else self._failure or "CANCELLED")


def _tokens_to_move(reservation: Reservation, progress: Progress) -> Callable[[], int] | None:
    """Return a function that returns how many tokens another engine would have to prefill.

    Return None for an answer that has left an engine before. It may be the reason why workers die,
    so it must not go round the engines.
    """
    if progress.has_left_worker:
        return None
    num_prompt = len(reservation.prompt.token_ids)
    return lambda: num_prompt + progress.longest


def _engine_request(
    call: Call, reservation: Reservation, progress: Progress
) -> inference_pb2.GenerateRequest:
    """Return the request to send to the engine, with token ids and the admitted output limit."""
    limit_s = reservation.credit.step_limit_s
    request = asked_of_engine(call.request, reservation.prompt)
    request.request_id = call.record.request_id
    request.model = call.request.model
    request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=reservation.prompt.token_ids))
    request.session_id = call.tenant.scoped_session(call.request.session_id)
    request.cache_salt = call.tenant.cache_salt(call.request.cache_salt)
    request.priority = call.request.priority
    request.step_limit_s = limit_s if math.isfinite(limit_s) else 0.0
    if request.embed:
        return request

    request.stop.max_tokens = reservation.max_tokens
    if progress.has_begun:
        request.stop.max_tokens += progress.longest
        progress.write(request)
    request.stop.min_tokens = min(request.stop.min_tokens, request.stop.max_tokens)
    return request


def _complete_acceptance(
    from_engine: inference_pb2.Accepted, call: Call, reservation: Reservation
) -> inference_pb2.Accepted:
    """Return the engine's Accepted message, with the router's decision filled in."""
    decision = call.decisions.latest
    prompt = reservation.prompt
    max_tokens = reservation.max_tokens
    accepted = inference_pb2.Accepted()
    accepted.CopyFrom(from_engine)

    accepted.request_id = call.record.request_id
    accepted.engine = decision.engine
    accepted.prompt_tokens = len(prompt.token_ids)
    accepted.predicted_bytes = decision.predicted_bytes or 0
    accepted.max_tokens = min(max_tokens, from_engine.max_tokens or max_tokens)
    accepted.action = decision.action
    accepted.route = decision.route

    del accepted.degraded[:], accepted.prompt_token_ids[:], accepted.trail[:]
    accepted.model = decision.model
    accepted.revision = decision.revision
    accepted.degraded.extend(decision.degraded)
    accepted.ignored.extend(prompt.ignored)
    accepted.trail.extend(decision.trail)
    if call.request.output.return_token_ids:
        accepted.prompt_token_ids.extend(prompt.token_ids)
    return accepted


async def _expect(source: Source) -> Event:
    """Return the next event of a stream, or raise ServiceError if the stream has ended."""
    event = await source.read()
    if event is None:
        raise errors.broken_stream("the engine ended the stream before the first token")
    return event


def _final_error(error: ServiceError, timeout_s: float, num_failures: int) -> ServiceError:
    """Return the error that the client gets once the router stops trying engines."""
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.deadline(timeout_s)
    if error.code in _NO_ENGINE:
        return ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            # This is the only reason that people can remedy.
            error.reason if error.reason == "MEMORY_SHORT" else "NO_ENGINE",
            f"{num_failures} attempts failed, the last with: {error.message}; retry",
            retry_after_s=error.retry_after_s or 1,
        )
    return error
