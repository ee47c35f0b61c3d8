"""Serves the endpoints that generate text, which share one code path and differ in a `Dialect`."""

import asyncio
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.validation import num_answers
from ullage_router.call import Call, ResponseStream, deadline_of
from ullage_router.errors import http_status, internal
from ullage_router.files.catalog import StoredFile
from ullage_router.files.documents import naming_files
from ullage_router.http.client_timeout import time_limit_s
from ullage_router.http.files.attach import attach_documents
from ullage_router.http.messages import Body, Headers, Reply, Request
from ullage_router.http.openai import requests
from ullage_router.http.openai.conversation import as_functions
from ullage_router.http.openai.errors import (
    ErrorFormat,
    decision_headers,
    error_headers,
    openai_errors,
    resumed_headers,
)
from ullage_router.http.openai.many_prompts import Begun, ManyPrompts, check_size
from ullage_router.http.openai.responses import (
    JSON,
    ChatFormat,
    CompletionFormat,
    ResponseOptions,
)
from ullage_router.http.openai.schemas import Common
from ullage_router.http.openai.sse import ChunkedAnswer
from ullage_router.http.sessions import open_session, set_priority
from ullage_router.pipeline import idempotency
from ullage_router.pipeline.replace import HEADER
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord
from ullage_router.telemetry.spans import trace_context
from ullage_router.tenants.session import TenantSession
from ullage_router.tokenizer.model import Model

_NOT_ONE = inference_pb2.Accepted()
"""Stands for the acceptance of a request with several prompts, each of which has its own."""
KEEPALIVE = b": keepalive\n\n"
MAX_KEPT_BYTES = 128 << 20
"""Maximum estimated memory of a response that is kept until it is complete, in bytes."""
LOGPROB_BYTES = 256
"""Estimated memory per kept log-probability: as a message, as JSON and in the reply, in bytes."""
CHARACTER_BYTES = 8
"""Estimated memory per kept character, in bytes."""
LONG_TEXT = 4096
"""Number of characters from which a piece of text counts. Echoed prompts have longer ones."""
_encode = msgspec.json.Encoder().encode
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

log = logging.getLogger(__name__)


class Answer(Protocol):
    """Writes one answer in an API's format, either as a stream or as a whole."""

    def opening(self, accepted: inference_pb2.Accepted) -> bytes:
        """Return the bytes to send before the first event."""

    def of(self, event: inference_pb2.GenerateResponse) -> bytes:
        """Return the bytes to send for an event of the answer (empty if there are none)."""

    def failed(self, error: ServiceError) -> bytes:
        """Return the last bytes of a stream that fails."""

    def collect(self, event: inference_pb2.GenerateResponse) -> None:
        """Add an event to the complete response."""

    def whole(self, accepted: inference_pb2.Accepted) -> JSON:
        """Return the body of the complete response."""


class CountAnswer:
    """Writes the number of a prompt's tokens, which is never a stream.

    Args:
        errors: The API's format of errors.
        more: Fields of the response in addition to the number.
    """

    def __init__(self, errors: ErrorFormat, more: Mapping[str, object] | None = None) -> None:
        self._errors = errors
        self._more = dict(more or {})

    def opening(self, accepted: inference_pb2.Accepted) -> bytes:
        """Return nothing."""
        return b""

    def of(self, event: inference_pb2.GenerateResponse) -> bytes:
        """Return nothing."""
        return b""

    def failed(self, error: ServiceError) -> bytes:
        """Return the event that ends a stream with an error."""
        return self._errors.event(error)

    def collect(self, event: inference_pb2.GenerateResponse) -> None:
        """Do nothing, since nothing is generated."""

    def whole(self, accepted: inference_pb2.Accepted) -> JSON:
        """Return the number of the prompt's tokens."""
        return self._more | {"input_tokens": accepted.prompt_tokens}


class Style(NamedTuple):
    """Options of the response that are not part of the request."""

    usage: bool = False
    continuous_usage: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int | None = None
    """Number of alternatives in the field `prompt_logprobs`, or None to leave the field out."""
    echo_logprobs: int | None = None
    """Number of alternatives of echoed tokens, or None if the echo has no log-probabilities."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools whose input is text instead of JSON."""
    is_echo_only: bool = False
    """Whether the answer is the echoed prompt alone."""
    hides_reasoning: bool = False
    """Whether the model's reasoning is left out."""

    @property
    def scores_prompt(self) -> bool:
        """Whether the response has log-probabilities of the prompt's tokens."""
        return self.prompt_logprobs is not None or self.echo_logprobs is not None


