"""One engine's part of an answer: the request for the engine, and the events that it sends.

The engine's circuit breaker learns of failures and of endings.
"""

import math

import grpc

from ullage.inference.v1 import inference_pb2
from ullage_common.process.tracing import Span
from ullage_common.wire.errors import ServiceError
from ullage_router import errors
from ullage_router.admission.prefill_window import Reservation
from ullage_router.call import Call, Event, timed_out
from ullage_router.engines.flow_control import Source

TOTAL_MARGIN_S = 0.5
"""Margin before the end of a request's whole time, in seconds. An answer that ends with TIMEOUT
within the margin has used up its time, since engines end it a little early. An earlier TIMEOUT
means that the engine stalled."""


def engine_request(call: Call, reservation: Reservation) -> inference_pb2.GenerateRequest:
    """Return the request for the engine, with token ids and the granted limits."""
    limit_s = reservation.credit.step_limit_s
    request = inference_pb2.GenerateRequest(
        request_id=call.record.request_id,
        model=call.request.model,
        token_ids=inference_pb2.TokenIds(ids=reservation.prompt.token_ids),
        session_id=call.tenant.scoped_session(call.request.session_id),
        cache_salt=call.tenant.cache_salt(call.request.cache_salt),
        priority=call.request.priority,
        step_limit_s=limit_s if math.isfinite(limit_s) else 0.0,
        embed=call.request.embed,
    )
    if request.embed:
        return request

    request.sampling.CopyFrom(call.request.sampling)
    request.stop.CopyFrom(call.request.stop)
    request.output.CopyFrom(call.request.output)
    request.samples.CopyFrom(call.request.samples)
    if call.request.HasField("grammar"):
        request.grammar.CopyFrom(call.request.grammar)

    request.stop.max_tokens = reservation.max_tokens
    request.stop.min_tokens = min(request.stop.min_tokens, reservation.max_tokens)
    request.output.echo = False  # the router has the prompt's text and echoes it itself
    request.output.delta_token_ids = True  # another engine needs the ids to go on
    reservation.prompt.tool_use.ask(request)
    if call.progress.has_begun:
        request.stop.max_tokens += call.progress.longest
        call.progress.write(request)
    return request


def complete_acceptance(
    from_engine: inference_pb2.Accepted, call: Call, reservation: Reservation
) -> inference_pb2.Accepted:
    """Add the router's decision to the engine's acceptance."""
    decision = call.decision
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
    accepted.trail.extend(decision.trail)
    if call.request.output.return_token_ids:
        accepted.prompt_token_ids.extend(prompt.token_ids)
    return accepted


class OnEngine:
    """The part of an answer that one engine generates; it has its first token."""

    def __init__(
        self,
        call: Call,
        reservation: Reservation,
        source: Source,
        accepted: inference_pb2.Accepted,
        first: Event,
        span: Span | None = None,
    ) -> None:
        self.accepted = accepted
        self.is_over = False
        self.has_stalled = False
        self._progress = call.progress
        self._deadline = call.deadline
        self._timeout_s = call.token_timeout_s
        output = call.request.output
        self._hides_ids = not (output.return_token_ids or output.delta_token_ids)
        self._reservation = reservation
        self._source = source
        self._first: Event | None = first
        self._is_closed = False
        self._span = span
        self._failure = ""

    async def read(self) -> Event:
        """Return the next event; the last is Finished.

        Raises:
            ServiceError: the engine failed.
        """
        try:
            event = self._first
            self._first = None
            if event is None:
                event = await self._source.read()
                if event is None:
                    raise errors.broken_stream("the engine ended it without a last word")
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
        """Note the end of the answer or of a sample.

        Raises:
            ServiceError: the engine cut the answer off.
        """
        if event.HasField("sample_finished"):
            check_ending(event.sample_finished)
            self._progress.on_sample_finished(event.sample_finished)
        else:
            check_ending(event.finished)
            self.is_over = True
            self._note_ending(event.finished)

    def _note_ending(self, finished: inference_pb2.Finished) -> None:
        """Report an answer's end to the breaker, unless only its whole time was over."""
        engine = self._reservation.engine
        credit = self._reservation.credit
        if finished.reason != inference_pb2.FINISH_REASON_TIMEOUT:
            engine.breaker.on_success(credit)
        elif self._deadline.remaining_s > TOTAL_MARGIN_S:
            self.has_stalled = True
            engine.on_failure(credit, errors.stalled(engine.id, self._timeout_s))

    def _after(self, error: ServiceError) -> Event:
        """Return the last event where only the time is over; otherwise raise the failure."""
        engine = self._reservation.engine
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if not engine.is_silent:
                event = timed_out(self.accepted, self._progress.num_tokens)
                self._take_ending(event)
                return event
            error = errors.cut_off(engine.id, engine.age_s, self._timeout_s)
        engine.on_failure(self._reservation.credit, error)
        raise error

    def close(self) -> None:
        """End the engine's work on the answer; harmless when it has ended."""
        if not self._is_closed:
            self._is_closed = True
            engine = self._reservation.engine
            engine.watchdog.forget(self._source)
            self._source.cancel()
            engine.release(self._reservation.credit)
            if self._span:
                self._span.end(error="" if self.is_over else self._failure or "CANCELLED")


async def expect(source: Source) -> Event:
    """Return the next event; raise ServiceError where the stream has ended."""
    event = await source.read()
    if event is None:
        raise errors.broken_stream("the engine ended it before its first token")
    return event


def check_ending(finished: inference_pb2.Finished | inference_pb2.SampleFinished) -> None:
    """Raise ServiceError where a draining engine cut off an answer that no client cancelled."""
    if finished.reason == inference_pb2.FINISH_REASON_CANCELLED:
        raise errors.cancelled_by_engine()
