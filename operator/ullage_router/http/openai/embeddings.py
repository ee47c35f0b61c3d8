"""Serves POST /v1/embeddings, and computes the embeddings of the other endpoints that use them.

Each input becomes a separate request that is admitted and placed independently. The client gets
either one response or one error for all inputs of a body.
"""

import asyncio
import base64
import functools
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_PROMPT_TOKENS, MAX_REQUEST_ID_BYTES
from ullage_common.wire.validation import invalid_value
from ullage_router.call import Call, deadline_of
from ullage_router.errors import deadline, http_status, internal, vectors_full
from ullage_router.http.client_timeout import time_limit_s
from ullage_router.http.limits import BodyRoom
from ullage_router.http.messages import Body, Reply, Request
from ullage_router.http.openai.decoding import (
    body_decoder,
    decode_field,
    long_token_lists,
    parse_fields,
    utf8,
)
from ullage_router.http.openai.endpoint import (
    EMBEDDINGS,
    Writer,
    as_service_error,
    request_id,
)
from ullage_router.http.openai.requests import check_truncation, set_tokens
from ullage_router.http.openai.responses import JSON, prompt_tokens_details
from ullage_router.http.openai.schemas import AtLeastOne, Refusing, Token, TruncatePromptTokens
from ullage_router.http.sessions import open_session, set_priority
from ullage_router.policy.retry import UNKNOWN_RETRY_AFTER_S
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord, cached_tokens
from ullage_router.telemetry.spans import trace_context
from ullage_router.tenants.session import TenantSession

MAX_INPUTS = 2048
MAX_PARALLEL = 32
"""Maximum number of one body's inputs that run or are queued at a time."""
MAX_VECTOR_BYTES = 64 << 20
"""Maximum total size in bytes of one body's embeddings, which are kept until all are computed."""
MAX_ALL_VECTOR_BYTES = 256 << 20
"""Maximum bytes of all bodies' embeddings in a process. One tenant gets at most half of this."""
PIECE_BYTES = 64 << 10
"""Number of response bytes to encode before the event loop serves other requests."""

Tokens = Annotated[list[Token], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
Input = str | Annotated[list[str | Token | Tokens], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]


class EmbeddingsRequest(Refusing, frozen=True, kw_only=True):
    """The body of a POST request to /v1/embeddings."""

    input: msgspec.Raw
    """The inputs as undecoded JSON of type `Input`."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    cache_salt: str | None = None
    dimensions: AtLeastOne | None = None
    """Number of elements of each embedding. Only the model's own number is possible."""
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    """Number of tokens to keep of each input, its first ones. -1 keeps what fits the context."""
    truncation_side: object = None
    """The side that `truncate_prompt_tokens` cuts off. Only the end is ever cut off."""
    add_special_tokens: bool | None = None

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"truncation_side": (None, "right")}


_BODY = body_decoder(EmbeddingsRequest)
_INPUT = msgspec.json.Decoder(Input)


class Inputs(NamedTuple):
    """A parsed body: the inputs, and how the response is made of their embeddings."""

    requests: Sequence[inference_pb2.GenerateRequest]
    """One request for each input. All have the same model."""
    names: Sequence[str]
    """The field of each input, for errors."""
    answer: "Callable[[EmbeddingRun, Writer], Awaitable[None]]"
    """Sends the response, once all embeddings are computed."""
    ignored: tuple[str, ...]
    """Names of the body's unknown fields."""
    dimensions: int | None = None
    """Number of elements that each embedding must have, or None for any."""


def vector_room() -> BodyRoom:
    """Return the memory budget for the embeddings of all bodies in a process."""
    return BodyRoom(MAX_ALL_VECTOR_BYTES)


