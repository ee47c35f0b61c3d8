"""Try the steps of a cascade until one has an answer that may be sent.

The first tokens of a judged step are held back. The answer is discarded if they are too uncertain,
or if the step refuses, fails or uses up its share of the time. Then the next step is tried. The
last step is not judged: its answer is sent as it is, and its error is the client's.

A step may be another service's router (`peer.py`).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

import grpc
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import MAX_STEPS, CascadeSection
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.tls import Certificates
from ullage_router.call import Call, DecisionLog, Event, Handler, ResponseStream
from ullage_router.cascade.peer import PeerRouter
from ullage_router.errors import http_status
from ullage_router.policy.cascade import HELD_SHARE, Confidence, Plan, ServiceLoad, features, plan
from ullage_router.policy.decision import Attempt, Decision, Outcome

REFUSALS = frozenset({400, 401, 403, 404, 413, 429, 503})
"""HTTP statuses that count as a refusal of a step. All others count as a failure."""


class Cascade:
    """The steps, and the outcomes of requests at each step.

    Args:
        policy: The steps, and when a request goes on to the next.
        load: Returns the current load of this service's engines.
        on_attempt: Called with each attempt when it is over, or when its answer is released.
        grace_s: Seconds that answers of other services have to end when certificates change.
    """

    def __init__(
        self,
        policy: CascadeSection,
        load: Callable[[], ServiceLoad],
        on_attempt: Callable[[Attempt], None],
        grace_s: float,
    ) -> None:
        self.policy = policy
        self._load = load
        self._on_attempt = on_attempt
        self._counts: Counter[tuple[str, str]] = Counter()
        self._discarded: Counter[str] = Counter()
        self._peers = {
            i: PeerRouter(step, policy.name, grace_s)
            for i, step in enumerate(policy.steps)
            if step.target
        }

    async def read_secrets(self) -> None:
        """Read the certificates and the keys of other services.

        Raises:
            ConfigError: They cannot be used.
        """
        for peer in self._peers.values():
            await peer.start()

    @property
    def certificates(self) -> dict[str, Certificates]:
        """The certificates of steps that have any, by `cascade.` and the step's name."""
        steps = self.policy.steps
        named = {f"cascade.{steps[i].name}": peer.certificates for i, peer in self._peers.items()}
        return {name: certificates for name, certificates in named.items() if certificates}

    async def close(self) -> None:
        """Close the channels to other services."""
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    async def run(self, call: Call, proceed: Handler) -> ResponseStream:
        """Return an answer that has its first token and may be sent to the client.

        Args:
            call: The request.
            proceed: Begins an answer of this service's own engines.

        Raises:
            ServiceError: The last step refused or failed, or cascades form a loop.
        """
        _check_path(call.path, self.policy.name)

        # No other model can continue an answer, has this model's adapters or its embeddings.
        request = call.request
        if request.HasField("continuation") or call.adapter or request.embed:
            return await proceed(call)

        chosen = plan(features(call.request), self._load(), self.policy)
        run = _Run(self, call, proceed, chosen)
        answer: BufferedAnswer | None = None
        try:
            answer = await run.answer()
            await run.drop_rest()
        except BaseException:  # also when the client disconnects while the rest is dropped
            if answer:
                answer.close()
            await run.drop_rest()
            raise

        answer.describe(call.record.request_id, call.decisions.latest)
        return answer

    def handler_of(self, step: int, own: Handler) -> Handler:
        """Return the handler of a step: another service, or this service's engines (`own`)."""
        return self._peers[step].ask if step in self._peers else own

    def on_end(self, attempt: Attempt) -> None:
        """Count an attempt that is over."""
        self._counts[attempt.step, attempt.outcome] += 1
        self._discarded[attempt.step] += attempt.discarded_tokens
        self._on_attempt(attempt)

    def snapshot(self) -> list[dict[str, object]]:
        """Return the outcomes and the discarded tokens of each step, for /stats."""
        return [
            {
                "step": step.name,
                "target": step.target,
                "outcomes": {o: n for (name, o), n in self._counts.items() if name == step.name},
                "discarded_tokens": self._discarded[step.name],
            }
            for step in self.policy.steps
        ]


