"""The end of the chain: a request on an engine, and on another one where the first fails it.

The first token decides: an engine that fails before it is replaced by another, unseen by the
client; one that fails after it ends the answer with an error, never silently. When no token
comes in time after the first, or the time of the whole is over, the answer ends there with the
reason TIMEOUT.
"""

from collections.abc import AsyncGenerator
from functools import partial

import grpc
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.config.engine import RequestLimits
from ullage_common.config.router import StreamingSection
from ullage_common.wire.errors import ServiceError
from ullage_router import errors
from ullage_router.admission.admission import Admission, Reservation
from ullage_router.admission.load_balancer import LoadBalancer
from ullage_router.call import Call, Event, ResponseStream, timed_out
from ullage_router.engines.flow_control import Source, flow_of, for_unary, rate_limited
from ullage_router.prompts.tool_use import read_calls
from ullage_router.rollout import Rollout, Send
from ullage_router.tickets.signing import TicketSigner

MAX_ENGINE_FAILURES = 3
# A request at which engines break may be the cause, and must not go on to break them all.
MAX_BREAKAGES = 2
BREAKAGES = frozenset({"WORKER_LOST", "REQUEST_FAILED"})
# Failures that another engine may not have; anything else is the request's own.
ANOTHER_ENGINE_MAY = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        *errors.OF_THE_ROUTER,
    }
)
# Failures that say nothing of the request: it may come back.
_NO_ENGINE = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, *errors.OF_THE_ROUTER}
)


class EngineStages:
    """Sends requests to engines.

    Args:
        streaming: how tokens flow.
        limits: how long an engine may send none.
        admission: where a request may run.
        balancer: whether a request may be tried again.
        signer: signs what is sent to engines, where they want that; None: they do not.
        rollout: counts what becomes of requests by side; None: there is never a canary.
    """

    def __init__(
        self,
        streaming: StreamingSection,
        limits: RequestLimits,
        admission: Admission,
        balancer: LoadBalancer,
        signer: TicketSigner | None,
        rollout: Rollout | None,
    ) -> None:
        self._admission = admission
        self._balancer = balancer
        self._signer = signer if signer and signer.is_required else None
        self._flow = flow_of(streaming, limits.request_timeout)
        self._unary_flow = for_unary(self._flow)
        self._send: Send = self._send_to_engine
        if rollout:
            self._send = partial(rollout.observe, send=self._send_to_engine)

    async def generate(self, call: Call) -> ResponseStream:
        """Tries one engine after another, as long as another one may help; the last handler of the
        chain.

        Raises:
            ServiceError: the request is not admitted, or its own failure, or the last engine's.
        """
        self._balancer.budget.on_request()
        failures: list[ServiceError] = []
        while True:
            reservation = await self._admission.admit(call)
            try:
                return await self._send(call, reservation)
            except ServiceError as refusal:
                error = reservation.prompt.tool_use.explain(refusal)
                if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    failures.append(error)
                if not self._may_retry(error, failures):
                    raise _final_error(error, call.token_timeout_s, len(failures)) from refusal
                engine = reservation.engine
                call.refused_by[engine.address] = engine.reports
                decision = call.decision.after("engine", error.reason)
                call.decision = replace(decision, degraded=call.prompt.degraded)

    async def attempt(self, call: Call) -> ResponseStream:
        """Returns the answer of the first engine that is chosen.

        Raises:
            ServiceError: the request is not admitted, or the engine's failure.
            NotOnCanary: the stable engines should have it.
        """
        return await self._send(call, await self._admission.admit(call))

    def _may_retry(self, error: ServiceError, failures: list[ServiceError]) -> bool:
        """Whether another engine is tried; a retry after an engine's fault costs budget."""
        breakages = sum(failure.reason in BREAKAGES for failure in failures)
        is_enough = len(failures) >= MAX_ENGINE_FAILURES or breakages >= MAX_BREAKAGES
        if error.code not in ANOTHER_ENGINE_MAY or is_enough:
            return False
        return not errors.is_engine_fault(error) or self._balancer.may_retry()

    async def _send_to_engine(self, call: Call, reservation: Reservation) -> ResponseStream:
        """Sends the request and waits for its first token.

        Raises:
            ServiceError: the engine refused or failed.
        """
        engine, source = reservation.engine, None
        try:
            source = self._open(call, reservation)
            engine.first_token_watchdog.watch(source)
            accepted = await _expect(source)
            engine.on_accepted(reservation.credit)
            first = await _expect(source)
            if first.HasField("finished"):
                _check_ending(first.finished)
        except BaseException as error:
            if source:
                source.cancel()
            if isinstance(error, ServiceError):
                engine.on_failure(reservation.credit, error)
            engine.release(reservation.credit)
            raise
        finally:
            if source:
                engine.first_token_watchdog.forget(source)
        engine.on_first_token(reservation.credit)
        if accepted.accepted.degraded:
            call.decision = call.decision.lowered(accepted.accepted.degraded)
        return Generation(call, reservation, source, accepted.accepted, first)

    def _open(self, call: Call, reservation: Reservation) -> Source:
        engine, request = reservation.engine, engine_request(call, reservation)
        flow = self._unary_flow
        if call.is_streamed:
            flow = rate_limited(self._flow, call.tenant.rules.tokens_per_second)
        metadata = call.metadata
        if self._signer:
            metadata = (*metadata, self._signer.sign_request(engine.id, request))
        return engine.generate(request, max(0.001, call.deadline.remaining_s), metadata, flow)


