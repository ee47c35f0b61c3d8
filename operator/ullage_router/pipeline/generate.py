"""The end of the chain: a request runs on an engine, and on another one where the first fails.

Where an engine fails before the first token, the request is tried on another engine while that may
help. Where an engine is lost later, the client sees a pause: another engine goes on with the tokens
received so far, or the stream waits for an engine for as long as it may be without a token. Each
engine holds credit for its part, while quota, limits and metrics count the request once.

An answer ends with the reason TIMEOUT when its next token does not come in time, or when the time
of the whole answer is over.
"""

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import nullcontext
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
    Losses,
    Progress,
    write_cached,
)
from ullage_common.wire.errors import ServiceError
from ullage_router import errors
from ullage_router.admission.admission import Admission
from ullage_router.admission.load_balancer import LoadBalancer
from ullage_router.admission.prefill_window import Reservation
from ullage_router.call import (
    Call,
    EngineStream,
    Event,
    PausableDeadline,
    ResponseStream,
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
from ullage_router.pipeline.on_engine import (
    OnEngine,
    check_ending,
    complete_acceptance,
    engine_request,
    expect,
)
from ullage_router.policy.facts import Side
from ullage_router.prompts.tools.answers import read_calls
from ullage_router.rollout.stages import Rollout, Send
from ullage_router.tickets.signing import TicketSigner

MAX_ENGINE_FAILURES = 3
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
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
"""Failures that another engine may not have. All other failures are caused by the request."""
_ANOTHER_MAY_GO_ON = ANOTHER_ENGINE_MAY | {grpc.StatusCode.UNIMPLEMENTED}
"""The same while an answer is resumed: an engine may not know continuations."""
_NO_ENGINE = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, *errors.OF_THE_ROUTER}
)
"""Failures that say nothing about the request, so that the client may send it again."""

log = logging.getLogger(__name__)

OnResumption = Callable[[str, str], None]
"""Called with the cause of an engine's loss after the first token, and the outcome for the answer:
`resumed` or `lost`."""