class EmbeddingsEndpoint:
    """Serves requests to an endpoint whose responses are made of embeddings.

    Args:
        service: Serves requests, and provides the tenants.
        room: Memory budget for the embeddings of all bodies.
        parse: Parses a body, and checks it.
    """

    def __init__(
        self, service: RouterService, room: BodyRoom, parse: Callable[[Body], Inputs]
    ) -> None:
        self._service = service
        self._room = room
        self._parse = parse

    async def __call__(self, request: Request, reply: Reply) -> None:
        service = self._service
        record = RequestRecord(request_id(request.headers))
        tenant: TenantSession | None = None

        try:
            authorization = request.headers.get("authorization")
            tenant = open_session(service.tenants, request, authorization)
            data = await request.read_json(tenant.name)
            parsing = functools.partial(self._parse, data)
            inputs = await service.intake.run(data.num_bytes, tenant.name, parsing)
            asked = inputs.requests
            set_priority(request, asked)
            limit_s = time_limit_s(request.headers, service.config.limits.total_timeout)
            if len(asked) > 1:
                tenant.check_many(len(asked), sum(len(r.token_ids.ids) or 1 for r in asked))
        except Exception as error:
            request.end_turn()
            # The traceback holds the body, and this frame would hold the error: a reference cycle.
            refusal = as_service_error(error, record).with_traceback(None)
            service.pipeline.refuse(record, refusal, tenant, trace_context(request.headers))
            await Writer(reply, record, EMBEDDINGS).error(refusal)
            return

        trace = trace_context(request.headers)
        run = EmbeddingRun(
            service,
            record.request_id,
            tenant,
            trace,
            inputs,
            self._room,
            request.end_turn,
            limit_s,
        )

        try:
            try:
                await run.compute()
            except Exception as error:
                request.end_turn()  # a slow client must not keep its turn while it reads the error
                await Writer(reply, run.record, EMBEDDINGS).error(
                    as_service_error(error, run.record)
                )
                return

            run.record.ignored = inputs.ignored
            await inputs.answer(run, Writer(reply, run.record, EMBEDDINGS))
        finally:
            run.close()


