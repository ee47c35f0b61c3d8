"""Serves a completion request with several prompts.

Each prompt becomes a separate request that is admitted, placed and counted independently. The
client gets the events of all answers as those of one answer with more choices: the choices of the
first prompt, then those of the second, and so on. The first error ends all answers.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_REQUEST_ID_BYTES, MAX_SAMPLES, MAX_TOP_LOGPROBS
from ullage_common.wire.validation import num_answers
from ullage_router.call import Call, Event, ResponseStream, deadline_of
from ullage_router.errors import http_status
from ullage_router.pipeline.pipeline import RequestPipeline
from ullage_router.policy.retry import UNKNOWN_RETRY_AFTER_S
from ullage_router.telemetry.record import RequestRecord, add_cached

MAX_PARALLEL = 32
"""Maximum number of one body's prompts that run or are queued at a time."""
WAITING_EVENTS = 64
"""Maximum number of events that wait for the client to read. Engines then pause."""


def check_size(requests: Sequence[inference_pb2.GenerateRequest], max_output_tokens: int) -> None:
    """Refuse a body whose answers could take more memory than those of any single prompt.

    Args:
        requests: The requests, one for each prompt.
        max_output_tokens: The service's limit on the tokens of one answer.

    Raises:
        ServiceError: The answers could be too large.
    """
    first = requests[0]
    choices = len(requests) * max(1, num_answers(first.samples))
    tokens = max_output_tokens
    if first.stop.HasField("max_tokens"):
        tokens = min(tokens, first.stop.max_tokens)
    entries = 1
    if first.output.HasField("top_logprobs"):
        entries += 1 + first.output.top_logprobs

    scored = 0
    if first.output.HasField("prompt_logprobs"):
        entries_of_prompt = (2 + first.output.prompt_logprobs) * max(1, num_answers(first.samples))
        scored = entries_of_prompt * sum(map(_most_tokens, requests))

    most = MAX_SAMPLES * (2 + MAX_TOP_LOGPROBS) * max_output_tokens
    if choices * tokens * entries + scored > most:
        raise invalid(
            "prompt",
            f"prompt has {len(requests)} prompts, whose {choices} answers may have {tokens} tokens "
            "each, in addition to log-probabilities of the prompts that are asked for; send fewer "
            "prompts, a lower max_tokens or fewer logprobs",
        )


