"""POST /v1/embeddings: each input is a request of its own, with its own admission and place, and
all of them are one answer, or one error."""

import asyncio
import base64
import functools
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, ClassVar, Literal

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.limits import MAX_PROMPT_TOKENS, MAX_REQUEST_ID_BYTES
from ullage_common.wire.validation import invalid_value
from ullage_router.call import Call
from ullage_router.errors import deadline, http_status, internal, vectors_full
from ullage_router.http.messages import Body, BodyRoom, Reply, Request
from ullage_router.http.openai.endpoint import Writer, as_service_error, request_id
from ullage_router.http.openai.requests import (
    decode_field,
    long_token_lists,
    parse,
    set_tokens,
    utf8,
)
from ullage_router.http.openai.responses import JSON, prompt_tokens_details
from ullage_router.http.openai.schemas import Token
from ullage_router.policy.retry import UNKNOWN_RETRY_AFTER_S
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord, cached_tokens
from ullage_router.telemetry.trace_context import trace_context
from ullage_router.tenants.session import TenantSession

MAX_INPUTS = 2048
MAX_PARALLEL = 32
"""Inputs of one body that are with engines, or wait for one, at a time."""
MAX_VECTOR_BYTES = 64 << 20
"""Most bytes of one body's vectors, which are kept until all are there."""
MAX_ALL_VECTOR_BYTES = 256 << 20
"""Most bytes of the vectors of all bodies of a process; one tenant gets at most half of them."""
PIECE_BYTES = 64 << 10
"""Bytes of an answer that are encoded before other requests have their turn."""

