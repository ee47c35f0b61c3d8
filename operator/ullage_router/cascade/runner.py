"""Tries the steps of a cascade until one has an answer to let go.

A step that is judged holds its first tokens back. It is thrown away when they are too unsure, when
it refuses, fails, or uses up its share of the time; then the next one has its turn. The last step
is not judged: what it says is the answer, and its error is the client's.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import grpc

from ullage_router.answer import Answer, Begin, Call
from ullage_router.cascade.config import MAX_STEPS, CascadeSection
from ullage_router.cascade.held import Held, adopt
from ullage_router.cascade.peer import Peer
from ullage_router.cascade.plan import HELD_SHARE, Confidence, Load, Plan, plan
from ullage_router.cascade.trail import Attempt, Outcome
from ullage_router.cascade.traits import traits
from ullage_router.errors import http_status
from ullage_rpc.errors import ServiceError

REFUSALS = frozenset({400, 401, 403, 404, 413, 429, 503})


class Cascade:
    """The steps and what became of requests at each.

    Args:
        policy: steps and when to hand over.
        load: how busy the own engines are at this moment.
        on_attempt: told every attempt when it is over, an answer's when it is let go.
    """

    def __init__(
        self,
        policy: CascadeSection,
        load: Callable[[], Load],
        on_attempt: Callable[[Attempt], None],
    ) -> None:
        self.policy = policy
        self._load = load
        self._on_attempt = on_attempt
        self._counts: Counter[tuple[str, str]] = Counter()
        self._discarded: Counter[str] = Counter()
        self._peers = {
            i: Peer(step.target, policy.name) for i, step in enumerate(policy.steps) if step.target
        }

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    async def begin(self, call: Call, own: Begin) -> Answer:
        """An answer that has its first token and may be sent on.

        Args:
            own: begins an answer of this service's own engines.

        Raises:
            ServiceError: the last step refused or failed, or the request came round in a circle.
        """
        _check_path(call.path, self.policy.name)
        chosen = plan(traits(call.request), self._load(), self.policy)
        run = _Run(self, call, own, chosen)
        held: Held | None = None
        try:
            held = await run.answer()
            await run.drop_rest()
        except BaseException:  # also of a client that goes while the rest is dropped
            if held:
                held.close()
            await run.drop_rest()
            raise
        held.tell(call.record)
        return held

    async def begin_step(self, step: int, call: Call, own: Begin) -> Answer:
        return await (self._peers[step].begin if step in self._peers else own)(call)

    def ended(self, attempt: Attempt) -> None:
        self._counts[attempt.step, attempt.outcome] += 1
        self._discarded[attempt.step] += attempt.discarded_tokens
        self._on_attempt(attempt)

    def snapshot(self) -> list[dict[str, object]]:
        """Every step with what became of its attempts."""
        return [
            {
                "step": step.name,
                "target": step.target,
                "outcomes": {o: n for (name, o), n in self._counts.items() if name == step.name},
                "discarded_tokens": self._discarded[step.name],
            }
            for step in self.policy.steps
        ]


class _Run:
    """One request on its way through the steps."""

    def __init__(self, cascade: Cascade, call: Call, own: Begin, chosen: Plan) -> None:
        self._cascade = cascade
        self._call = call
        self._own = own
        self._plan = chosen
        self._tasks: dict[int, asyncio.Task[Held]] = {}
        self._scratches: dict[int, Call] = {}

    async def answer(self) -> Held:
        *earlier, last = self._plan.steps
        for step, following in zip(earlier, self._plan.steps[1:], strict=True):
            self._start(step)
            if self._plan.is_parallel:
                self._start(following)
            if (held := await self._try(step)) is not None:
                return held
        self._start(last)
        return await self._finally(last)

    async def drop_rest(self) -> None:
        """Ends what was begun and is not the answer; all of it, even when cancelled meanwhile."""
        for task in self._tasks.values():
            _end(task)
        for step in list(self._tasks):
            self._ended(step, "lost", await self._drop(step))

    def _start(self, step: int) -> None:
        if step not in self._tasks:
            call = self._scratches[step] = self._scratch(step)
            self._tasks[step] = asyncio.create_task(self._begin(step, call))

    def _scratch(self, step: int) -> Call:
        """The request as a step gets it, with a record of its own."""
        record = replace(self._call.record, degraded=[], trail=[], attempts=[])
        if not self._is_judged(step) or self._call.request.output.HasField("top_logprobs"):
            return replace(self._call, record=record)
        request = type(self._call.request)()
        request.CopyFrom(self._call.request)
        request.output.top_logprobs = 0
        return replace(self._call, record=record, request=request)

    def _is_judged(self, step: int) -> bool:
        return self._plan.is_judged and step != self._plan.steps[-1]

    async def _begin(self, step: int, call: Call) -> Held:
        answer = await self._cascade.begin_step(step, call, self._own)
        return Held(answer, call.record, self._call.request.output.HasField("top_logprobs"))

    async def _try(self, step: int) -> Held | None:
        """The step's answer if it is good enough; what it did otherwise is noted."""
        confidence = Confidence(self._cascade.policy.confidence.tokens)
        held: Held | None = None
        outcome: Outcome = "escalated"
        reason = ""
        try:
            async with asyncio.timeout(HELD_SHARE * self._call.remaining_s):
                held = await self._tasks[step]
                if not self._is_judged(step):
                    return self._let_go(step, held)
                await held.judge(confidence)
            if confidence.reaches(self._cascade.policy.confidence.threshold):
                return self._let_go(step, held, confidence)
        except TimeoutError:
            outcome = "slow"
        except ServiceError as error:
            outcome, reason = "failed" if held else _outcome(error), error.reason
        self._ended(step, outcome, await self._drop(step), confidence, reason)
        return None

    async def _finally(self, step: int) -> Held:
        """The last step's answer, or its error."""
        try:
            held = await self._tasks[step]
        except ServiceError as error:
            adopt(self._call.record, self._scratches[step].record)
            del self._tasks[step]
            self._ended(step, _outcome(error), None, reason=error.reason)
            raise
        return self._let_go(step, held)

    def _let_go(self, step: int, held: Held, confidence: Confidence | None = None) -> Held:
        del self._tasks[step]
        held.release(self._call.record)
        is_fallback = self._plan.reason == "PEAK" and step == self._plan.steps[0]
        self._ended(step, "fallback" if is_fallback else "served", held, confidence)
        return held

    async def _drop(self, step: int) -> Held | None:
        """Ends a step's work and returns its answer if it had begun one."""
        task = self._tasks.pop(step)
        _end(task)
        (held,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(held, Held):
            return None
        await held.discard()
        return held

    def _ended(
        self,
        step: int,
        outcome: Outcome,
        held: Held | None,
        confidence: Confidence | None = None,
        reason: str = "",
    ) -> None:
        attempt = Attempt(
            step=self._cascade.policy.steps[step].name,
            outcome=outcome,
            model=held.accepted.model if held else "",
            confidence=confidence.value if confidence else None,
            prompt_tokens=held.accepted.prompt_tokens if held else 0,
            completion_tokens=confidence.tokens if confidence else 0,
            reason=reason,
        )
        self._call.record.attempts.append(attempt)
        self._cascade.ended(attempt)


def _end(task: asyncio.Task[Held]) -> None:
    """Cancels it, or closes the answer that it has begun in the meantime."""
    task.cancel()
    task.add_done_callback(_close)


def _close(task: asyncio.Task[Held]) -> None:
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
