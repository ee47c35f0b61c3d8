"""Serves /v1/chat/completions and /v1/completions, which share one code path."""

import asyncio
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import num_answers
from ullage_router.call import Call, ResponseStream, deadline_of
from ullage_router.errors import http_status, internal
from ullage_router.http.client_timeout import time_limit_s
from ullage_router.http.messages import Body, Headers, Reply, Request
from ullage_router.http.openai import requests
from ullage_router.http.openai.errors import (
    decision_headers,
    envelope,
    error_headers,
    resumed_headers,
)
from ullage_router.http.openai.many_prompts import Begun, ManyPrompts, check_size
from ullage_router.http.openai.responses import (
    JSON,
    ChatFormat,
    Collected,
    CompletionFormat,
    Format,
    ResponseOptions,
)
from ullage_router.http.openai.schemas import Common
from ullage_router.http.openai.sse import Chunks, sse_event
from ullage_router.pipeline import idempotency
from ullage_router.pipeline.replace import HEADER
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord
from ullage_router.telemetry.spans import trace_context

_NOT_ONE = inference_pb2.Accepted()
"""Stands for the acceptance of a request with several prompts, each of which has its own."""
KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

log = logging.getLogger(__name__)


class Parsed(NamedTuple):
    """A parsed body: the requests for the pipeline, and options that are not part of them."""

    requests: Sequence[inference_pb2.GenerateRequest]
    """One request for each prompt. Only completions may have several."""
    is_streamed: bool
    style: "Style"
    prompt_cache_key: str
    ignored: tuple[str, ...]
    """Names of the body's unknown fields."""


class Style(NamedTuple):
    """Options of the response that are not part of the request."""

    usage: bool
    continuous_usage: bool
    tokens_as_ids: bool


def _parsed(
    body: Common, requests: Sequence[inference_pb2.GenerateRequest], ignored: tuple[str, ...]
) -> Parsed:
    return Parsed(
        requests,
        is_streamed=bool(body.stream),
        style=Style(
            usage=body.wants_usage,
            continuous_usage=body.wants_continuous_usage,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        ),
        prompt_cache_key=body.prompt_cache_key or "",
        ignored=ignored,
    )


@dataclass(frozen=True, slots=True)
class Dialect:
    """The differences between the chat endpoint and the completions endpoint."""

    parse: Callable[[Body], Parsed]
    format: Callable[[ResponseOptions], Format]
    input_field: str
    """The endpoint's name for the prompt, which is used in errors."""


def _parse_chat(body: Body) -> Parsed:
    chat, ignored = requests.parse_chat(body.take())
    return _parsed(chat, [requests.from_chat(chat)], ignored)


def _parse_completion(body: Body) -> Parsed:
    completion, ignored = requests.parse_completion(body.take())
    return _parsed(completion, requests.from_completion(completion), ignored)


CHAT = Dialect(_parse_chat, ChatFormat, "messages")
COMPLETION = Dialect(_parse_completion, CompletionFormat, "prompt")