Tokens = Annotated[list[Token], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
Input = str | Annotated[list[str | Token | Tokens], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    input: msgspec.Raw
    """JSON of an `Input`."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    cache_salt: str | None = None
    dimensions: object = None
    truncate_prompt_tokens: object = None
    add_special_tokens: bool | None = None

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "dimensions": (None,),
        "truncate_prompt_tokens": (None,),
        "add_special_tokens": (None, True),
    }
    """Values that ask for nothing, of the fields that cannot be honoured."""

    @classmethod
    def neutral_values(cls, name: str) -> tuple[object, ...]:
        """Return the values of a field that ask for nothing."""
        return cls.NEUTRAL[name]

    def refused(self) -> tuple[str, object] | None:
        """The first field that cannot be honoured and asks for something, with its value."""
        for name, neutral in self.NEUTRAL.items():
            if (value := getattr(self, name)) not in neutral:
                return name, value
        return None


_BODY = msgspec.json.Decoder(EmbeddingsRequest)
_INPUT = msgspec.json.Decoder(Input)


class EmbeddingsEndpoint:
    """Serves the path.

    Args:
        service: serves requests, and says who may send them.
    """

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._room = BodyRoom(MAX_ALL_VECTOR_BYTES)

    async def __call__(self, request: Request, reply: Reply) -> None:
        service = self._service
        record = RequestRecord(request_id(request.headers))
        tenant: TenantSession | None = None
        try:
            tenant = service.tenants.open_session(request.headers.get("authorization"))
            data = await request.read_json(tenant.name)
            parsing = functools.partial(_parsed, data)
            body, asked = await service.intake.run(data.num_bytes, tenant.name, parsing)
            if len(asked) > 1:
                tenant.check_many(len(asked), sum(len(r.token_ids.ids) or 1 for r in asked))
        except Exception as error:
            request.end_turn()
            # The traceback holds the body, and this frame would hold the error: a reference cycle.
            refusal = as_service_error(error, record).with_traceback(None)
            service.pipeline.refuse(record, refusal, tenant, trace_context(request.headers))
            await Writer(reply, record, "input").error(refusal)
            return
        is_base64 = body.encoding_format == "base64"
        del body
        trace = trace_context(request.headers)
        room = self._room
        run = _Run(service, record.request_id, tenant, trace, asked, room, request.end_turn)
        try:
            try:
                await run.compute()
            except Exception as error:
                request.end_turn()  # a client may be slow to take the error
                await Writer(reply, run.record, "input").error(as_service_error(error, run.record))
                return
            pieces = run.pieces(is_base64=is_base64)
            await Writer(reply, run.record, "input").in_pieces(pieces)
        finally:
            run.close()


class _Run:
    """The inputs of one body on their way.

    Args:
        name: request id; those of all inputs but the first get numbers behind it.
        tenant: a session of it; each input gets one of its own.
        room: for the vectors of all bodies.
        end_turn: lets other long bodies come; called when an input waits for others than this
            router.

    record
        the first input's, whose decision the headers tell
    """

    def __init__(
        self,
        service: RouterService,
        name: str,
        tenant: TenantSession,
        trace: tuple[tuple[str, str], ...],
        asked: Sequence[inference_pb2.GenerateRequest],
        room: BodyRoom,
        end_turn: Callable[[], None],
    ) -> None:
        self.record = RequestRecord(name)
        self._pipeline = service.pipeline
        self._limits = service.config.limits
        self._max_queued = service.config.routing.queue.max_requests
        self._model = service.config.model
        self._name = name
        self._tenant = tenant
        self._trace = trace
        self._asked = asked
        self._deadline = time.monotonic() + self._limits.total_timeout
        self._waiting = deque(range(len(asked)))
        """Inputs that are still to be served, by index."""
        self._running: dict[int, Call] = {}
        self._vectors = [b""] * len(asked)
        """Numbers as float32, little-endian."""
        self._num_tokens = self._num_done = 0
        self._cached = Counter[str]()
        """Prompt tokens whose KV was reused, by tier."""
        self._room = room
        self._end_turn = end_turn
        self._taken_bytes = 0

    async def compute(self) -> None:
        """Has all vectors computed.

        Raises:
            ServiceError: an input was refused or failed; the others are cancelled.
        """
        error = await self._serve_all()
        if error:
            try:
                raise error
            finally:
                del error  # the error holds this frame, which would hold the error

    async def _serve_all(self) -> BaseException | None:
        """Return the first error."""
        try:
            async with asyncio.TaskGroup() as group:
                timer = group.create_task(self._time_out())
                count = range(self._max_parallel())
                await asyncio.wait([group.create_task(self._work()) for _ in count])
                timer.cancel()
        except BaseExceptionGroup as errors:
            # The frames of the group hold it. With such a cycle the inputs, which the frames of its
            # errors hold, would stay until the garbage collector runs, which is rare.
            errors.__traceback__ = None
            return errors.exceptions[0]
        return None

    def close(self) -> None:
        """Give back the room of the vectors."""
        self._room.give_back(self._taken_bytes, self._tenant.name)
        self._taken_bytes = 0

    def pieces(self, *, is_base64: bool) -> Iterator[bytes]:
        """Yield the body of the answer in pieces of about PIECE_BYTES; each vector once."""
        piece = bytearray(b'{"object":"list","data":[')
        for index, vector in enumerate(self._vectors):
            piece += b"," if index else b""
            piece += _item(index, vector, is_base64=is_base64)
            self._vectors[index] = b""
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        usage: JSON = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        if self._cached:
            usage["prompt_tokens_details"] = prompt_tokens_details(self._cached)
        yield bytes(piece) + b"]," + msgspec.json.encode({"model": self._model, "usage": usage})[1:]

    def _max_parallel(self) -> int:
        """Return how many inputs may run or wait at a time without refusing one another."""
        most = self._tenant.max_concurrency or MAX_PARALLEL
        return min(len(self._asked), MAX_PARALLEL, most, 1 + self._max_queued)

    async def _time_out(self) -> None:
        await asyncio.sleep(self._deadline - time.monotonic())
        error = deadline(self._limits.total_timeout)
        self._end_others(error)
        raise error

    async def _work(self) -> None:
        """Serve one input after another.

        One that lacks what others of this body take is served when one of them has ended, and
        fewer run at a time from then on. Once a vector is there, the last worker waits shortages
        out.
        """
        while self._waiting:
            index = self._waiting.popleft()
            try:
                await self._embed(index)
            except ServiceError as error:
                is_shortage = http_status(error) == HTTPStatus.TOO_MANY_REQUESTS
                wait_s = error.retry_after_s or UNKNOWN_RETRY_AFTER_S
                may_wait = self._num_done and time.monotonic() + wait_s < self._deadline
                if not (is_shortage and (self._running or may_wait)):
                    self._end_others(error)
                    # Frames below hold this task, which will hold the error: a cycle.
                    raise error.with_traceback(None) from None
                self._waiting.appendleft(index)
                if self._running:
                    return
                await asyncio.sleep(wait_s)

    def _end_others(self, error: ServiceError) -> None:
        """Make the inputs that end with the body count as its error, not as clients that left."""
        for call in self._running.values():
            call.ended_by = error

    async def _embed(self, index: int) -> None:
        call = self._running[index] = self._call(index)
        vector = b""
        try:
            async with self._pipeline.serve(call) as stream:
                async for event in stream.events():
                    vector += event.delta.embedding
                    self._num_tokens += event.finished.usage.prompt_tokens
                    for each in cached_tokens(event.finished.usage):
                        self._cached[each.tier] += each.num_tokens
            if not vector:
                raise internal(call.record.request_id)
        except ServiceError as error:
            _name_field(error, _name(index, len(self._asked)))
            raise
        finally:
            del self._running[index]
        self._take_room(len(vector))
        self._model = call.adapter or self._model
        self._vectors[index] = vector
        self._num_done += 1

    def _take_room(self, size: int) -> None:
        """Take room for all vectors of the body, once the size of one in bytes is known.

        Raises:
            ServiceError: they are too large together, or there is no room now.
        """
        count = len(self._asked)
        most = max(1, MAX_VECTOR_BYTES // size)
        if self._taken_bytes:
            return
        if count > most:
            raise invalid(
                "input",
                f"input has {count} inputs, and their vectors of {size} bytes would have more than "
                f"{MAX_VECTOR_BYTES >> 20} MiB; send at most {most} at a time",
            )
        if not self._room.take(count * size, self._tenant.name):
            raise vectors_full()
        self._taken_bytes = count * size

    def _call(self, index: int) -> Call:
        suffix = f"-{index}" if index else ""
        record = RequestRecord(self._name[: MAX_REQUEST_ID_BYTES - len(suffix)] + suffix)
        if not index:
            self.record = record
        total_s = self._limits.total_timeout
        stall_s = self._limits.request_timeout
        request = self._asked[index]
        tenant = self._tenant.new_session()
        return Call(
            request,
            record,
            total_s,
            stall_s,
            self._trace,
            tenant,
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
    """Name the input at fault in an error, in the words of this endpoint."""
    if error.metadata.get("field") in ("prompt", "input"):
        error.metadata["field"] = name
        if error.message.startswith("prompt "):
            error.message = name + error.message.removeprefix("prompt")


def _parsed(data: Body) -> tuple[EmbeddingsRequest, list[inference_pb2.GenerateRequest]]:
    body = parse(_BODY, data.take())
    return body, _requests(body)


def _requests(body: EmbeddingsRequest) -> list[inference_pb2.GenerateRequest]:
    """Return one request for each input.

    Raises:
        ServiceError: there is none, or there are too many.
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


def _request(
    body: EmbeddingsRequest, item: str | int | Sequence[int], field: str
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=utf8("model", body.model or ""),
        cache_salt=utf8("cache_salt", body.cache_salt or ""),
        embed=True,
    )
    if isinstance(item, str):
        request.text = utf8(field, item)
    elif isinstance(item, int):
        raise invalid(
            field, f"{field} is a token beside other inputs; send texts or lists of tokens"
        )
    else:
        set_tokens(request, item)
    return request