class EngineStages:
    """Sends requests to engines.

    Args:
        streaming: how tokens flow.
        limits: how long an engine may send no token.
        admission: reserves a place on an engine.
        balancer: holds the budget of retries.
        signer: signs requests for engines that require it; None where no engine does.
        rollout: counts outcomes by side; None where there is never a canary.
        on_resumption: called whenever an answer has lost its engine.
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
        self._on_resumption = on_resumption
        self._suspected: set[str] = set()
        """Keys of engines that run a suspect: a request that may break engines, until its next
        token. An engine has at most one suspect, so that no other suspect is blamed for it."""
        self._flow = flow_of(streaming, limits.request_timeout)
        self._unary_flow = for_unary(self._flow)
        self._send: Send = self._send_to_engine
        if rollout:
            self._send = partial(rollout.observe, send=self._send_to_engine)

    async def generate(self, call: Call) -> ResponseStream:
        """Try one engine after another while another one may help.

        This is the last handler of the chain.

        Raises:
            ServiceError: the request is not admitted, is at fault, or the last engine failed.
        """
        self._balancer.budget.on_request()
        call.progress = Progress(call.request)
        failures: list[ServiceError] = []
        while True:
            reservation = await self._admission.admit(call)
            try:
                return Generation(call, reservation, await self._send(call, reservation), self)
            except ServiceError as refusal:
                error = reservation.prompt.tool_use.explain(refusal)
                if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    failures.append(error)
                if not self._may_retry(error, failures):
                    raise _final_error(error, call.token_timeout_s, len(failures)) from refusal

                call.progress = Progress(call.request)
                engine = reservation.engine
                call.refused_by[engine.key] = engine.reports
                call.record.note("engine_failed", engine=engine.id, reason=error.reason)
                decision = call.decision.after("engine", error.reason)
                call.decision = replace(decision, degraded=call.prompt.degraded)

    async def attempt(self, call: Call) -> ResponseStream:
        """Return the answer of the first engine that is chosen.

        Raises:
            ServiceError: the request is not admitted, or the engine failed.
            NotOnCanary: the stable engines should serve the request.
        """
        call.progress = Progress(call.request)
        reservation = await self._admission.admit(call)
        return Generation(call, reservation, await self._send(call, reservation), self)

    async def resume(
        self, call: Call, lost: Reservation, losses: Losses, error: ServiceError
    ) -> tuple[Reservation, EngineStream]:
        """Go on with an answer on another engine, as soon as one can take it.

        Args:
            call: holds the answer's progress, and is changed.
            lost: the reservation on the lost engine; its credit was given back.
            losses: engines that the answer lost before.
            error: the error with which the answer broke off.

        Raises:
            ServiceError: the answer is given up; this is the last error of an engine.
        """
        if error.code not in _ANOTHER_MAY_GO_ON and error.reason != errors.ENGINE_SILENT:
            raise error  # the request is at fault

        cause = _cause_of(error)
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(max(0.0, call.deadline.remaining_s)),
                asyncio.timeout(max(0.0, call.deadline.first_token_remaining_s)) as timeout,
            ):
                with call.deadline.pauses(timeout):
                    taken = await self._take_over(call, lost, losses, error)
        except (ServiceError, TimeoutError) as failure:
            self._on_resumption(cause, "lost")
            _log_resumption(call, logging.WARNING, "answer lost", cause, lost.engine.id)
            if isinstance(failure, TimeoutError):
                raise errors.not_resumed(lost.engine.id, call.token_timeout_s, error) from error
            raise

        self._on_resumption(cause, "resumed")
        engines = f"{lost.engine.id} -> {taken[0].engine.id}"
        paused_s = time.monotonic() - began
        inexact = {"inexact": True} if call.progress.goes_on_inexactly else {}
        call.record.note("resumed", paused_s, engines=engines, reason=cause, **inexact)
        _log_resumption(call, logging.INFO, "answer resumed", cause, engines, paused_s)
        return taken

    async def _take_over(
        self, call: Call, lost: Reservation, losses: Losses, error: ServiceError
    ) -> tuple[Reservation, EngineStream]:
        """Try engines until one has taken over; raise ServiceError after too many losses."""
        while True:
            losses.add(error, call.progress)
            is_whole = call.progress.is_whole
            if losses.are_too_many or not is_whole or error.code not in _ANOTHER_MAY_GO_ON:
                raise error

            call.progress.on_loss()
            if self._admission.has_stable_engine(call):
                call.side = Side.STABLE  # a canary does not get an answer back that it has lost
            call.refused_by[lost.engine.key] = lost.engine.reports
            try:
                return await self._on_next_engine(call, losses.is_suspect)
            except _EngineLost as another:
                lost = another.reservation
                error = another.error

    async def _on_next_engine(
        self, call: Call, is_suspect: bool
    ) -> tuple[Reservation, EngineStream]:
        """Wait for an engine that takes the rest of an answer.

        Args:
            is_suspect: whether the request may break engines. A suspect goes only to an engine
                without another one; pauses for that do not count as time without a token.

        Raises:
            _EngineLost: an engine failed before it sent a token.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            is_occupied = False
            try:
                if taken := await self._try_once(call, is_suspect):
                    return taken
            except _SuspectThere:
                is_occupied = True

            with call.deadline.paused() if is_occupied else nullcontext():
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _try_once(
        self, call: Call, is_suspect: bool
    ) -> tuple[Reservation, EngineStream] | None:
        """Send the rest of an answer to one engine; return None where none takes it now.

        Raises:
            _SuspectThere: the engine has another suspect.
            _EngineLost: the engine failed before it sent a token.
        """
        if not self._admission.has_engine:
            return None
        try:
            reservation = await self._admission.admit(call)
        except ServiceError:
            # No refusal is final here: the request could be served before.
            return None

        engine = reservation.engine
        try:
            with self._alone(reservation) if is_suspect else nullcontext():
                return reservation, await self._send(call, reservation)
        except _SuspectThere:
            call.refused_by[engine.key] = engine.reports
            raise
        except ServiceError as error:
            if not _is_refusal(error):
                raise _EngineLost(reservation, error) from error
            call.refused_by[engine.key] = engine.reports
            return None

    @contextlib.contextmanager
    def _alone(self, reservation: Reservation) -> Iterator[None]:
        """Keep other suspects from the engine within the block.

        Raises:
            _SuspectThere: the engine has a suspect; the reservation was given back.
        """
        engine = reservation.engine
        if engine.key in self._suspected:
            engine.release(reservation.credit)
            raise _SuspectThere
        self._suspected.add(engine.key)
        try:
            yield
        finally:
            self._suspected.discard(engine.key)

    def _may_retry(self, error: ServiceError, failures: list[ServiceError]) -> bool:
        """Return whether to try another engine; a retry after an engine's fault costs budget."""
        breakages = sum(failure.reason in BREAKAGES for failure in failures)
        is_enough = len(failures) >= MAX_ENGINE_FAILURES or breakages >= MAX_BREAKAGES
        if error.code not in ANOTHER_ENGINE_MAY or is_enough:
            return False
        if not errors.is_engine_fault(error):
            return True
        is_paid = isinstance(error, ConnectionBroken) and not error.loss.is_first("retries")
        return is_paid or self._balancer.may_retry()

    async def _send_to_engine(self, call: Call, reservation: Reservation) -> EngineStream:
        """Send the request and wait for its first token.

        Raises:
            ServiceError: the engine refused or failed.
        """
        engine = reservation.engine
        source = None
        span = None
        request = engine_request(call, reservation)
        call.record.note("sent", engine=engine.id)
        if call.span and call.span.is_recording:
            attributes = {"ullage.engine": engine.id, "server.address": engine.address}
            span = call.span.child("engine", kind="client", attributes=attributes)

        try:
            source = self._open(call, reservation, request, span)
            engine.watchdog.watch(source)
            accepted = (await expect(source)).accepted
            engine.on_accepted(reservation.credit)
            call.record.note("admitted", engine=engine.id)
            call.progress.on_accepted(accepted, request.stop.max_tokens)
            first = await expect(source)
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
            call.decision = call.decision.lowered(accepted.degraded)
        return OnEngine(call, reservation, source, accepted, first, span)

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
        if not call.is_growing:
            flow = without_stalls(flow)

        metadata = span.metadata if span else call.metadata
        if self._signer:
            metadata = (*metadata, self._signer.sign_request(engine.id, request))
        return engine.generate(request, max(0.001, call.deadline.remaining_s), metadata, flow)