class Writer:
    """Writes one response: a JSON body, or server-sent events that always end with [DONE].

    The methods wait for a slow client, which in turn slows down the engine's stream.

    Args:
        reply: The reply to the request.
        record: The request's record, for the headers.
        input_field: The endpoint's name for the prompt, which is used in errors.
        keepalive_s: Seconds of silence after which a stream gets a comment, or 0 for none.
    """

    def __init__(
        self, reply: Reply, record: RequestRecord, input_field: str, keepalive_s: float = 0.0
    ) -> None:
        self._reply = reply
        self._record = record
        self._input_field = input_field
        self._keepalive_s = keepalive_s

        self._is_streaming = False
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def whole(self, answer: JSON, later: Headers) -> None:
        """Send a complete, non-streamed response.

        Args:
            answer: The body of the response.
            later: Headers that are known only when the answer is complete.
        """
        await self._body(200, _encode(answer), later)

    async def in_pieces(self, pieces: Iterator[bytes]) -> None:
        """Send a JSON body in chunks.

        Each chunk is created once the client has read enough of the earlier ones. Between two
        chunks, the event loop serves other requests.
        """
        first = next(pieces)
        second = next(pieces, None)
        if second is None:
            await self._body(200, first, [])
            return

        kind = (b"content-type", b"application/json")
        self._reply.start(200, [kind, *decision_headers(self._record)])
        for piece in chain((first, second), pieces):
            await self._reply.piece(piece)
            await asyncio.sleep(0)
        await self._reply.end()

    def describe(self, record: RequestRecord) -> None:
        """Take the headers of the response from another record."""
        self._record = record

    def wait_for_stream(self) -> None:
        """Start sending a comment after each long silence.

        The comments make load balancers keep the connection open. The first comment starts
        the stream if it has not started yet.
        """
        if self._keepalive_s:
            self._sent_at = self._loop.time()
            self._timer = self._loop.call_later(self._keepalive_s, self._keep_alive)

    def start_stream(self) -> None:
        """Start the stream if it has not started yet."""
        if self._is_streaming:
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *decision_headers(self._record),
        ]
        self._reply.start(200, headers)
        self._is_streaming = True

    def stop(self) -> None:
        """Stop the keep-alive comments."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _keep_alive(self) -> None:
        """Send a comment if the stream was silent for too long, and schedule the next check."""
        now = self._loop.time()
        if now - self._sent_at >= self._keepalive_s:
            self.start_stream()
            self._reply.nudge(KEEPALIVE)
            self._sent_at = now
        due = self._sent_at + self._keepalive_s
        self._timer = self._loop.call_at(due, self._keep_alive)

    async def events(self, data: bytes) -> None:
        """Send encoded server-sent events to the client."""
        self._sent_at = self._loop.time()
        await self._reply.piece(data)

    async def end_stream(self, last: bytes = b"") -> None:
        """Send the last events, then [DONE]."""
        await self._reply.end(last + DONE)

    async def error(self, error: ServiceError) -> None:
        """Send an error as the response, or as an event if the stream has started."""
        body = envelope(error, self._input_field, is_event=self._is_streaming)
        self.stop()
        if self._is_streaming:
            await self.end_stream(sse_event(body))
        else:
            await self._body(http_status(error), body, error_headers(error))

    async def _body(self, status: int, body: bytes, headers: Headers) -> None:
        kind = (b"content-type", b"application/json")
        await self._reply.whole(status, [kind, *decision_headers(self._record), *headers], body)


class GenerateEndpoint:
    """Serves requests to /v1/chat/completions or /v1/completions.

    Args:
        service: Serves requests, and provides the tenants.
        dialect: The differences between the two endpoints.
    """

    def __init__(self, service: RouterService, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, request: Request, reply: Reply) -> None:
        service = self._service
        headers = request.headers
        record_id = request_id(headers)

        try:
            tenant = service.tenants.open_session(headers.get("authorization"))
            body = await request.read_json(tenant.name)
            record = RequestRecord(record_id)  # the clock starts once the whole body has arrived
            parse = functools.partial(self._dialect.parse, body)
            parsed = await service.intake.run(body.num_bytes, tenant.name, parse)
            asked = parsed.requests
            limits = service.config.limits
            limit_s = time_limit_s(headers, limits.total_timeout)
            if len(asked) > 1:
                check_size(asked, limits.max_output_tokens)
                tenant.check_many(len(asked), sum(len(r.token_ids.ids) or 1 for r in asked))
        except Exception as error:
            request.end_turn()
            record = RequestRecord(record_id)
            # The traceback holds the body, and this frame would hold the error: a reference cycle.
            refusal = as_service_error(error, record).with_traceback(None)
            service.pipeline.refuse(record, refusal, trace=trace_context(headers))
            await self._writer(reply, record).error(refusal)
            return

        if session_id := headers.get("x-session-id"):
            for one in asked:
                one.session_id = session_id
        record.ignored = parsed.ignored
        deadline = deadline_of(asked[0], record, limit_s, limits.request_timeout)
        call = Call(
            asked[0],
            record,
            tenant,
            deadline,
            trace_context(headers),
            prompt_cache_key=parsed.prompt_cache_key,
            replace_key=headers.get(HEADER, ""),
            idempotency_key=headers.get(idempotency.HEADER, ""),
            authorization=headers.get("authorization"),
            is_streamed=parsed.is_streamed,
            release_body=request.release,
            end_turn=request.end_turn,
        )
        writer = self._writer(reply, record)
        if len(asked) == 1:
            await self._answer(call, parsed.style, writer)
            return
        max_queued = service.config.routing.queue.max_requests
        many = ManyPrompts(
            service.pipeline, call, asked, max_queued, limit_s, limits.request_timeout
        )
        await self._answer_many(call, many, len(asked), parsed.style, writer)

    def _writer(self, reply: Reply, record: RequestRecord) -> Writer:
        keepalive_s = self._service.config.streaming.keepalive
        return Writer(reply, record, self._dialect.input_field, keepalive_s)

    async def _answer(self, call: Call, style: Style, writer: Writer) -> None:
        if call.is_streamed:
            writer.wait_for_stream()

        try:
            async with self._service.pipeline.serve(call) as stream:
                options = self._response_options(call, style)
                form = self._dialect.format(options)
                if call.is_streamed:
                    await _stream(stream, Chunks(form, options), writer)
                else:
                    await _whole(stream, form, writer, options.n)
        except Exception as error:
            call.end_turn()  # a slow client must not keep its turn while it reads the error
            await writer.error(as_service_error(error, call.record))
        finally:
            writer.stop()

    async def _answer_many(
        self, call: Call, many: ManyPrompts, num_prompts: int, style: Style, writer: Writer
    ) -> None:
        if call.is_streamed:
            writer.wait_for_stream()

        try:
            async with many.serve() as stream:
                writer.describe(many.record)
                options = self._response_options(call, style, num_prompts)
                form = CompletionFormat(options)
                if call.is_streamed:
                    await _stream_many(stream, form, Chunks(form, options), writer)
                else:
                    await _whole_many(stream, form, writer, options.n)
        except Exception as error:
            call.end_turn()  # a slow client must not keep its turn while it reads the error
            await writer.error(as_service_error(error, call.record))
        finally:
            writer.stop()

    def _response_options(self, call: Call, style: Style, num_prompts: int = 1) -> ResponseOptions:
        request = call.request
        return ResponseOptions(
            id=call.record.request_id,
            model=request.model or self._service.config.model,
            created=int(time.time()),
            logprobs=request.output.HasField("top_logprobs"),
            token_ids=request.output.return_token_ids,
            usage=style.usage,
            continuous_usage=style.continuous_usage,
            tokens_as_ids=style.tokens_as_ids,
            n=num_answers(request.samples) * num_prompts,
            tools=request.messages.HasField("tools"),
            lowered_limit=call.record.decision.lowered_limit,
        )


def as_service_error(error: Exception, record: RequestRecord) -> ServiceError:
    """Return the error to send to the client, and log the original if the router is at fault."""
    if isinstance(error, ServiceError):
        return error
    log.error("request failed", exc_info=error, extra={"request_id": record.request_id})
    return internal(record.request_id)


async def _stream(stream: ResponseStream, chunks: Chunks, writer: Writer) -> None:
    writer.start_stream()
    opening = chunks.opening(stream.accepted)
    async for event in stream.events():
        if data := chunks.of(event):
            await writer.events(opening + data)
            opening = b""
    await writer.end_stream()


async def _whole(stream: ResponseStream, form: Format, writer: Writer, n: int) -> None:
    parts = [Collected() for _ in range(n)]
    finished = inference_pb2.Finished()
    async for event in stream.events():
        finished = _collect(parts, event) or finished
    await writer.whole(form.whole(stream.accepted, parts, finished), resumed_headers(finished))


def _collect(
    parts: Sequence[Collected], event: inference_pb2.GenerateResponse
) -> inference_pb2.Finished | None:
    """Add an event to the choice to which it belongs. Return the end of the answer if it is one."""
    match event.WhichOneof("event"):
        case "finished":
            return event.finished
        case "sample_finished":
            parts[event.sample_finished.sample].end = event.sample_finished
        case _:
            parts[event.delta.sample].add(event.delta)
    return None


async def _stream_many(
    stream: ManyPrompts, form: CompletionFormat, chunks: Chunks, writer: Writer
) -> None:
    writer.start_stream()
    async for event in stream.events():
        if isinstance(event, Begun):
            form.begin(event.accepted, event.choices)
        elif data := chunks.of(event):
            await writer.events(data)
    await writer.end_stream()


async def _whole_many(stream: ManyPrompts, form: CompletionFormat, writer: Writer, n: int) -> None:
    parts = [Collected() for _ in range(n)]
    finished = inference_pb2.Finished()
    async for event in stream.events():
        if isinstance(event, Begun):
            form.begin(event.accepted, event.choices)
        else:
            finished = _collect(parts, event) or finished
    await writer.whole(form.whole(_NOT_ONE, parts, finished), resumed_headers(finished))


def request_id(headers: Mapping[str, str]) -> str:
    """Return the client's request id if it is printable and short. Otherwise return a new id."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
