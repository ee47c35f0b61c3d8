"""Tries the steps of a cascade until one has an answer that may be sent.

The first tokens of a step that is judged are held back. Its answer is discarded when they are too
uncertain, when the step refuses, fails, or uses up its share of the time; then the next step is
tried. The last step is not judged: its answer is sent as it is, and its error is the client's.

A step may be another service's router, which is asked over gRPC as any client asks it: in plaintext
or over TLS, with the client's key or with one of this service.
"""

import asyncio
import contextlib
import copy
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.config.router import MAX_STEPS, CascadeSection, StepSection
from ullage_common.process.api_keys import HASH_PREFIX, read_entry
from ullage_common.process.config_file import ConfigError
from ullage_common.process.file_watch import fingerprint, follow
from ullage_common.wire.channels import open_channel
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_common.wire.tls import Certificates
from ullage_router import errors
from ullage_router.call import Call, Event, Handler, ResponseStream, timed_out
from ullage_router.errors import http_status
from ullage_router.policy.cascade import HELD_SHARE, Confidence, Plan, ServiceLoad, features, plan
from ullage_router.policy.decision import Attempt, Decision, Outcome

PATH_KEY = "x-ullage-cascade"
"""Metadata that names the cascades a request came through, joined by commas."""

log = logging.getLogger(__name__)

EventStream = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, Event]


class ServiceKey:
    """The API key that this service has with another one, from a mounted Secret, and followed.

    Args:
        folder: with the file `key`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def authorization(self) -> str:
        return f"Bearer {self._key}"

    async def start(self) -> None:
        """Raise ConfigError when there is no usable key."""
        seen = fingerprint([self._folder])
        self._read()
        self._task = asyncio.create_task(follow([self._folder], seen, self._reload))

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _read(self) -> None:
        path = self._folder / "key"
        try:
            key = path.read_text(encoding="ascii").strip()
            read_entry(key)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}; the Secret must have the entry key"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        if key.startswith(HASH_PREFIX):
            raise ConfigError(f"{path}: has the digest of a key; write the key itself")
        self._key = key

    async def _reload(self) -> None:
        try:
            self._read()
        except ConfigError as error:
            log.error("key not read; the one before stays", extra={"reason": str(error)})


class Peer:
    """The router of another service.

    Args:
        step: its address, and the folders of certificates and key.
        name: the name of the cascade that asks.
        grace_s: time that answers have to end when a new certificate replaces the one before.
    """

    def __init__(self, step: StepSection, name: str, grace_s: float) -> None:
        self._step = step
        self._name = name
        self._grace_s = grace_s
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._key = ServiceKey(Path(step.key_dir)) if step.key_dir else None
        self.certificates: Certificates | None = None
        if step.tls:
            folder = Path(step.tls.dir)
            self.certificates = Certificates(folder, folder, self._reconnect)

    async def start(self) -> None:
        """Read certificates and key; raises ConfigError when they cannot be used."""
        if self.certificates:
            await self.certificates.start()
        if self._key:
            await self._key.start()

    async def close(self) -> None:
        if self.certificates:
            await self.certificates.close()
        if self._key:
            await self._key.close()
        if self._channel:
            await self._channel.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _reconnect(self) -> None:
        """The next request opens a channel with the new certificate."""
        if self._channel:
            task = asyncio.create_task(self._channel.close(self._grace_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._channel = None

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            tls = self._step.tls
            target = self._step.target
            if tls and self.certificates:
                credentials = self.certificates.channel_credentials()
                self._channel = open_channel(target, credentials, tls.server_name)
            else:
                self._channel = open_channel(target)
        return self._channel

    async def ask(self, call: Call) -> ResponseStream:
        """Return the service's answer once it has a first token.

        Raises:
            ServiceError: it refused or failed.
        """
        call.end_turn()
        authorization = self._key.authorization if self._key else call.authorization
        credentials = [("authorization", authorization)] if authorization else []
        path = ",".join((*call.path, self._name))
        stub = inference_pb2_grpc.InferenceServiceStub(self._connected())
        stream = stub.Generate(
            _for_peer(call),
            timeout=max(0.001, call.deadline.remaining_s),
            metadata=(*call.metadata, *credentials, (PATH_KEY, path)),
        )
        try:
            first = await _read(stream)
            if first is None:
                raise errors.broken_stream("the service ended it before its first token")
        except BaseException:
            stream.cancel()
            raise
        call.decision = _adopted(call, first.accepted)
        return _PeerStream(stream, first.accepted)


class _PeerStream:
    """An answer that another router began."""

    def __init__(
        self,
        stream: EventStream,
        accepted: inference_pb2.Accepted,
    ) -> None:
        self.accepted = accepted
        self.output_tokens = 0
        self._stream = stream

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._next()) is not None:
            self.output_tokens += event.delta.num_tokens
            if event.HasField("finished"):
                self.output_tokens = event.finished.usage.completion_tokens
                yield event
                await self._end()
                return
            yield event
        raise errors.broken_stream("the service ended it without a last word")

    def close(self) -> None:
        self._stream.cancel()

    async def _end(self) -> None:
        """Wait until the service has counted the request, for which a cancelled one has failed."""
        with contextlib.suppress(ServiceError):
            await _read(self._stream)

    async def _next(self) -> Event | None:
        try:
            return await _read(self._stream)
        except ServiceError as error:
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        return timed_out(self.accepted, self.output_tokens)


def _for_peer(call: Call) -> inference_pb2.GenerateRequest:
    """Return the request without this service's own facts: the model's name, and the tenant's high
    priority here.

    A high priority would pass the other service's own clients, or be refused where its tenant may
    not ask for it. A low one stays low: such work gives way everywhere.
    """
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(call.request)
    request.model = ""
    request.request_id = call.record.request_id
    request.priority = min(0, call.request.priority)
    return request


def _adopted(call: Call, accepted: inference_pb2.Accepted) -> Decision:
    """Return the decision of the other router as this router's."""
    return replace(
        call.decision,
        prompt_tokens=accepted.prompt_tokens,
        predicted_bytes=accepted.predicted_bytes,
        action=accepted.action,
        route=accepted.route,
        reason="CASCADE",
        engine=accepted.engine,
        model=accepted.model,
        degraded=tuple(accepted.degraded),
    )