class Generation:
    """An engine's answer that has its first token."""

    def __init__(
        self,
        call: Call,
        reservation: Reservation,
        source: Source,
        accepted: inference_pb2.Accepted,
        first: Event,
    ) -> None:
        self.accepted = _complete(accepted, call, reservation)
        self.output_tokens = 0
        self._call = call
        self._reservation = reservation
        self._source = source
        self._first = first
        self._is_closed = False

    def events(self) -> AsyncGenerator[Event, None]:
        """Yields the events; raises ServiceError when the engine fails after tokens were sent."""
        tool_use, samples = self._reservation.prompt.tool_use, self._call.request.samples
        events = self._events()
        return read_calls(events, tool_use, max(1, samples.n)) if tool_use.new_reader else events

    async def _events(self) -> AsyncGenerator[Event, None]:
        engine, credit = self._reservation.engine, self._reservation.credit
        event: Event | None = self._first
        try:
            if self._call.request.output.echo:
                text = self._prompt_text()
                for sample in range(max(1, self._call.request.samples.n)):
                    yield Event(delta=inference_pb2.Delta(text=text, sample=sample))
            while event is not None:
                is_last = self._count(event)
                yield event
                if is_last:
                    break
                event = await self._next()
            else:
                raise errors.broken_stream("the engine ended it without a last word")
        except ServiceError as error:
            engine.on_failure(credit, error)
            raise
        engine.breaker.on_success(credit)

    def _count(self, event: Event) -> bool:
        """Counts an event and returns whether it is the last one; raises ServiceError where the
        engine cut the answer off."""
        match event.WhichOneof("event"):
            case "finished":
                _check_ending(event.finished)
                self.output_tokens = event.finished.usage.completion_tokens
                return True
            case "sample_finished":
                _check_ending(event.sample_finished)
            case _:
                self.output_tokens += event.delta.num_tokens
        return False

    def _prompt_text(self) -> str:
        prompt = self._reservation.prompt
        return self._call.request.text or prompt.model.decode(prompt.token_ids)

    async def _next(self) -> Event | None:
        try:
            return await self._source.read()
        except ServiceError as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        engine = self._reservation.engine
        if engine.is_silent:
            raise errors.cut_off(engine.id, engine.age_s, self._call.token_timeout_s)
        return timed_out(self.accepted.prompt_tokens, self.output_tokens)

    def close(self) -> None:
        """Ends the engine's work on the answer; harmless when it has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._source.cancel()
            self._reservation.engine.release(self._reservation.credit)


def engine_request(call: Call, reservation: Reservation) -> inference_pb2.GenerateRequest:
    """Returns the request as the engine gets it: token ids, and the limits that were granted."""
    request = inference_pb2.GenerateRequest(
        request_id=call.record.request_id,
        model=call.request.model,
        token_ids=inference_pb2.TokenIds(ids=reservation.prompt.token_ids),
        sampling=call.request.sampling,
        stop=call.request.stop,
        session_id=call.tenant.scoped_session(call.request.session_id),
        cache_salt=call.tenant.cache_salt(call.request.cache_salt),
        priority=call.request.priority,
        output=call.request.output,
        samples=call.request.samples,
        grammar=call.request.grammar if call.request.HasField("grammar") else None,
    )
    request.stop.max_tokens = reservation.max_tokens
    request.stop.min_tokens = min(request.stop.min_tokens, reservation.max_tokens)
    request.output.echo = False  # the router has the prompt's text and prepends it itself
    reservation.prompt.tool_use.ask(request)
    return request


def _complete(
    from_engine: inference_pb2.Accepted, call: Call, reservation: Reservation
) -> inference_pb2.Accepted:
    """Adds the router's decision to the engine's acceptance."""
    decision, prompt = call.decision, reservation.prompt
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
    accepted.model, accepted.revision = decision.model, decision.revision
    accepted.degraded.extend(decision.degraded)
    accepted.trail.extend(decision.trail)
    if call.request.output.return_token_ids:
        accepted.prompt_token_ids.extend(prompt.token_ids)
    return accepted


async def _expect(source: Source) -> Event:
    event = await source.read()
    if event is None:
        raise errors.broken_stream("the engine ended it before its first token")
    return event


def _check_ending(finished: inference_pb2.Finished | inference_pb2.SampleFinished) -> None:
    """Raises where a draining engine cut an answer off, which no client asked for."""
    if finished.reason == inference_pb2.FINISH_REASON_CANCELLED:
        raise errors.broken_stream("the engine cancelled it")


def _final_error(error: ServiceError, timeout_s: float, num_failures: int) -> ServiceError:
    """Returns the client's error when no engine could serve the request."""
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.deadline(timeout_s)
    if error.code in _NO_ENGINE:
        return ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            "NO_ENGINE",
            f"{num_failures} attempts failed, the last with: {error.message}; retry",
            retry_after_s=error.retry_after_s or 1,
        )
    return error