class Parsed(NamedTuple):
    """A parsed body: the requests for the pipeline, and options that are not part of them."""

    requests: Sequence[inference_pb2.GenerateRequest]
    """One request for each prompt. Only completions may have several."""
    is_streamed: bool
    answer: Callable[[ResponseOptions], Answer]
    """Creates the writer of the answer."""
    style: Style = Style()
    prompt_cache_key: str = ""
    ignored: tuple[str, ...] = ()
    """Names of the body's unknown fields."""
    kept_bytes: int = 0
    """Bytes of the body's memory that stay reserved until the response is complete.

    The response repeats parts of some bodies.
    """
    counts_only: bool = False
    """Whether only the prompt's tokens are counted."""
    keeps_logprobs: bool = False
    """Whether a stream keeps log-probabilities, which its last events repeat."""


def _parsed(
    body: Common,
    requests: Sequence[inference_pb2.GenerateRequest],
    answer: Callable[[ResponseOptions], Answer],
    ignored: tuple[str, ...],
) -> Parsed:
    return Parsed(
        requests,
        is_streamed=bool(body.stream),
        answer=answer,
        style=Style(
            usage=body.wants_usage,
            continuous_usage=body.wants_continuous_usage,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            prompt_logprobs=body.prompt_logprobs,
        ),
        prompt_cache_key=body.prompt_cache_key or "",
        ignored=ignored,
    )


def bearer(headers: Mapping[str, str]) -> str | None:
    """Return a request's credentials, from the `authorization` header."""
    return headers.get("authorization")


def _no_headers(record: RequestRecord) -> Headers:
    return []


@dataclass(frozen=True, slots=True)
class Dialect:
    """The differences between the endpoints that generate text."""

    parse: Callable[[Body, TenantSession], Parsed]
    errors: ErrorFormat
    keepalive: bytes = KEEPALIVE
    """Sent in a stream after each long silence."""
    credentials: Callable[[Mapping[str, str]], str | None] = bearer
    """Returns a request's credentials, as the `authorization` header has them."""
    headers: Callable[[RequestRecord], Headers] = _no_headers
    """Returns headers of responses in addition to those of every endpoint."""
    takes_files: bool = False
    """Whether a body may name files, whose texts take the place of their names."""
    more_bytes: Callable[[Body, TenantSession], int] | None = None
    """Returns the bytes of text that a request brings along in addition to its body, if it may."""


_CHAT_ERRORS = openai_errors("messages")
_COMPLETION_ERRORS = openai_errors("prompt")


def _chat_answer(options: ResponseOptions) -> ChunkedAnswer:
    return ChunkedAnswer(ChatFormat(options), _CHAT_ERRORS, options)


def _completion_answer(options: ResponseOptions) -> ChunkedAnswer:
    return ChunkedAnswer(CompletionFormat(options), _COMPLETION_ERRORS, options)


def _parse_chat(body: Body, _: TenantSession) -> Parsed:
    chat, ignored = requests.parse_chat(body.take())
    asked = requests.from_chat(chat, body.documents)
    parsed = _parsed(chat, [asked], _chat_answer, ignored)
    style = parsed.style._replace(
        custom_tools=as_functions(chat.tools)[1], hides_reasoning=chat.include_reasoning is False
    )
    return parsed._replace(style=style)


def _parse_completion(body: Body, _: TenantSession) -> Parsed:
    completion, ignored = requests.parse_completion(body.take())
    asked = requests.from_completion(completion)
    parsed = _parsed(completion, asked, _completion_answer, ignored)
    style = parsed.style._replace(
        echo_logprobs=completion.logprobs if completion.echo else None,
        is_echo_only=completion.max_tokens == 0,
    )
    return parsed._replace(style=style)


CHAT = Dialect(_parse_chat, _CHAT_ERRORS, takes_files=True)
COMPLETION = Dialect(_parse_completion, _COMPLETION_ERRORS)
EMBEDDINGS = openai_errors("input")