def _most_tokens(request: inference_pb2.GenerateRequest) -> int:
    return len(request.token_ids.ids) or len(request.text.encode())


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer to one prompt has begun."""

    choices: range
    """The choices that belong to the prompt."""
    accepted: inference_pb2.Accepted


class ManyPrompts:
    """Serves all prompts of one body.

    Args:
        pipeline: Serves each prompt.
        first: The call of the first prompt. The calls of the others are like it.
        requests: The requests, one for each prompt.
        max_queued: Number of requests that the router's queue holds.
        limit_s: The time limit for all prompts, seconds.
        stall_s: The time limit for the first token of each prompt, seconds.

    Attributes:
        record: The record of the prompt whose answer began first, under the body's request id. The
            response headers show its decision.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        first: Call,
        requests: Sequence[inference_pb2.GenerateRequest],
        max_queued: int,
        limit_s: float,
        stall_s: float,
    ) -> None:
        self.record = first.record
        self._pipeline = pipeline
        self._first = first
        self._requests = requests
        self._stall_s = stall_s
        self._deadline = time.monotonic() + limit_s
        self._num_choices = max(1, num_answers(requests[0].samples))
        most = first.tenant.max_concurrency or MAX_PARALLEL
        self._max_parallel = min(len(requests), MAX_PARALLEL, most, 1 + max_queued)

        self._waiting = deque(range(len(requests)))
        """Indices of the prompts that are still waiting for a worker."""
        self._num_running = 0
        self._begun = set[int]()
        """Indices of the prompts whose answers have begun, so that they cannot begin again."""
        self._rendered = set[int]()
        """Indices of the prompts that have been rendered, some of them again after a retry."""
        self._num_done = 0
        self._failure: BaseException | None = None
        self._events = asyncio.Queue[Begun | Event | BaseException](WAITING_EVENTS)
        self._next: Begun | Event | BaseException | None = None
        self._finished = inference_pb2.Finished()
        """The end of all answers, as far as they have ended."""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["ManyPrompts"]:
        """Serve the prompts, and enter the `with` block once the first answer has begun.

        Raises:
            ServiceError: A prompt was refused or failed before any answer began.
        """
        workers = [asyncio.create_task(self._work()) for _ in range(self._max_parallel)]
        try:
            self._next = await self._events.get()
            _raise_error(self._next)
            yield self
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._failure = self._next = None  # their frames refer to this object

    async def events(self) -> AsyncIterator[Begun | Event]:
        """Yield the events of all answers, then the event that ends them.

        Raises:
            ServiceError: A prompt was refused or failed.
        """
        while True:
            event = self._next or await self._events.get()
            self._next = None
            _raise_error(event)
            assert not isinstance(event, BaseException)
            yield event
            if isinstance(event, Event) and event.HasField("finished"):
                return

    async def _work(self) -> None:
        """Serve the waiting prompts one after another, as one of several parallel workers.

        If the body's other prompts have used up the quota or the memory, this worker puts its
        prompt back and exits, so that fewer prompts run in parallel. The last worker does not exit
        but waits for the shortage to pass, provided that a prompt has been answered.
        """
        while self._waiting:
            index = self._waiting.popleft()
            try:
                await self._answer(index)
            except ServiceError as error:
                is_shortage = http_status(error) == HTTPStatus.TOO_MANY_REQUESTS
                wait_s = error.retry_after_s or UNKNOWN_RETRY_AFTER_S
                may_wait = self._num_done and time.monotonic() + wait_s < self._deadline
                may_retry = is_shortage and index not in self._begun
                if not (may_retry and (self._num_running or may_wait)):
                    await self._fail(_named(error, index))
                    return
                self._waiting.appendleft(index)
                if self._num_running:
                    return
                await asyncio.sleep(wait_s)
            except Exception as error:
                await self._fail(error)
                return

    async def _answer(self, index: int) -> None:
        call = self._call(index)
        choices = range(index * self._num_choices, (index + 1) * self._num_choices)
        self._num_running += 1
        try:
            # Prompts that another's failure cancels get that error, not a client's disconnect.
            async with self._pipeline.serve(call, self._error) as stream:
                if self.record is self._first.record:
                    name = self._first.record.request_id
                    self.record = replace(call.record, request_id=name)
                self._begun.add(index)
                await self._events.put(Begun(choices, stream.accepted))
                await self._forward(stream, choices, call)
        finally:
            self._num_running -= 1
        self._num_done += 1
        if self._num_done == len(self._requests):
            await self._events.put(Event(finished=self._finished))

    async def _forward(self, stream: ResponseStream, choices: range, call: Call) -> None:
        is_open = dict.fromkeys(choices, True)
        async for event in stream.events():
            match event.WhichOneof("event"):
                case "finished":
                    self._add_ending(event.finished)
                    for choice in (each for each in choices if is_open[each]):
                        await self._events.put(_ended(choice, event.finished, call))
                case "sample_finished":
                    choice = choices[event.sample_finished.sample]
                    is_open[choice] = False
                    await self._events.put(_ended(choice, event.sample_finished, call))
                case _:
                    moved = Event()
                    moved.CopyFrom(event)  # other clients may share the event
                    moved.delta.sample = choices[event.delta.sample]
                    await self._events.put(moved)

    def _add_ending(self, finished: inference_pb2.Finished) -> None:
        whole = self._finished
        whole.reason = whole.reason or finished.reason
        whole.usage.prompt_tokens += finished.usage.prompt_tokens
        whole.usage.completion_tokens += finished.usage.completion_tokens
        whole.usage.reasoning_tokens += finished.usage.reasoning_tokens
        add_cached(whole.usage, finished.usage)
        whole.resumes += finished.resumes
        whole.resumed_on.extend(e for e in finished.resumed_on if e not in whole.resumed_on)
        whole.resumed_inexact |= finished.resumed_inexact

    async def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            await self._events.put(error.with_traceback(None))

    def _error(self) -> ServiceError | None:
        return self._failure if isinstance(self._failure, ServiceError) else None

    def _call(self, index: int) -> Call:
        first = self._first
        suffix = f"-{index}" if index else ""
        record = RequestRecord(
            first.record.request_id[: MAX_REQUEST_ID_BYTES - len(suffix)] + suffix
        )
        record.ignored = first.record.ignored
        request = self._requests[index]
        remaining_s = max(0.0, self._deadline - record.arrived)
        return Call(
            request,
            record,
            first.tenant.new_session(),
            deadline_of(request, record, remaining_s, self._stall_s),
            first.metadata,
            prompt_cache_key=first.prompt_cache_key,
            replace_key=_numbered(first.replace_key, suffix),
            idempotency_key=_numbered(first.idempotency_key, suffix),
            authorization=first.authorization,
            is_streamed=first.is_streamed,
            release_body=partial(self._release, index),
            end_turn=first.end_turn,
        )

    def _release(self, index: int) -> None:
        """Release the body once all prompts have been rendered.

        Args:
            index: Index of a prompt that has been rendered.
        """
        self._rendered.add(index)
        if len(self._rendered) == len(self._requests):
            self._first.release_body()


def _ended(
    choice: int, end: inference_pb2.Finished | inference_pb2.SampleFinished, call: Call
) -> Event:
    """Return the event that ends a choice. It says by which lowered limit, if by one."""
    stop = end.stop_string
    if end.reason == inference_pb2.FINISH_REASON_LENGTH:
        stop = call.decisions.latest.lowered_limit
    return Event(
        sample_finished=inference_pb2.SampleFinished(
            sample=choice, reason=end.reason, stop_string=stop
        )
    )


def _numbered(key: str, suffix: str) -> str:
    return key + suffix if key else ""


def _named(error: ServiceError, index: int) -> ServiceError:
    """Make an error about a prompt name its place in the list."""
    if error.metadata.get("field") in ("prompt", "input"):
        error.metadata["field"] = f"prompt[{index}]"
        if error.message.startswith("prompt "):
            error.message = f"prompt[{index}]" + error.message.removeprefix("prompt")
    return error


def _raise_error(event: object) -> None:
    if isinstance(event, BaseException):
        raise event