async def _read(stream: EventStream) -> Event | None:
    """The next message; None when there is no more.

    Raises:
        ServiceError: the call failed.
    """
    try:
        event = await stream.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return event if isinstance(event, Event) else None


REFUSALS = frozenset({400, 401, 403, 404, 413, 429, 503})


class BufferedAnswer:
    """A step's answer whose first tokens wait until they are judged.

    Args:
        stream: as the step began it.
        call: the step's own call.
        with_logprobs: the client asked for them; otherwise they are for the judgement only.
    """

    def __init__(self, stream: ResponseStream, call: Call, with_logprobs: bool) -> None:
        self.accepted = inference_pb2.Accepted()
        self.accepted.CopyFrom(stream.accepted)
        self.call = call
        self._stream = stream
        self._with_logprobs = with_logprobs
        self._coming = stream.events()
        self._buffered: list[Event] = []

    @property
    def output_tokens(self) -> int:
        return self._stream.output_tokens

    async def judge(self, confidence: Confidence) -> None:
        """Hold back as many tokens as are judged, or the whole answer if that is shorter.

        Raises:
            ServiceError: it broke off before.
        """
        async for event in self._coming:
            self._buffered.append(event)
            logprobs = (entry.logprob for entry in event.delta.logprobs)
            confidence.add(event.delta.num_tokens, logprobs)
            if confidence.is_complete or event.HasField("finished"):
                return

    def describe(self, request_id: str, decision: Decision) -> None:
        """Write into `accepted` what was tried."""
        self.accepted.request_id = request_id
        self.accepted.model = decision.model
        del self.accepted.attempts[:]
        self.accepted.attempts.extend(attempt.to_wire() for attempt in decision.attempts)

    async def events(self) -> AsyncIterator[Event]:
        while self._buffered:
            yield self._visible(self._buffered.pop(0))
        async for event in self._coming:
            yield self._visible(event)

    def close(self) -> None:
        self._stream.close()

    async def discard(self) -> None:
        """End it unread."""
        self._stream.close()
        aclose = getattr(self._coming, "aclose", None)
        if aclose is not None:
            with contextlib.suppress(Exception):  # no client waits for this answer any more
                await aclose()

    def _visible(self, event: Event) -> Event:
        """The event as the client may see it."""
        if self._with_logprobs or not event.delta.logprobs:
            return event
        bare = Event()  # others may share this one and have asked for it all
        bare.CopyFrom(event)
        bare.delta.ClearField("logprobs")
        return bare