class Writer:
    """Writes one response: a JSON body, or server-sent events.

    The methods wait for a slow client, which in turn slows down the engine's stream.

    Args:
        reply: The reply to the request.
        record: The request's record, for the headers.
        errors: The format of errors.
        keepalive_s: Seconds of silence after which a stream gets a sign of life, or 0 for none.
        keepalive: The sign of life.
        headers: Headers of the response in addition to those that describe the decision.
    """

    def __init__(
        self,
        reply: Reply,
        record: RequestRecord,
        errors: ErrorFormat,
        keepalive_s: float = 0.0,
        keepalive: bytes = KEEPALIVE,
        headers: Callable[[RequestRecord], Headers] = _no_headers,
    ) -> None:
        self._reply = reply
        self._record = record
        self._errors = errors
        self._keepalive_s = keepalive_s
        self._keepalive = keepalive
        self._more_headers = headers

        self._is_streaming = False
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._opening = b""
        """Encoded events that are sent together with the next ones, or with the error."""
        self._timer: asyncio.TimerHandle | None = None

    async def whole(self, body: bytes, later: Headers) -> None:
        """Send a complete, non-streamed response.

        Args:
            body: The encoded body.
            later: Headers that are known only when the answer is complete.
        """
        await self._body(200, body, later)

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
        self._reply.start(200, [kind, *self._headers()])
        for piece in chain((first, second), pieces):
            await self._reply.piece(piece)
            await asyncio.sleep(0)
        await self._reply.end()

    def describe(self, record: RequestRecord) -> None:
        """Take the headers of the response from another record."""
        self._record = record

    def wait_for_stream(self) -> None:
        """Start sending a sign of life after each long silence.

        It makes load balancers keep the connection open. The first one starts the stream if it has
        not started yet.
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
            *self._headers(),
        ]
        self._reply.start(200, headers)
        self._is_streaming = True

    def hold(self, opening: bytes) -> None:
        """Send encoded events together with the next ones, which may be those of an error."""
        self._opening = opening

    def stop(self) -> None:
        """Stop the signs of life."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _keep_alive(self) -> None:
        """Send a sign of life if the stream was silent too long, and schedule the next check."""
        now = self._loop.time()
        if now - self._sent_at >= self._keepalive_s:
            self.start_stream()
            self._reply.nudge(self._keepalive)
            self._sent_at = now
        due = self._sent_at + self._keepalive_s
        self._timer = self._loop.call_at(due, self._keep_alive)

    async def events(self, data: bytes) -> None:
        """Send encoded server-sent events to the client."""
        self._sent_at = self._loop.time()
        opening = self._opening
        self._opening = b""
        await self._reply.piece(opening + data)

    async def end_stream(self, last: bytes = b"") -> None:
        """Send the last events."""
        await self._reply.end(self._opening + last)

    async def error(self, error: ServiceError, answer: Answer | None = None) -> None:
        """Send an error as the response, or as an event if the stream has started.

        Args:
            error: The error.
            answer: The writer of the answer if the answer has begun.
        """
        self.stop()
        if self._is_streaming:
            await self.end_stream(answer.failed(error) if answer else self._errors.event(error))
        else:
            body = self._errors.body(error)
            await self._body(http_status(error), body, error_headers(error))

    async def _body(self, status: int, body: bytes, headers: Headers) -> None:
        kind = (b"content-type", b"application/json")
        await self._reply.whole(status, [kind, *self._headers(), *headers], body)

    def _headers(self) -> Headers:
        return [*decision_headers(self._record), *self._more_headers(self._record)]


