"""A request's life in the router: validate, tokenise, admit, send, relay.

The first token decides: an engine that fails before it is replaced by another, unseen by the
client; one that fails after it ends the answer with an error, never silently. When the time limit
passes after the first token the answer ends there with the reason TIMEOUT.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial

import grpc

from ullage.inference.v1 import inference_pb2
from ullage_router import attempts, errors, validate
from ullage_router.admission import Admission, Grant, NotOnCanary, Wish
from ullage_router.answer import Answer, Call, Event, timed_out
from ullage_router.canary import Side
from ullage_router.cascade.runner import Cascade
from ullage_router.cascade.traits import estimated_tokens
from ullage_router.coalesce import Coalescer
from ullage_router.config import RouterConfig
from ullage_router.engine import Engine
from ullage_router.engines import Engines
from ullage_router.flow import Source, flow_of, of_whole, paced
from ullage_router.outcomes import Observation
from ullage_router.pick.tickets import TicketOffice
from ullage_router.placement import Placement
from ullage_router.prompts import Prompt, Prompts
from ullage_router.replace import Replacer
from ullage_router.rollout import Rollout
from ullage_router.serving import Serving
from ullage_router.stats import Record
from ullage_router.tokenize import Model
from ullage_router.tools.events import read_calls
from ullage_router.wake.wakes import Wakes
from ullage_router.wire import asked_tokens, engine_request, fill_accepted, make_wish, num_samples
from ullage_rpc.errors import ServiceError


class Generation:
    """An answer that has begun.

    accepted
        what was decided, complete
    events()
        Delta and, of several samples, SampleFinished any number of times, then Finished; or
        ServiceError
    """

    def __init__(
        self, grant: Grant, stream: Source, call: Call, first: Event, seen: Observation
    ) -> None:
        self.accepted = inference_pb2.Accepted()
        self._seen = seen
        self._grant = grant
        self._stream = stream
        self._call = call
        self._first = first
        self._is_closed = False

    def events(self) -> AsyncGenerator[Event, None]:
        """Raises ServiceError when the engine fails now that tokens were sent."""
        use, num_samples = self._grant.prompt.tool_use, max(1, self._call.request.samples.n)
        return read_calls(self._told(), use, num_samples) if use.new_reader else self._told()

    async def _told(self) -> AsyncGenerator[Event, None]:
        engine, credit = self._grant.engine, self._grant.credit
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
            engine.failed(credit, error)
            self._seen.failed(error)
            raise
        engine.breaker.succeeded(credit)
        self._seen.succeeded()

    def _count(self, event: Event) -> bool:
        """Whether it is the last one; raises ServiceError where the engine cut the answer off."""
        record = self._call.record
        match event.WhichOneof("event"):
            case "finished":
                attempts.check_ending(event.finished)
                record.output_tokens = event.finished.usage.completion_tokens
                return True
            case "sample_finished":
                attempts.check_ending(event.sample_finished)
            case _:
                record.output_tokens += event.delta.num_tokens
        return False

    def _prompt_text(self) -> str:
        request, prompt = self._call.request, self._grant.prompt
        return request.text or prompt.model.decode(prompt.token_ids)

    async def _next(self) -> Event | None:
        try:
            return await self._stream.read()
        except ServiceError as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        engine = self._grant.engine
        if engine.is_silent:
            raise errors.cut_off(engine.id, engine.age_s, self._call.timeout_s)
        return timed_out(self.accepted.prompt_tokens, self._call.record.output_tokens)

    def close(self) -> None:
        """Ends the engine's work on it; harmless when it has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.cancel()
            self._grant.engine.release(self._grant.credit)