class Cascade:
    """The steps and what became of requests at each.

    Args:
        policy: steps and when to hand over.
        load: how busy the own engines are at this moment.
        on_attempt: called with every attempt when it is over, and with an answer's when it is
            released.
        grace_s: time that answers of other services have to end when certificates change.
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
            i: Peer(step, policy.name, grace_s)
            for i, step in enumerate(policy.steps)
            if step.target
        }

    async def read_secrets(self) -> None:
        """Read certificates and keys; raises ConfigError when they cannot be used."""
        for peer in self._peers.values():
            await peer.start()

    @property
    def certificates(self) -> dict[str, Certificates]:
        """The certificates of each step that has some, by the step's name behind `cascade.`."""
        steps = self.policy.steps
        named = {f"cascade.{steps[i].name}": peer.certificates for i, peer in self._peers.items()}
        return {name: certificates for name, certificates in named.items() if certificates}

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    async def run(self, call: Call, proceed: Handler) -> ResponseStream:
        """An answer that has its first token and may be sent on.

        Args:
            proceed: begins an answer of this service's own engines.

        Raises:
            ServiceError: the last step refused or failed, or the request came round in a circle.
        """
        _check_path(call.path, self.policy.name)
        # No other model goes on with an answer, has this one's adapters or makes its embeddings.
        request = call.request
        if request.HasField("continuation") or call.adapter or request.embed:
            return await proceed(call)
        chosen = plan(features(call.request), self._load(), self.policy)
        run = _Run(self, call, proceed, chosen)
        answer: BufferedAnswer | None = None
        try:
            answer = await run.answer()
            await run.drop_rest()
        except BaseException:  # also of a client that goes while the rest is dropped
            if answer:
                answer.close()
            await run.drop_rest()
            raise
        answer.describe(call.record.request_id, call.decision)
        return answer

    def handler_of(self, step: int, own: Handler) -> Handler:
        """The other service of a step, or this one's engines."""
        return self._peers[step].ask if step in self._peers else own

    def on_end(self, attempt: Attempt) -> None:
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
    """One request's run through the steps of the cascade."""

    def __init__(self, cascade: Cascade, call: Call, own: Handler, chosen: Plan) -> None:
        self._cascade = cascade
        self._call = call
        self._own = own
        self._plan = chosen
        self._tasks: dict[int, asyncio.Task[BufferedAnswer]] = {}
        self._calls: dict[int, Call] = {}

    async def answer(self) -> BufferedAnswer:
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
        """End what was begun and is not the answer; all of it, even when cancelled meanwhile."""
        for task in self._tasks.values():
            _end(task)
        for step in list(self._tasks):
            self._on_end(step, "lost", await self._drop(step))

    def _start(self, step: int) -> None:
        if step not in self._tasks:
            call = self._calls[step] = self._call_of(step)
            self._tasks[step] = asyncio.create_task(self._begin(step, call))

    def _call_of(self, step: int) -> Call:
        """Return the call as a step gets it, with decisions of its own."""
        call = copy.copy(self._call)
        call.decision = Decision()
        call.refused_by = {}
        call.hands_on = step != self._plan.steps[-1]
        if self._is_judged(step) and not call.request.output.HasField("top_logprobs"):
            call.request = type(call.request)()
            call.request.CopyFrom(self._call.request)
            call.request.output.top_logprobs = 0
        return call

    def _is_judged(self, step: int) -> bool:
        return self._plan.is_judged and step != self._plan.steps[-1]

    async def _begin(self, step: int, call: Call) -> BufferedAnswer:
        stream = await self._cascade.handler_of(step, self._own)(call)
        with_logprobs = self._call.request.output.HasField("top_logprobs")
        return BufferedAnswer(stream, call, with_logprobs)

    async def _try(self, step: int) -> BufferedAnswer | None:
        """The step's answer if it is good enough; what it did otherwise is noted."""
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
        """The last step's answer, or its error."""
        try:
            answer = await self._tasks[step]
        except ServiceError as error:
            self._adopt(self._calls[step].decision)
            del self._tasks[step]
            self._on_end(step, _outcome(error), None, reason=error.reason)
            raise
        return self._release(step, answer)

    def _release(
        self, step: int, answer: BufferedAnswer, confidence: Confidence | None = None
    ) -> BufferedAnswer:
        del self._tasks[step]
        self._adopt(answer.call.decision)
        is_fallback = self._plan.reason == "PEAK" and step == self._plan.steps[0]
        self._on_end(step, "fallback" if is_fallback else "served", answer, confidence)
        return answer

    async def _drop(self, step: int) -> BufferedAnswer | None:
        """End a step's work and return its answer if it had begun one."""
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
        decision = self._call.decision
        self._call.decision = replace(decision, attempts=(*decision.attempts, attempt))
        self._cascade.on_end(attempt)

    def _adopt(self, decision: Decision) -> None:
        """Take over a step's decision for the request; what was tried before stays with it."""
        self._call.decision = replace(decision, attempts=self._call.decision.attempts)


def _end(task: asyncio.Task[BufferedAnswer]) -> None:
    """Cancel it, or close the answer that it has begun in the meantime."""
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
