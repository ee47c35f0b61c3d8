"""POST /v1/embeddings: each input is a request of its own, with its own admission and place, and
all of them are one answer, or one error."""

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_PROMPT_TOKENS, MAX_REQUEST_ID_BYTES
from ullage_common.wire.validation import invalid_value
from ullage_router.call import Call
from ullage_router.errors import deadline, internal
from ullage_router.http.messages import Reply, Request
from ullage_router.http.openai.endpoint import Writer, as_service_error, request_id
from ullage_router.http.openai.requests import parse, utf8
from ullage_router.http.openai.schemas import Token
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord, trace_context
from ullage_router.tenants import TenantSession

MAX_INPUTS = 2048
MAX_PARALLEL = 32
"""Inputs of one body that are with engines, or wait for one, at a time."""

Tokens = Annotated[list[Token], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    input: str | Annotated[list[str | Token | Tokens], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    cache_salt: str | None = None
    dimensions: object = None
    truncate_prompt_tokens: object = None
    add_special_tokens: bool | None = None

    def refused(self) -> tuple[str, object] | None:
        """The first field that cannot be honoured and asks for something, with its value."""
        for name in ("dimensions", "truncate_prompt_tokens"):
            if (value := getattr(self, name)) is not None:
                return name, value
        return ("add_special_tokens", False) if self.add_special_tokens is False else None


_BODY = msgspec.json.Decoder(EmbeddingsRequest)


class EmbeddingsEndpoint:
    """Serves the path.

    Args:
        service: serves requests, and says who may send them.
    """

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def __call__(self, request: Request, reply: Reply) -> None:
        service, record = self._service, RequestRecord(request_id(request.headers))
        try:
            tenant = service.tenants.open_session(request.headers.get("authorization"))
            body = parse(_BODY, await request.read(tenant.name))
            # Its time begins when all of the body is there.
            record = RequestRecord(record.request_id)
            asked = _requests(body)
        except Exception as error:
            refusal = as_service_error(error, record)
            service.pipeline.refuse(record, refusal)
            await Writer(reply, record, "input").error(refusal)
            return
        trace = trace_context(request.headers)
        run = _Run(service, record, tenant, trace, asked, body.encoding_format == "base64")
        writer = Writer(reply, record, "input")
        try:
            await writer.whole(await run.answer())
        except Exception as error:
            await writer.error(as_service_error(error, record))


class _Run:
    """The inputs of one body on their way.

    Args:
        record: of the first input, whose decision the headers tell.
        tenant: its session; the others get sessions of their own.
    """

    def __init__(
        self,
        service: RouterService,
        record: RequestRecord,
        tenant: TenantSession,
        trace: tuple[tuple[str, str], ...],
        asked: Sequence[inference_pb2.GenerateRequest],
        is_base64: bool,
    ) -> None:
        self._pipeline = service.pipeline
        self._limits = service.config.limits
        self._model = service.config.model
        self._record = record
        self._tenant = tenant
        self._trace = trace
        self._asked = asked
        self._is_base64 = is_base64
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self._data = [msgspec.Raw()] * len(asked)
        self._num_tokens = 0

    async def answer(self) -> dict[str, object]:
        """Returns the body of the answer.

        Raises:
            ServiceError: an input was refused or failed; the others are cancelled.
        """
        limit_s = self._limits.total_timeout
        try:
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                for index in range(len(self._asked)):
                    group.create_task(self._embed(index))
        except TimeoutError as error:
            raise deadline(limit_s) from error
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        usage = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        return {"object": "list", "data": self._data, "model": self._model, "usage": usage}

    async def _embed(self, index: int) -> None:
        async with self._slots:
            call = self._call(index)
            vector = b""
            try:
                async with self._pipeline.serve(call) as stream:
                    async for event in stream.events():
                        vector += event.delta.embedding
                        self._num_tokens += event.finished.usage.prompt_tokens
            except ServiceError as error:
                raise _named(error, _name(index, len(self._asked))) from error
            if not vector:
                raise internal(call.record.request_id)
            self._model = call.adapter or self._model
            self._data[index] = msgspec.Raw(self._item(index, vector))

    def _call(self, index: int) -> Call:
        record, tenant = self._record, self._tenant
        if index:
            suffix = f"-{index}"
            name = record.request_id[: MAX_REQUEST_ID_BYTES - len(suffix)] + suffix
            record, tenant = RequestRecord(name), tenant.new_session()
        total_s, stall_s = self._limits.total_timeout, self._limits.request_timeout
        request = self._asked[index]
        return Call(request, record, total_s, stall_s, self._trace, tenant, is_streamed=False)

    def _item(self, index: int, vector: bytes) -> bytes:
        numbers: object = base64.b64encode(vector).decode()
        if not self._is_base64:
            numbers = struct.unpack(f"<{len(vector) // 4}f", vector)
        item = {"object": "embedding", "index": index, "embedding": numbers}
        return msgspec.json.encode(item)


def _name(index: int, count: int) -> str:
    return "input" if count == 1 else f"input[{index}]"


def _named(error: ServiceError, name: str) -> ServiceError:
    """Returns the error with the input at fault in the words of this endpoint."""
    if error.metadata.get("field") in ("prompt", "input"):
        error.metadata["field"] = name
        if error.message.startswith("prompt "):
            error.message = name + error.message.removeprefix("prompt")
    return error


def _requests(body: EmbeddingsRequest) -> list[inference_pb2.GenerateRequest]:
    """Returns one request for each input.

    Raises:
        ServiceError: there is none, or there are too many.
    """
    inputs = body.input
    if isinstance(inputs, str) or (inputs and all(isinstance(item, int) for item in inputs)):
        return [_request(body, inputs, "input")]
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise invalid_value("input", f"a list of {len(inputs)}", f"1 to {MAX_INPUTS} inputs")
    return [_request(body, item, _name(i, len(inputs))) for i, item in enumerate(inputs)]


def _request(
    body: EmbeddingsRequest, item: str | int | list[int] | list[str | int | list[int]], field: str
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=utf8("model", body.model or ""),
        cache_salt=utf8("cache_salt", body.cache_salt or ""),
        embed=True,
    )
    if isinstance(item, str):
        request.text = utf8(field, item)
    elif isinstance(item, list):
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(token for token in item if isinstance(token, int))
    else:
        raise invalid(
            field, f"{field} is a token beside other inputs; send texts or lists of tokens"
        )
    return request
