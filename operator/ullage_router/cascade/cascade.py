"""Tries the steps of a cascade in order until one of them produces an acceptable answer.

The first tokens of a step's answer are buffered and judged. The answer is discarded if the model
was too uncertain about these tokens, or if the step refuses, fails or exceeds its fraction of the
time limit. The next step is then tried. The last step is not judged: the client gets its answer or
error unchanged.

A step may be run by the router of another service (`peer.py`).
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
"""HTTP statuses that count as a refusal by a cascade step. All other errors count as failures."""


class Cascade:
    """Runs requests through the configured steps, and counts the outcomes of each step.

    Args:
        policy: The steps, and when to move on to the next step.
        load: Returns the current load of this service's engines.
        on_attempt: Called with each attempt once it has ended or its answer has been released to
            the client.
        grace_s: Seconds that running answers from other services have to finish when certificates
            change.
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
        """Read the certificates and the API keys for other services.

        Raises:
            ConfigError: A certificate or a key cannot be used.
        """
        for peer in self._peers.values():
            await peer.start()

    @property
    def certificates(self) -> dict[str, Certificates]:
        """The certificates of all steps that use TLS, keyed by `cascade.` plus the step's name."""
        steps = self.policy.steps
        named = {f"cascade.{steps[i].name}": peer.certificates for i, peer in self._peers.items()}
        return {name: certificates for name, certificates in named.items() if certificates}

    async def close(self) -> None:
        """Close the channels to other services."""
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    async def run(self, call: Call, proceed: Handler) -> ResponseStream:
        """Run the steps in order, and return the first acceptable answer.

        Args:
            call: The request.
            proceed: Starts an answer on this service's own engines.

        Raises:
            ServiceError: The last step refused or failed, or the cascades of several services form
                a loop.
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
        """Return the handler that runs a step.

        This is `own` if the step runs on this service's engines. Otherwise, the handler sends the
        request to another service's router.
        """
        return self._peers[step].ask if step in self._peers else own

    def on_end(self, attempt: Attempt) -> None:
        """Record the outcome of an attempt once it ends or its answer is released to the client."""
        self._counts[attempt.step, attempt.outcome] += 1
        self._discarded[attempt.step] += attempt.discarded_tokens
        self._on_attempt(attempt)

    def snapshot(self) -> list[dict[str, object]]:
        """Return the outcome counts and discarded tokens of each step, for /stats."""
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
        stream: The answer's stream, as the step returned it.
        with_logprobs: Whether the client requested log probabilities. If not, they are used only to
            judge the answer, and are removed before events reach the client.
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
        """Number of output tokens that the step has generated so far."""
        return self._stream.output_tokens

    async def judge(self, confidence: Confidence) -> None:
        """Read and buffer the tokens to be judged, or the whole answer if it is shorter.

        Args:
            confidence: Accumulates the tokens' log probabilities.

        Raises:
            ServiceError: The answer was interrupted.
        """
        async for event in self._coming:
            self._buffered.append(event)
            logprobs = (entry.logprob for entry in event.delta.logprobs)
            confidence.add(event.delta.num_tokens, logprobs)
            if confidence.is_complete or event.HasField("finished"):
                return

    def describe(self, request_id: str, decision: Decision) -> None:
        """Write the request id, the model and the cascade's attempts into the Accepted message."""
        self.accepted.request_id = request_id
        self.accepted.model = decision.model
        del self.accepted.attempts[:]
        self.accepted.attempts.extend(attempt.to_wire() for attempt in decision.attempts)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events that were held back, then the rest of the answer."""
        while self._buffered:
            yield self._visible(self._buffered.pop(0))
        async for event in self._coming:
            yield self._visible(event)

    def close(self) -> None:
        """Cancel the generation of the answer."""
        self._stream.close()

    async def discard(self) -> None:
        """Close the answer without reading the rest, and wait until its generator has finished."""
        self._stream.close()
        aclose = getattr(self._coming, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(Exception):  # no client waits for this answer
                await aclose()

    def _visible(self, event: Event) -> Event:
        """Return the event, stripped of log probabilities unless the client requested them."""
        if self._with_logprobs or not event.delta.logprobs:
            return event
        bare = Event()  # a copy, since other clients may share the event and want its logprobs
        bare.CopyFrom(event)
        bare.delta.ClearField("logprobs")
        return bare


class _Run:
    """Runs one request through the steps of the cascade."""

    def __init__(self, cascade: Cascade, call: Call, own: Handler, chosen: Plan) -> None:
        self._cascade = cascade
        self._call = call
        self._own = own
        self._plan = chosen
        self._tasks: dict[int, asyncio.Task[BufferedAnswer]] = {}
        self._calls: dict[int, Call] = {}

    async def answer(self) -> BufferedAnswer:
        """Return the first answer that is good enough, or else the last step's answer.

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
        """Cancel all other started steps, even if this task is itself cancelled in the meantime."""
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
        """Return a copy of the call for one step, with its own decision log."""
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
        """Return the step's answer if it is good enough.

        Otherwise, record the failed attempt and return None.
        """
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
        """Return the last step's answer without judging it.

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
        """Record that the client gets this step's answer, and return that answer."""
        del self._tasks[step]
        self._adopt_decision(step)
        is_fallback = self._plan.reason == "PEAK" and step == self._plan.steps[0]
        self._on_end(step, "fallback" if is_fallback else "served", answer, confidence)
        return answer

    async def _drop(self, step: int) -> BufferedAnswer | None:
        """Cancel a step and discard its answer, which is returned if it had begun (else None)."""
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
        """Adopt a step's decision as the request's own, keeping the attempts recorded so far."""
        decisions = self._call.decisions
        decisions.adopt(self._calls[step].decisions.latest, attempts=decisions.latest.attempts)


def _end(task: asyncio.Task[BufferedAnswer]) -> None:
    """Cancel a step's task, and close its answer if the task has already returned one."""
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