class _SuspectThere(Exception):
    """The engine has another request that may break engines."""


class _EngineLost(Exception):
    """An engine that was to go on with an answer failed before it sent a token."""

    def __init__(self, reservation: Reservation, error: ServiceError) -> None:
        super().__init__(error.message)
        self.reservation = reservation
        self.error = error


class Generation:
    """An answer that has its first token, on one engine after another."""

    def __init__(
        self, call: Call, reservation: Reservation, stream: EngineStream, stages: EngineStages
    ) -> None:
        self.accepted = complete_acceptance(stream.accepted, call, reservation)
        self._call = call
        self._reservation = reservation
        self._stream = stream
        self._stages = stages
        self._losses: Losses | None = None
        self._resumed_on: list[str] = []
        self._num_counted: int | None = None
        """Output tokens as the engine counted them; None before the end."""

    @property
    def output_tokens(self) -> int:
        return self._call.progress.num_tokens if self._num_counted is None else self._num_counted

    def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events.

        Raises:
            ServiceError: the answer is lost after tokens were sent.
        """
        tool_use = self._reservation.prompt.tool_use
        samples = self._call.request.samples
        events = self._events()
        return read_calls(events, tool_use, max(1, samples.n)) if tool_use.new_reader else events

    async def _events(self) -> AsyncGenerator[Event, None]:
        request = self._call.request
        if request.output.echo and not request.HasField("continuation"):
            text = self._prompt_text()
            for sample in range(max(1, request.samples.n)):
                yield Event(delta=inference_pb2.Delta(text=text, sample=sample))

        # An answer that is known only at its end starts again after a loss, so its events are held
        # until the end.
        held: list[Event] | None = None if self._call.is_growing else []
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
            if held is None:
                yield event
            else:
                held.append(event)

        for event in held or ():
            yield event

    def _is_out_of_time(self, failure: ServiceError) -> bool:
        """Return whether no engine went on in time and there are tokens, which are the answer."""
        has_tokens = self._call.progress.num_tokens > 0
        return has_tokens and failure.reason in (errors.ENGINE_LOST, errors.ENGINE_SILENT)

    def _cut_off(self, failure: ServiceError) -> Event:
        """Return the last event of an answer that no engine went on with."""
        event = timed_out(self.accepted, self._call.progress.num_tokens)
        event.finished.stop_string = failure.reason
        self._finish(event.finished)
        return event

    def _finish(self, finished: inference_pb2.Finished) -> None:
        self._num_counted = finished.usage.completion_tokens
        reason = inference_pb2.FinishReason.Name(finished.reason)
        self._call.record.finish = reason.removeprefix("FINISH_REASON_").lower()
        finished.resumes += len(self._resumed_on)
        finished.resumed_on.extend(self._resumed_on)
        finished.resumed_inexact |= self._call.progress.is_inexact
        if self._resumed_on:
            write_cached(finished.usage, self.accepted)

    def _prompt_text(self) -> str:
        prompt = self._reservation.prompt
        return self._call.request.text or prompt.model.decode(prompt.token_ids)

    async def _resume(self, error: ServiceError) -> None:
        self._stream.close()
        if self._losses is None:
            self._losses = Losses()
            self._call = copy.copy(self._call)  # the log shows the first engine's decision
            self._call.prompt = self._reservation.prompt  # which may have been shortened
            self._call.refused_by = {}
            self._call.is_trial = False
        next_token_at = time.monotonic() + self._call.stall_s
        self._call.deadline = PausableDeadline(self._call.deadline.at, next_token_at)
        self._reservation, self._stream = await self._stages.resume(
            self._call, self._reservation, self._losses, error
        )
        self._resumed_on.append(self._reservation.engine.id)

    def close(self) -> None:
        """End the engine's work on the answer; harmless when it has ended."""
        self._stream.close()