class BufferedAnswer:
    """A step's answer whose first tokens are held back until they are judged.

    Args:
        stream: The answer as the step began it.
        with_logprobs: Whether the client asked for log probabilities. Otherwise they serve the
            judgement only, and the client does not get them.
    """

    def __init__(self, stream: ResponseStream, with_logprobs: bool) -> None:
        self.accepted = inference_pb2.Accepted()
        self.accepted.CopyFrom(stream.accepted)
        self._stream = stream
        self._with_logprobs = with_logprobs
        self._coming = stream.events()
        self._buffered: list[Event] = []

    @property
    def output_tokens(self) -> int:
        """The output tokens that the step has generated so far."""
        return self._stream.output_tokens

    async def judge(self, confidence: Confidence) -> None:
        """Read and hold back the judged tokens, or the whole answer if that is shorter.

        Args:
            confidence: Counts the tokens and their log probabilities.

        Raises:
            ServiceError: The answer broke off.
        """
        async for event in self._coming:
            self._buffered.append(event)
            logprobs = (entry.logprob for entry in event.delta.logprobs)
            confidence.add(event.delta.num_tokens, logprobs)
            if confidence.is_complete or event.HasField("finished"):
                return

    def describe(self, request_id: str, decision: Decision) -> None:
        """Write the request's id, the model and the attempts into `accepted`."""
        self.accepted.request_id = request_id
        self.accepted.model = decision.model
        del self.accepted.attempts[:]
        self.accepted.attempts.extend(attempt.to_wire() for attempt in decision.attempts)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events that were held back, then the rest."""
        while self._buffered:
            yield self._visible(self._buffered.pop(0))
        async for event in self._coming:
            yield self._visible(event)

    def close(self) -> None:
        """Cancel the answer."""
        self._stream.close()

    async def discard(self) -> None:
        """End the answer unread, and wait until its generator has closed."""
        self._stream.close()
        aclose = getattr(self._coming, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(Exception):  # no client waits for this answer
                await aclose()

    def _visible(self, event: Event) -> Event:
        """Return the event as the client may see it."""
        if self._with_logprobs or not event.delta.logprobs:
            return event
        bare = Event()  # a copy, since other clients may share the event and want its logprobs
        bare.CopyFrom(event)
        bare.delta.ClearField("logprobs")
        return bare


class _Run:
    """One request's run through the steps of the cascade."""

    def __init__(self, cascade: Cascade, call: Call, own: Handler, chosen: Plan) -> None:
        self._cascade = cascade
        self._call = call
        self._own = own
        self._plan = chosen
        self._tasks: dict[int, asyncio.Task[BufferedAnswer]] = {}
        self._calls: dict[int, Call] = {}

    async def answer(self) -> BufferedAnswer:
        """Return the first answer that is good enough, or else the last step's.

        Raises:
            ServiceError: The last step refused or failed.
        """
        *earlier, last = self._plan.steps
        for step, following in zip(earlier, self._plan.steps[1:], strict=True):
            self._start(step)
            if self._plan.is_parallel:
                self._start(following)
            if (answer := await self._try(step)) is not None:
                return answer

        self._start(last)
        return await self._finally(last)

    async def drop_rest(self) -> None:
        """End every step that was started and is not the answer, even if the task is cancelled."""
        # First end all of them, without a pause in which a cancellation could leave one running.
        for task in self._tasks.values():
            _end(task)

        for step in list(self._tasks):
            self._on_end(step, "lost", await self._drop(step))

    def _start(self, step: int) -> None:
        if step not in self._tasks:
            call = self._calls[step] = self._call_of(step)
            self._tasks[step] = asyncio.create_task(self._begin(step, call))

    def _call_of(self, step: int) -> Call:
        """Return a copy of the call for a step, with decisions of its own."""
        request = self._call.request
        # A judged step needs log probabilities, even where the client did not ask for them.
        if self._is_judged(step) and not request.output.HasField("top_logprobs"):
            request = type(request)()
            request.CopyFrom(self._call.request)
            request.output.top_logprobs = 0

        hands_on = step != self._plan.steps[-1]
        return replace(self._call, request=request, decisions=DecisionLog(), hands_on=hands_on)

    def _is_judged(self, step: int) -> bool:
        return self._plan.is_judged and step != self._plan.steps[-1]

    async def _begin(self, step: int, call: Call) -> BufferedAnswer:
        stream = await self._cascade.handler_of(step, self._own)(call)
        with_logprobs = self._call.request.output.HasField("top_logprobs")
        return BufferedAnswer(stream, with_logprobs)

    async def _try(self, step: int) -> BufferedAnswer | None:
        """Return the step's answer if it is good enough, or record the attempt."""
        confidence = Confidence(self._cascade.policy.confidence.tokens)
        answer: BufferedAnswer | None = None
        outcome: Outcome = "escalated"
        reason = ""

        try:
            async with asyncio.timeout(HELD_SHARE * self._call.deadline.first_token_remaining_s):
                answer = await self._tasks[step]
                if not self._is_judged(step):
                    return self._release(step, answer)
                await answer.judge(confidence)
            if confidence.reaches(self._cascade.policy.confidence.threshold):
                return self._release(step, answer, confidence)
        except TimeoutError:
            outcome = "slow"
        except ServiceError as error:
            outcome = "failed" if answer else _outcome(error)
            reason = error.reason

        self._on_end(step, outcome, await self._drop(step), confidence, reason)
        return None

    async def _finally(self, step: int) -> BufferedAnswer:
        """Return the last step's answer.

        Raises:
            ServiceError: The last step refused or failed.
        """
        try:
            answer = await self._tasks[step]
        except ServiceError as error:
            self._adopt_decision(step)
            del self._tasks[step]
            self._on_end(step, _outcome(error), None, reason=error.reason)
            raise
        return self._release(step, answer)

    def _release(
        self, step: int, answer: BufferedAnswer, confidence: Confidence | None = None
    ) -> BufferedAnswer:
        """Record the step as the one that answers, and return its answer."""
        del self._tasks[step]
        self._adopt_decision(step)
        is_fallback = self._plan.reason == "PEAK" and step == self._plan.steps[0]
        self._on_end(step, "fallback" if is_fallback else "served", answer, confidence)
        return answer

    async def _drop(self, step: int) -> BufferedAnswer | None:
        """End a step, and return its answer if it had begun one."""
        task = self._tasks.pop(step)
        _end(task)
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(answer, BufferedAnswer):
            return None
        await answer.discard()
        return answer

    def _on_end(
        self,
        step: int,
        outcome: Outcome,
        answer: BufferedAnswer | None,
        confidence: Confidence | None = None,
        reason: str = "",
    ) -> None:
        attempt = Attempt(
            step=self._cascade.policy.steps[step].name,
            outcome=outcome,
            model=answer.accepted.model if answer else "",
            confidence=confidence.value if confidence else None,
            prompt_tokens=answer.accepted.prompt_tokens if answer else 0,
            completion_tokens=confidence.tokens if confidence else 0,
            reason=reason,
        )
        decisions = self._call.decisions
        decisions.change(attempts=(*decisions.latest.attempts, attempt))
        self._cascade.on_end(attempt)

    def _adopt_decision(self, step: int) -> None:
        """Make a step's decision the request's, and keep the attempts that were recorded."""
        decisions = self._call.decisions
        decisions.adopt(self._calls[step].decisions.latest, attempts=decisions.latest.attempts)


def _end(task: asyncio.Task[BufferedAnswer]) -> None:
    """Cancel a step, or close its answer if it has begun one in the meantime."""
    task.cancel()
    task.add_done_callback(_close)


def _close(task: asyncio.Task[BufferedAnswer]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _outcome(error: ServiceError) -> Outcome:
    return "refused" if http_status(error) in REFUSALS else "failed"


def _check_path(path: tuple[str, ...], name: str) -> None:
    if name not in path and len(path) < MAX_STEPS:
        return
    raise ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "CASCADE_LOOP",
        f"cascades hand the request on in a circle: {' -> '.join((*path, name))}; "
        "take one of these services out of the other's spec.cascade.steps",
    )