class KeptMemory:
    """Reserves memory for the large parts of a response that is kept until it is complete.

    Args:
        request: The request, to which the memory is charged.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_bytes = 0

    def take(self, event: inference_pb2.GenerateResponse) -> None:
        """Reserve memory for the log-probabilities and the echoed prompt of an event.

        Raises:
            ServiceError: The response is too large, or there is not enough memory for it now.
        """
        num_logprobs = sum(1 + len(entry.top) for entry in event.delta.logprobs)
        length = len(event.delta.text)
        num_bytes = num_logprobs * LOGPROB_BYTES
        if length >= LONG_TEXT:
            num_bytes += length * CHARACTER_BYTES
        if not num_bytes:
            return

        self._num_bytes += num_bytes
        if self._num_bytes > MAX_KEPT_BYTES:
            field = "logprobs" if num_logprobs else "echo"
            raise invalid(
                field,
                f"{field}: the whole response would take more than {MAX_KEPT_BYTES >> 20} MiB of "
                "memory; ask for fewer answers, tokens or alternatives (n, max_tokens, "
                "top_logprobs), or stream a chat or a completion",
            )
        self._request.keep(num_bytes)


class GenerateEndpoint:
    """Serves the requests to one endpoint that generates text.

    Args:
        service: Serves requests, and provides the tenants.
        dialect: The differences between the endpoints.
    """

    def __init__(self, service: RouterService, dialect: Dialect) -> None:
        self._service = service
        self._dialect = dialect

    async def __call__(self, request: Request, reply: Reply) -> None:
        service = self._service
        headers = request.headers
        record_id = request_id(headers)
        authorization = self._dialect.credentials(headers)

        try:
            tenant = open_session(service.tenants, request, authorization)
            body = await request.read_json(tenant.name)
            record = RequestRecord(record_id)  # the clock starts once the whole body has arrived
            files = await self._attach_documents(request, body, tenant.name)
            num_bytes = body.num_bytes
            if self._dialect.more_bytes:
                weigh = functools.partial(self._dialect.more_bytes, body, tenant)
                more_bytes = await service.intake.run(num_bytes, tenant.name, weigh)
                request.charge(more_bytes)
                num_bytes += more_bytes
            parse = functools.partial(self._dialect.parse, body, tenant)
            parsed = await service.intake.run(num_bytes, tenant.name, parse)
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
        set_priority(request, asked)
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
            authorization=authorization,
            is_streamed=parsed.is_streamed,
            release_body=functools.partial(request.release, parsed.kept_bytes),
            end_turn=request.end_turn,
            counts_only=parsed.counts_only,
        )
        writer = self._writer(reply, record)
        kept = KeptMemory(request)
        if len(asked) == 1:
            await self._answer(call, parsed, files, writer, kept)
            return
        max_queued = service.config.routing.queue.max_requests
        many = ManyPrompts(
            service.pipeline, call, asked, max_queued, limit_s, limits.request_timeout
        )
        await self._answer_many(call, many, len(asked), parsed.style, writer, kept)

    def _writer(self, reply: Reply, record: RequestRecord) -> Writer:
        dialect = self._dialect
        keepalive_s = self._service.config.streaming.keepalive
        return Writer(
            reply, record, dialect.errors, keepalive_s, dialect.keepalive, dialect.headers
        )

    async def _attach_documents(
        self, request: Request, body: Body, tenant: str
    ) -> Sequence[StoredFile]:
        """Read the files that a body names, and return their descriptions."""
        if not self._dialect.takes_files:
            return ()
        service = self._service
        return await attach_documents(service.files, service.intake, request, body, tenant)

    async def _answer(
        self,
        call: Call,
        parsed: Parsed,
        files: Sequence[StoredFile],
        writer: Writer,
        kept: KeptMemory,
    ) -> None:
        if call.is_streamed:
            writer.wait_for_stream()

        answer: Answer | None = None
        try:
            async with self._service.pipeline.serve(call) as stream:
                answer = parsed.answer(self._response_options(call, parsed.style))
                if call.is_streamed:
                    await _stream(stream, answer, writer, kept if parsed.keeps_logprobs else None)
                else:
                    is_long = _is_long(call, parsed.style)
                    body, later = await _collect(stream, answer, kept, is_long=is_long)

            # A slow client must not keep its tenant's place while it reads a complete answer.
            if not call.is_streamed:
                await writer.whole(body, later)
        except Exception as error:
            call.end_turn()  # a slow client must not keep its turn while it reads the error
            # A variable for the refusal would be a reference cycle, since the error has this frame.
            await writer.error(_refusal(error, call.record, files), answer)
        finally:
            writer.stop()

    async def _answer_many(
        self,
        call: Call,
        many: ManyPrompts,
        num_prompts: int,
        style: Style,
        writer: Writer,
        kept: KeptMemory,
    ) -> None:
        if call.is_streamed:
            writer.wait_for_stream()

        try:
            async with many.serve() as stream:
                writer.describe(many.record)
                options = self._response_options(call, style, num_prompts)
                form = CompletionFormat(options)
                answer = ChunkedAnswer(form, self._dialect.errors, options)
                if call.is_streamed:
                    await _stream_many(stream, form, answer, writer)
                else:
                    is_long = _is_long(call, style)
                    body, later = await _collect_many(stream, form, answer, kept, is_long=is_long)

            if not call.is_streamed:
                await writer.whole(body, later)
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
            prompt_logprobs=style.prompt_logprobs,
            echo_logprobs=style.echo_logprobs,
            is_echo_only=style.is_echo_only,
            hides_reasoning=style.hides_reasoning,
            custom_tools=style.custom_tools,
            n=num_answers(request.samples) * num_prompts,
            samples=num_answers(request.samples),
            tools=request.messages.HasField("tools"),
            lowered_limit=call.record.decision.lowered_limit,
        )


def as_service_error(error: Exception, record: RequestRecord) -> ServiceError:
    """Return the error to send to the client, and log the original if the router is at fault."""
    if isinstance(error, ServiceError):
        return error
    log.error("request failed", exc_info=error, extra={"request_id": record.request_id})
    return internal(record.request_id)


def _refusal(error: Exception, record: RequestRecord, files: Sequence[StoredFile]) -> ServiceError:
    """Return the error to send to the client, with the files if they make the prompt too long."""
    refusal = as_service_error(error, record)
    if files and refusal.reason == "CONTEXT_TOO_LONG":
        return naming_files(refusal, files)
    return refusal


def _is_long(call: Call, style: Style) -> bool:
    """Return whether a complete response may be so long that writing it takes noticeable time."""
    return style.scores_prompt or call.request.output.HasField("top_logprobs")


async def _stream(
    stream: ResponseStream, answer: Answer, writer: Writer, kept: KeptMemory | None
) -> None:
    writer.start_stream()
    writer.hold(answer.opening(stream.accepted))
    async for event in stream.events():
        if kept:
            kept.take(event)
        if data := answer.of(event):
            await writer.events(data)
    await writer.end_stream()


async def encoded(answer: Callable[[], JSON], *, is_long: bool) -> bytes:
    """Return a complete answer as JSON.

    Args:
        answer: Returns the answer.
        is_long: Whether to encode it in a thread, so that others are served meanwhile.
    """
    return await asyncio.to_thread(_written, answer) if is_long else _written(answer)


def _written(answer: Callable[[], JSON]) -> bytes:
    return _encode(answer())


async def _collect(
    stream: ResponseStream, answer: Answer, kept: KeptMemory, *, is_long: bool
) -> tuple[bytes, Headers]:
    """Return the body of a complete answer, and the headers that are known only at its end."""
    finished = inference_pb2.Finished()
    async for event in stream.events():
        kept.take(event)
        answer.collect(event)
        if event.HasField("finished"):
            finished = event.finished

    body = await encoded(functools.partial(answer.whole, stream.accepted), is_long=is_long)
    return body, resumed_headers(finished)


async def _stream_many(
    stream: ManyPrompts, form: CompletionFormat, answer: Answer, writer: Writer
) -> None:
    writer.start_stream()
    async for event in stream.events():
        if isinstance(event, Begun):
            form.begin(event.accepted, event.choices)
        elif data := answer.of(event):
            await writer.events(data)
    await writer.end_stream()


async def _collect_many(
    stream: ManyPrompts,
    form: CompletionFormat,
    answer: Answer,
    kept: KeptMemory,
    *,
    is_long: bool,
) -> tuple[bytes, Headers]:
    """Return what `_collect` does, for the answers to many prompts."""
    finished = inference_pb2.Finished()
    async for event in stream.events():
        if isinstance(event, Begun):
            form.begin(event.accepted, event.choices)
            continue
        kept.take(event)
        answer.collect(event)
        if event.HasField("finished"):
            finished = event.finished

    body = await encoded(functools.partial(answer.whole, _NOT_ONE), is_long=is_long)
    return body, resumed_headers(finished)


def sampling_defaults(model: Model) -> dict[str, float]:
    """Return the model's recommended sampling parameters, which requests use by default.

    The protobuf fields are float32, so 0.7 arrives as a slightly smaller number. Rounding to seven
    digits restores the original value.
    """
    fields = model.description.sampling_defaults.ListFields()
    return {field.name: float(f"{value:.7g}") for field, value in fields}


def request_id(headers: Mapping[str, str]) -> str:
    """Return the client's request id if it is printable and short. Otherwise return a new id."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