def _final_error(error: ServiceError, timeout_s: float, num_failures: int) -> ServiceError:
    """Return the error for the client when no engine could serve the request."""
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.deadline(timeout_s)
    if error.code in _NO_ENGINE:
        return ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            # Of these reasons people can only remedy this one.
            error.reason if error.reason == "MEMORY_SHORT" else "NO_ENGINE",
            f"{num_failures} attempts failed, the last with: {error.message}; retry",
            retry_after_s=error.retry_after_s or 1,
        )
    return error


def _is_refusal(error: ServiceError) -> bool:
    """Return whether the engine takes no request now, without a failure."""
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED or error.reason in errors.LEAVING


def _cause_of(error: ServiceError) -> str:
    """Return the cause of an engine's loss, as a label of metrics."""
    if error.reason in BREAKAGES:
        return "worker"
    if error.reason in errors.LEAVING:
        return "leaving"
    if error.reason == errors.ENGINE_SILENT:
        return "silent"
    return "connection" if error.code is grpc.StatusCode.UNAVAILABLE else "error"


def _log_resumption(
    call: Call, level: int, message: str, cause: str, engine: str, paused_s: float | None = None
) -> None:
    extra: dict[str, object] = {
        "request_id": call.record.request_id,
        "event": "resumed" if paused_s is not None else "lost",
        "reason": cause,
        "engine": engine,
        "output_tokens": call.progress.num_tokens,
    }
    if paused_s is not None:
        extra["seconds"] = round(paused_s, 3)
        extra["inexact"] = call.progress.goes_on_inexactly
    log.log(level, message, extra=extra)