class Pipeline:
    """Serves requests of either protocol.

    Args:
        config: limits and the model's name.
        engines: where the model and its tokenizer come from.
        admission: where a request may run.
        prompts: tokenises.
        wakes: holds requests whose pool sleeps.
        placement: says whether a request may be tried again.
        on_end: told every record once its request has its last word.
        rollout: on which side of it a request runs.
        cascade: other services that may answer instead.
        office: signs what is sent to engines, where they want that.

    coalescer, replacer: share and replace requests; each counts what it did.
    """

    def __init__(
        self,
        config: RouterConfig,
        engines: Engines,
        admission: Admission,
        prompts: Prompts,
        wakes: Wakes,
        placement: Placement,
        on_end: Callable[[Record], None],
        rollout: Rollout,
        cascade: Cascade | None = None,
        office: TicketOffice | None = None,
    ) -> None:
        self._config = config
        self._engines = engines
        self._admission = admission
        self._prompts = prompts
        self._wakes = wakes
        self._placement = placement
        self._on_end = on_end
        self._rollout = rollout
        self.coalescer = Coalescer(config.routing.coalesce)
        self.replacer = Replacer(config.routing.replace.enabled)
        self._cascade = cascade
        self._flow = flow_of(config.streaming)
        self._whole_flow = of_whole(self._flow)
        self._office = office
        self._inflight = 0
        self._is_draining = False

    @property
    def inflight(self) -> int:
        return self._inflight

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def drain(self) -> None:
        """Refuses new requests; those begun go on."""
        self._is_draining = True

    def model(self, name: str, side: Side = Side.STABLE) -> Model:
        """The served model, of a side of the rollout.

        Raises:
            ServiceError: it has another name, or no engine has described it yet.
        """
        self._check_name(name)
        model = self._engines.model_of(side)
        if model is None:
            raise errors.no_engine()
        return model

    def _check_name(self, name: str) -> None:
        if name not in ("", self._config.model):
            raise errors.unknown_model(name, self._config.model)

    def serve(self, call: Call) -> Serving:
        """An answer that has its first token; leaving the block ends it.

        Raises:
            ServiceError: the request is refused or failed before the first token.
        """
        call.record.tenant = call.visit.tenant
        self._inflight += 1
        return Serving(call, self._begin, self.replacer.hold(call), self._left)

    def _left(self, call: Call) -> None:
        self._inflight -= 1
        call.record.ended = time.monotonic()
        call.visit.end(call.record)
        # After the answer's last bytes, which leave at the end of this turn.
        asyncio.get_running_loop().call_soon(self._on_end, call.record)

    def refused(self, record: Record, error: ServiceError) -> None:
        """Counts a request that never became a Call."""
        record.status, record.error = errors.http_status(error), error.reason
        record.ended = time.monotonic()
        self._on_end(record)

    async def _begin(self, call: Call) -> Answer:
        if self._is_draining:
            raise errors.draining()
        try:
            async with asyncio.timeout(max(0.0, call.remaining_s)) as limit:
                with call.record.patience.under(limit):
                    return await self._first_answer(call)
        except TimeoutError as error:
            raise errors.deadline(call.timeout_s) from error

    async def _first_answer(self, call: Call) -> Answer:
        self._check_name(call.request.model)
        validate.check(call.request)
        call.visit.begin(call.request, self._config.model, call.record)
        if self._cascade:
            call.visit.charge(estimated_tokens(call.request), self._expected(call), call.record)
            return await self._cascade.begin(call, self._first_token)
        return await self._first_token(call)

    async def _first_token(self, call: Call) -> Answer:
        await self._wakes.introduced(call.record, call.request.ByteSize())
        side = self._rollout.side_of(call.request.session_id)
        model = self.model(call.request.model, side)
        call.record.model = self._config.model
        prompt = await self._prompt(model, call)

        async def wait() -> bool:
            facts = self._admission.facts(make_wish(call, prompt))
            return await self._wakes.awake(facts, model, call.record, prompt.memory_bytes)

        if self._wakes.asleep:
            await wait()
        call.visit.charge(len(prompt.token_ids), self._expected(call), call.record)
        generate = partial(self._generate, prompt=prompt, side=side)
        begin = partial(self.coalescer.begin, call, generate)
        return await self._wakes.served(begin, wait)

    async def _generate(self, call: Call, prompt: Prompt, side: Side) -> Generation:
        self._placement.budget.requested()
        call.record.degraded.extend(prompt.degraded)
        wish = make_wish(call, prompt, side, self._rollout.is_trial(side))
        if wish.is_trial:
            try:
                return await self._tried(wish, call)
            except NotOnCanary as left:
                generation = await self._placed(await self._on_stable(wish, call), call)
                left.served_elsewhere()
                return generation
        return await self._placed(wish, call)

    async def _tried(self, wish: Wish, call: Call) -> Generation:
        """On the canary, which has one try at once.

        Raises:
            NotOnCanary: the stable engines should have it.
        """
        outcomes = self._rollout.outcomes
        try:
            grant = await self._admission.admit(wish, call.record, {})
            return await self._send(call, grant)
        except NotOnCanary:
            outcomes.declined()
            raise
        except ServiceError as error:
            if call.remaining_s <= 0:
                raise
            call.record.step("engine", error.reason)
            raise NotOnCanary(partial(outcomes.contradicted, error)) from error

    async def _on_stable(self, wish: Wish, call: Call) -> Wish:
        """The same for the stable engines, with the tokens of their model."""
        model, prompt = self.model(call.request.model), wish.prompt
        if model.fingerprint != prompt.model.fingerprint:
            prompt = await self._prompt(model, call)
        call.record.degraded[:] = prompt.degraded
        call.record.step("stable", "CANARY")
        return replace(wish, prompt=prompt, side=Side.STABLE, is_trial=False)

    async def _placed(self, wish: Wish, call: Call) -> Generation:
        """On one engine after another, as long as another one may help."""
        refused: dict[str, int] = {}
        failures: list[ServiceError] = []
        while True:
            grant = await self._admission.admit(wish, call.record, refused)
            try:
                return await self._send(call, grant)
            except ServiceError as refusal:
                error = wish.prompt.tool_use.explain(refusal)
                if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    failures.append(error)
                if not self._may_retry(error, failures):
                    raise attempts.as_told(error, call.timeout_s, len(failures)) from refusal
                refused[grant.engine.address] = grant.engine.reports
                call.record.degraded[:] = wish.prompt.degraded
                call.record.step("engine", error.reason)

    def _expected(self, call: Call) -> int:
        """Tokens that all answers together are charged in advance."""
        limits = (asked_tokens(call.request), call.visit.rules.max_tokens)
        most = min(n for n in (*limits, self._config.limits.max_output_tokens) if n)
        return min(most, self._engines.expected_output) * num_samples(call.request.samples)

    async def _prompt(self, model: Model, call: Call) -> Prompt:
        errands = partial(call.visit.errand, self._expected(call))
        return await self._prompts.make(model, call.request, errands, call.path)

    def _may_retry(self, error: ServiceError, failures: list[ServiceError]) -> bool:
        """Whether another engine is asked; what an engine did wrong costs budget."""
        if error.code not in attempts.ANOTHER_ENGINE_MAY or attempts.is_enough(failures):
            return False
        return not errors.is_engine_fault(error) or self._placement.may_retry()

    def _proof(
        self, engine: Engine, request: inference_pb2.GenerateRequest
    ) -> tuple[tuple[str, str], ...]:
        """A ticket, where engines take nothing without one."""
        if self._office is None or not self._office.is_required:
            return ()
        return (self._office.proof(engine.id, request),)

    def _sent(self, call: Call, grant: Grant) -> Source:
        engine, request = grant.engine, engine_request(call, grant)
        flow = self._whole_flow
        if call.is_streamed:
            flow = paced(self._flow, call.visit.rules.tokens_per_second)
        metadata = (*call.metadata, *self._proof(engine, request))
        return engine.generate(request, max(0.001, call.remaining_s), metadata, flow)

    async def _send(self, call: Call, grant: Grant) -> Generation:
        """Sends the request and waits for its first token.

        Raises:
            ServiceError: the engine refused or failed.
        """
        engine = grant.engine
        try:
            stream = self._sent(call, grant)
        except BaseException:
            engine.release(grant.credit)
            raise
        seen = self._rollout.observe(engine.side, call.record)
        try:
            engine.waits.begin(stream)
            accepted = await _expect(stream)
            engine.accepted(grant.credit)
            first = await _expect(stream)
            if first.HasField("finished"):
                attempts.check_ending(first.finished)
        except BaseException as error:
            stream.cancel()
            if isinstance(error, ServiceError):
                engine.failed(grant.credit, error)
                seen.failed(error)
            elif call.remaining_s <= 0:
                seen.timed_out()
            engine.release(grant.credit)
            raise
        finally:
            engine.waits.end(stream)
        engine.began(grant.credit)
        seen.began()
        call.record.ttft_s = time.monotonic() - call.record.arrived
        call.record.degrade(accepted.accepted.degraded)
        generation = Generation(grant, stream, call, first, seen)
        fill_accepted(generation.accepted, accepted.accepted, call, grant)
        return generation


async def _expect(stream: Source) -> Event:
    event = await stream.read()
    if event is None:
        raise errors.broken_stream("the engine ended it before its first token")
    return event
