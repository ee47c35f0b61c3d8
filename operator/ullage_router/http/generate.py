"""POST /v1/chat/completions and /v1/completions: two bodies, one way through the router."""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc

from ullage.inference.v1 import inference_pb2
from ullage_router.answer import Answer, Call
from ullage_router.http import convert
from ullage_router.http.answers import (
    ChatFormat,
    Collected,
    CompletionFormat,
    Format,
    Wanted,
)
from ullage_router.http.chunks import Chunks
from ullage_router.http.messages import Reply, Request
from ullage_router.http.schemas import Common
from ullage_router.http.sse import Writer
from ullage_router.replace import HEADER
from ullage_router.service import RouterService
from ullage_router.stats import Record
from ullage_router.trace import trace_context
from ullage_rpc.errors import ServiceError

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A body in both its forms."""

    body: Common
    request: inference_pb2.GenerateRequest


@dataclass(frozen=True, slots=True)
class Dialect:
    """What tells the two endpoints apart."""

    parse: Callable[[bytes], Parsed]
    format: Callable[[Wanted], Format]
    input_field: str


def _parse_chat(body: bytes) -> Parsed:
    chat = convert.parse_chat(body)
    return Parsed(chat, convert.from_chat(chat))


def _parse_completion(body: bytes) -> Parsed:
    completion = convert.parse_completion(body)
    return Parsed(completion, convert.from_completion(completion))


CHAT = Dialect(_parse_chat, ChatFormat, "messages")
COMPLETION = Dialect(_parse_completion, CompletionFormat, "prompt")


class GenerateEndpoint:
    """Serves one path.

    Args:
        service: serves requests, and says who may send them.
        dialect: chat or completions.
    """

    def __init__(self, service: RouterService, dialect: Dialect) -> None:
        config = service.config
        self._pipeline = service.pipeline
        self._tenants = service.tenants
        self._model = config.model
        self._timeout_s = config.limits.request_timeout
        self._keepalive_s = config.streaming.keepalive
        self._dialect = dialect

    async def __call__(self, request: Request, reply: Reply) -> None:
        headers = request.headers
        record = Record(request_id(headers))
        writer = Writer(reply, record, self._dialect.input_field, self._keepalive_s)
        try:
            visit = self._tenants.visit(headers.get("authorization"))
            parsed = self._parse(request)
        except Exception as error:
            told = _told(error, record)
            self._pipeline.refused(record, told)
            writer.error(told)
            return
        if session_id := headers.get("x-session-id"):
            parsed.request.session_id = session_id
        call = Call(
            parsed.request,
            record,
            self._timeout_s,
            trace_context(headers),
            visit,
            idempotency_key=headers.get(HEADER, ""),
            authorization=headers.get("authorization"),
            is_streamed=bool(parsed.body.stream),
        )
        await self._answer(call, parsed.body, writer)

    def _parse(self, request: Request) -> Parsed:
        if not request.has_length:
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "LENGTH_REQUIRED",
                "the request has no body; send one with Content-Length",
            )
        body, request.body = request.body, b""  # an answer may take long and needs it no more
        return self._dialect.parse(body)

    async def _answer(self, call: Call, body: Common, writer: Writer) -> None:
        try:
            async with self._pipeline.serve(call) as generation:
                wanted = self._wanted(call, body)
                form = self._dialect.format(wanted)
                if body.stream:
                    await _stream(generation, Chunks(form, wanted), writer)
                else:
                    await _whole(generation, form, writer, body.n or 1)
        except Exception as error:
            writer.error(_told(error, call.record))

    def _wanted(self, call: Call, body: Common) -> Wanted:
        return Wanted(
            id=call.record.request_id,
            model=self._model,
            created=int(time.time()),
            logprobs=call.request.output.HasField("top_logprobs"),
            token_ids=call.request.output.return_token_ids,
            usage=body.wants_usage,
            n=body.n or 1,
            tools=call.request.messages.HasField("tools"),
        )


def _told(error: Exception, record: Record) -> ServiceError:
    """The error as the client sees it; what went wrong in the router is for its log."""
    if isinstance(error, ServiceError):
        return error
    log.error("request failed", exc_info=error, extra={"request_id": record.request_id})
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "INTERNAL",
        f"the router failed; its log names request {record.request_id}",
    )


async def _stream(generation: Answer, chunks: Chunks, writer: Writer) -> None:
    writer.start_stream()
    try:
        opening = chunks.opening(generation.accepted)
        async for event in generation.events():
            if data := chunks.of(event):
                await writer.events(opening + data)
                opening = b""
        writer.end_stream()
    finally:
        writer.stop()


async def _whole(generation: Answer, form: Format, writer: Writer, n: int) -> None:
    parts, finished = [Collected() for _ in range(n)], inference_pb2.Finished()
    async for event in generation.events():
        match event.WhichOneof("event"):
            case "finished":
                finished = event.finished
            case "sample_finished":
                parts[event.sample_finished.sample].end = event.sample_finished
            case _:
                parts[event.delta.sample].add(event.delta)
    writer.whole(form.whole(generation.accepted, parts, finished))


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id when it is printable and short, otherwise a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