class EmbeddingRun:
    """Computes the embeddings of all inputs of one request body.

    Args:
        service: Serves requests.
        name: The request id. A number is appended to it for each input except the first.
        tenant: The tenant's session, from which a separate session is created for each input.
        trace: The trace context.
        inputs: The inputs.
        room: Memory budget for the embeddings of all bodies.
        end_turn: Ends the body's turn. Called when an input waits for anything outside this router.
        limit_s: The time limit for all inputs, seconds.

    Attributes:
        record: The record of the first input. The response headers show its decision.
        name: The request id.
        model: Name of the model, or of its adapter, that computes the embeddings.
        vectors: Embeddings as little-endian float32, by index. Empty until computed.
    """

    def __init__(
        self,
        service: RouterService,
        name: str,
        tenant: TenantSession,
        trace: tuple[tuple[str, str], ...],
        inputs: Inputs,
        room: BodyRoom,
        end_turn: Callable[[], None],
        limit_s: float,
    ) -> None:
        self.record = RequestRecord(name)

        self._pipeline = service.pipeline
        self._limits = service.config.limits
        self._max_queued = service.config.routing.queue.max_requests
        self.model = inputs.requests[0].model or service.config.model
        self.name = name
        self._tenant = tenant
        self._trace = trace
        self._room = room
        self._end_turn = end_turn
        self._taken_bytes = 0

        self._asked = inputs.requests
        self._names = inputs.names
        self._dimensions = inputs.dimensions
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._waiting = deque(range(len(self._asked)))
        """Indices of the inputs that are still waiting for a worker."""
        self._num_running = 0
        self._failure: ServiceError | None = None
        """The error that makes all inputs fail, or None."""
        self.vectors = [b""] * len(self._asked)
        self._num_tokens = 0
        self._num_done = 0
        self._cached = Counter[str]()
        """Number of prompt tokens of all inputs whose KV was reused, by cache tier."""

    async def compute(self) -> None:
        """Compute all embeddings.

        Raises:
            ServiceError: An input was refused or failed. The other inputs were cancelled.
        """
        error = await self._serve_all()
        if error:
            try:
                raise error
            finally:
                del error  # the error refers to this frame: a reference cycle

    async def _serve_all(self) -> BaseException | None:
        """Serve all inputs, and return the first error, or None if all inputs succeed."""
        try:
            async with asyncio.TaskGroup() as group:
                timer = group.create_task(self._time_out())
                count = range(self._max_parallel())
                await asyncio.wait([group.create_task(self._work()) for _ in count])
                timer.cancel()
        except BaseExceptionGroup as errors:
            # The frames of the group refer to the group: a reference cycle. The inputs, to which
            # the frames of its errors refer, would stay alive until the garbage collector runs,
            # which is rare.
            errors.__traceback__ = None
            return errors.exceptions[0]
        finally:
            self._failure = None  # its frames refer to this object: a reference cycle
        return None

    def close(self) -> None:
        """Free the memory that the embeddings use."""
        self._room.give_back(self._taken_bytes, self._tenant.name)
        self._taken_bytes = 0

    def pieces(self, *, is_base64: bool) -> Iterator[bytes]:
        """Yield the body of the response in chunks of about PIECE_BYTES.

        Each embedding is dropped once it is encoded, so call this method only once.
        """
        piece = bytearray(b'{"object":"list","data":[')
        for index, vector in enumerate(self.vectors):
            piece += b"," if index else b""
            piece += _item(index, vector, is_base64=is_base64)
            self.vectors[index] = b""
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()

        rest = {"model": self.model, "usage": self.usage}
        yield bytes(piece) + b"]," + msgspec.json.encode(rest)[1:]

    @property
    def usage(self) -> JSON:
        """The token counts of all inputs."""
        usage: JSON = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        if self._cached:
            usage["prompt_tokens_details"] = prompt_tokens_details(self._cached)
        return usage

    def _max_parallel(self) -> int:
        """Return the maximum number of the body's inputs that may run or queue at a time.

        The limits are MAX_PARALLEL, the tenant's maximum concurrency and the queue's capacity.
        """
        most = self._tenant.max_concurrency or MAX_PARALLEL
        return min(len(self._asked), MAX_PARALLEL, most, 1 + self._max_queued)

    async def _time_out(self) -> None:
        await asyncio.sleep(self._deadline - time.monotonic())
        error = deadline(self._limit_s)
        self._failure = error
        raise error

    async def _work(self) -> None:
        """Serve the waiting inputs one after another, as one of several parallel workers.

        If the body's other inputs have used up the quota or the memory, this worker puts its input
        back and exits, so that fewer inputs run in parallel. The last worker does not exit but
        waits for the shortage to pass, provided that at least one embedding has been computed.
        """
        while self._waiting:
            index = self._waiting.popleft()
            try:
                await self._embed(index)
            except ServiceError as error:
                is_shortage = http_status(error) == HTTPStatus.TOO_MANY_REQUESTS
                wait_s = error.retry_after_s or UNKNOWN_RETRY_AFTER_S
                may_wait = self._num_done and time.monotonic() + wait_s < self._deadline
                if not (is_shortage and (self._num_running or may_wait)):
                    self._failure = error
                    # The frames below refer to this task, which will refer to the error: a cycle.
                    raise error.with_traceback(None) from None

                self._waiting.appendleft(index)
                if self._num_running:
                    return
                await asyncio.sleep(wait_s)

    async def _embed(self, index: int) -> None:
        call = self._call(index)
        vector = b""
        self._num_running += 1
        try:
            # Inputs that another's failure cancels get that error, not a client's disconnect.
            async with self._pipeline.serve(call, lambda: self._failure) as stream:
                async for event in stream.events():
                    vector += event.delta.embedding
                    self._num_tokens += event.finished.usage.prompt_tokens
                    for each in cached_tokens(event.finished.usage):
                        self._cached[each.tier] += each.num_tokens
            if not vector:
                raise internal(call.record.request_id)
        except ServiceError as error:
            _name_field(error, self._names[index])
            raise
        finally:
            self._num_running -= 1

        size = len(vector) // 4
        if self._dimensions not in (None, size):
            raise invalid_value("dimensions", self._dimensions, f"{size}, as the model has them")
        self._take_room(len(vector))
        self.vectors[index] = vector
        self._num_done += 1

    def _take_room(self, size: int) -> None:
        """Reserve memory for all embeddings of the body, unless this has already been done.

        Args:
            size: Bytes of one embedding.

        Raises:
            ServiceError: The embeddings are too large in total, or there is not enough memory now.
        """
        if self._taken_bytes:
            return

        count = len(self._asked)
        most = max(1, MAX_VECTOR_BYTES // size)
        if count > most:
            field = self._names[-1].partition("[")[0]
            raise invalid(
                field,
                f"{field}: the vectors of {count} inputs, with {size} bytes each, would have more "
                f"than {MAX_VECTOR_BYTES >> 20} MiB; send at most {most} at a time",
            )
        if not self._room.take(count * size, self._tenant.name):
            raise vectors_full()
        self._taken_bytes = count * size

    def _call(self, index: int) -> Call:
        suffix = f"-{index}" if index else ""
        record = RequestRecord(self.name[: MAX_REQUEST_ID_BYTES - len(suffix)] + suffix)
        if not index:
            self.record = record

        request = self._asked[index]
        return Call(
            request,
            record,
            self._tenant.new_session(),
            deadline_of(request, record, self._limit_s, self._limits.request_timeout),
            self._trace,
            is_streamed=False,
            release_body=self._end_turn,
            end_turn=self._end_turn,
        )


def _item(index: int, vector: bytes, *, is_base64: bool) -> bytes:
    numbers: object = base64.b64encode(vector).decode()
    if not is_base64:
        numbers = struct.unpack(f"<{len(vector) // 4}f", vector)
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": numbers})


def _name(index: int, count: int) -> str:
    return "input" if count == 1 else f"input[{index}]"


def _name_field(error: ServiceError, name: str) -> None:
    """Replace the field name in an error about the prompt with the name of the input.

    Other errors remain unchanged.
    """
    if error.metadata.get("field") in ("prompt", "input"):
        error.metadata["field"] = name
        if error.message.startswith("prompt "):
            error.message = name + error.message.removeprefix("prompt")


def parse_embeddings(data: Body) -> Inputs:
    """Parse the body of a request to /v1/embeddings.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    body, ignored = parse_fields(_BODY, data.take())
    check_truncation(body.truncate_prompt_tokens)
    asked = _requests(body)
    names = [_name(i, len(asked)) for i in range(len(asked))]
    is_base64 = body.encoding_format == "base64"

    async def answer(run: EmbeddingRun, writer: Writer) -> None:
        await writer.in_pieces(run.pieces(is_base64=is_base64))

    return Inputs(asked, names, answer, ignored, body.dimensions)


def _requests(body: EmbeddingsRequest) -> list[inference_pb2.GenerateRequest]:
    """Return one request for each input.

    Raises:
        ServiceError: There is no input, there are too many, or one is invalid.
    """
    lists = long_token_lists(body.input, "input")
    inputs: str | Sequence[str | int | Sequence[int]]
    inputs = decode_field(_INPUT, body.input, "input") if lists is None else lists

    if isinstance(inputs, str):
        return [_request(body, inputs, "input")]
    if inputs and all(isinstance(item, int) for item in inputs):
        return [_request(body, [item for item in inputs if isinstance(item, int)], "input")]
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise invalid_value("input", f"a list of {len(inputs)}", f"1 to {MAX_INPUTS} inputs")
    return [_request(body, item, _name(i, len(inputs))) for i, item in enumerate(inputs)]


def embedding_request(model: str | None, cache_salt: str | None) -> inference_pb2.GenerateRequest:
    """Return a request for an embedding, without its input."""
    return inference_pb2.GenerateRequest(
        model=utf8("model", model or ""),
        cache_salt=utf8("cache_salt", cache_salt or ""),
        embed=True,
    )


def _request(
    body: EmbeddingsRequest, item: str | int | Sequence[int], field: str
) -> inference_pb2.GenerateRequest:
    request = embedding_request(body.model, body.cache_salt)
    request.truncate_prompt_tokens = body.truncate_prompt_tokens or 0
    request.omit_special_tokens = body.add_special_tokens is False
    if isinstance(item, str):
        request.text = utf8(field, item)
    elif isinstance(item, int):
        raise invalid(field, f"{field} is a token among inputs; send texts or lists of token ids")
    else:
        set_tokens(request, item)
    return request
